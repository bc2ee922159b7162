"""The command ``hc-lens analyse lexical-overlap``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hc_lens.cli import options
from hc_lens.cli.run import Run
from hc_lens.cli.screen import quiet_reading
from hc_lens.cli.settings import Context

if TYPE_CHECKING:
    import pandas as pd

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
FIGURES = ("heads.png", "maps.png")
SHOWN = 12
"""Heads in the table on the screen."""


@app.command()
def run(
    context: Context,
    model: options.Model,
    task: options.TaskName,
    mark: Annotated[
        list[str] | None,
        typer.Option(
            callback=options.split, metavar="A,B,...", help="Heads to mark in the figures."
        ),
    ] = None,
    replicates: Annotated[int, typer.Option(help="Bootstrap replicates; 0 for none.")] = 1000,
    path: options.RowsPath = None,
    split: options.Split = None,
    limit: options.Limit = None,
    max_length: options.MaxLength = None,
    token_budget: options.TokenBudget = 4096,
    seed: options.Seed = 0,
    columns: options.Columns = None,
    label: options.Label = "label",
    labels: options.Labels = None,
    case: options.Case = None,
    device: options.Device = None,
    out: options.Out = None,
    format: options.Format = "csv",
    force: options.Force = False,
    as_json: options.Json = False,
    config: options.Config = None,
) -> None:
    """Which heads look from a word to the same word in the other sentence?"""
    from analyses.lexical_overlap import figure, heat_maps, scores
    from hc_lens.patterns import word_batches

    this = Run(context, writes=FIGURES, summary=highest)
    hooked = this.model()
    spec = options.rows(this.values)
    with quiet_reading(this.progress):
        rows = word_batches(
            hooked,
            spec.read(),
            spec.split,
            limit=spec.limit,
            seed=spec.seed,
            max_length=spec.max_length,
            token_budget=spec.token_budget,
        )
    this.inputs[rows.name] = rows.batches.fingerprint
    this.screen.note(f"{rows.name}: {rows.n_rows} rows")
    if not this.begin():
        return
    with quiet_reading(this.progress):
        table = scores(hooked, rows, n_bootstrap=replicates, seed=seed, progress=this.progress)
    if this.out is not None:
        marked = mark or []
        figure(table, mark=marked).savefig(this.out / FIGURES[0], dpi=150)
        heat_maps(table, mark=marked).savefig(this.out / FIGURES[1], dpi=150)
    this.finish(table)


def highest(table: pd.DataFrame) -> pd.DataFrame:
    """The heads with the highest overlap score, beside chance and the permuted rows."""
    overlap = table.loc[table["score"] == "overlap"]
    shown = overlap.sort_values(by="value", ascending=False, kind="stable").head(SHOWN)
    return shown.loc[:, ["unit", "value", "low", "high", "chance", "permuted", "n", "role"]]
