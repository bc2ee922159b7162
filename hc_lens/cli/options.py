"""The options that commands share, each defined once.

A command names the ones it has in its signature, as ``model: Model``; `rows` and `ood` read them
back as the rows they describe.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from hc_lens.cli.settings import read_config
from hc_lens.errors import HcLensError
from hc_lens.spec import DataSpec


def split(values: list[str] | None) -> list[str] | None:
    """Entries that were given one by one, or several with commas between them."""
    if values is None:
        return None
    return [entry.strip() for value in values for entry in str(value).split(",") if entry.strip()]


Model = Annotated[
    str, typer.Option(help="Checkpoint: a directory, a Hub id, organism or organism:STEP.")
]
TaskName = Annotated[
    str,
    typer.Option(
        help="mnli, snli, qqp, hans, paws-qqp, organism, organism-ood, or with --columns any name "
        "for rows of your own."
    ),
]
RowsPath = Annotated[
    Path | None, typer.Option("--path", help="File or folder with the rows, not the Hub.")
]
Split = Annotated[
    str | None, typer.Option(help="Split to read; by default the only one, or train.")
]
Limit = Annotated[int | None, typer.Option(help="Most rows, drawn with the seed.")]
MaxLength = Annotated[int | None, typer.Option(help="Cut longer rows to this many tokens.")]
TokenBudget = Annotated[int, typer.Option(help="Most tokens in a batch, padding included.")]
Seed = Annotated[int, typer.Option(help="Seed of the random draws.")]
RowsSeed = Annotated[
    int, typer.Option(help="Decides the rows under --limit and the order of batches.")
]
Columns = Annotated[
    list[str] | None,
    typer.Option(
        callback=split, metavar="A,B", help="The one or two text columns of rows of your own."
    ),
]
Label = Annotated[str, typer.Option(help="Label column of rows of your own.")]
Labels = Annotated[
    list[str] | None,
    typer.Option(
        callback=split,
        metavar="A,B,...",
        help="Label names, in the order of the integers in your rows.",
    ),
]
Case = Annotated[
    str | None, typer.Option(help="Column of rows of your own by which results are grouped.")
]
Ood = Annotated[str | None, typer.Option(help="Second task, out of domain; named like --task.")]
OodPath = Annotated[Path | None, typer.Option(help="File or folder with the rows of --ood.")]
OodSplit = Annotated[str | None, typer.Option(help="Split of --ood.")]
MeansFile = Annotated[
    str | None,
    typer.Option(
        "--means",
        help="What replaces removed units: a file or folder of hc-lens means or prune, or zero; "
        "by default means are collected.",
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Another setting of hc.PruneConfig, such as lr=0.05; repeatable.",
    ),
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, ...")]
Out = Annotated[Path | None, typer.Option(help="Folder for the results.")]
Force = Annotated[bool, typer.Option("--force", help="Write over the results in --out.")]
Format = Annotated[str, typer.Option(help="Of the table in --out: csv or parquet.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Config = Annotated[
    Path | None,
    typer.Option(
        callback=read_config,
        is_eager=True,
        help="TOML file with values for these options; the command line wins.",
    ),
]

_OWN = ("columns", "label", "labels", "case")


def rows(values: Mapping[str, Any], **changes: Any) -> DataSpec:
    """The rows that --task and its companions describe."""
    fields = [field.name for field in dataclasses.fields(DataSpec)]
    given = {name: values[name] for name in fields if values.get(name) is not None}
    if "rows_seed" in values:
        given["seed"] = values["rows_seed"]
    if given.get("path") is not None:
        given["path"] = str(given["path"])
    lists = {name: tuple(given[name]) for name in ("columns", "labels") if name in given}
    return DataSpec(**{**given, **lists, **changes})


def ood(values: Mapping[str, Any], **changes: Any) -> DataSpec | None:
    """The rows that --ood describes; columns and labels of your own hold for them too."""
    from hc_lens.data.known import KNOWN

    task, path = values.get("ood"), values.get("ood_path")
    if task is None:
        if path is not None:
            raise HcLensError(f"expected --ood with --ood-path, got {path} alone; name its task")
        return None
    where = {"task": task, "path": None if path is None else str(path)}
    own = {name: DataSpec.__dataclass_fields__[name].default for name in _OWN}
    named = task in KNOWN or (path is None and task.startswith("organism"))
    return rows(values, **where, split=values.get("ood_split"), **(own if named else {}), **changes)
