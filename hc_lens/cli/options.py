"""The options that commands share, each defined once.

1. A command's options are the fields of one settings dataclass, and the fields' docstrings are the
   help. `section` makes such a class; a field whose class is a section contributes its options.
2. `changes` makes a section from a settings class of the library, such as ``PruneConfig``: every
   field is an option, and one that is not given is None. `given` has those that are given.
3. Lists are written with commas, or by repeating the option (`Names`, `Numbers`, `Seeds`).
"""

import dataclasses
import operator
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from cyclopts import Group, Parameter, Token, validators
from docstring_parser import parse_from_object
from typing_extensions import dataclass_transform

from hc_lens.data.specs import ORGANISM, DataSpec
from hc_lens.errors import HcLensError

if TYPE_CHECKING:
    from hc_lens.sweeps.runs import Runs


T = TypeVar("T")

TITLES = ("This command", "Model", "Rows", "Out of domain", "Pruning", "Training", "Results")
_GROUPS = {title: Group(title, sort_key=number) for number, title in enumerate(TITLES)}


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def section(title: str = TITLES[0]) -> Callable[[type[T]], type[T]]:
    """Make a class of settings whose fields are options, under a title in the help."""
    parameter = Parameter(name="*", group=_GROUPS[title])
    return lambda kind: parameter(dataclass(frozen=True, kw_only=True)(kind))


def changes(kind: type, *without: str, title: str = TITLES[0]) -> Callable[[type[T]], type[T]]:
    """Give a class every field of a settings class, except some, as an option that may be left out.

    The help is the docstring of the field, and its default is shown.
    """

    def make(named: type[T]) -> type[T]:
        bases = [base for base in reversed(kind.__mro__) if dataclasses.is_dataclass(base)]
        described = [each for base in bases for each in parse_from_object(base).params]
        docs = {each.arg_name: each.description for each in described}
        hints = {name: _option_kind(hint) for name, hint in get_type_hints(kind).items()}
        fields = [
            (each.name, hints[each.name], _parameter(each, hints[each.name], docs[each.name]))
            for each in dataclasses.fields(kind)
            if each.name not in without
        ]
        made = dataclasses.make_dataclass(
            named.__name__,
            [(name, Annotated[hint | None, more], None) for name, hint, more in fields],
            namespace={"__module__": named.__module__, "__doc__": named.__doc__},
            frozen=True,
            kw_only=True,
        )
        return Parameter(name="*", group=_GROUPS[title])(made)

    return make


def given(chosen: object) -> dict[str, Any]:
    """The settings of a section made with `changes` that were given."""
    values = {each.name: getattr(chosen, each.name) for each in dataclasses.fields(chosen)}  # type: ignore[arg-type]
    return {name: value for name, value in values.items() if value is not None}


def _option_kind(hint: Any) -> Any:
    """What a command line can give of the values that a setting may have: no None, no function."""
    if get_origin(hint) not in (Union, types.UnionType):
        return hint
    kinds = [kind for kind in get_args(hint) if kind is not type(None)]
    if {int, str} == set(kinds):  # a number with a unit, such as 2GB
        return str
    return reduce(operator.or_, [kind for kind in kinds if get_origin(kind) is not Callable])


def _parameter(described: dataclasses.Field[Any], hint: Any, doc: str | None) -> Parameter:
    """How an option of `changes` is read and explained."""
    default = described.default
    shown = default not in (None, dataclasses.MISSING) and default is not False and f"{default}"
    if get_origin(hint) is tuple:
        text = ",".join(map(str, default)) if isinstance(default, tuple) else ""
        return Parameter(
            help=doc, show_default=text or False, converter=_listed, n_tokens=1, metavar="A,B,..."
        )
    off = f"--no-{described.name.replace('_', '-')}"
    return Parameter(help=doc, show_default=shown, negative=off if hint is bool else ())


def _listed(kind: Any, tokens: Sequence[Token]) -> tuple[Any, ...]:
    """A list that was given with commas, or one entry at a time."""
    kinds = [each for each in get_args(kind) if get_origin(each) is tuple] or [kind]
    entry = get_args(kinds[0])[0]
    parts = [part.strip() for token in tokens for part in token.value.split(",")]
    return tuple(_number(part, entry) if entry in (int, float) else part for part in parts if part)


def _number(text: str, kind: Callable[[str], T], what: str = "a number") -> T:
    try:
        return kind(text)
    except ValueError:
        raise HcLensError(f"expected {what}, got {text!r}; correct it") from None


def seeds_of(given: Sequence[str]) -> tuple[int, ...]:
    """Seeds from numbers and ranges such as 0-11."""
    found: list[int] = []
    for text in given:
        first, dash, last = text.partition("-")
        what = "a seed or a range such as 0-11 as a number"
        start = _number(first, int, what)
        found += range(start, (_number(last, int, what) if dash else start) + 1)
    return tuple(found)


def _seeds(_: Any, tokens: Sequence[Token]) -> tuple[int, ...]:
    return seeds_of(_listed(tuple[str, ...], tokens))


Names = Annotated[tuple[str, ...], Parameter(converter=_listed, metavar="A,B,...")]
Numbers = Annotated[tuple[float, ...], Parameter(converter=_listed, metavar="A,B,...")]
Seeds = Annotated[tuple[int, ...], Parameter(converter=_seeds, metavar="A,B-C,...")]
Workers = Annotated[int | None, Parameter(validator=validators.Number(gte=1))]
Hidden = Parameter(parse=False)
"""Marks a setting that a command does not offer."""


@section("Model")
class Device:
    """Where a model runs."""

    device: str | None = None
    """Where it runs: cpu, cuda, ..."""


