"""The figures of section 4 of Bhaskar, Friedman and Chen (2024); accuracies are in percent."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import cycle
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from hc_lens.analyses.style import BLUE, LINES, PALE, RED, legend, panels, percent_axis
from hc_lens.analyses.subnetworks import at_sparsity, by_sparsity, frequency_table, spearman
from hc_lens.analyses.tables import CELL, FullModels, RunTable, with_full
from hc_lens.data.known import SIDES
from hc_lens.errors import HcLensError, check_choice

MARKERS = "osD^vP*X"
"""A second way to tell curves and sparsities apart."""
DASHES = [dash for dash in ("-", "--", ":", "-.") for _ in LINES]
"""Styles of the lines: the next when the colours are used up."""


def frequency_scatter(
    table: pd.DataFrame, rows: float, columns: float, mark: Iterable[str] = ()
) -> Figure:
    """The heads at two frequencies (Figures 5 and 11); a disc's area and number say how many.

    Args:
        table: what `frequencies` returned.
        rows: sparsity on the vertical axis.
        columns: sparsity on the horizontal axis.
        mark: heads whose discs are filled and that are named below, such as the core.
    """
    counted = frequency_table(table, rows, columns)
    across, up = (at_sparsity(table, at).set_index("unit")["count"] for at in (columns, rows))
    bold = [unit for unit in map(str, mark) if unit in across]
    drawing, (axes,) = panels((7.0, 5.4))
    discs: Any = across.groupby([across, up]).groups
    for (x, y), units in discs.items():
        fill = PALE if set(units) & set(bold) else "white"
        size = 130 * min(len(units), 12) ** 0.7
        axes.scatter(x, y, s=size, color=fill, edgecolors=BLUE, linewidths=1.5, zorder=3)
        axes.text(x, y, str(len(units)), ha="center", va="center", fontsize=9, zorder=4)
    found = spearman(table, rows, columns)
    axes.set(
        xlabel=f"subnetworks of {100 * columns:g}% sparsity that keep the head",
        ylabel=f"subnetworks of {100 * rows:g}% sparsity that keep the head",
        title=f"number of heads; Spearman's rho {found.rho:.2f} over {found.n} heads",
        xticks=list(counted.columns),
        yticks=list(counted.index),
    )
    if bold:
        named = ", ".join(bold[:8]) + (f" and {len(bold) - 8} more" if len(bold) > 8 else "")
        drawing.supxlabel(f"orange: with {named}", fontsize=9)
    axes.margins(0.07)
    axes.grid(color="0.92", zorder=0)
    return drawing


def spread_figure(
    table: RunTable, full: FullModels, *, cases: Sequence[str] | None = None
) -> Figure:
    """A dot for each seed and case, a panel for each sparsity, the full model as a line.

    The layout is that of Figures 2, 3 and 12. If the table has cases of both sides, the friendly
    ones stand first, and every case is marked with its side.

    Args:
        table: runs of one checkpoint.
        full: accuracies of the full models.
        cases: which to draw, in this order; default all. The only case of a dataset goes by the
            dataset's name, a case of several datasets by ``dataset case``.
    """
    runs, names = _named(with_full(table, full), cases)
    labels = _labels(runs, names)
    sparsities = sorted(runs["sparsity"].unique())
    drawing, grid = panels((7.0, 1.0 + 0.3 * len(names)), columns=len(sparsities), sharey=True)
    for axes, sparsity in zip(grid, sparsities, strict=True):
        part = runs.loc[runs["sparsity"] == sparsity]
        for line, name in enumerate(names):
            rows = part.loc[part["name"] == name].sort_values(by="accuracy")
            # Dots in the order of accuracy, spread evenly: no random shift, and none hides another.
            beside = line + 0.3 * np.linspace(-1, 1, len(rows)) if len(rows) > 1 else line
            axes.plot(100 * rows["accuracy"], beside, "o", color=BLUE, ms=4, alpha=0.8)
            whole = 100 * rows["full"].iloc[:1]
            axes.vlines(whole, line - 0.42, line + 0.42, color=RED, linewidth=2.5)
        percent_axis(axes, "x", "accuracy")
        axes.set_title(f"{100 * sparsity:g}% sparsity")
        axes.grid(axis="x", color="0.9")
    grid[0].set_yticks(range(len(names)), labels)
    grid[0].invert_yaxis()
    grid[0].plot([], [], "o", color=BLUE, ms=4, label="one seed's subnetwork")
    grid[0].plot([], [], color=RED, linewidth=2.5, label="full model")
    legend(drawing, 2)
    return drawing


def sparsity_figure(
    table: RunTable, full: FullModels, *, cases: Sequence[str] | None = None
) -> Figure:
    """Accuracy against sparsity (Figure 4): the mean over seeds, with their range.

    The arguments and the order are those of `spread_figure`; the full model is drawn at sparsity 0.
    """
    curves, names = _named(by_sparsity(table, full), cases)
    labels = _labels(curves, names)
    drawing, (axes,) = panels((7.0, 4.4))
    styles = zip(cycle(LINES), cycle(MARKERS), cycle(DASHES), strict=False)
    for name, label, (colour, marker, dash) in zip(names, labels, styles, strict=False):
        rows = curves.loc[curves["name"] == name]
        at = 100 * rows["sparsity"]
        axes.fill_between(at, 100 * rows["min"], 100 * rows["max"], color=colour, alpha=0.1)
        axes.plot(at, 100 * rows["mean"], dash, color=colour, marker=marker, ms=5, label=label)
    axes.set_xlabel("sparsity (%)")
    percent_axis(axes, "y", "accuracy")
    legend(drawing, side="right", fontsize=9)
    return drawing


def _named(table: pd.DataFrame, cases: Sequence[str] | None) -> tuple[pd.DataFrame, list[str]]:
    """The rows of one checkpoint with the column `name`, and which names to draw."""
    checkpoints = table["checkpoint"].unique().tolist()
    if len(checkpoints) > 1:
        raise HcLensError(
            f"expected the runs of one checkpoint, got those of {checkpoints}; draw one with "
            "table[table['checkpoint'] == ...]"
        )
    cells: Any = table[list(CELL)].drop_duplicates()
    dataset, case = cells["dataset"], cells["case"]
    alone = ~dataset.duplicated(keep=False) & (dataset.nunique() > 1)
    names = case.mask(case.duplicated(keep=False), dataset + " " + case).mask(alone, dataset)
    named = table.merge(cells.assign(name=names), on=list(CELL))
    if cases is None and _both_sides(named):
        # Friendly before adversarial, each in its order; what is on neither side comes first.
        order = named["side"].map({side: place for place, side in enumerate(SIDES, 1)}).fillna(0)
        names = named.loc[order.sort_values(kind="stable").index, "name"].drop_duplicates()
    chosen = names.tolist() if cases is None else list(cases)
    for name in chosen or [None]:
        check_choice("cases of the runs", name, names)
    return named, chosen


def _both_sides(table: pd.DataFrame) -> bool:
    return "side" in table and set(SIDES) <= set(table["side"])


def _labels(named: pd.DataFrame, names: list[str]) -> list[str]:
    """The names, with the side of each case if the table has both sides."""
    if not _both_sides(named):
        return names
    sides = named.drop_duplicates("name").set_index("name")["side"]
    return [f"{name} ({sides[name]})" if sides[name] in SIDES else name for name in names]
