"""Figures of a table of `analyses.lexical_overlap.scores`.

1. `figure` is Figure 9 of Bhaskar, Friedman and Chen (2024): bars of a few scores for a few heads,
   with their interval, chance level and permuted value.
2. `heat_maps` shows one layer x head map for each score.

Both return a matplotlib Figure of their own: nothing is drawn on the screen, and no global state
of matplotlib is read or changed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from hc_lens.errors import HcLensError
from hc_lens.units import Unit

FIGURE_9 = ("overlap", "previous", "next", "separator")
"""The scores of the paper's figure."""
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
"""Okabe and Ito's palette, which colour-blind readers can tell apart."""
WIDTH_OF_ENTRY = 1.6
"""Inches that an entry of the legend needs."""
N_UNITS = 8
"""Heads in the bar chart if none are named."""


def figure(
    table: pd.DataFrame,
    units: Iterable[str] | None = None,
    scores: Sequence[str] = FIGURE_9,
    mark: Iterable[str] = (),
) -> Figure:
    """Bars of some scores for some heads.

    Args:
        table: what `scores` returned.
        units: labels of the heads; by default the eight with the highest overlap score.
        scores: which scores to draw.
        mark: heads whose label is printed bold, such as the core heads.
    """
    _check(table, scores, "score")
    chosen = _top(table) if units is None else list(map(str, units))
    _check(table, chosen, "unit")
    bold = set(map(str, mark))
    cells = table.set_index(["unit", "score"])
    drawing = Figure(figsize=(max(6.0, 1.1 * len(chosen) + 1.6), 3.6), layout="constrained")
    axes = drawing.subplots()
    places = np.arange(len(chosen))
    width = 0.8 / len(scores)
    for at, score in enumerate(scores):
        rows = cells.loc[[(unit, score) for unit in chosen]]
        left = places + (at - (len(scores) - 1) / 2) * width
        errors = np.stack([rows["value"] - rows["low"], rows["high"] - rows["value"]])
        colour = COLOURS[at % len(COLOURS)]
        axes.bar(left, rows["value"], width * 0.92, color=colour, label=score.replace("_", " "))
        if not np.isnan(errors).all():
            errors = np.nan_to_num(errors).clip(min=0)
            axes.errorbar(left, rows["value"], errors, fmt="none", ecolor="black", elinewidth=1)
        half = width * 0.46
        axes.hlines(rows["chance"], left - half, left + half, colors="black", linestyles="dotted")
        axes.plot(left, rows["permuted"], "D", color="white", markeredgecolor="black", markersize=4)
    axes.hlines([], 0, 1, colors="black", linestyles="dotted", label="chance")
    axes.plot([], [], "D", color="white", markeredgecolor="black", markersize=4, label="permuted")
    axes.set_xticks(places, chosen)
    for tick in axes.get_xticklabels():
        tick.set_fontweight("bold" if tick.get_text() in bold else "normal")
    axes.set_ylabel("attention mass")
    axes.set_ylim(0, 1)
    axes.spines[["top", "right"]].set_visible(False)
    columns = max(2, int(drawing.get_figwidth() / WIDTH_OF_ENTRY))
    drawing.legend(loc="outside upper center", ncols=min(columns, len(scores) + 2), frameon=False)
    return drawing


def heat_maps(
    table: pd.DataFrame, scores: Sequence[str] | None = None, mark: Iterable[str] = ()
) -> Figure:
    """One layer x head map for each score that is defined.

    Args:
        table: what `scores` returned.
        scores: which scores to draw; by default all that are defined.
        mark: heads to draw a frame around, such as the core heads.
    """
    defined = table.dropna(subset=["value"])["score"].unique().tolist()
    chosen = defined if scores is None else list(scores)
    _check(table, chosen, "score")
    _check(table, [*map(str, mark)] or table["unit"].tolist(), "unit")
    marks = [Unit.parse(str(unit)) for unit in mark]
    columns = min(3, len(chosen))
    lines = math.ceil(len(chosen) / columns)
    n_layers, n_heads = table["layer"].max() + 1, table["head"].max() + 1
    size = (columns * (1.6 + 0.22 * n_heads), lines * (1.0 + 0.22 * n_layers))
    drawing = Figure(figsize=size, layout="constrained")
    grid = drawing.subplots(lines, columns, squeeze=False).flatten()
    for axes, score in zip(grid, chosen, strict=False):
        values = table[table["score"] == score].pivot(index="layer", columns="head", values="value")
        axes.imshow(values.to_numpy(), cmap="viridis", vmin=0, vmax=1, aspect="equal")
        chance = table.loc[table["score"] == score, "chance"].iloc[0]
        axes.set_title(f"{score.replace('_', ' ')} (chance {chance:.2f})", fontsize=9)
        axes.set_xticks(range(n_heads))
        axes.set_yticks(range(n_layers))
        axes.tick_params(labelsize=7)
        axes.set_xlabel("head", fontsize=8)
        axes.set_ylabel("layer", fontsize=8)
        for unit in marks:
            corner = ((unit.head or 0) - 0.5, unit.layer - 0.5)
            axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor="red", linewidth=1.5))
    for axes in grid[len(chosen) :]:
        axes.set_axis_off()
    drawing.colorbar(grid[0].images[0], ax=grid.tolist(), shrink=0.6, label="attention mass")
    return drawing


def _top(table: pd.DataFrame) -> list[str]:
    overlap = table.dropna(subset=["value"]).query("score == 'overlap'")
    if overlap.empty:
        raise HcLensError(
            "expected an overlap score to choose the heads by, got none (the task has one "
            "sentence?); name the heads with units="
        )
    return overlap.nlargest(N_UNITS, "value")["unit"].tolist()


def _check(table: pd.DataFrame, names: Sequence[str], column: str) -> None:
    known = table[column].unique().tolist()
    missing = [name for name in names if name not in known]
    if missing or not names:
        raise HcLensError(
            f"expected a {column} of the table among {known[:12]}, got "
            f"{missing[0] if missing else 'none'!r}; choose among them"
        )
