"""A task: labelled rows of one or two texts, and their batches for a model.

1. Read the source's tables, one for each split (`hc_lens.data.readers`).
2. Bring a split into one form when it is first asked for (`hc_lens.data.rows`).
3. Match the model's labels to the task's by name (`hc_lens.data.labels`).
4. Tokenise the rows once (`hc_lens.data.encode`) and bucket them by length
   (`hc_lens.data.batches`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from datasets import Dataset

from hc_lens.data import readers
from hc_lens.data.batches import Batches, bucket, sample
from hc_lens.data.encode import tokenise
from hc_lens.data.known import KNOWN, Layout
from hc_lens.data.labels import align, check_names, fold
from hc_lens.data.rows import ADDED, find, label_names, read
from hc_lens.errors import HcLensError
from hc_lens.models.inputs import Padding, Side
from hc_lens.protocols import Model
from hc_lens.records import digest

Columns = str | Sequence[str]
HELD_OUT = ("validation", "dev", "test")
"""How the names of splits begin that are not for training."""


@dataclass(frozen=True, eq=False, repr=False)
class Task:
    """Rows of one or two texts, with a label and a case each, in named splits."""

    name: str
    """Name of the task."""
    labels: tuple[str, ...]
    """Label names, in the order of the label ids; empty for rows without labels."""
    _layout: Layout
    """Which columns of the source hold texts, label, case and id."""
    _tables: Mapping[str, Dataset]
    """The source's table of each split."""
    _read: dict[str, Dataset] = field(default_factory=dict)
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
        elif task.repo is not None:
            tables = readers.read_hub(task.repo, task.config, task.revision, task.remedy)
        else:
            raise HcLensError(f"expected path= for {name}, which is not on the Hub; {task.remedy}")
        return cls(name, tuple(labels or task.labels), task.layout, tables)

    @classmethod
    def from_files(
        cls,
        path: readers.Files,
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
        rows = readers.read_files(path)
        name = name or ("files" if isinstance(path, Mapping) else Path(path).stem)
        return cls.from_rows(
            rows, columns=columns, label=label, labels=labels, case=case, name=name
        )

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
        rows = readers.read_hub(repo, config, revision, remedy)
        name = name or repo.split("/")[-1]
        return cls.from_rows(
            rows, columns=columns, label=label, labels=labels, case=case, name=name
        )

    @classmethod
    def from_rows(
        cls,
        rows: readers.Table | Mapping[str, readers.Table],
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
        tables = readers.read_rows(rows)
        columns = (columns,) if isinstance(columns, str) else tuple(columns)
        # A repeated or reserved name leaves fewer distinct ones than were given.
        if len(columns) not in (1, 2) or len({*columns} - {*ADDED}) < len(columns):
            raise HcLensError(
                f"expected one or two text columns not named {', '.join(ADDED)}, got "
                f"{list(columns)}; pass for instance columns=('premise', 'hypothesis')"
            )
        cases = ((case,),) if case else ()
        layout = Layout((columns,), (label,) if label else (), cases, id=("id",))
        task = cls(name, (), layout, tables)  # a missing text column is reported first
        if label is None:
            return task
        return replace(task, labels=check_names(labels or label_names(tables, label)))

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the one or two texts of a row."""
        return self._layout.texts[0]

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits."""
        return tuple(self._tables)

    def training_split(self) -> str:
        """``train``, else the first split that is not held out, else the only one."""
        if "train" in self.splits:
            return "train"
        others = [split for split in self.splits if not split.startswith(HELD_OUT)]
        return (others or self.splits)[0]

    def held_out_split(self) -> str:
        """The first split that is not for training; the first of all if there is none."""
        kept = [split for split in self.splits if split.startswith(HELD_OUT)]
        return (kept or self.splits)[0]

    def dataset(self, split: str | None = None) -> Dataset:
        """The rows of a split: its texts, ``label`` (an index), ``case`` and ``id``."""
        name = self._split(split)
        if name not in self._read:
            where = f"{self.name}/{name}"
            self._read[name] = read(self._tables[name], self._layout, self.labels, where)
        return self._read[name]

    def n_dropped(self, split: str | None = None) -> int:
        """Number of source rows that a split leaves out, as they have no gold label."""
        return len(self._tables[self._split(split)]) - len(self.dataset(split))

    def batches(
        self,
        model: Model,
        split: str | None = None,
        *,
        limit: int | None = None,
        seed: int = 0,
        max_length: int | None = None,
        token_budget: int = 4096,
        padding_side: Side | None = None,
        separator: str | None = None,
    ) -> Batches:
        """The rows of a split in batches for a model.

        Args:
            model: What ``hc.load`` returns, or a TransformerLens model with a tokenizer.
            split: By default the only one, or ``"train"`` of several.
            limit: Use at most this many rows, drawn at random with the seed.
            seed: Decides the rows under `limit` and the order of the batches.
            max_length: Cut longer rows to this many tokens; without it they are an error.
            token_budget: Most tokens in a batch, padding included.
            padding_side: The side for a decoder; its tokenizer's side by default.
            separator: Text to put between the two texts of a pair for a decoder whose tokenizer
                puts nothing there (GPT-2). By default the two are concatenated as Hugging Face
                does, which is what its fine-tuned checkpoints have seen.
        """
        where = f"{self.name}/{self._split(split)}"
        _check(model, limit=limit, token_budget=token_budget, max_length=max_length)
        padding = Padding.of(model, padding_side)
        own = getattr(model, "labels", None) or {}
        to_task = align(own, self.labels) if self.labels else []
        rows = self.dataset(split)
        positions = sample(len(rows), limit, seed)
        chosen = rows.select(positions)
        texts = chosen.select_columns(list(self.columns))
        tokens, key = tokenise(model, texts, where, max_length, separator)
        gold, cases, lengths = chosen["label"][:], chosen["case"][:], tokens["length"][:]
        order = bucket(lengths, token_budget, seed)
        content = [key, gold, cases, positions, self.labels, to_task, seed, token_budget]
        return Batches(
            name=where,
            labels=self.labels,
            to_task=torch.tensor(to_task, dtype=torch.long),
            n_dropped=self.n_dropped(split),
            n_truncated=sum(tokens["long"][:]),
            fingerprint=digest(*content, padding.side),
            rows=torch.tensor(positions),
            _tokens=tokens,
            _gold=torch.tensor(gold),
            _cases=tuple(cases),
            _order=tuple(map(tuple, order)),
            _widths=tuple(max(lengths[row] for row in batch) for batch in order),
            _padding=padding,
        )

    def _split(self, split: str | None) -> str:
        if split is None:
            split = self.splits[0] if len(self.splits) == 1 else "train"
        for name in (split, readers.split_in(split) or split):
            if name in self._tables:
                return name
        raise HcLensError(
            f"expected a split of {self.name} among {list(self.splits)}, got {split!r}; "
            "pass split= with one of them"
        )

    def __repr__(self) -> str:
        rows = ", ".join(f"{split} {len(table)}" for split, table in self._tables.items())
        return f"Task({self.name}: {' + '.join(self.columns)} -> {list(self.labels)}; {rows})"


def _check(model: Model, **numbers: int | None) -> None:
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
