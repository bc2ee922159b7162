"""Figures of the tables of `analyses.subnetworks`.

1. `frequency_scatter` and `frequency_heat_map` show how often each head is kept at two sparsities
   (Figures 5 and 11 of Bhaskar, Friedman and Chen 2024).
2. `spread_figure` has a dot for each seed and a line for the full model, case by case (Figures 2, 3
   and 12).
3. `sparsity_figure` has a curve for each case against sparsity (Figure 4).

Accuracies are drawn in percent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import cycle
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from analyses.style import BLUE, LINES, PALE, RED, legend, panels, percent_axis
from analyses.subnetworks import at_sparsity, by_sparsity, frequency_table, spearman
from analyses.tables import CELL, FullModels, with_full
from hc_lens.errors import HcLensError, check_choice

MARKERS = "osD^vP*X"
"""A second way to tell curves and sparsities apart."""
DASHES = [dash for dash in ("-", "--", ":", "-.") for _ in LINES]
"""Styles of the lines: the next when the colours are used up."""
JITTER = 0.3
"""Largest distance of a dot from the middle of its column, as a share of the column."""


def frequency_scatter(
    table: pd.DataFrame, rows: float, columns: float, mark: Iterable[str] = ()
) -> Figure:
    """The heads at their two frequencies; a disc's area and number say how many it holds.

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
        xlabel=_keeping(columns),
        ylabel=_keeping(rows),
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


def frequency_heat_map(counted: pd.DataFrame) -> Figure:
    """What `frequency_table` returned as a map, with the number of heads in each cell."""
    values = counted.to_numpy()
    drawing, (axes,) = panels((7.0, 0.9 + 5.6 * min(1.2, len(values) / values.shape[1])))
    # A root scale: a few heads in a cell must show beside the many that are never kept.
    axes.imshow(np.sqrt(values), cmap="Blues", origin="lower", aspect="auto")
    dark = np.sqrt(values.max()) * 0.6
    for (row, column), number in np.ndenumerate(values):
        if number:
            ink = "white" if np.sqrt(number) > dark else "black"
            axes.text(column, row, str(number), ha="center", va="center", color=ink, fontsize=10)
    across, up = (
        float(str(counts.name).removeprefix("count at "))
        for counts in (counted.columns, counted.index)
    )
    axes.set(
        xlabel=_keeping(across),
        ylabel=_keeping(up),
        title="number of heads by how many subnetworks keep them",
        xticks=list(counted.columns),
        yticks=list(counted.index),
    )
    return drawing


def spread_figure(
    table: pd.DataFrame,
    full: FullModels,
    *,
    sparsities: Sequence[float] | None = None,
    cases: Sequence[str] | None = None,
) -> Figure:
    """One dot per seed and case, one panel per sparsity, the full model as a line.

    Args:
        table: runs of one checkpoint.
        full: accuracies of the full models.
        sparsities: which to draw; default all.
        cases: which to draw, in this order; default all. The only case of a dataset goes by the
            dataset's name, a case of several datasets by ``dataset case``.
    """
    runs, names = _named(with_full(table, full), cases)
    chosen = sparsities or sorted(runs["sparsity"].unique())
    size = (7.0, 1.0 + 0.3 * len(names))
    drawing, grid = panels(size, columns=len(chosen), sharey=True)
    for axes, sparsity in zip(grid, chosen, strict=True):
        part = at_sparsity(runs, sparsity)
        for line, name in enumerate(names):
            rows = part.loc[part["name"] == name].sort_values(by="accuracy")
            # Dots in the order of accuracy, spread evenly: no random shift, and none hides another.
            beside = line + JITTER * np.linspace(-1, 1, len(rows)) if len(rows) > 1 else line
            axes.plot(100 * rows["accuracy"], beside, "o", color=BLUE, ms=4, alpha=0.8)
            for whole in 100 * rows["full"].iloc[:1]:
                axes.vlines(whole, line - 0.42, line + 0.42, color=RED, linewidth=2.5)
        percent_axis(axes, "x", "accuracy")
        axes.set_title(f"{100 * sparsity:g}% sparsity")
        axes.grid(axis="x", color="0.9")
    grid[0].set_yticks(range(len(names)), names)
    grid[0].invert_yaxis()
    grid[0].plot([], [], "o", color=BLUE, ms=4, label="one seed's subnetwork")
    grid[0].plot([], [], color=RED, linewidth=2.5, label="full model")
    legend(drawing, 2)
    return drawing


def sparsity_figure(
    table: pd.DataFrame, full: FullModels, *, cases: Sequence[str] | None = None
) -> Figure:
    """Accuracy against sparsity: the mean over seeds, with the range of the seeds.

    The arguments are those of `spread_figure`; the full model is drawn at sparsity 0.
    """
    curves, names = _named(by_sparsity(table, full), cases)
    drawing, (axes,) = panels((7.0, 4.4))
    styles = zip(cycle(LINES), cycle(MARKERS), cycle(DASHES), strict=False)
    for name, (colour, marker, dash) in zip(names, styles, strict=False):
        rows = curves.loc[curves["name"] == name]
        at = 100 * rows["sparsity"]
        axes.fill_between(at, 100 * rows["min"], 100 * rows["max"], color=colour, alpha=0.1)
        axes.plot(at, 100 * rows["mean"], dash, color=colour, marker=marker, ms=5, label=name)
    axes.set_xlabel("sparsity (%)")
    percent_axis(axes, "y", "accuracy")
    legend(drawing, side="right", fontsize=9)
    return drawing


def _named(table: pd.DataFrame, cases: Sequence[str] | None) -> tuple[pd.DataFrame, list[str]]:
    """The rows of one checkpoint with the column `name`, and which names to draw, all by default.

    A dataset's only case goes by the dataset's name, any other by its own.
    """
    checkpoints = table["checkpoint"].unique().tolist()
    if len(checkpoints) > 1:
        raise HcLensError(
            f"expected the runs of one checkpoint, got those of {checkpoints}; draw one with "
            "table[table['checkpoint'] == ...]"
        )
    cells: Any = table[list(CELL)].drop_duplicates()
    n_cases, n_datasets = cells["dataset"].value_counts(), cells["case"].value_counts()

    def name(dataset: str, case: str) -> str:
        if n_cases[dataset] == 1 and len(n_cases) > 1:
            return dataset
        return case if n_datasets[case] == 1 else f"{dataset} {case}"

    names = [name(*cell) for cell in zip(table["dataset"], table["case"], strict=True)]
    known = list(dict.fromkeys(names))
    chosen = known if cases is None else list(cases)
    for case in chosen or [None]:
        check_choice("cases of the runs", case, known)
    return table.assign(name=names), chosen


def _keeping(sparsity: float) -> str:
    return f"subnetworks of {100 * sparsity:g}% sparsity that keep the head"
