"""A source table into rows of one form.

1. Find the text, label, case and id columns.
2. Map each label to its id by name; drop the rows without a gold label and count them.
3. Name each row's case: the joined values of the case columns, ``all`` where there are none. A
   slash becomes a hyphen (``ln_subject/object_swap``), so that a case can name a file.
4. Keep the texts, ``label``, ``case`` and ``id``: the source's own id, else the row's position in
   the source.
"""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Mapping, Sequence

from datasets import ClassLabel, Dataset, Features, Value

from hc_lens.data.known import Layout
from hc_lens.data.labels import NO_LABEL, is_missing, label_id
from hc_lens.errors import HcLensError

ADDED = ("label", "case", "id")
"""Columns that a table of rows has beside its texts."""
NO_CASE = "all"
"""Case of every row of a task without cases."""

_BYTES = re.compile(r"""b(['"]).*\1""", re.DOTALL)


def find(table: Dataset, choices: Sequence[tuple[str, ...]], where: str) -> tuple[str, ...]:
    """The first choice whose columns are all in the table; none is an HcLensError."""
    for choice in choices:
        if all(column in table.column_names for column in choice):
            return choice
    wanted = " or ".join(" + ".join(map(repr, choice)) for choice in choices)
    raise HcLensError(
        f"expected the column {wanted} in {where}, got the columns {table.column_names}; name the "
        "columns of your rows with columns=..., label=... and case=... of Task.from_files"
    )


def read(table: Dataset, layout: Layout, labels: Sequence[str], where: str) -> Dataset:
    """The rows of a source table, with labels as indices into `labels`."""
    sources = find(table, layout.texts, where)
    label_ids = _label_ids(table, layout, labels, where)
    kept = [row for row, label in enumerate(label_ids) if label != NO_LABEL or not layout.label]
    if not kept:
        got = f"{len(label_ids)} rows without a gold label" if label_ids else "an empty split"
        raise HcLensError(f"expected rows in {where}, got {got}; choose another split")
    columns: dict[str, list] = {
        name: _texts(table, source, layout.byte_literals, where)
        for name, source in zip(layout.texts[0], sources, strict=True)
    }
    own = [column for column in layout.id if column in table.column_names]
    ids = [str(value) for value in (table[own[0]][:] if own else range(len(table)))]
    columns |= {"label": label_ids, "case": _cases(table, layout, where), "id": ids}
    types = {name: Value("int64" if name == "label" else "string") for name in columns}
    chosen = {name: [values[row] for row in kept] for name, values in columns.items()}
    return Dataset.from_dict(chosen, Features(types))


def label_names(tables: Mapping[str, Dataset], label: str) -> tuple[str, ...]:
    """Label names found in the tables: those of a ClassLabel, else the sorted texts."""
    for split, table in tables.items():
        find(table, [(label,)], f"split {split!r}")
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


def _texts(table: Dataset, column: str, byte_literals: bool, where: str) -> list[str]:
    texts = table[column][:]
    wrong = [row for row, text in enumerate(texts) if not isinstance(text, str)]
    if wrong:
        raise HcLensError(
            f"expected text in column {column!r} of {where}, got {texts[wrong[0]]!r} in row "
            f"{wrong[0]} (and {len(wrong) - 1} more); fill or remove these rows"
        )
    return [_unwrapped(text) for text in texts] if byte_literals else texts


def _unwrapped(text: str) -> str:
    with contextlib.suppress(SyntaxError, ValueError):
        if _BYTES.fullmatch(text):
            return ast.literal_eval(text).decode("utf-8")
    return text


def _label_ids(table: Dataset, layout: Layout, labels: Sequence[str], where: str) -> list[int]:
    if not layout.label:
        return [NO_LABEL] * len(table)
    (column,) = find(table, [(name,) for name in layout.label], where)
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


def _cases(table: Dataset, layout: Layout, where: str) -> list[str]:
    if not layout.case:
        return [NO_CASE] * len(table)
    parts = [table[column][:] for column in find(table, layout.case, where)]
    return ["_".join(map(str, values)).replace("/", "-") for values in zip(*parts, strict=True)]
