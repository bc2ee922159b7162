"""The figure of a table of `hc_lens.analyses.effective_size`.

`figure` is Figure 6 of Bhaskar, Friedman and Chen (2024): the effective size along training, a line
for each target, above the full model's accuracy. A hollow mark is a size with a flag: at the grid's
ceiling, with no sparsity that passes, of a model at chance, or with runs missing.
"""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from hc_lens.analyses.style import BLUE, GREEN, ORANGE, RED, legend, panels
from hc_lens.analyses.tables import ACCURACY, SHARES
from hc_lens.errors import HcLensError

STYLES = {
    "id": (BLUE, "o", "in domain", -0.1),
    "ood": (RED, "s", "out of domain", 0.0),
    "balanced": (ORANGE, "^", "out of domain, balanced", 0.05),
    "mix": (GREEN, "D", "mix", 0.1),
}
"""Colour, mark and name of each target, and how far to the side of the checkpoint it is drawn."""


def figure(table: pd.DataFrame, measure: str = ACCURACY) -> Figure:
    """The table of `effective_size`: size and the full model's measure by checkpoint."""
    missing = [name for name in ("effective_size", "target", "floor") if name not in table]
    if missing or table.empty:
        raise HcLensError(
            f"expected the table of effective_size(...), got one without {missing or 'rows'}"
        )
    percent = measure in SHARES
    scale = 100 if percent else 1
    names = list(dict.fromkeys(table["checkpoint"]))
    position = {name: number for number, name in enumerate(names)}
    drawing, (upper, lower) = panels((7.0, 5.4), rows=2, sharex=True, height_ratios=(2, 1))
    for target, (colour, mark, label, aside) in STYLES.items():
        rows = table.loc[table["target"] == target]
        if rows.empty:
            continue
        # Beside each other, so that equal sizes do not hide each other.
        at = rows["checkpoint"].map(position) + aside
        sizes = rows["effective_size"]
        upper.errorbar(at, sizes, rows["std"], color=colour, lw=1.8, elinewidth=1.5, zorder=2)
        for x, size, flag in zip(at, sizes, flagged(rows), strict=True):
            fill = "white" if flag else colour
            upper.plot(x, size, mark, color=fill, markeredgecolor=colour, mew=1.8, ms=7, zorder=3)
        lower.plot(at, scale * rows["full"], f"{mark}-", color=colour, markersize=5)
        upper.plot([], [], f"{mark}-", color=colour, label=label)
    upper.plot([], [], "o", color="white", markeredgecolor="0.3", mew=1.8, label="flagged")
    upper.set(ylabel="effective size (% of units)", ylim=(0, 104))
    lower.set(ylabel="full model (%)" if percent else f"full model\n({measure})")
    lower.set(xlabel="checkpoint", **({"ylim": (-5, 105)} if percent else {}))
    lower.set_xticks(range(len(names)), list(map(str, names)))
    for axes in (upper, lower):
        axes.grid(axis="y", color="0.9")
    legend(drawing, 5)
    return drawing


def flagged(table: pd.DataFrame) -> pd.Series:
    """Whether a size carries a flag that changes how it reads."""
    floor = table["floor"].fillna(False).astype(bool)
    return table["ceiling"] | table["none_passes"] | floor | (table["missing"] > 0)
