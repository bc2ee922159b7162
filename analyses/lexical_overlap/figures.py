"""Figures of a table of `hc_lens.analyses.lexical_overlap.scores`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from hc_lens.analyses.style import COLOURS, error_bars, legend, panels
from hc_lens.errors import HcLensError, check_choice
from hc_lens.units import Unit

FIGURE_9 = ("overlap", "previous", "next", "separator")
"""The scores of the paper's figure."""
CHANCE: dict[str, Any] = {"colors": "black", "linestyles": "dotted"}
"""How a chance level is drawn."""
PERMUTED: dict[str, Any] = {"color": "white", "markeredgecolor": "black", "markersize": 4}
"""How a permuted value is drawn."""


def figure(
    table: pd.DataFrame, units: Iterable[str] | None = None, mark: Iterable[str] = ()
) -> Figure:
    """Figure 9 of Bhaskar, Friedman and Chen (2024): bars of a few scores for a few heads.

    Each has its interval, its chance level and its permuted value.

    Args:
        table: what `scores` returned.
        units: labels of the heads; by default the eight with the highest overlap score.
        mark: heads whose label is printed bold, such as the core heads.
    """
    chosen = _top(table) if units is None else list(map(str, units))
    _check(table, chosen, "unit")
    bold = set(map(str, mark))
    cells = table.set_index(["unit", "score"])
    drawing, (axes,) = panels((max(6.0, 1.1 * len(chosen) + 1.6), 3.6))
    width = 0.8 / len(FIGURE_9)
    for at, score in enumerate(FIGURE_9):
        rows = cells.loc[[(unit, score) for unit in chosen]]
        middle = np.arange(len(chosen)) + (at - (len(FIGURE_9) - 1) / 2) * width
        axes.bar(middle, rows["value"], width * 0.92, color=COLOURS[at], label=score)
        error_bars(axes, middle, rows["value"], (rows["low"], rows["high"]), elinewidth=1)
        half = width * 0.46
        axes.hlines(rows["chance"], middle - half, middle + half, **CHANCE)
        axes.plot(middle, rows["permuted"], "D", **PERMUTED)
    axes.hlines([], 0, 1, **CHANCE, label="chance")
    axes.plot([], [], "D", **PERMUTED, label="permuted")
    axes.set_xticks(range(len(chosen)), chosen)
    for tick in axes.get_xticklabels():
        tick.set_fontweight("bold" if tick.get_text() in bold else "normal")
    axes.set(ylabel="attention mass", ylim=(0, 1))
    # An entry of the legend needs 1.6 inches.
    legend(drawing, min(int(drawing.get_figwidth() / 1.6), len(FIGURE_9) + 2))
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
    marks = [Unit.parse(unit) for unit in mark]
    for unit in marks:
        check_choice("a unit of the table", str(unit), table["unit"].unique())
    columns = min(3, len(chosen))
    lines = math.ceil(len(chosen) / columns)
    n_layers, n_heads = table["layer"].max() + 1, table["head"].max() + 1
    size = (columns * (1.6 + 0.22 * n_heads), lines * (1.0 + 0.22 * n_layers))
    drawing, grid = panels(size, lines, columns)
    for axes, score in zip(grid, chosen, strict=False):
        values = table[table["score"] == score].pivot(index="layer", columns="head", values="value")
        axes.imshow(values.to_numpy(), cmap="viridis", vmin=0, vmax=1, aspect="equal")
        chance = table.loc[table["score"] == score, "chance"].iloc[0]
        axes.set_title(f"{score.replace('_', ' ')} (chance {chance:.2f})", fontsize=9)
        axes.set(xticks=range(n_heads), yticks=range(n_layers))
        axes.tick_params(labelsize=7)
        axes.set_xlabel("head", fontsize=8)
        axes.set_ylabel("layer", fontsize=8)
        for unit in marks:
            corner = ((unit.head or 0) - 0.5, unit.layer - 0.5)
            axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor="red", linewidth=1.5))
    for axes in grid[len(chosen) :]:
        axes.set_axis_off()
    drawing.colorbar(grid[0].images[0], ax=grid, shrink=0.6, label="attention mass")
    return drawing


def _top(table: pd.DataFrame) -> list[str]:
    overlap = table.dropna(subset=["value"]).query("score == 'overlap'")
    if overlap.empty:
        raise HcLensError(
            "expected an overlap score to choose the heads by, got none (the task has one "
            "sentence?); name the heads with units="
        )
    return overlap.nlargest(8, "value")["unit"].tolist()


def _check(table: pd.DataFrame, names: Sequence[str], column: str) -> None:
    for name in names or [None]:
        check_choice(f"a {column} of the table", name, table[column].unique())
