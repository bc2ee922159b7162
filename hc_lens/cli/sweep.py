"""``hc-lens sweep``: many subnetworks, over checkpoints, sparsities and seeds.

1. The sweep comes from a TOML or YAML file (``hc.SweepConfig.from_file``), or from the options.
2. Its runs go to ``--store``, by default ``runs`` below ``--out``. A run that is there is not run
   again: the same command goes on after a stop, and sweeps that share a store share their runs.
3. The table of this sweep and its settings go to ``--out``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hc_lens.cli import options
from hc_lens.cli import prune as pruning
from hc_lens.cli.run import Run
from hc_lens.cli.settings import Context
from hc_lens.cli.tables import over_cases
from hc_lens.errors import HcLensError

if TYPE_CHECKING:
    import pandas as pd

    from hc_lens.data import Task
    from hc_lens.sweep import SweepConfig

NEEDED = ("model", "task", "sparsity", "seeds")
FREE = ("model", "sparsity", "seeds", "store", "engine", "workers", "cpus", "gpus", "address")
"""What may change when a sweep goes on in its folder: more runs, or another place to run them."""


def command(
    context: Context,
    out: options.Out,
    file: Annotated[
        Path | None, typer.Argument(help="TOML or YAML file of the sweep, instead of options.")
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            callback=options.split,
            metavar="A,B,...",
            help="Checkpoints, each as MODEL or NAME=MODEL.",
        ),
    ] = None,
    task: Annotated[str | None, typer.Option(help="Task to prune on; see hc-lens prune.")] = None,
    sparsity: Annotated[
        list[str] | None,
        typer.Option(callback=options.split, metavar="A,B,...", help="Such as 0.5,0.7."),
    ] = None,
    seeds: Annotated[
        list[str] | None,
        typer.Option(callback=options.split, metavar="A,B,...", help="Such as 0,1,2 or 0-11."),
    ] = None,
    steps: pruning.Steps = None,
    method: pruning.Method = None,
    keep: pruning.Keep = None,
    heads_only: pruning.HeadsOnly = False,
    reference: pruning.Reference = False,
    settings: options.Settings = None,
    held_out: Annotated[
        str | None,
        typer.Option(help="Split of --task to evaluate on; by default the first held-out one."),
    ] = None,
    evaluation_limit: Annotated[
        int | None, typer.Option(help="Most rows to evaluate on, of each task.")
    ] = None,
    ood: options.Ood = None,
    ood_path: options.OodPath = None,
    ood_split: options.OodSplit = None,
    path: options.RowsPath = None,
    split: options.Split = None,
    limit: options.Limit = None,
    max_length: options.MaxLength = None,
    token_budget: options.TokenBudget = 4096,
    rows_seed: options.RowsSeed = 0,
    columns: options.Columns = None,
    label: options.Label = "label",
    labels: options.Labels = None,
    case: options.Case = None,
    store: Annotated[str | None, typer.Option(help="Folder or address of the runs.")] = None,
    engine: Annotated[str, typer.Option(help="local or ray.")] = "local",
    workers: Annotated[int | None, typer.Option(help="Processes at once.")] = None,
    cpus: Annotated[float, typer.Option(help="Ray: processors of each run.")] = 1,
    gpus: Annotated[float, typer.Option(help="Ray: GPUs of each run.")] = 0,
    address: Annotated[str | None, typer.Option(help="Ray: address of the cluster.")] = None,
    format: options.Format = "csv",
    force: options.Force = False,
    as_json: options.Json = False,
    config: options.Config = None,
) -> None:
    """Find subnetworks for many checkpoints, sparsities and seeds."""
    from hc_lens import engines
    from hc_lens.sweep import sweep

    chosen = sweep_config(context.params)
    run = Run(context, summary=by_seed, free=FREE)
    run.begin(resumes=True)
    place = store or str(run.folder / "runs")
    where = engines.named(engine, workers)
    if isinstance(where, engines.Ray):
        where = engines.Ray(workers, cpus=cpus, gpus=gpus, address=address)
    run.screen.note(f"{chosen.n_runs} runs in {place}; what is there is not run again")
    runs = sweep(chosen, store=place, engine=where, progress=True)
    run.finish(
        runs.table,
        runs=len(runs.subnetworks),
        failed=len(runs.failed),
        checkpoints=list(runs.checkpoints),
        store=place,
    )
    if len(runs.failed):
        first = runs.failed.iloc[0]
        raise HcLensError(
            f"expected every run to finish, {len(runs.failed)} failed, the first "
            f"({first['checkpoint']}, sparsity {first['sparsity']}, seed {first['seed']}) with: "
            f"{first['why']}; the finished ones are kept, the same command tries the others again"
        )


def sweep_config(values: Mapping[str, Any]) -> SweepConfig:
    """The sweep of the file, or of the options."""
    from hc_lens.sweep import SweepConfig

    file = values.get("file")
    given = [name for name in NEEDED if values.get(name)]
    if file is not None:
        if given:
            raise HcLensError(
                f"expected a sweep from {file} or from options, got both ({', '.join(given)}); "
                "leave one out"
            )
        return SweepConfig.from_file(file)
    if len(given) < len(NEEDED):
        missing = [f"--{name}" for name in NEEDED if name not in given]
        raise HcLensError(
            f"expected a file, or all of --model, --task, --sparsity and --seeds, missing "
            f"{', '.join(missing)}; see hc-lens sweep --help"
        )
    train = options.rows(values)
    split = values["held_out"] or held_out(train.read())
    limit = values["evaluation_limit"]
    evaluation = {"id": options.rows(values, split=split, limit=limit)}
    other = options.ood(values, limit=limit)
    if other is not None and other.split is None:
        other = dataclasses.replace(other, split=held_out(other.read()))
    return SweepConfig(
        checkpoints=checkpoints(values["model"]),
        train=train,
        evaluation=evaluation if other is None else {**evaluation, "ood": other},
        sparsities=tuple(_number(text, float, "sparsity") for text in values["sparsity"]),
        seeds=seeds_of(values["seeds"]),
        prune=pruning.prune_settings(values),
    )


def checkpoints(given: Sequence[str]) -> dict[str, str]:
    """Checkpoints by name, from MODEL or NAME=MODEL."""
    found = {}
    for text in given:
        name, equals, model = text.partition("=")
        named = equals and not Path(text).exists()
        found[name if named else text] = model if named else text
    return found


def seeds_of(given: Sequence[str]) -> tuple[int, ...]:
    """Seeds from numbers and ranges such as 0-11."""
    found: list[int] = []
    for text in given:
        first, dash, last = text.partition("-")
        start = _number(first, int, "a seed or a range such as 0-11")
        stop = _number(last, int, "a seed or a range such as 0-11") if dash else start
        found += range(start, stop + 1)
    return tuple(found)


def held_out(task: Task) -> str:
    """The first split of a task that is not for training; its only one if there is no other."""
    kept = [split for split in task.splits if split.startswith(("validation", "dev", "test"))]
    return (kept or list(task.splits))[0]


def _number(text: str, kind: Any, what: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise HcLensError(f"expected {what} as a number, got {text!r}; correct it") from None


def by_seed(table: pd.DataFrame) -> pd.DataFrame:
    """One line per checkpoint, sparsity and dataset: means over seeds, and the accuracy's range.

    A seed's numbers are means over the rows of all cases.
    """
    keys = ["checkpoint", "sparsity", "dataset"]
    each: Any = over_cases(table, [*keys, "seed"], ("accuracy", "kl", "agreement"))
    return (
        each.groupby(keys, sort=False)
        .agg(
            seeds=("seed", "size"),
            accuracy=("accuracy", "mean"),
            lowest=("accuracy", "min"),
            highest=("accuracy", "max"),
            kl=("kl", "mean"),
            agreement=("agreement", "mean"),
        )
        .reset_index()
    )
