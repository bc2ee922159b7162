"""Does the model make up for what is ablated, and which units do it?

After Rushing and Nanda (2024, arXiv 2402.15390), without their approximations:

1. `repair_rows` takes the effect of each ablation apart, row by row: what the set's own output did
   to the answer (everything behind it held at the clean run), what the norms make of that, and what
   each later unit adds because it reads a changed stream (`hc_lens.analyses.self_repair.engine`).
2. `analyse` makes the tables of it (`hc_lens.analyses.self_repair.tables`).
3. `backup` says how much of the interaction of a set is backup, and by which units.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import pandas as pd
from matplotlib.figure import Figure

from hc_lens.analyses.self_repair.engine import RepairRows, repair_rows
from hc_lens.analyses.self_repair.figures import figure
from hc_lens.analyses.self_repair.tables import backup, effects, givers
from hc_lens.errors import HcLensError
from hc_lens.masks.replacements import Source
from hc_lens.metrics import Metrics
from hc_lens.protocols import BatchesLike, Model
from hc_lens.units import UnitSet, UnitSpace, as_units, resolve_sets

__all__ = [
    "RepairConfig",
    "RepairRows",
    "SelfRepair",
    "analyse",
    "backup",
    "effects",
    "figure",
    "givers",
    "repair_rows",
]


@dataclass(frozen=True)
class RepairConfig:
    """What is measured, on how many rows, and how intervals are made."""

    measure: str = "logit"
    """What a change is a change of: accuracy, probability, logit (log-odds of the right answer),
    margin, kl or another metric."""
    limit: int | None = None
    """Number of rows of each dataset to use, always the same sample; without it, all rows."""
    n_resamples: int = 2000
    """Number of bootstrap resamples."""
    level: float = 0.95
    """Coverage of the intervals."""
    seed: int = 0
    """Seed of the bootstrap."""

    def __post_init__(self) -> None:
        if self.n_resamples < 100 or not 0 < self.level < 1:
            raise HcLensError(
                "expected at least 100 resamples and a level between 0 and 1, got "
                f"{self.n_resamples} and {self.level}; the defaults are 2000 and 0.95"
            )


DEFAULTS = RepairConfig()


@dataclass(frozen=True)
class SelfRepair:
    """What `analyse` found."""

    rows: RepairRows
    """The effects row by row."""
    effects: pd.DataFrame
    """One line for each set and case; see `effects`."""
    givers: pd.DataFrame
    """One line for each set, case and later unit; see `givers`."""
    backup: pd.DataFrame
    """One line for each case and set of two or more units; empty without any. See `backup`."""

    def figure(self, case: str | None = None) -> Figure:
        """Draw one case; see `figure`."""
        return figure(self.effects, case)


def analyse(
    model: Model,
    datasets: Mapping[str, BatchesLike] | BatchesLike,
    means: Source | str,
    sets: Iterable[UnitSet] | None = None,
    config: RepairConfig = DEFAULTS,
    *,
    metrics: Metrics = (),
    progress: bool = True,
) -> SelfRepair:
    """Take the effect of each ablation apart; of joint sets, say how much is backup.

    The sets are by default every unit alone. The members of a joint set are looked at alone, too.
    The model, the datasets and the means are those of `hc.scan`.
    """
    space = UnitSpace.of(model)
    asked = resolve_sets(space, sets)
    wanted = list(dict.fromkeys([*asked, *((unit,) for given in asked for unit in given)]))
    found = repair_rows(
        model,
        datasets,
        means,
        wanted,
        config.measure,
        metrics=metrics,
        limit=config.limit,
        progress=progress,
    )
    bootstrap = (config.n_resamples, config.level, config.seed)
    joint = [given for given in asked if len(as_units(given)) > 1]
    shared = backup(found, joint, config.measure) if joint else pd.DataFrame()
    return SelfRepair(found, effects(found, *bootstrap), givers(found, *bootstrap), shared)
