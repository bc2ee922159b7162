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
PAPER_SEEDS = tuple(range(42, 54))
"""The paper's twelve seeds."""
TENTHS = tuple(round(0.1 * step, 1) for step in range(1, 10))
TWENTIETHS = tuple(round(0.05 * step, 2) for step in range(1, 20))
"""The sparsities of a coarse grid, and those of the paper's."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is done."""

    sparsities: tuple[float, ...] = (0.5, 0.7)
    """Fractions of the units that separate runs remove."""
    seeds: tuple[int, ...]
    """Seeds of the separate runs."""
    steps: int
    """Updates of each separate run."""
    grid: tuple[float, ...]
    """Sparsities of each path."""
    grid_seeds: tuple[int, ...]
    """Seeds of the paths."""
    grid_steps: int
    """Updates of each path."""
    rows: int
    """Most rows to prune on and to take means over; of prompts that are made, a tenth."""
    token_budget: int = 512
    """Most tokens in the batch of an update."""
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

    def say(self) -> list[str]:
        """What the size contains, in a few lines."""
        apart, path = len(self.sparsities) * len(self.seeds), len(self.grid_seeds)

        def rows(n: int | None) -> str:
            return "all" if n is None else f"{n:,}"

        return [
            f"{apart} separate runs a checkpoint: {len(self.seeds)} seeds at "
            f"{' and '.join(f'{each:g}' for each in self.sparsities)}, {self.steps:,} updates each",
            f"{path} path{'s' * (path > 1)} a checkpoint of a series: {len(self.grid)} sparsities "
            f"from {self.grid[0]:g} to {self.grid[-1]:g}, {self.grid_steps:,} updates each",
            f"rows: {self.rows:,} to prune on with {self.token_budget} tokens an update, "
            f"{rows(self.evaluation_rows)} in and {rows(self.ood_rows)} out of domain to evaluate",
        ]


SIZES: dict[SizeName, Size] = {
    "quick": Size(
        seeds=PAPER_SEEDS[:3],
        steps=200,
        grid=TENTHS,
        grid_seeds=PAPER_SEEDS[:1],
        grid_steps=500,
        rows=2_000,
        evaluation_rows=300,
        ood_rows=900,
        scan_rows=300,
        attention_rows=100,
        trace_rows=100,
    ),
    "standard": Size(
        seeds=PAPER_SEEDS,
        steps=400,
        grid=TWENTIETHS,
        grid_seeds=PAPER_SEEDS[:3],
        grid_steps=1_500,
        rows=20_000,
        evaluation_rows=1_000,
        ood_rows=3_000,
        scan_rows=2_000,
        attention_rows=500,
        trace_rows=800,
    ),
    "paper": Size(
        seeds=PAPER_SEEDS,
        steps=1_500,
        grid=TWENTIETHS,
        grid_seeds=PAPER_SEEDS,
        grid_steps=3_000,
        rows=100_000,
        evaluation_rows=None,
        ood_rows=None,
        scan_rows=10_000,
        attention_rows=2_000,
        trace_rows=2_000,
    ),
}
"""What each size contains."""
