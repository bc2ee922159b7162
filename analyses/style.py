"""How the figures of all analyses look.

Nothing appears on the screen, and matplotlib's global state is neither read nor changed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import numpy as np
from jaxtyping import Real
from matplotlib.axes import Axes
from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, PINK = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
SKY, RED, YELLOW, GREY = "#56B4E9", "#D55E00", "#F0E442", "#999999"
COLOURS = (BLUE, ORANGE, GREEN, PINK, SKY, RED, YELLOW, GREY)
"""A palette that colour-blind readers can tell apart (Okabe and Ito 2008)."""
LINES = tuple(colour for colour in COLOURS if colour != YELLOW)
"""The colours for lines: yellow is too faint on white."""
PALE = "#F5B26B"
"""A fill on which black text is easy to read."""


def panels(
    size: tuple[float, float], rows: int = 1, columns: int = 1, **settings: Any
) -> tuple[Figure, list[Axes]]:
    """A figure and its axes, row by row, without a frame at the top and on the right.

    `settings` are those of ``Figure.subplots``.
    """
    drawing = Figure(figsize=size, layout="constrained")
    grid = drawing.subplots(rows, columns, squeeze=False, **settings).flatten().tolist()
    for axes in grid:
        axes.spines[["top", "right"]].set_visible(False)
    return drawing, grid


def legend(
    drawing: Figure, n_columns: int = 1, side: Literal["top", "right"] = "top", **settings: Any
) -> None:
    """A legend of all labelled marks, outside the axes."""
    where = "outside upper center" if side == "top" else "outside right center"
    drawing.legend(loc=where, ncols=n_columns, frameon=False, **settings)


def percent_axis(axes: Axes, axis: Literal["x", "y"], label: str) -> None:
    """An axis from 0 to 100, a little wider so that marks at the ends are whole."""
    axes.set(**{f"{axis}lim": (-3, 103), f"{axis}label": f"{label} (%)"})


def error_bars(
    axes: Axes,
    positions: Real[np.ndarray, "bars"],
    values: Iterable[float],
    ends: tuple[Iterable[float], Iterable[float]],
    **settings: Any,
) -> None:
    """Intervals between the two `ends` of each value; one without ends is not drawn."""
    middle, low, high = (np.fromiter(given, dtype=float) for given in (values, *ends))
    lengths = np.stack([middle - low, high - middle])
    if not np.isnan(lengths).all():
        lengths = np.nan_to_num(lengths).clip(min=0)
        axes.errorbar(positions, middle, lengths, fmt="none", ecolor="black", **settings)
