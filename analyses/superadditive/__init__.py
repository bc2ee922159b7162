"""Do units do more damage together than the sum of what each does alone?

Tables 3 and 4 of Bhaskar, Friedman and Chen (2024), with intervals.

1. `analyse` scans every head, some joint sets and the subsets of a pool, and makes the tables of
   `hc_lens.analyses.superadditive.drops`. Each set has a verdict on each case
   (`hc_lens.analyses.superadditive.verdicts`).
2. `screen` estimates the interaction of every pair of units, for models with too many pairs to
   measure (`hc_lens.analyses.superadditive.interactions`).
3. With ``backup=True`` the table of excess also says how much of each interaction is what some
   units give back to the members alone and not to the set (`hc_lens.analyses.self_repair`).
4. `figure` draws one set against the sum of what its members lose.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from hc_lens.analyses.self_repair import backup, repair_rows
from hc_lens.analyses.statistics import holm
from hc_lens.analyses.superadditive.drops import (
    ExcessConfig,
    excess,
    layout,
    minimal,
    subsets,
    to_scan,
)
from hc_lens.analyses.superadditive.figures import figure
from hc_lens.analyses.superadditive.interactions import Screen, ScreenConfig, screen
from hc_lens.analyses.superadditive.verdicts import Verdict
from hc_lens.errors import HcLensError
from hc_lens.masks.replacements import Source
from hc_lens.metrics import Metrics
from hc_lens.protocols import BatchesLike, Model
from hc_lens.scans.scan import ScanRows, scan_rows
from hc_lens.units import Unit, UnitSet, UnitSpace, as_units, set_label

__all__ = [
    "ExcessConfig",
    "Screen",
    "ScreenConfig",
    "SuperAdditive",
    "SuperAdditiveConfig",
    "Verdict",
    "analyse",
    "excess",
    "figure",
    "holm",
    "layout",
    "minimal",
    "screen",
    "subsets",
]


@dataclass(frozen=True)
class SuperAdditiveConfig(ExcessConfig):
    """Which sets of units are ablated together, and how their excess is measured."""

    joint: tuple[str, ...] = ()
    """Sets to ablate together, such as L2.H5+L3.H7; without any, all core heads at once."""
    pool: tuple[str, ...] = ()
    """Units within which minimal super-additive subsets are looked for."""
    max_size: int = 3
    """Largest subset of the pool."""
    backup: bool = False
    """Whether to say how much of each set's interaction is backup, and of which units."""
    limit: int | None = None
    """Number of rows of each dataset to use, always the same sample; without it, all rows."""
    memory: int | str = "1GB"
    """Most bytes to hold beside the model and the results, such as 500_000_000 or 2GB."""


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
    metrics: Metrics = (),
    store: str | Path | None = None,
    progress: bool = True,
) -> SuperAdditive:
    """Scan the core heads, every other head, the joint sets and the pool, and analyse all of it.

    The core are the heads of the heuristic core, or whichever heads are the question. The model,
    the datasets, the means, the metrics and the store are those of `hc.scan`. The drops are of
    ``config.measure``, which may be one of these metrics if more of it is better.
    """
    asked = to_scan(config.measure, metrics)
    units = as_units(core)
    together = [as_units(given) for given in config.joint] or [units]
    small = [set_label(given) for given in together if len(given) < 2]
    if small:
        raise HcLensError(
            f"expected at least two units in a joint set, got {small}; name more core heads, or "
            "give joint sets such as L2.H5+L3.H7"
        )
    within = subsets(config.pool, config.max_size) if config.pool else []
    heads = UnitSpace.of(model).heads
    singles = [(unit,) for given in (heads, *together, *within) for unit in given]
    sets = dict.fromkeys([*singles, *together, *within])
    scanned = scan_rows(
        model,
        datasets,
        means,
        sets,
        metrics=asked,
        limit=config.limit,
        memory=config.memory,
        store=store,
        progress=progress,
    )
    table = excess(scanned, [given for given in sets if len(given) > 1], config)
    found = minimal(table.loc[table["set"].isin(map(set_label, within))])
    if config.backup:
        joint = [given for given in sets if len(given) > 1]
        alone = [(unit,) for given in joint for unit in given]
        repaired = repair_rows(
            model,
            datasets,
            means,
            dict.fromkeys([*alone, *joint]),
            config.measure,
            metrics=metrics,
            limit=config.limit,
            progress=progress,
        )
        columns = ["dataset", "case", "set", "backup", "backup_share", "backup_units"]
        table = table.merge(backup(repaired, joint, config.measure)[columns], how="left")
    return SuperAdditive(scanned, layout(scanned.table(), units, together), table, found)
