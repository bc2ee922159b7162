"""Figures of the tables of `analyses.subnetworks`.

1. `frequency_scatter` and `frequency_heat_map` show how often each head is kept at two sparsities
   (Figures 5 and 11 of Bhaskar, Friedman and Chen 2024).
2. `spread_figure` has a dot for each seed and a line for the full model, case by case (Figures 2, 3
   and 12).
3. `sparsity_figure` has a curve for each case against sparsity (Figure 4).

Each returns a matplotlib Figure of its own: nothing is drawn on the screen, and no global state of
matplotlib is read or changed. Accuracies are drawn in percent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from analyses.lexical_overlap_figures import COLOURS
from analyses.subnetworks import by_sparsity, frequency_table, spearman
from analyses.tables import CELL, FullModels, full_table, run_table, with_full
from hc_lens.errors import HcLensError

MARKED = "#F5B26B"
"""Fill of a marked disc, light enough for black figures on it."""
CURVES = tuple(colour for colour in COLOURS if colour != "#F0E442")
"""Yellow is too faint for a line on white."""
MARKERS = "osD^vP*X"
"""A second way to tell curves and sparsities apart."""
DASHES = ("-", "--", ":", "-.")
"""Styles of the lines when the colours are used up."""
JITTER = 0.3
"""Largest distance of a dot from the middle of its column, as a share of the column."""


def frequency_scatter(
    table: pd.DataFrame, rows: float, columns: float, mark: Iterable[str] = ()
) -> Figure:
    """The heads at their two frequencies; a disc's area and number tell how many are at a place.

    Args:
        table: what `frequencies` returned.
        rows: sparsity on the vertical axis.
        columns: sparsity on the horizontal axis.
        mark: heads whose discs are filled and who are named below, such as the core.
    """
    counted = frequency_table(table, rows, columns)
    wide = table.pivot(index="unit", columns="sparsity", values="count")
    across, up = wide[_nearest(wide, columns)], wide[_nearest(wide, rows)]
    bold = [unit for unit in map(str, mark) if unit in wide.index]
    drawing = Figure(figsize=(7.0, 5.4), layout="constrained")
    axes = drawing.subplots()
    places: Any = wide.groupby([across, up]).groups
    for (x, y), units in places.items():
        fill = MARKED if set(units) & set(bold) else "white"
        size = 130 * min(len(units), 12) ** 0.7
        axes.scatter(x, y, s=size, color=fill, edgecolors=COLOURS[0], linewidths=1.5, zorder=3)
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
    axes.spines[["top", "right"]].set_visible(False)
    return drawing


def frequency_heat_map(counted: pd.DataFrame) -> Figure:
    """The frequency x frequency table as a map, with the number of heads in each cell.

    Args:
        counted: what `frequency_table` returned.
    """
    values = counted.to_numpy()
    drawing = Figure(figsize=(7.0, 0.9 + 5.6 * min(1.2, len(values) / values.shape[1])))
    drawing.set_layout_engine("constrained")
    axes = drawing.subplots()
    # A root scale: a few heads in a cell must show beside the many that are never kept.
    axes.imshow(np.sqrt(values), cmap="Blues", origin="lower", aspect="auto")
    dark = np.sqrt(values.max()) * 0.6
    for (row, column), number in np.ndenumerate(values):
        if number:
            ink = "white" if np.sqrt(number) > dark else "black"
            axes.text(column, row, str(number), ha="center", va="center", color=ink, fontsize=10)
    axes.set_xticks(range(values.shape[1]), list(map(str, counted.columns)))
    axes.set_yticks(range(values.shape[0]), list(map(str, counted.index)))
    axes.set_xlabel(_percent(counted.columns.name))
    axes.set_ylabel(_percent(counted.index.name))
    axes.set_title("number of heads by how many subnetworks keep them")
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
    runs = with_full(run_table(table), full_table(full))
    _one_checkpoint(runs)
    runs = runs.assign(name=_names(runs))
    names = list(dict.fromkeys(runs["name"])) if cases is None else list(cases)
    chosen = sorted(runs["sparsity"].unique()) if sparsities is None else list(sparsities)
    wanted = [runs.loc[np.isclose(runs["sparsity"], sparsity)] for sparsity in chosen]
    unknown = [name for name in names if name not in set(runs["name"])]
    if unknown or not names or any(part.empty for part in wanted) or not wanted:
        raise HcLensError(
            f"expected cases and sparsities of the runs, got {unknown or names} and {chosen}; they "
            f"have {runs['name'].unique().tolist()} and {sorted(runs['sparsity'].unique())}"
        )
    drawing = Figure(figsize=(7.0, 1.0 + 0.3 * len(names)), layout="constrained")
    panels = drawing.subplots(1, len(chosen), squeeze=False, sharey=True)[0]
    for axes, sparsity, part in zip(panels, chosen, wanted, strict=True):
        for place, name in enumerate(names):
            rows = part.loc[part["name"] == name].sort_values(by="accuracy")
            # Dots in the order of accuracy, spread evenly: no draw, and none hides another.
            beside = place + JITTER * np.linspace(-1, 1, len(rows)) if len(rows) > 1 else place
            axes.plot(100 * rows["accuracy"], beside, "o", color=COLOURS[0], ms=4, alpha=0.8)
            if len(rows):
                axes.vlines(100 * rows["full"].iloc[0], place - 0.42, place + 0.42,
                            color=COLOURS[5], linewidth=2.5)  # fmt: skip
        axes.set(xlim=(-3, 103), xlabel="accuracy (%)", title=f"{100 * sparsity:g}% sparsity")
        axes.grid(axis="x", color="0.9")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(range(len(names)), names)
    panels[0].invert_yaxis()
    panels[0].plot([], [], "o", color=COLOURS[0], ms=4, label="one seed's subnetwork")
    panels[0].plot([], [], color=COLOURS[5], linewidth=2.5, label="full model")
    drawing.legend(loc="outside upper center", ncols=2, frameon=False)
    return drawing


def sparsity_figure(
    table: pd.DataFrame, full: FullModels, *, cases: Sequence[str] | None = None
) -> Figure:
    """Accuracy against sparsity: the mean over seeds, with the range of the seeds.

    Args:
        table: runs of one checkpoint.
        full: accuracies of the full models, drawn at sparsity 0.
        cases: which cases to draw, named as in `spread_figure`; default all.
    """
    curves = by_sparsity(table, full)
    _one_checkpoint(curves)
    curves = curves.assign(name=_names(curves))
    names = list(dict.fromkeys(curves["name"])) if cases is None else list(cases)
    unknown = [name for name in names if name not in set(curves["name"])]
    if unknown or not names:
        raise HcLensError(
            f"expected cases of the runs, got {unknown or names}; they have "
            f"{curves['name'].unique().tolist()}"
        )
    drawing = Figure(figsize=(7.0, 4.4), layout="constrained")
    axes = drawing.subplots()
    for place, name in enumerate(names):
        rows = curves[curves["name"] == name]
        style: dict[str, Any] = {
            "color": CURVES[place % len(CURVES)],
            "marker": MARKERS[place % len(MARKERS)],
            "linestyle": DASHES[place // len(CURVES) % len(DASHES)],
        }
        at = 100 * rows["sparsity"]
        axes.fill_between(at, 100 * rows["min"], 100 * rows["max"], color=style["color"], alpha=0.1)
        axes.plot(at, 100 * rows["mean"], **style, markersize=5, label=name)
    axes.set(xlabel="sparsity (%)", ylabel="accuracy (%)", ylim=(-3, 103))
    axes.spines[["top", "right"]].set_visible(False)
    drawing.legend(loc="outside right center", frameon=False, fontsize=9)
    return drawing


def _names(table: pd.DataFrame) -> pd.Series:
    """What each row's case is called: a dataset's only case by the dataset, others by the case."""
    cells: Any = table[list(CELL)].drop_duplicates()
    n_cases, n_datasets = cells["dataset"].value_counts(), cells["case"].value_counts()
    names = []
    for dataset, case in zip(table["dataset"], table["case"], strict=True):
        if n_cases[dataset] == 1 and len(n_cases) > 1:
            names.append(dataset)
        else:
            names.append(case if n_datasets[case] == 1 else f"{dataset} {case}")
    return pd.Series(names, index=table.index)


def _one_checkpoint(table: pd.DataFrame) -> None:
    names = table["checkpoint"].unique().tolist()
    if len(names) > 1:
        raise HcLensError(
            f"expected the runs of one checkpoint, got those of {names}; draw one with "
            "table[table['checkpoint'] == ...]"
        )


def _nearest(wide: pd.DataFrame, sparsity: float) -> float:
    return min(wide.columns, key=lambda given: abs(given - sparsity))


def _percent(name: Any) -> str:
    sparsity = float(str(name).removeprefix("count at "))
    return f"subnetworks of {100 * sparsity:g}% sparsity that keep the head"
