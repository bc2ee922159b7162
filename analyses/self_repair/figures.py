"""The figure of `hc_lens.analyses.self_repair`: direct effect, norms, later units, total."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from hc_lens.analyses.style import BLUE, GREEN, ORANGE, panels
from hc_lens.errors import check_choice

PARTS = {
    "direct": ("direct effect", BLUE),
    "norm": ("norms", ORANGE),
    "later": ("later units", GREEN),
}
"""The columns that add up to the total, with their names and colours."""


def figure(table: pd.DataFrame, case: str | None = None, most: int = 12) -> Figure:
    """Bars of the sets with the largest direct effect on one case of `effects`, the first if None.

    The parts stand side by side, with a line at their sum, the total effect.
    """
    chosen = table["case"].iloc[0] if case is None else case
    check_choice("a case of the table", chosen, table["case"].unique())
    part = table.loc[table["case"] == chosen]
    part = part.loc[part["dataset"] == part["dataset"].iloc[0]]
    part = part.sort_values("direct", key=np.abs, ascending=False, kind="stable").head(most)
    drawing, (axes,) = panels((max(5.0, 0.8 * len(part) + 2), 3.6))
    positions = np.arange(len(part))
    for place, (column, (name, colour)) in enumerate(PARTS.items()):
        axes.bar(positions + 0.27 * (place - 1), part[column], 0.25, color=colour, label=name)
    axes.hlines(
        part["total"], positions - 0.42, positions + 0.42, color="black", label="total effect"
    )
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xticks(positions, list(part["set"]), rotation=30, ha="right")
    axes.set(ylabel="change", title=f"{part['dataset'].iloc[0]}, {chosen}")
    axes.legend()
    return drawing
