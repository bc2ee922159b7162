"""The command ``hc-lens analyse subnetworks``, and its findings in words.

It reads a store of sweeps, runs nothing, and writes tables and figures with ``--out``.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hc_lens.errors import HcLensError

if TYPE_CHECKING:
    import pandas as pd

    from analyses.subnetworks import EarlyCore, Key
    from hc_lens.store import Subnetwork
    from hc_lens.sweep import Runs

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

StoreArgument = Annotated[str, typer.Argument(help="Store of the sweep: a folder or an address.")]
SettingsOption = Annotated[
    str, typer.Option(help="How the hash of the sweep's settings begins, if the store has several.")
]
OutOption = Annotated[Path | None, typer.Option(help="Folder for tables (csv) and figures (png).")]


@app.command("subnetworks")
def run(
    store: StoreArgument,
    checkpoint: Annotated[str, typer.Option(help="Checkpoint to look at; default the last.")] = "",
    early: Annotated[
        str, typer.Option(help="Checkpoint from before generalisation, to compare the core with.")
    ] = "",
    sparsity: Annotated[
        list[float] | None, typer.Option(help="Sparsity to use, may be repeated; default all.")
    ] = None,
    fraction: Annotated[
        float, typer.Option(help="Share of the subnetworks that a core head is in.")
    ] = 1.0,
    settings: SettingsOption = "",
    out: OutOption = None,
) -> None:
    """Head frequencies, the core against chance, and the spread over seeds (arXiv 2403.03942)."""
    from analyses import subnetworks as analysis
    from analyses.stores import read_store

    runs = read_store(store, settings)
    name = _checkpoint(runs, checkpoint or runs.checkpoints[-1])
    chosen = analysis.select(runs.subnetworks, checkpoint=name, sparsities=sparsity)
    typer.echo(core_text(chosen, fraction))
    if early:
        before = analysis.select(
            runs.subnetworks, checkpoint=_checkpoint(runs, early), sparsities=sparsity
        )
        typer.echo(early_text(analysis.early_core(before, chosen, fraction), early, name))
    inside = runs.table.set_index(["checkpoint", "sparsity", "seed"]).index.isin(list(chosen))
    table = runs.table.loc[inside]
    spread = analysis.spread(table, runs.full)
    typer.echo("\nspread over seeds")
    typer.echo(spread.drop(columns="checkpoint").round(3).to_string(index=False))
    if out is not None:
        _write_subnetworks(out, chosen, table, runs.full, spread, fraction)
        typer.echo(f"\nwritten to {out}")


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


def _write_subnetworks(
    out: Path,
    chosen: Mapping[Key, Subnetwork],
    table: pd.DataFrame,
    full: pd.DataFrame,
    spread: pd.DataFrame,
    fraction: float,
) -> None:
    from analyses import subnetworks as analysis
    from analyses import subnetworks_figures as figures

    out.mkdir(parents=True, exist_ok=True)
    counted = analysis.frequencies(chosen)
    counted.to_csv(out / "frequencies.csv", index=False)
    analysis.jaccard(chosen).to_csv(out / "jaccard.csv", index=False)
    spread.to_csv(out / "spread.csv", index=False)
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
        drawing.savefig(out / f"{name}.png", dpi=150)
