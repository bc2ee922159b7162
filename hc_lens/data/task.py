"""A task: labelled rows of one or two texts, and their batches for a model.

1. Read the source's tables, one for each split (`hc_lens.data.readers`).
2. Bring a split into one form when it is first asked for: its texts, ``label``, ``case`` and
   ``id``. A label becomes its id, by name (`hc_lens.data.labels`); rows without a gold label are
   dropped and counted. A case is the joined values of the case columns, ``all`` where there are
   none, with a hyphen for each slash (``ln_subject/object_swap``), so that it can name a file. An
   id is the source's own, else the row's position in the source.
3. Match the model's labels to the task's by name.
4. Tokenise the rows and bucket them by length (`hc_lens.data.batches`).
"""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypedDict

import torch
from datasets import ClassLabel, Dataset, Features, Value
from typing_extensions import Unpack

from hc_lens.data import readers
from hc_lens.data.batches import Batches, bucket, draw, tokenise
from hc_lens.data.known import KNOWN, Layout
from hc_lens.data.labels import NO_LABEL, align, check_names, fold, is_missing, label_id
from hc_lens.data.splits import HELD_OUT as HELD_OUT
from hc_lens.data.splits import Splits
from hc_lens.errors import HcLensError, check_count
from hc_lens.models.inputs import Padding, Side
from hc_lens.protocols import Model
from hc_lens.records import digest

ADDED = ("label", "case", "id")
"""Columns that the rows of a split have beside their texts."""
IDS = ("pairID", "id", "idx", "index")
"""Names that a source may give to its rows' own ids."""


class Labelling(TypedDict, total=False):
    """What `Task.from_files` says of labels and cases."""

    label: str | None
    labels: Sequence[str] | None
    case: str | None
    heuristic: str | None


class ForDecoder(TypedDict, total=False):
    """Arguments of `Task.batches` that only a decoder has."""

    padding_side: Side | None
    separator: str | None


