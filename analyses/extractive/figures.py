"""Position x layer heat maps of the scores, and the experiments' ranks as bars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from hc_lens.errors import HcLensError

_ROWS = {"head": "heads", "mlp": "MLPs"}


def heat_maps(table: pd.DataFrame, *, title: str | None = None) -> Figure:
    """Mean score by position and layer: one map a score, heads (summed) above, MLPs below.

    Args:
        table: scores by position, as `scores(..., by="position")` returns them.
        title: stands above the figure.
    """
    if "slot" not in table:
        raise HcLensError(
            "expected scores by position, got a table without the column slot; "
            'compute them with scores(..., by="position")'
        )
    names = [
        name for name in ("informative", "downstream", "upstream") if name in set(table["score"])
    ]
    labels = table.groupby("slot")["label"].agg(lambda column: column.mode().iloc[0])
    figure = Figure(figsize=(1.6 + 3.1 * len(names), 4.6), layout="constrained")
    axes = figure.subplots(2, len(names), squeeze=False, sharex=True, sharey=True)
    for column, score in enumerate(names):
        grids = {kind: _grid(table, score, kind, labels.index) for kind in _ROWS}
        # One scale for heads and MLPs of a score, so that the two maps can be compared.
        limit = max(float(np.abs(grid).max()) for grid in grids.values()) or 1.0
        image: Any = None
        for row, (kind, grid) in enumerate(grids.items()):
            axis = axes[row][column]
            image = axis.imshow(
                grid, cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto", origin="lower"
            )
            axis.set_yticks(range(grid.shape[0]))
            if column == 0:
                axis.set_ylabel(f"{_ROWS[kind]}, layer")
        axes[0][column].set_title(score)
        axes[1][column].set_xticks(range(len(labels)), labels, rotation=60, ha="right", fontsize=8)
        figure.colorbar(image, ax=axes[:, column].tolist(), location="bottom", shrink=0.8, pad=0.02)
    if labels.str.fullmatch(r"<-\d+>").any():
        figure.supxlabel("<-1>: last token of the stretch in which the prompts differ", fontsize=8)
    if title is not None:
        figure.suptitle(title, fontsize=11)
    return figure


def _grid(table: pd.DataFrame, score: str, kind: str, slots: pd.Index) -> np.ndarray:
    """Layers x slots: components of the kind summed, then the mean over questions."""
    chosen = table[(table["score"] == score) & (table["kind"] == kind)]
    layers = sorted(table["layer"].dropna().unique())
    summed = chosen.groupby(["question", "layer", "slot"])["value"].sum()
    mean = summed.groupby(["layer", "slot"]).mean().unstack("slot")
    return mean.reindex(index=layers, columns=slots).fillna(0.0).to_numpy(dtype=float)


def rank_bars(tables: Sequence[tuple[str, pd.DataFrame, str, str]], chance: float) -> Figure:
    """Mean ranks as bars with a dot a seed: one panel a table.

    Args:
        tables: (title, table, column of the names, column of the ranks), one panel each; a table
            may hold several rows a name, one a seed.
        chance: rank of a guess, drawn as a dashed line.
    """
    widths = [table[names].nunique() for _, table, names, _ in tables]
    figure = Figure(figsize=(1.2 + 0.6 * sum(widths), 3.4), layout="constrained")
    axes = figure.subplots(1, len(tables), squeeze=False, sharey=True, width_ratios=widths)[0]
    for axis, (title, table, names, ranks) in zip(axes, tables, strict=True):
        order = list(dict.fromkeys(table[names]))
        by_name: Any = table.groupby(names)[ranks].mean()
        axis.bar(range(len(order)), by_name.reindex(order), color="#8fb3d9", width=0.65)
        places = table[names].map({name: place for place, name in enumerate(order)})
        axis.plot(places, table[ranks], "o", color="#1f3b57", markersize=3.5)
        axis.axhline(chance, color="0.4", linestyle="--", linewidth=1)
        axis.set_xticks(range(len(order)), order, rotation=35, ha="right", fontsize=8)
        axis.set_title(title, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("mean rank of the answer")
    axes[0].text(-0.45, chance, "chance", va="bottom", fontsize=8, color="0.4")
    return figure
