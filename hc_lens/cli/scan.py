"""``hc-lens scan``: what the model loses without each unit, or each set of units.

With ``--out`` every finished batch is kept there, and the same command goes on after a stop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hc_lens.cli import options
from hc_lens.cli.run import MEANS, Run
from hc_lens.cli.settings import Context
from hc_lens.cli.tables import over_cases

if TYPE_CHECKING:
    import pandas as pd

STORE = "batches"
"""Folder of the finished batches below --out."""


def command(
    context: Context,
    model: options.Model,
    task: options.TaskName,
    sets: Annotated[
        list[str] | None,
        typer.Option(
            callback=options.split,
            metavar="A+B,...",
            help="Sets to ablate together, such as L2.H5+L3.H7.",
        ),
    ] = None,
    units: Annotated[
        list[str] | None,
        typer.Option(
            callback=options.split, metavar="A,B,...", help="Units to ablate alone; by default all."
        ),
    ] = None,
    pairs: Annotated[bool, typer.Option("--pairs", help="Also every pair of the units.")] = False,
    by_case: Annotated[
        bool, typer.Option("--by-case", help="Show every case; --out and --json always have them.")
    ] = False,
    memory: Annotated[str, typer.Option(help="Most memory beside the model.")] = "1GB",
    ood: options.Ood = None,
    ood_path: options.OodPath = None,
    ood_split: options.OodSplit = None,
    means: options.MeansFile = None,
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
    """Ablate every unit, or sets of units, and tell what changes."""
    from hc_lens.scan import scan

    run = Run(context, writes=(MEANS, STORE), summary=None if by_case else by_dataset)
    hooked = run.model()
    data = run.evaluation(hooked)
    if not run.begin():
        return
    source = run.means(hooked)
    run.screen.note("scanning")
    table = scan(
        hooked,
        data,
        source,
        sets or None,
        units=units or None,
        pairs=pairs,
        memory=memory,
        store=None if run.out is None else run.out / STORE,
        progress=run.progress,
    )
    run.finish(table)


def by_dataset(table: pd.DataFrame) -> pd.DataFrame:
    """The table of a scan with the cases of each dataset averaged over their rows."""
    numbers = ("accuracy", "accuracy_change", "kl", "agreement", "logit_change")
    return over_cases(table, ("dataset", "set"), numbers)