@dataclass(frozen=True, eq=False, repr=False)
class Task(Splits):
    """Rows of one or two texts, with a label and a case each, in named splits."""

    name: str
    """Name of the task."""
    labels: tuple[str, ...]
    """Label names, in the order of the label ids; empty for rows without labels."""
    _layout: Layout
    """Which columns of the source hold texts, label and case."""
    _tables: Mapping[str, Dataset]
    """The source's table of each split."""
    heuristic: str | None = None
    """The label that the heuristic answers, whose cases are friendly; None for no heuristic."""
    _read: dict[str, Dataset] = field(default_factory=dict, init=False)
    """Splits that have been brought into one form."""

    def __post_init__(self) -> None:
        empty = [split for split, table in self._tables.items() if not table.column_names]
        if empty or not self._tables:
            raise HcLensError(
                f"expected rows in every split of {self.name}, got none in {empty or 'any'}; "
                "leave empty splits out"
            )
        for split, table in self._tables.items():
            _find(table, self._layout.texts, f"{self.name}/{split}")
        if self.heuristic is not None:
            object.__setattr__(self, "heuristic", _own_name(self.heuristic, self.labels))

    @classmethod
    def named(
        cls, name: str, path: str | Path | None = None, *, labels: Sequence[str] | None = None
    ) -> Task:
        """A task that hc_lens knows: mnli, snli, qqp, hans or paws-qqp.

        The rows come from the Hub, or from `path`: a jsonl, json, csv, tsv or parquet file, a
        folder of them, or a folder written by ``datasets.save_to_disk``; HANS also as its original
        text files. `labels` names the integers in files that do not follow the Hub's order.
        """
        if name not in KNOWN:
            raise HcLensError(
                f"expected one of the named tasks {', '.join(KNOWN)}, got {name!r}; "
                "read other rows with Task.from_files, Task.from_hub or Task.from_rows"
            )
        task = KNOWN[name]
        if labels is not None and sorted(map(fold, labels)) != sorted(map(fold, task.labels)):
            raise HcLensError(
                f"expected the labels of {name}, {list(task.labels)}, in the order of the "
                f"integers in your files, got {list(labels)}; leave labels= out if they are names"
            )
        if path is not None:
            tables = readers.read_files(path, name)
        elif task.hub is not None:
            tables = readers.read_hub(*task.hub, task.remedy)
        else:
            raise HcLensError(f"expected files for {name}, which is not on the Hub; {task.remedy}")
        return cls(name, tuple(labels or task.labels), task.layout, tables, task.heuristic)

    @classmethod
    def from_files(
        cls,
        path: readers.Files,
        *,
        columns: str | Sequence[str],
        label: str | None = "label",
        labels: Sequence[str] | None = None,
        case: str | None = None,
        heuristic: str | None = None,
        name: str | None = None,
    ) -> Task:
        """Your own rows: a file, a folder of files, or a mapping of split names to files.

        `columns` names the one or two text columns; `label` the label column (None for rows
        without labels), whose values are names or integers that count into `labels`; `case` a
        column by which results are grouped; `heuristic` the label that the heuristic answers.
        """
        rows = readers.read_files(path)
        about: Labelling = {"label": label, "labels": labels, "case": case, "heuristic": heuristic}
        name = name or ("files" if isinstance(path, Mapping) else Path(path).stem)
        return cls.from_rows(rows, columns=columns, name=name, **about)

    @classmethod
    def from_hub(
        cls,
        repo: str,
        config: str | None = None,
        *,
        columns: str | Sequence[str],
        revision: str | None = None,
        name: str | None = None,
        **about: Unpack[Labelling],
    ) -> Task:
        """A dataset on the Hub; the other arguments are those of `from_files`."""
        remedy = "download the rows and pass their path to Task.from_files"
        rows = readers.read_hub(repo, config, revision, remedy)
        return cls.from_rows(rows, columns=columns, name=name or repo.split("/")[-1], **about)

    @classmethod
    def from_rows(
        cls,
        rows: readers.Table | Mapping[str, readers.Table],
        *,
        columns: str | Sequence[str],
        label: str | None = "label",
        labels: Sequence[str] | None = None,
        case: str | None = None,
        heuristic: str | None = None,
        name: str = "rows",
    ) -> Task:
        """Rows in memory: a list of dicts, a DataFrame, a Dataset, or a mapping of splits to such.

        The other arguments are those of `from_files`.
        """
        tables = readers.read_rows(rows)
        columns = (columns,) if isinstance(columns, str) else tuple(columns)
        # A repeated or reserved name leaves fewer distinct ones than were given.
        if len(columns) not in (1, 2) or len({*columns} - {*ADDED}) < len(columns):
            raise HcLensError(
                f"expected one or two text columns not named {', '.join(ADDED)}, got "
                f"{list(columns)}; pass for instance columns=('premise', 'hypothesis')"
            )
        layout = Layout((columns,), (label,) if label else (), ((case,),) if case else ())
        task = cls(name, (), layout, tables)  # a missing text column is reported first
        names = () if label is None else check_names(labels or _label_names(tables, label))
        return replace(task, labels=names, heuristic=heuristic)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the one or two texts of a row."""
        return self._layout.texts[0]

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits."""
        return tuple(self._tables)

    def dataset(self, split: str | None = None) -> Dataset:
        """The rows of a split: its texts, ``label`` (an index), ``case`` and ``id``."""
        name = self.split_named(split)
        if name not in self._read:
            where = f"{self.name}/{name}"
            self._read[name] = _in_one_form(self, self._tables[name], where)
        return self._read[name]

    def n_dropped(self, split: str | None = None) -> int:
        """Number of source rows that a split leaves out: without a gold label, or without text."""
        return len(self._tables[self.split_named(split)]) - len(self.dataset(split))

    def batches(
        self,
        model: Model,
        split: str | None = None,
        *,
        limit: int | None = None,
        limit_per_case: int | None = None,
        seed: int = 0,
        max_length: int | None = None,
        token_budget: int = 4096,
        **decoder: Unpack[ForDecoder],
    ) -> Batches:
        """The rows of a split in batches for a model.

        Args:
            model: What ``hc.load`` returns, or a TransformerLens model with a tokenizer.
            split: By default the only one, or ``"train"`` of several.
            limit: Use at most this many rows, drawn at random with the seed.
            limit_per_case: Use at most this many rows of each case instead, drawn likewise.
            seed: Decides the rows under a limit and the order of the batches.
            max_length: Cut longer rows to this many tokens; without it they are an error.
            token_budget: Most tokens in a batch, padding included.
            decoder: `padding_side`, by default the side of its tokenizer, and `separator`, the text
                between the two texts of a pair for a decoder that was trained with one. By default
                they are concatenated, as Hugging Face does for GPT-2.
        """
        where = f"{self.name}/{self.split_named(split)}"
        if not hasattr(model, "cfg"):
            raise HcLensError(f"expected a TransformerLens model, got {model!r}; use hc.load(...)")
        for what, given in {"token_budget": token_budget, "max_length": max_length}.items():
            if given is not None:
                check_count(what, given)
        padding_side, separator = _for_decoder(**decoder)
        padding = Padding.of(model, padding_side)
        own = getattr(model, "labels", None) or {}
        to_task = align(own, self.labels) if self.labels else []
        positions = draw(self.dataset(split)["case"][:], seed, limit, limit_per_case)
        chosen = self.dataset(split).select(positions)
        texts = chosen.select_columns(list(self.columns))
        tokens, key = tokenise(model, texts, where, max_length, separator)
        gold, cases, lengths = chosen["label"][:], chosen["case"][:], tokens["length"][:]
        order = bucket(lengths, token_budget, seed)
        content = [key, gold, cases, positions, self.labels, to_task, seed, token_budget]
        tokens = tokens.add_column("label", gold).add_column("case", cases)
        return Batches(
            name=where,
            labels=self.labels,
            heuristic=self.heuristic,
            to_task=torch.tensor(to_task, dtype=torch.long),
            n_dropped=self.n_dropped(split),
            fingerprint=digest(*content, padding.side),
            rows=torch.tensor(positions),
            _table=tokens,
            _plan=tuple((tuple(batch), max(lengths[row] for row in batch)) for batch in order),
            _padding=padding,
        )

    def __repr__(self) -> str:
        rows = ", ".join(f"{split} {len(table)}" for split, table in self._tables.items())
        return f"Task({self.name}: {' + '.join(self.columns)} -> {list(self.labels)}; {rows})"


