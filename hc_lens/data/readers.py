"""Files, folders and Hub datasets into one table for each split.

1. A file is read by its suffix. In ``.csv`` a cell may be quoted; ``.tsv`` and ``.txt`` are plain
   tabs as in GLUE and HANS, unless every quote in the file is a quoted cell.
2. Each file of a folder is a split, named by the last split word in the file's name
   (``mnli_validation_matched.parquet`` is ``validation_matched``, ``dev.tsv`` is ``validation``),
   else by the whole name. Shards ``train-00000-of-00002`` are joined.
3. In a folder that holds several tasks, a named task takes the files that begin with its name.
4. A folder written by ``datasets.save_to_disk`` keeps its own splits.
5. A single table without a split word is the split ``all``.
6. A column has one type: where some of its cells are lists, all are.
"""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pyarrow.parquet
from datasets import Dataset, DatasetDict, config

from hc_lens.errors import HcLensError, first_line

Table = Dataset | pd.DataFrame | Sequence[Mapping]
Files = str | Path | Mapping[str, str | Path | Sequence[str | Path]]

ONLY = "all"
"""Name of the split when a source is a single table without a split word."""

LISTS = (list, tuple, np.ndarray)
"""What a cell with several values may be."""

_SPLIT_OF = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev", "eval", "evaluation"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}
_QUOTED_CELL = re.compile(r'"(?:[^"]|"")*"')


def split_in(name: str) -> str | None:
    """The split that a name holds, as the Hub calls it: ``my_dev`` holds ``validation``."""
    words = re.split(r"[^a-z0-9]+", name.lower())
    found = [index for index, word in enumerate(words) if word in _SPLIT_OF]
    if not found:
        return None
    rest = [word for word in words[found[-1] + 1 :] if word in ("matched", "mismatched")]
    return "_".join([_SPLIT_OF[words[found[-1]]], *rest])


def read_files(files: Files, task: str | None = None) -> dict[str, Dataset]:
    """One table for each split from a file, a folder, or a mapping of split names to files."""
    if isinstance(files, Mapping):
        return {split: _read_shards(paths) for split, paths in files.items()}
    path = Path(files).expanduser()
    if not os.path.exists(path):
        raise HcLensError(
            f"expected a file or folder of rows, got {str(path)!r}, which does not exist; "
            "check the path"
        )
    if path.is_file():
        return {split_in(_stem(path)) or ONLY: _read(path)}
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        with _explained("what datasets.save_to_disk writes", repr(str(path)), "write it again"):
            saved = datasets.load_from_disk(str(path))
        saved = saved if isinstance(saved, DatasetDict) else {saved.split or ONLY: saved}
        return {str(split): table for split, table in saved.items()}
    return {split: _read_shards(shards) for split, shards in _group(path, task).items()}


def read_hub(
    repo: str, subset: str | None, revision: str | None, remedy: str
) -> dict[str, Dataset]:
    """One table for each split from the Hub; a failure is an HcLensError that ends in `remedy`."""
    wanted = repo if subset is None else f"{repo} ({subset})"
    cached = Path(config.HF_DATASETS_CACHE).glob(f"{repo.split('/')[0]}*")
    remedy = f"check the name and the network, or {remedy}"
    with _explained(f"to read {wanted} from the Hugging Face Hub", "a failure", remedy):
        if not _reachable(repo) and not any(cached):
            raise ConnectionError("no connection and no cached copy")
        loaded = datasets.load_dataset(repo, subset, revision=revision, trust_remote_code=False)
    return {str(split): table for split, table in loaded.items()}


def read_rows(rows: Table | Mapping[str, Table]) -> dict[str, Dataset]:
    """One table for each split from rows in memory; a single table is the split ``all``."""
    tables = rows if isinstance(rows, Mapping) else {ONLY: rows}
    return {split: _as_dataset(table, split) for split, table in tables.items()}


def _as_dataset(table: Table, split: str) -> Dataset:
    if isinstance(table, Dataset):
        return table
    with _explained(
        f"a list of dicts, a DataFrame or a Dataset for split {split!r}",
        f"a {type(table).__name__} that does not make a table",
        "give every row the same columns and every column one type",
    ):
        if isinstance(table, pd.DataFrame):
            return _from_frame(table)
        return _from_dicts(table)


def _from_dicts(rows: Sequence[Mapping]) -> Dataset:
    # Dataset.from_list takes the columns of the first row only.
    columns = dict.fromkeys(column for row in rows for column in row)
    cells = {column: [row.get(column) for row in rows] for column in columns}
    return Dataset.from_dict({column: _of_one_kind(each) for column, each in cells.items()})


def _from_frame(frame: pd.DataFrame) -> Dataset:
    evened = frame.copy(deep=False)
    for place, kind in enumerate(frame.dtypes):
        if pd.api.types.is_object_dtype(kind):
            cells = _of_one_kind(frame.iloc[:, place].tolist())
            evened.isetitem(place, pd.Series(cells, frame.index, object))
    return Dataset.from_pandas(evened, preserve_index=False)


