"""The command ``hc-lens analyse superadditive``."""

from __future__ import annotations

from typing import Annotated

import typer

from hc_lens.cli import options
from hc_lens.cli.run import MEANS, Run
from hc_lens.cli.settings import Context

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
STORE = "batches"


@app.command()
def run(
    context: Context,
    model: options.Model,
    task: options.TaskName,
    core: Annotated[
        list[str],
        typer.Option(callback=options.split, metavar="A,B,...", help="The heads in question."),
    ],
    joint: Annotated[
        list[str] | None,
        typer.Option(
            callback=options.split,
            metavar="A+B,...",
            help="Sets to ablate together; by default all of --core.",
        ),
    ] = None,
    pool: Annotated[
        list[str] | None,
        typer.Option(
            callback=options.split,
            metavar="A,B,...",
            help="Look for minimal super-additive sets among these.",
        ),
    ] = None,
    max_size: Annotated[int, typer.Option(help="Largest set of the pool.")] = 3,
    measure: Annotated[str, typer.Option(help="accuracy, probability or logit.")] = "accuracy",
    resamples: Annotated[int, typer.Option(help="Bootstrap resamples.")] = 2000,
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
    """Do heads do more damage together than the sum of what each does alone?"""
    from analyses.superadditive import analyse

    this = Run(context, writes=(MEANS, STORE, "layout.csv", "minimal.csv", "set-*.png"))
    hooked = this.model()
    data = this.evaluation(hooked)
    if not this.begin():
        return
    found = analyse(
        hooked,
        data,
        this.means(hooked),
        core,
        joint=joint or None,
        pool=pool or (),
        max_size=max_size,
        measure=measure,
        n_resamples=resamples,
        seed=seed,
        store=None if this.out is None else this.out / STORE,
        progress=this.progress,
    )
    if this.out is not None:
        found.layout.to_csv(this.out / "layout.csv")
        found.minimal.to_csv(this.out / "minimal.csv", index=False)
        for number, units in enumerate(joint or ["+".join(core)]):
            found.figure(units).savefig(this.out / f"set-{number}.png", dpi=150)
    least = zip(found.minimal["set"], found.minimal["case"], strict=True)
    this.finish(found.excess, minimal=[f"{units} ({name})" for units, name in least])