def _for_decoder(
    padding_side: Side | None = None, separator: str | None = None
) -> tuple[Side | None, str | None]:
    """The arguments by their names; Python refuses others."""
    return padding_side, separator


def _own_name(heuristic: str, labels: Sequence[str]) -> str:
    """The task's own name of the label that its heuristic answers."""
    found = [label for label in labels if fold(label) == fold(heuristic)]
    if not found:
        raise HcLensError(
            f"expected the heuristic's answer among the labels {list(labels)}, got {heuristic!r}; "
            "name one of these with heuristic=, or leave it out"
        )
    return found[0]


def _find(table: Dataset, choices: Sequence[tuple[str, ...]], where: str) -> tuple[str, ...]:
    """The first choice whose columns are all in the table; none is an HcLensError."""
    for choice in choices:
        if all(column in table.column_names for column in choice):
            return choice
    wanted = " or ".join(" + ".join(map(repr, choice)) for choice in choices)
    raise HcLensError(
        f"expected the column {wanted} in {where}, got the columns {table.column_names}; name the "
        "columns of your rows with columns=..., label=... and case=... of Task.from_files"
    )


def _in_one_form(task: Task, table: Dataset, where: str) -> Dataset:
    """The rows of a source table, with labels as indices into those of the task.

    Without a column for the case all rows are one case, or one for each label if the heuristic's
    answer is known: what it gets right and what it gets wrong.
    """
    layout, labels = task._layout, task.labels
    sources = _find(table, layout.texts, where)
    label_ids = _label_ids(table, layout, labels, where)
    blank = _blank_rows(table, sources, layout, where)
    kept = [
        row
        for row, label in enumerate(label_ids)
        if (label != NO_LABEL or not layout.label) and row not in blank
    ]
    if not kept:
        got = f"{len(label_ids)} rows without a gold label" if label_ids else "an empty split"
        raise HcLensError(f"expected rows in {where}, got {got}; choose another split")
    columns: dict[str, list] = {
        name: [_unwrapped(text) for text in table[source][:]]
        if layout.byte_literals
        else table[source][:]
        for name, source in zip(layout.texts[0], sources, strict=True)
    }
    own = [column for column in IDS if column in table.column_names]
    ids = [str(value) for value in (table[own[0]][:] if own else range(len(table)))]
    cases = ["all"] * len(table)
    if task.heuristic is not None and not layout.case:
        cases = [labels[label] for label in label_ids]
    if layout.case:
        parts = [table[column][:] for column in _find(table, layout.case, where)]
        cases = [
            "_".join(map(str, values)).replace("/", "-") for values in zip(*parts, strict=True)
        ]
    columns |= {"label": label_ids, "case": cases, "id": ids}
    types = {name: Value("int64" if name == "label" else "string") for name in columns}
    chosen = {name: [values[row] for row in kept] for name, values in columns.items()}
    return Dataset.from_dict(chosen, Features(types))


