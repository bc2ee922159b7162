"""The command ``hc-lens analyse subnetworks``, and its findings in words.

It reads a store of sweeps, runs nothing, and writes tables and figures with ``--out``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from itertools import combinations
from pathlib import Path

from hc_lens.analyses import subnetworks as analysis
from hc_lens.cli import options
from hc_lens.cli.work import Work, readable
from hc_lens.errors import check_choice
from hc_lens.pruning.subnetwork import Subnetwork
from hc_lens.records import table_bytes


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
    measure: str = "accuracy"
    """What the spread is of: a column of the runs, such as accuracy, kl or agreement."""
    output: options.Output = field(default_factory=options.Output)
    table: options.Table = field(default_factory=options.Table)


def run(settings: Settings, work: Work) -> None:
    """Head frequencies, the core against chance, and the spread over seeds (arXiv 2403.03942)."""
    runs = work.store(settings.store)
    name = settings.checkpoint or runs.checkpoints[-1]
    for given in (name, settings.early or name):
        check_choice("a checkpoint of the store", given, runs.checkpoints)
    if not work.begin():
        return
    chosen = analysis.select(runs.subnetworks, checkpoint=name)
    parts = [core_text(chosen, settings.fraction)]
    if settings.early:
        before = analysis.select(runs.subnetworks, checkpoint=settings.early)
        found = analysis.early_core(before, chosen, settings.fraction)
        parts.append(early_text(found, settings.early, name))
    table = runs.table.loc[runs.table["checkpoint"] == name]
    spread = analysis.spread(table, runs.full, settings.measure)
    parts += [
        f"\nspread of the {settings.measure} over seeds",
        readable(spread.drop(columns="checkpoint")),
    ]
    sides = analysis.by_side(table, runs.full) if "side" in table else None
    if sides is not None and len(sides):
        # Runs on prompts say no labels.
        shown = readable(sides.drop(columns="checkpoint").dropna(axis=1, how="all"))
        parts += ["\nfriendly and adversarial cases, and the balanced score of each run", shown]

    def write(folder: Path) -> None:
        from hc_lens.analyses.subnetworks import figures

        if sides is not None:
            (folder / "sides.csv").write_bytes(table_bytes(sides))
        counted = analysis.frequencies(chosen)
        (folder / "frequencies.csv").write_bytes(table_bytes(counted))
        (folder / "jaccard.csv").write_bytes(table_bytes(analysis.jaccard(chosen)))
        figures.spread_figure(table, runs.full).savefig(folder / "spread.png", dpi=150)
        figures.sparsity_figure(table, runs.full).savefig(folder / "sparsity.png", dpi=150)
        first, last = counted["sparsity"].min(), counted["sparsity"].max()
        if first < last:
            core = analysis.core(chosen, settings.fraction)
            drawing = figures.frequency_scatter(counted, first, last, mark=core)
            drawing.savefig(folder / "frequencies.png", dpi=150)

    work.keep(write)
    work.finish(spread, text="\n".join(parts))


def core_text(subnetworks: Mapping[analysis.Key, Subnetwork], fraction: float = 1.0) -> str:
    """The core of one checkpoint's subnetworks against chance, in a few lines."""
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
    alike = overlap.loc[overlap["sparsity_a"] == overlap["sparsity_b"]]
    for sparsity, rows in alike.groupby("sparsity_a"):
        lines.append(
            f"Jaccard of two subnetworks of sparsity {sparsity:g}: mean "
            f"{rows['jaccard'].mean():.2f}, by chance {rows['expected'].mean():.2f}"
        )
    return "\n".join(lines)


def early_text(found: analysis.EarlyCore, early: str, final: str) -> str:
    """Whether an early core survives, in a sentence."""
    if not found.early:
        return f"checkpoint {early} has no core: nothing to compare with {final}"
    inside = "inside" if found.share == 1 else "not wholly inside"
    lost = [unit for unit in found.early if unit not in found.shared]
    return (
        f"the core of checkpoint {early} ({', '.join(found.early)}) is {inside} that of {final}: "
        f"{len(found.shared)} of {len(found.early)} heads"
        + (f", without {', '.join(lost)}" if lost else "")
        + f"; by chance {found.expected * len(found.early):.2g}, P = {found.tail:.2g}"
    )