def _of_one_kind(cells: list[Any]) -> list[Any]:
    """The cells of a column; if some are lists, one that is not becomes a list of its own."""
    if not any(isinstance(cell, LISTS) for cell in cells):
        return cells
    return [
        cell if isinstance(cell, LISTS) else None if pd.isna(cell) else [cell] for cell in cells
    ]


def _reachable(repo: str) -> bool:
    """Whether the Hub answers at all; load_dataset itself retries for half a minute."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        HfApi().dataset_info(repo, timeout=10)
    except HfHubHTTPError:  # the Hub answers, even if it refuses
        return True
    except Exception:  # the connection errors of two HTTP libraries, by version
        return False
    return True


def _stem(path: Path) -> str:
    return re.sub(r"-\d{5}-of-\d{5}$", "", path.stem)


def _group(folder: Path, task: str | None) -> dict[str, list[Path]]:
    paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in _READERS)
    # MNLI and HANS ship each split as .jsonl and .txt, and a README.txt or .json may be there too.
    paths = [path for path in paths if path.suffix.lower() not in (".json", ".txt")] or paths
    if task is not None:
        paths = [path for path in paths if _letters(path.stem).startswith(_letters(task))] or paths
    if not paths:
        raise HcLensError(
            f"expected a folder with files of rows ({', '.join(_READERS)}), got {str(folder)!r} "
            "without any; pass the folder that holds them"
        )
    groups: dict[str, list[Path]] = {}
    for path in paths:
        otherwise = ONLY if len(paths) == 1 else _stem(path)
        groups.setdefault(split_in(_stem(path)) or otherwise, []).append(path)
    for split, members in groups.items():
        if len({_stem(path) + path.suffix for path in members}) > 1:
            raise HcLensError(
                f"expected one file for split {split!r}, got {[path.name for path in members]}; "
                "leave one of them in the folder, or say which with Task.from_files({split: file})"
            )
    return groups


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _read_shards(paths: str | Path | Sequence[str | Path]) -> Dataset:
    shards = [paths] if isinstance(paths, (str, Path)) else paths
    return datasets.concatenate_datasets([_read(Path(path)) for path in shards])


def _read(path: Path) -> Dataset:
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise HcLensError(
            f"expected a file of rows ({', '.join(_READERS)}), got {str(path)!r}; convert it first"
        )
    remedy = "check that the file is whole and that its suffix is right"
    with _explained("a readable table", repr(str(path)), remedy):
        return reader(path)


@contextmanager
def _explained(expected: str, given: str, remedy: str) -> Iterator[None]:
    """Turn whatever a library raises into an error that says what was expected and what to do."""
    try:
        yield
    except HcLensError:
        raise
    except Exception as error:
        raise HcLensError(
            f"expected {expected}, got {given}: {first_line(error)}; {remedy}"
        ) from error


def _read_json(path: Path) -> Dataset:
    text = path.read_text(encoding="utf-8-sig")
    if text.lstrip().startswith("["):
        return _from_dicts(json.loads(text))
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            rows.append(_row(line, number))
    return _from_dicts(rows)


def _row(line: str, number: int) -> dict[str, Any]:
    """The row of a line of a ``.jsonl`` file."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"line {number} column {error.colno}: {error.msg}") from None
    if not isinstance(row, dict):
        raise ValueError(f"line {number}: {line.strip()[:40]!r} is no row of names and values")
    return row


def _read_tabs(path: Path) -> Dataset:
    cells = _cells(path, delimiter="\t", quoting=csv.QUOTE_NONE)
    quotes = [cell for row in cells for cell in row if '"' in cell]
    # A doubled quote is written by a program that quotes cells; GLUE and HANS never do.
    if any('""' in cell for cell in quotes) and all(_QUOTED_CELL.fullmatch(c) for c in quotes):
        cells = _cells(path, delimiter="\t", strict=True)
    return _from_cells(cells, path)


def _cells(path: Path, **dialect: Any) -> list[list[str]]:
    # The csv module, as pandas turns the text "None" or "NA" into a missing value.
    with path.open(encoding="utf-8-sig", newline="") as file:
        return [row for row in csv.reader(file, **dialect) if row]


def _from_cells(cells: list[list[str]], path: Path) -> Dataset:
    if not cells:
        raise HcLensError(
            f"expected a line of column names, got the empty file {str(path)!r}; check the path"
        )
    header, rows = cells[0], cells[1:]
    if len(set(header)) < len(header):
        raise HcLensError(
            f"expected each column once in {str(path)!r}, got the header {header}; rename one"
        )
    for number, row in enumerate(rows, start=1):
        if len(row) != len(header):
            raise HcLensError(
                f"expected {len(header)} cells in each row of {str(path)!r}, got {len(row)} in row "
                f"{number}; check the quoting, or save the rows as .jsonl or .parquet"
            )
    return Dataset.from_dict(
        {column: [row[index] for row in rows] for index, column in enumerate(header)}
    )


_READERS: dict[str, Callable[[Path], Dataset]] = {
    ".parquet": lambda path: Dataset(pyarrow.parquet.read_table(path)),
    ".jsonl": _read_json,
    ".json": _read_json,
    ".csv": lambda path: _from_cells(_cells(path, delimiter=",", strict=True), path),
    ".tsv": _read_tabs,
    ".txt": _read_tabs,
}
