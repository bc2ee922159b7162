"""Do units do more damage together than the sum of what each does alone?

Tables 3 and 4 of Bhaskar, Friedman and Chen (2024), with intervals.

1. The drop of a set S on a case is the full model's mean minus the mean with S ablated; the mean is
   over rows, of being right by default. A set is super-additive if its drop exceeds the sum of its
   members' drops: ``excess(S) = drop(S) - sum of drop({i})``.
2. The excess is the mean over rows of ``(c - c_S) - sum of (c - c_i)``, where c is 1 for a right
   answer. Its interval is the percentile bootstrap over rows, all sets on the same resamples.
3. `p` is one-sided, from the excess over its bootstrap standard error; `p_holm` is Holm's
   correction over all rows of the table, for readers who look for the largest among many.
4. A super-additive set is minimal if no smaller set within it, of two members or more, is
   super-additive on the same case.
5. `screen` estimates the excess of every pair of units, for models with too many pairs to measure.

A drop in accuracy only shows where a decision flips: two units can each move a row half-way to the
boundary. ``measure="logit"`` asks the same of the gold label's log-odds, which have no boundary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from analyses.statistics import holm
from analyses.superadditive.config import ExcessConfig, ScreenConfig, SuperAdditiveConfig
from analyses.superadditive.drops import excess, layout, minimal, subsets
from analyses.superadditive.figures import figure
from analyses.superadditive.interactions import Screen, screen
from hc_lens.errors import HcLensError
from hc_lens.masks.replacements import Source
from hc_lens.protocols import BatchesLike, Model
from hc_lens.scans.scan import ScanRows, scan_rows
from hc_lens.units import Unit, UnitSet, UnitSpace, as_units, set_label

__all__ = [
    "ExcessConfig",
    "Screen",
    "ScreenConfig",
    "SuperAdditive",
    "SuperAdditiveConfig",
    "analyse",
    "excess",
    "figure",
    "holm",
    "layout",
    "minimal",
    "screen",
    "subsets",
]

DEFAULTS = SuperAdditiveConfig()


@dataclass(frozen=True)
class SuperAdditive:
    """What `analyse` found."""

    rows: ScanRows
    """The scan behind it, row by row."""
    layout: pd.DataFrame
    """The layout of the paper's Tables 3 and 4, in percent; see `layout`."""
    excess: pd.DataFrame
    """The joint sets and the subsets of the pool; see `excess`."""
    minimal: pd.DataFrame
    """The minimal super-additive subsets of the pool."""

    def figure(self, units: UnitSet) -> Figure:
        """Draw one joint set; see `figure`."""
        return figure(self.excess, units)


def analyse(
    model: Model,
    datasets: Mapping[str, BatchesLike] | BatchesLike,
    means: Source | str,
    core: Sequence[Unit | str],
    config: SuperAdditiveConfig = DEFAULTS,
    *,
    store: str | Path | None = None,
    progress: bool = True,
) -> SuperAdditive:
    """Scan the core heads, every other head, the joint sets and the pool, and analyse all of it.

    Args:
        model: a classifier of `hc.load`.
        datasets: batches by name, or batches alone.
        means: what replaces a removed unit.
        core: the heads of the heuristic core, or whichever heads are the question.
        config: the joint sets, the pool, and how their excess is measured.
        store: folder in which finished batches are kept; the same call continues from there.
        progress: show a progress bar.
    """
    units = list(as_units(core))
    together = [as_units(given) for given in config.joint] or [as_units(units)]
    small = [set_label(given) for given in together if len(given) < 2]
    if small:
        raise HcLensError(
            f"expected at least two units in a joint set, got {small}; name more core heads, or "
            "give joint sets such as L2.H5+L3.H7"
        )
    within = subsets(config.pool, config.max_size) if config.pool else []
    singles = [(unit,) for unit in UnitSpace.of(model).heads]
    singles += [(unit,) for given in (*together, *within) for unit in given]
    sets = dict.fromkeys([*singles, *together, *within])
    scanned = scan_rows(
        model,
        datasets,
        means,
        sets,
        limit=config.limit,
        memory=config.memory,
        store=store,
        progress=progress,
    )
    asked = [given for given in sets if len(given) > 1]
    table = excess(scanned, asked, config)
    found = minimal(table.loc[table["set"].isin(map(set_label, within))], level=config.level)
    return SuperAdditive(scanned, layout(scanned.table(), units, together), table, found)
