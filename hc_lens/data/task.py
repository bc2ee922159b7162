"""A task: labelled rows of one or two texts, and their batches for a model.

1. Read the source's tables, one a split (`hc_lens.data.sources`).
2. Bring a split into one form when it is first asked for (`hc_lens.data.rows`).
3. Match the model's labels to the task's by name (`hc_lens.data.labels`).
4. Tokenise the rows once (`hc_lens.data.encode`) and bucket them by length
   (`hc_lens.data.batches`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from hc_lens.data import sources
from hc_lens.data.batches import Batches, Padding, bucket, sample
from hc_lens.data.encode import Encoder, digest
from hc_lens.data.known import known
from hc_lens.data.labels import align, check_names, fold
from hc_lens.data.rows import ADDED, Layout, Rows, find, label_names, read
from hc_lens.errors import HcLensError
from hc_lens.models.inputs import is_encoder
from hc_lens.models.inputs import padding_side as side_of

Columns = str | Sequence[str]


@dataclass(frozen=True, eq=False, repr=False)
class Task:
    """Rows of one or two texts, with a label and a case each, in named splits."""

    name: str
    """Name of the task."""
    labels: tuple[str, ...]
    """Label names, in the order of the label ids; empty for rows without labels."""
    _layout: Layout
    """Where texts, label, case and id stand in the source."""
    _tables: Mapping[str, Dataset]
    """The source's table of each split."""
    _read: dict[str, Rows] = field(default_factory=dict)
    """Splits that have been brought into one form."""

    def __post_init__(self) -> None:
        empty = [split for split, table in self._tables.items() if not table.column_names]
        if empty or not self._tables:
            raise HcLensError(
                f"expected rows in every split of {self.name}, got none in {empty or 'any'}; "
                "leave empty splits out"
            )
        for split, table in self._tables.items():
            find(table, self._layout.texts, f"{self.name}/{split}")

    @classmethod
    def named(
        cls, name: str, path: str | Path | None = None, *, labels: Sequence[str] | None = None
    ) -> Task:
        """A task that hc_lens knows: mnli, snli, qqp, hans or paws-qqp.

        The rows come from the Hub, or from `path`: a jsonl, json, csv, tsv or parquet file, a
        folder of them, or a folder written by ``datasets.save_to_disk``; HANS also as its original
        text files. `labels` names the integers in files that do not follow the Hub's order.
        """
        task = known(name)
        if labels is not None and sorted(map(fold, labels)) != sorted(map(fold, task.labels)):
            raise HcLensError(
                f"expected the labels of {name}, {list(task.labels)}, in the order of the "
                f"integers in your files, got {list(labels)}; leave labels= out if they are names"
            )
        if path is not None:
            tables = sources.read_files(path, name)
        elif task.repo is not None:
            tables = sources.read_hub(task.repo, task.config, task.revision, task.remedy)
        else:
            raise HcLensError(f"expected path= for {name}, which is not on the Hub; {task.remedy}")
        return cls(name, check_names(labels or task.labels), task.layout, tables)

    @classmethod
    def from_files(
        cls,
        path: sources.Files,
        *,
        columns: Columns,
        label: str | None = "label",
        labels: Sequence[str] | None = None,
        case: str | None = None,
        name: str | None = None,
    ) -> Task:
        """Your own rows: a file, a folder of files, or a mapping of split names to files.

        `columns` names the one or two text columns; `label` the label column (None for rows
        without labels), whose values are names or integers that count into `labels`; `case` a
        column by which results are grouped.
        """
        tables = sources.read_files(path)
        name = name or ("files" if isinstance(path, Mapping) else Path(path).stem)
        return cls._own(name, tables, columns, label, labels, case)

    @classmethod
    def from_hub(
        cls,
        repo: str,
        config: str | None = None,
        *,
        columns: Columns,
        revision: str | None = None,
        label: str | None = "label",
        labels: Sequence[str] | None = None,
        case: str | None = None,
        name: str | None = None,
    ) -> Task:
        """A dataset on the Hub; the other arguments are those of `from_files`."""
        remedy = "download the rows and pass their path to Task.from_files"
        tables = sources.read_hub(repo, config, revision, remedy)
        return cls._own(name or repo.split("/")[-1], tables, columns, label, labels, case)

    @classmethod
    def from_rows(
        cls,
        rows: sources.Table | Mapping[str, sources.Table],
        *,
        columns: Columns,
        label: str | None = "label",
        labels: Sequence[str] | None = None,
        case: str | None = None,
        name: str = "rows",
    ) -> Task:
        """Rows in memory: a list of dicts, a DataFrame, a Dataset, or a mapping of splits to such.

        The other arguments are those of `from_files`.
        """
        return cls._own(name, sources.read_rows(rows), columns, label, labels, case)

    @classmethod
    def _own(
        cls,
        name: str,
        tables: Mapping[str, Dataset],
        columns: Columns,
        label: str | None,
        labels: Sequence[str] | None,
        case: str | None,
    ) -> Task:
        columns = (columns,) if isinstance(columns, str) else tuple(columns)
        # A repeated or reserved name leaves fewer distinct ones than were given.
        if len(columns) not in (1, 2) or len({*columns} - {*ADDED}) < len(columns):
            raise HcLensError(
                f"expected one or two text columns not named {', '.join(ADDED)}, got "
                f"{list(columns)}; pass for instance columns=('premise', 'hypothesis')"
            )
        layout = Layout(
            columns, (columns,), (label,) if label else (), ((case,),) if case else (), ("id",)
        )
        task = cls(name, (), layout, tables)  # a missing text column is told first
        if label is None:
            return task
        return replace(task, labels=check_names(labels or label_names(tables, label)))

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the one or two texts of a row."""
        return self._layout.columns

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits."""
        return tuple(self._tables)

    def dataset(self, split: str | None = None) -> Dataset:
        """The rows of a split: its texts, ``label`` (an index), ``case`` and ``id``."""
        return self._rows(self._split(split)).table

    def n_dropped(self, split: str | None = None) -> int:
        """Number of source rows that a split leaves out, as they have no gold label."""
        return self._rows(self._split(split)).n_dropped

    def batches(
        self,
        model: Any,
        split: str | None = None,
        *,
        limit: int | None = None,
        seed: int = 0,
        max_length: int | None = None,
        token_budget: int = 4096,
        labels: Sequence[str] | None = None,
        padding_side: str | None = None,
        separator: str | None = None,
    ) -> Batches:
        """The rows of a split in batches for a model.

        Args:
            model: What ``hc.load`` returns, or a TransformerLens model with a tokenizer.
            split: Name of the split; by default the only one, or ``"train"`` of several.
            limit: Use at most this many rows, drawn at random with the seed.
            seed: Decides the rows under `limit` and the order of the batches.
            max_length: Cut longer rows to this many tokens. Without it a row that is longer than
                the model's context is an error.
            token_budget: Most tokens in a batch, padding included.
            labels: Names of the model's logits in order, for a checkpoint that does not tell.
            padding_side: ``"left"`` or ``"right"`` for a decoder; its tokenizer's side by default.
            separator: Text to put between the two texts of a pair for a decoder whose tokenizer
                puts nothing there (GPT-2). By default the two are concatenated as Hugging Face
                does, which is what its fine-tuned checkpoints have seen.
        """
        split = self._split(split)
        where = f"{self.name}/{split}"
        _check(model, limit=limit, token_budget=token_budget, max_length=max_length)
        side = _side(model, padding_side)
        encoder = Encoder.of(model, len(self.columns), max_length, separator)
        own = getattr(model, "labels", None) or {}
        to_task = align(own, self.labels, labels) if self.labels else []
        rows = self._rows(split)
        positions = sample(len(rows.table), limit, seed)
        chosen = rows.table.select(positions)
        key = encoder.key(chosen, self.columns)
        tokens = encoder.table(chosen, self.columns, key, where)
        gold, cases = chosen["label"][:], chosen["case"][:]
        content = [key, *gold, *cases, *positions, *self.labels, *to_task]
        return Batches(
            name=where,
            labels=self.labels,
            to_task=torch.tensor(to_task, dtype=torch.long),
            n_dropped=rows.n_dropped,
            n_truncated=sum(tokens["long"][:]),
            fingerprint=digest([*content, seed, token_budget, side]),
            rows=torch.tensor(positions),
            _tokens=tokens,
            _gold=torch.tensor(gold),
            _cases=tuple(cases),
            _order=tuple(map(tuple, bucket(tokens["length"][:], token_budget, seed))),
            _padding=Padding.of(model, side),
            _cfg=model.cfg,
        )

    def _split(self, split: str | None) -> str:
        if split is None:
            split = self.splits[0] if len(self.splits) == 1 else "train"
        for name in (split, sources.split_in(split) or split):
            if name in self._tables:
                return name
        raise HcLensError(
            f"expected a split of {self.name} among {list(self.splits)}, got {split!r}; "
            "pass split= with one of them"
        )

    def _rows(self, split: str) -> Rows:
        if split not in self._read:
            where = f"{self.name}/{split}"
            self._read[split] = read(self._tables[split], self._layout, self.labels, where)
        return self._read[split]

    def __repr__(self) -> str:
        rows = ", ".join(f"{split} {len(table)}" for split, table in self._tables.items())
        return f"Task({self.name}: {' + '.join(self.columns)} -> {list(self.labels)}; {rows})"


def _check(model: Any, **numbers: int | None) -> None:
    if not hasattr(model, "cfg"):
        raise HcLensError(
            f"expected a TransformerLens model to make batches for, got {model!r}; "
            "load one with hc.load(...)"
        )
    for name, number in numbers.items():
        if number is not None and (not isinstance(number, int) or number < 1):
            raise HcLensError(
                f"expected {name} as a whole number above 0, got {number!r}; "
                "leave it out for the default"
            )


def _side(model: Any, asked: str | None) -> str:
    if asked is None:
        return side_of(model)
    if asked not in ("left", "right") or (asked == "left" and is_encoder(model)):
        raise HcLensError(
            f"expected padding_side 'right', or 'left' on a decoder, got {asked!r}; "
            "leave it out for the tokenizer's own side"
        )
    return asked
