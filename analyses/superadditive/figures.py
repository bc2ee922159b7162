"""The figure of `hc_lens.analyses.superadditive`: a set against what its members lose alone."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from hc_lens.analyses.style import RED, SKY, error_bars, panels
from hc_lens.errors import check_choice
from hc_lens.units import UnitSet, set_label


def figure(table: pd.DataFrame, units: UnitSet) -> Figure:
    """Bars of one set of `excess` by case: the sum of its members' losses, and the drop of all.

    The whisker is the interval of the excess, measured from the sum of the losses.
    """
    label = set_label(units)
    check_choice("a set of the table", label, table["set"].unique())
    chosen = table.loc[table["set"] == label]
    drawing, (axes,) = panels((max(5.0, 0.9 * len(chosen) + 2), 3.6))
    positions = np.arange(len(chosen))
    summed = chosen["sum_of_losses"]
    axes.bar(positions - 0.2, summed, 0.38, color=SKY, label="sum of the losses of each alone")
    axes.bar(positions + 0.2, chosen["drop"], 0.38, color=RED, label="together")
    # The drop is the sum plus the excess, so its interval is that of the excess, moved up.
    ends = (summed + chosen["low"], summed + chosen["high"])
    name = "interval of the excess"
    error_bars(axes, positions + 0.2, chosen["drop"], ends, capsize=3, label=name)
    several = len(set(chosen["dataset"])) > 1
    names = chosen["dataset"] + "\n" + chosen["case"] if several else chosen["case"]
    axes.set_xticks(positions, list(names), rotation=30, ha="right")
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set(ylabel="drop", title=label)
    axes.legend()
    return drawing
