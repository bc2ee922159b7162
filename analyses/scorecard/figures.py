"""The figure of `hc_lens.analyses.scorecard`: faithfulness by the number of units."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from hc_lens.analyses.style import GREY, LINES, panels
from hc_lens.errors import HcLensError


def figure(table: pd.DataFrame, size: int | None = None) -> Figure:
    """The curves of some rankings; random ones in grey, the circuit's size as a line."""
    if table.empty:
        raise HcLensError(
            "expected the curve of a ranking, got a circuit alone; give a ranking, or a subnetwork "
            "with scores"
        )
    drawing, (axes,) = panels((5.4, 3.6))
    colours = iter(LINES * len(table))
    for name, part in table.groupby("ranker", sort=False):
        random = str(name).startswith("random")
        first = random and str(name).endswith("-0")
        label = (
            ("random" if first else None) if random else f"{name} (CPR {part['cpr'].iloc[0]:.2f})"
        )
        colour = GREY if random else next(colours)
        width = 0.8 if random else 1.8
        axes.plot(part["n_units"], part["faithfulness"], color=colour, linewidth=width, label=label)
    for level in (0, 1):
        axes.axhline(level, color="black", linewidth=0.6)
    if size is not None:
        axes.axvline(size, color="black", linewidth=0.8, linestyle=":", label=f"circuit of {size}")
    axes.set(xlabel="units", ylabel="faithfulness")
    axes.legend()
    return drawing
