"""What a command shows, and where.

1. Results go to stdout: readable lines and a table, or with ``--json`` one JSON document.
2. Notes on what is being done go to stderr, one line each. Progress bars are shown if stderr is a
   terminal.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    import pandas as pd

HIDDEN = ("command", "out", "model", "inputs", "table")
"""Entries of a document that the readable form leaves out, or shows elsewhere."""


class Screen:
    """The two streams of one command."""

    def __init__(self, as_json: bool = False):
        self.as_json = as_json

    @property
    def progress(self) -> bool:
        """Whether to show progress bars."""
        return sys.stderr.isatty()

    def note(self, text: str) -> None:
        """Say on stderr what is being done."""
        typer.echo(text, err=True)

    def show(
        self,
        document: Mapping[str, Any],
        summary: Callable[[pd.DataFrame], pd.DataFrame] | None = None,
    ) -> None:
        """Print the result, with the document's table or a summary of it."""
        if self.as_json:
            typer.echo(json.dumps(document, indent=1, ensure_ascii=False))
            return
        facts = {key: value for key, value in document.items() if key not in HIDDEN}
        width = max(map(len, facts), default=0)
        for key, value in facts.items():
            typer.echo(f"{key.replace('_', ' '):<{width}}  {_text(value)}")
        table = _frame(document)
        if table is not None:
            shown = table if summary is None else summary(table)
            typer.echo(("\n" if facts else "") + readable(shown))
        if document.get("out"):
            typer.echo(f"\nwritten to {document['out']}")


def readable(table: pd.DataFrame) -> str:
    """A table as text: four digits, nothing left out."""
    if table.empty:
        return "(no rows)"
    return table.to_string(index=False, float_format=lambda value: f"{value:.4f}", na_rep="-")


def records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a table as plain values that JSON can hold; NaN is None."""
    return [
        {str(key): _plain(value) for key, value in row.items()}
        for row in table.to_dict(orient="records")
    ]


def _frame(document: Mapping[str, Any]) -> pd.DataFrame | None:
    if "table" not in document:
        return None
    import pandas as pd

    return pd.DataFrame(document["table"])


def _plain(value: Any) -> Any:
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {entry}" for key, entry in value.items())
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


@contextmanager
def quiet_reading(progress: bool) -> Iterator[None]:
    """Keep the progress bars of ``datasets`` off a stream that is no terminal."""
    import datasets

    hidden = datasets.are_progress_bars_disabled()
    if not progress:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        if not hidden:
            datasets.enable_progress_bars()