@section("Model")
class Loading(Device):
    """How checkpoints are read."""

    model_labels: Names = ()
    """Names of the model's logits in order, if its own are LABEL_0, LABEL_1, ..."""


@section("Model")
class Checkpoint(Loading):
    """Which model."""

    model: str
    """Checkpoint: a directory, a Hub id, organism or organism:STEP."""


@section("Rows")
class Rows(DataSpec):
    """Which rows of which task."""

    seed: Annotated[int, Parameter(name="--rows-seed")] = 0
    columns: Names | None = None
    labels: Names | None = None

    def spec(self, **changes: Any) -> DataSpec:
        """The rows without their options, with some settings changed."""
        values = {each.name: getattr(self, each.name) for each in dataclasses.fields(DataSpec)}
        return DataSpec(**{**values, **changes})

    def of(self, task: str, path: str | None, **changes: Any) -> DataSpec:
        """The rows of a task, read like these; a named task has columns and labels of its own."""
        from hc_lens.data.known import KNOWN, PROMPTS

        made = path is None and (task in PROMPTS or task.startswith(ORGANISM))
        named = made or task in KNOWN
        own = ("columns", "label", "labels", "case", "heuristic") if named else ()
        defaults = {name: DataSpec.__dataclass_fields__[name].default for name in own}
        return self.spec(task=task, path=path, **{**changes, **defaults})


@section("Rows")
class HeldOutRows(Rows):
    """Which rows of which task, to score a model on."""

    split: str | None = None
    """Split to read; by default the held-out one."""


@section("Out of domain")
class Ood:
    """A second task."""

    ood: str | None = None
    """Second task, out of domain; named like --task."""
    ood_path: str | None = None
    """File or folder with the rows of --ood."""
    ood_split: str | None = None
    """Split of --ood; by default the held-out one."""
    ood_limit: int | None = None
    """Most rows of --ood; by default as many as --limit."""
    ood_limit_per_case: int | None = None
    """Most rows of each case of --ood; instead of --ood-limit."""

    def spec(self, rows: Rows, **changes: Any) -> DataSpec | None:
        """The rows of --ood, read like those of --task; `changes` give way to options."""
        if not self.ood:
            if self.ood_path is not None:
                raise HcLensError(
                    f"expected --ood with --ood-path, got {self.ood_path} alone; name its task"
                )
            return None
        limits = {"limit": self.ood_limit, "limit_per_case": self.ood_limit_per_case}
        if "limit" in changes:
            changes["limit_per_case"] = None
        if any(value is not None for value in limits.values()):
            changes |= limits
        if self.ood_split is not None:
            changes["split"] = self.ood_split
        return rows.of(self.ood, self.ood_path, **{"split": None, **changes})


@section("Model")
class Replacement:
    """What stands in for a removed unit."""

    means: str | None = None
    """What replaces removed units: a file or folder of hc-lens means or prune, zero, or
    counterfactual (of each prompt, at the same position); by default means are collected."""


@section("Results")
class Output:
    """Where results go."""

    out: Path | None = None
    """Folder for the results."""
    force: bool = False
    """Write over the results in --out."""
    json: bool = False
    """Print one JSON document."""
    config: Path | None = None
    """TOML file with values for these options; the command line wins."""


@section("Results")
class Folder(Output):
    """Where the results of a command that needs a folder go."""

    out: Path | None = field()


@section("Results")
class Table:
    """How a table is written."""

    format: Literal["csv", "parquet"] = "csv"
    """Of the table in --out: csv or parquet."""


@section()
class Metrics:
    """What is measured beside the columns that a table always has."""

    metrics: Names = ()
    """More to measure: logit_difference, log_odds, probability, loss or margin."""

    def checked(self) -> tuple[str, ...]:
        """Those that a table does not have anyway; an unknown name is told before any work."""
        from hc_lens.metrics import ACCURACY, AGREEMENT, KL, further

        return tuple(further(self.metrics, (ACCURACY, AGREEMENT, KL)))


@section()
class OnRows:
    """Settings of a command that runs a model on the rows of one task or two."""

    checkpoint: Checkpoint
    rows: HeldOutRows
    ood: Ood = field(default_factory=Ood)
    replacement: Replacement = field(default_factory=Replacement)
    output: Output = field(default_factory=Output)
    table: Table = field(default_factory=Table)


@section()
class Store:
    """The runs of a sweep."""

    store: str = field(kw_only=False)
    """Store of the sweep: a folder or an address."""
    sparsity: Numbers = ()
    """Sparsities to use; by default all."""
    seeds: Seeds = ()
    """Seeds to use, such as 0,1,2 or 0-11; by default all."""
    settings: str = ""
    """How the hash of the sweep's settings begins, if the store has several."""

    def read(self) -> "Runs":
        """The runs, read back without running anything."""
        from hc_lens.sweeps.runs import read_runs

        runs = read_runs(self.store, self.settings)
        chosen: Mapping[str, tuple[float, ...]] = {"sparsity": self.sparsity, "seed": self.seeds}
        table = runs.table
        for name, values in chosen.items():
            absent = sorted(set(values) - set(table[name]))
            if absent:
                raise HcLensError(
                    f"expected values of {name} that the store has, got {absent}; it has "
                    f"{sorted(set(table[name]))}"
                )
            table = table.loc[table[name].isin(values)] if values else table
        kept = set(zip(table["checkpoint"], table["sparsity"], table["seed"], strict=True))
        networks = {key: found for key, found in runs.subnetworks.items() if key in kept}
        return dataclasses.replace(runs, table=table, subnetworks=networks)
