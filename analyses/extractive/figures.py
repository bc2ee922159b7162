"""Position x layer heat maps of the scores, and the experiments' ranks as bars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from hc_lens.analyses.extractive.settings import SCORES
from hc_lens.analyses.style import BLUE, GREY, SKY, panels
from hc_lens.errors import HcLensError

_ROWS = {"head": "heads", "mlp": "MLPs"}


def heat_maps(table: pd.DataFrame, *, title: str | None = None) -> Figure:
    """Mean score by position and layer: one map per score, heads (summed) above, MLPs below."""
    if "slot" not in table:
        raise HcLensError(
            "expected scores by position, got a table without the column slot; "
            'compute them with scores(..., by="position")'
        )
    names = [name for name in SCORES if name in set(table["score"])]
    labels = table.groupby("slot")["label"].agg(lambda column: column.mode().iloc[0])
    size = (1.6 + 3.1 * len(names), 4.6)
    figure, axes = panels(size, len(_ROWS), len(names), sharex=True, sharey=True)
    for column, score in enumerate(names):
        grids = {kind: _grid(table, score, kind, labels.index) for kind in _ROWS}
        # One scale for heads and MLPs of a score, so that the two maps can be compared.
        limit = max(float(np.abs(grid).max()) for grid in grids.values()) or 1.0
        scale: Any = {"cmap": "RdBu_r", "vmin": -limit, "vmax": limit}
        maps = axes[column :: len(names)]
        for axis, (kind, grid) in zip(maps, grids.items(), strict=True):
            axis.imshow(grid, aspect="auto", origin="lower", **scale)
            axis.set_yticks(range(grid.shape[0]))
            if column == 0:
                axis.set_ylabel(f"{_ROWS[kind]}, layer")
        maps[0].set_title(score)
        maps[-1].set_xticks(range(len(labels)), labels, rotation=60, ha="right", fontsize=8)
        figure.colorbar(maps[0].images[0], ax=maps, location="bottom", shrink=0.8, pad=0.02)
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
    """Mean ranks as bars with a dot for each row: one panel per table.

    `tables` are (title, table, column of the names, column of the ranks); a table may hold several
    rows a name, one a seed. `chance`, the rank of a guess, is a dashed line.
    """
    widths = [table[names].nunique() for _, table, names, _ in tables]
    size = (1.2 + 0.6 * sum(widths), 3.4)
    figure, axes = panels(size, columns=len(tables), sharey=True, width_ratios=widths)
    for axis, (title, table, names, ranks) in zip(axes, tables, strict=True):
        order = list(dict.fromkeys(table[names]))
        by_name: Any = table.groupby(names)[ranks].mean()
        axis.bar(range(len(order)), by_name.reindex(order), color=SKY, width=0.65)
        axis.plot(table[names].map(order.index), table[ranks], "o", color=BLUE, markersize=3.5)
        axis.axhline(chance, color=GREY, linestyle="--", linewidth=1)
        axis.set_xticks(range(len(order)), order, rotation=35, ha="right", fontsize=8)
        axis.set_title(title, fontsize=10)
    axes[0].set_ylabel("mean rank of the answer")
    axes[0].text(-0.45, chance, "chance", va="bottom", fontsize=8, color=GREY)
    return figure