def _label_names(tables: Mapping[str, Dataset], label: str) -> tuple[str, ...]:
    """Label names found in the tables: those of a ClassLabel, else the sorted texts."""
    for split, table in tables.items():
        _find(table, [(label,)], f"split {split!r}")
        feature = table.features[label]
        if isinstance(feature, ClassLabel):
            return tuple(feature.names)
    values = {repr(value): value for table in tables.values() for value in table[label][:]}
    found = sorted((value for value in values.values() if not is_missing(value)), key=str)
    if not all(isinstance(value, str) and not value.strip().isdecimal() for value in found):
        raise HcLensError(
            f"expected label names in column {label!r}, got {found[:5]}; pass labels=[...] with "
            "the names of these numbers, in order"
        )
    return tuple(found)


def _blank_rows(table: Dataset, sources: Sequence[str], layout: Layout, where: str) -> set[int]:
    """The rows with a text that is empty or none; an HcLensError if the task cannot have any."""
    found: set[int] = set()
    for column in sources:
        texts = table[column][:]
        blank = [i for i, text in enumerate(texts) if not isinstance(text, str) or not text.strip()]
        if blank and not layout.drops_blank:
            raise HcLensError(
                f"expected text in column {column!r} of {where}, got {texts[blank[0]]!r} in row "
                f"{blank[0]} (and {len(blank) - 1} more); fill or remove these rows"
            )
        found |= set(blank)
    return found


def _unwrapped(text: str) -> str:
    with contextlib.suppress(SyntaxError, ValueError):
        if re.fullmatch(r"""b(['"]).*\1""", text, re.DOTALL):
            return ast.literal_eval(text).decode("utf-8")
    return text


def _label_ids(table: Dataset, layout: Layout, labels: Sequence[str], where: str) -> list[int]:
    if not layout.label:
        return [NO_LABEL] * len(table)
    (column,) = _find(table, [(name,) for name in layout.label], where)
    feature, values = table.features[column], table[column][:]
    if isinstance(feature, ClassLabel):
        values = [None if value is None or value < 0 else feature.names[value] for value in values]
    known: dict[str, int] = {}
    for row, value in enumerate(values):
        if repr(value) in known:
            continue
        try:
            known[repr(value)] = label_id(value, labels)
        except HcLensError as error:
            raise HcLensError(f"row {row} of {where}: {error}") from None
    return [known[repr(value)] for value in values]
