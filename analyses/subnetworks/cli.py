"""The command ``hc-lens analyse subnetworks``, and its findings in words.

It reads a store of sweeps, runs nothing, and writes tables and figures with ``--out``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

from hc_lens.cli import options
from hc_lens.cli.work import Work, readable
from hc_lens.errors import HcLensError
from hc_lens.records import table_bytes

if TYPE_CHECKING:
    import pandas as pd

    from analyses.subnetworks import EarlyCore, Key
    from hc_lens.pruning.subnetwork import Subnetwork
    from hc_lens.sweeps.runs import Runs


@options.section()
class Settings:
    """Which subnetworks."""

    store: options.Store = field(kw_only=False)
    checkpoint: str = ""
    """Checkpoint to look at; by default the last."""
    early: str = ""
    """Checkpoint from before generalisation, to compare the core with."""
    fraction: float = 1.0
    """Share of the subnetworks that a core head is in."""
    output: options.Output = field(default_factory=options.Output)
    table: options.Table = field(default_factory=options.Table)


def run(settings: Settings, work: Work) -> None:
    """Head frequencies, the core against chance, and the spread over seeds (arXiv 2403.03942)."""
    from analyses import subnetworks as analysis

    runs = work.store(settings.store)
    name = _checkpoint(runs, settings.checkpoint or runs.checkpoints[-1])
    if not work.begin():
        return
    chosen = analysis.select(runs.subnetworks, checkpoint=name)
    parts = [core_text(chosen, settings.fraction)]
    if settings.early:
        before = analysis.select(runs.subnetworks, checkpoint=_checkpoint(runs, settings.early))
        found = analysis.early_core(before, chosen, settings.fraction)
        parts.append(early_text(found, settings.early, name))
    table = runs.table.loc[runs.table["checkpoint"] == name]
    spread = analysis.spread(table, runs.full)
    parts += ["\nspread over seeds", readable(spread.drop(columns="checkpoint"))]
    work.keep(lambda folder: _write(folder, chosen, table, runs.full, settings.fraction))
    work.finish(spread, text="\n".join(parts))


def core_text(subnetworks: Mapping[Key, Subnetwork], fraction: float = 1.0) -> str:
    """The core of one checkpoint's subnetworks against chance, in a few lines."""
    from analyses import subnetworks as analysis

    sparsities = sorted({key[1] for key in subnetworks})
    core = analysis.core(subnetworks, fraction)
    table = analysis.frequencies(subnetworks)
    overlap = analysis.jaccard(subnetworks)
    model = analysis.chance(subnetworks, fraction)
    layer = analysis.chance(subnetworks, fraction, within="layer")
    names = ", ".join(f"{sparsity:g}" for sparsity in sparsities)
    in_many = "all of them" if fraction == 1 else f"at least {fraction:g} of them"
    lines = [
        f"{len(subnetworks)} subnetworks of checkpoint {next(iter(subnetworks))[0]}, sparsities "
        f"{names}, keeping {min(model.kept)} to {max(model.kept)} of {model.units} heads",
        f"core: {len(core)} heads are in {in_many}: {', '.join(core) or 'none'}",
        f"by chance {model.expected:.2g} heads; P(at least {model.size}) = {model.tail:.2g}",
        f"by chance with each run's heads per layer given {layer.expected:.2g} heads; "
        f"P(at least {layer.size}) = {layer.tail:.2g}",
    ]
    for first, second in combinations(sparsities, 2):
        found = analysis.spearman(table, first, second)
        lines.append(
            f"Spearman of the frequencies at {first:g} and {second:g}: rho {found.rho:.2f}, "
            f"p = {found.p:.2g}, {found.n} heads"
        )
    for sparsity in sparsities:
        rows = overlap.loc[
            (overlap["sparsity_a"] == sparsity) & (overlap["sparsity_b"] == sparsity)
        ]
        if len(rows):
            lines.append(
                f"Jaccard of two subnetworks of sparsity {sparsity:g}: mean "
                f"{rows['jaccard'].mean():.2f}, by chance {rows['expected'].mean():.2f}"
            )
    return "\n".join(lines)


def early_text(found: EarlyCore, early: str, final: str) -> str:
    """Whether an early core survives, in a sentence."""
    if not found.early:
        return f"checkpoint {early} has no core: nothing to compare with {final}"
    inside = "inside" if found.survives else "not wholly inside"
    lost = [unit for unit in found.early if unit not in found.shared]
    return (
        f"the core of checkpoint {early} ({', '.join(found.early)}) is {inside} that of {final}: "
        f"{len(found.shared)} of {len(found.early)} heads"
        + (f", without {', '.join(lost)}" if lost else "")
        + f"; by chance {found.expected * len(found.early):.2g}, P = {found.tail:.2g}"
    )


def _checkpoint(runs: Runs, name: str) -> str:
    if name not in runs.checkpoints:
        raise HcLensError(
            f"expected a checkpoint of the store, got {name!r}; it has {list(runs.checkpoints)}"
        )
    return name


def _write(
    folder: Path,
    chosen: Mapping[Key, Subnetwork],
    table: pd.DataFrame,
    full: pd.DataFrame,
    fraction: float,
) -> None:
    from analyses import subnetworks as analysis
    from analyses.subnetworks import figures

    counted = analysis.frequencies(chosen)
    (folder / "frequencies.csv").write_bytes(table_bytes(counted))
    (folder / "jaccard.csv").write_bytes(table_bytes(analysis.jaccard(chosen)))
    sparsities = sorted({key[1] for key in chosen})
    drawings = {
        "spread": figures.spread_figure(table, full),
        "sparsity": figures.sparsity_figure(table, full),
    }
    if len(sparsities) > 1:
        first, last = sparsities[0], sparsities[-1]
        core = analysis.core(chosen, fraction)
        drawings["frequencies"] = figures.frequency_scatter(counted, first, last, mark=core)
        both = analysis.frequency_table(counted, first, last)
        drawings["frequency-table"] = figures.frequency_heat_map(both)
    for name, drawing in drawings.items():
        drawing.savefig(folder / f"{name}.png", dpi=150)
