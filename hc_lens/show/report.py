"""A report: sentences, tables and figures in one HTML file that needs no network.

1. A `Fact` is a number of a results file; a `Sentence` is text around facts. Each fact is in a
   ``<data>`` element with its exact value and its name, so that a reader (or a test) can find it.
2. A `Table` is a DataFrame that is also in a file: every cell carries its exact value beside the
   rounded one that is shown, and a click on a heading sorts by it.
3. A `Drawing` is a matplotlib figure as SVG, made without a date or random ids: the same numbers
   give the same bytes. An `Attention` is drawn from its numbers and texts.
4. Jinja2 puts the sections together with autoescape on: text of models and rows is never markup.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure

from hc_lens.show.attention import Attention
from hc_lens.show.page import asset, bundle, policy, save

MISSING = "–"  # noqa: RUF001
"""What a missing number looks like."""


@dataclass(frozen=True)
class Fact:
    """A number, where it comes from and how it is shown."""

    name: str
    """Its name in the results file."""
    value: float | int
    """The number itself."""
    style: str = "number"
    """A name of `STYLES`."""

    @property
    def text(self) -> str:
        """How it is shown."""
        return show(self.value, self.style)


Part = str | Fact


@dataclass(frozen=True)
class Sentence:
    """Text around facts, and whether they are what the paper describes."""

    parts: tuple[Part, ...]
    """Text and facts in order."""
    found: bool | None = None
    """True if the numbers show what the paper describes, False if not, None for a plain remark."""

    @property
    def plain(self) -> str:
        """The sentence as text."""
        return "".join(part if isinstance(part, str) else part.text for part in self.parts)


@dataclass(frozen=True, eq=False)
class Table:
    """A results file as a table."""

    frame: pd.DataFrame
    """The rows and columns that are shown."""
    source: str
    """The file in the run folder that holds them."""
    title: str = ""
    """What the table says."""
    styles: Mapping[str, str] = field(default_factory=dict)
    """Column name to a name of `STYLES`; numbers are shown with three digits otherwise."""

    @property
    def headings(self) -> list[tuple[str, bool]]:
        """The heading of each column, and whether it holds numbers."""
        return [(name.replace("_", " "), self._numeric(name)) for name in self.frame]

    @property
    def rows(self) -> list[list[dict[str, Any]]]:
        """The cells, with exact and shown values."""
        cells = [[self._cell(name, value) for value in self.frame[name]] for name in self.frame]
        return [list(row) for row in zip(*cells, strict=True)]

    def _numeric(self, name: str) -> bool:
        kind = self.frame[name].dtype
        return pd.api.types.is_numeric_dtype(kind) and not pd.api.types.is_bool_dtype(kind)

    def _cell(self, name: str, value: Any) -> dict[str, Any]:
        number, exact = self._numeric(name), str(value)
        text = exact
        if pd.isna(value):
            exact, text = "", MISSING
        elif number:
            text = show(value, self.styles.get(name, "number"))
        elif pd.api.types.is_bool(value):
            text = "yes" if value else "no"
        return {"column": name, "value": exact, "text": text, "number": number}


@dataclass(frozen=True)
class Drawing:
    """A figure as SVG."""

    svg: bytes
    """The picture."""
    title: str
    """What it shows, also for readers who cannot see it."""

    @classmethod
    def of(cls, figure: Figure, title: str) -> Drawing:
        """A matplotlib figure, drawn to the same bytes each time."""
        stream = io.BytesIO()
        with mpl.rc_context({"svg.hashsalt": "hc_lens", "svg.fonttype": "path"}):
            figure.savefig(stream, format="svg", metadata={"Date": None})
        return cls(stream.getvalue(), title)

    @property
    def address(self) -> str:
        """The picture as a data address."""
        return "data:image/svg+xml;base64," + base64.b64encode(self.svg).decode("ascii")


@dataclass(frozen=True, eq=False)
class Section:
    """A part of the report."""

    name: str
    """Its id on the page."""
    title: str
    """Its heading."""
    sentences: Sequence[Sentence] = ()
    """What the numbers say."""
    items: Sequence[Table | Drawing | Attention] = ()
    """Tables and figures."""
    notes: Sequence[str] = ()
    """How to read them."""


@dataclass(frozen=True, eq=False)
class Report:
    """A whole report."""

    title: str
    """Heading of the page."""
    lead: str
    """One line under it."""
    sections: Sequence[Section]
    """The parts in order; the first is the summary."""
    settings: str = ""
    """The settings file, word by word."""
    about: Mapping[str, str] = field(default_factory=dict)
    """Command, versions, fingerprints."""
    made: str = ""
    """When the page was written."""

    def html(self) -> str:
        """The page."""
        environment = jinja2.Environment(
            loader=jinja2.PackageLoader("hc_lens.show", "."),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        return environment.get_template("report.html").render(
            report=self,
            policy=policy(),
            bundle=bundle(),
            style=asset("report.css"),
            script=asset("report.js"),
        )

    def save(self, path: str | Path) -> Path:
        """Write the page, whole or not at all."""
        return save(path, self.html())


STYLES: dict[str, Callable[[float], str]] = {
    "number": lambda value: (
        str(int(value)) if value % 1 == 0 and abs(value) < 1e9 else f"{value:.3g}"
    ),
    "percent": lambda value: f"{100 * value:.1f}%",
    "points": lambda value: f"{100 * value:+.1f}",
    "span": lambda value: f"{100 * value:.1f}",
    "probability": lambda value: "below 1e-12" if value < 1e-12 else f"{value:.2g}",
    "two": lambda value: f"{value:.2f}",
}
"""How numbers are shown; percent, points (with their sign) and span (without) take shares."""


def show(value: float | int, style: str) -> str:
    """A number in a style; a missing one is a dash."""
    return MISSING if math.isnan(value) else STYLES[style](value)
