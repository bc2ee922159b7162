"""How much a sweep or a study does, in three sizes: a first look, an evening, and the paper's.

A size sets how many subnetworks are found, with how many updates each, and how many rows are read.
It says nothing about the model and the tasks, and anything that it sets can be given instead. What
a size contains ends up in the settings that are written beside the results.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SizeName = Literal["quick", "standard", "paper"]
"""The sizes by name."""
PAPER_SPARSITIES, PAPER_SEEDS = (0.5, 0.7), tuple(range(42, 54))
"""The paper's sparsities, and its twelve seeds."""
TENTHS = tuple(round(0.1 * step, 1) for step in range(1, 10))
TWENTIETHS = tuple(round(0.05 * step, 2) for step in range(1, 20))
"""The sparsities of a coarse grid, and those of the paper's."""


@dataclass(frozen=True)
class Amount:
    """Which subnetworks of a checkpoint are found."""

    sparsities: tuple[float, ...]
    """Fractions of the units that are removed."""
    seeds: tuple[int, ...]
    """Seeds at each sparsity, or of the paths."""
    steps: int
    """Updates of each run, or of each path."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is done."""

    apart: Amount
    """Subnetworks of separate runs."""
    paths: Amount
    """Those of paths, from which the effective size is read."""
    rows: int
    """Most rows to prune on and to take means over."""
    evaluation_rows: int | None
    """Most rows in domain on which every subnetwork is evaluated; None for all."""
    ood_rows: int | None
    """Most rows out of domain on which every subnetwork is evaluated; None for all."""
    scan_rows: int
    """About how many rows in domain, and adversarial ones, are in the ablation scan."""
    attention_rows: int
    """Rows in domain whose attention is scored."""
    trace_rows: int
    """About how many rows in domain, and adversarial ones, are in the composition trace."""

    def announced(self, name: SizeName) -> str:
        """What the size contains, in a few lines."""
        apart, paths = self.apart, self.paths

        def rows(n: int | None) -> str:
            return "all" if n is None else f"{n:,}"

        lines = [
            f"size {name}, where no option says otherwise; for each checkpoint:",
            f"{len(apart.seeds)} seeds at sparsity "
            f"{' and '.join(f'{each:g}' for each in apart.sparsities)}, separate runs of "
            f"{apart.steps:,} updates",
            f"{len(paths.seeds)} path{'s' * (len(paths.seeds) > 1)} through "
            f"{len(paths.sparsities)} sparsities from {paths.sparsities[0]:g} to "
            f"{paths.sparsities[-1]:g}, {paths.steps:,} updates each",
            f"{self.rows:,} rows at most to prune on; {rows(self.evaluation_rows)} in and "
            f"{rows(self.ood_rows)} out of domain to evaluate every subnetwork on",
        ]
        return "\n  ".join(lines)


SIZES: dict[SizeName, Size] = {
    "quick": Size(
        apart=Amount(PAPER_SPARSITIES, PAPER_SEEDS[:3], 200),
        paths=Amount(TENTHS, PAPER_SEEDS[:1], 500),
        rows=2_000,
        evaluation_rows=300,
        ood_rows=900,
        scan_rows=300,
        attention_rows=100,
        trace_rows=100,
    ),
    "standard": Size(
        apart=Amount(PAPER_SPARSITIES, PAPER_SEEDS, 400),
        paths=Amount(TWENTIETHS, PAPER_SEEDS[:3], 1_500),
        rows=20_000,
        evaluation_rows=1_000,
        ood_rows=3_000,
        scan_rows=2_000,
        attention_rows=500,
        trace_rows=800,
    ),
    "paper": Size(
        apart=Amount(PAPER_SPARSITIES, PAPER_SEEDS, 1_500),
        paths=Amount(TWENTIETHS, PAPER_SEEDS, 3_000),
        rows=100_000,
        evaluation_rows=None,
        ood_rows=None,
        scan_rows=10_000,
        attention_rows=2_000,
        trace_rows=2_000,
    ),
}
"""What each size contains."""
