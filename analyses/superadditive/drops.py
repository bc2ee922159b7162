"""What sets of units lose together and alone: tables from a scan.

1. The drop of a set S on a case is the full model's mean minus the mean with S ablated; the mean is
   over rows, of being right by default. A negative drop is a gain. Of a measure in which less is
   better (`COSTS`) it is the rise.
2. `excess` compares the drop of each set with the sum of its members' losses, and gives a verdict
   (`hc_lens.analyses.superadditive.verdicts`). All sets of a case have the same resamples.
3. A super-additive set is minimal if no smaller set within it, of two members or more, is
   super-additive on the same case.

A drop in accuracy only shows where a decision flips: two units can each move a row half-way to the
boundary. ``measure="logit"`` asks the same of the gold label's log-odds, which have no boundary; of
a prompt they are the logit difference of its answers.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import pandas as pd
from jaxtyping import Float
from scipy.special import expit

from hc_lens.analyses.statistics import bootstrap_means
from hc_lens.analyses.superadditive.verdicts import DECIMALS, SUPERADDITIVE, excess_of, judge
from hc_lens.errors import HcLensError, check_choice
from hc_lens.metrics import (
    ACCURACY,
    AGREEMENT,
    COSTS,
    DIFFERENCE,
    FULL,
    KL,
    LOGIT,
    NAMED,
    ODDS,
    OF_LABELLED,
    PROBABILITY,
    Metric,
    Metrics,
    check_metrics,
)
from hc_lens.scans.scan import ScanRows
from hc_lens.units import Unit, UnitSet, as_units, set_label

SHARES = (ACCURACY, AGREEMENT, PROBABILITY)
"""Measures that cannot fall below zero."""
ALWAYS = {
    ACCURACY: "correct",
    AGREEMENT: "agreement",
    KL: "kl",
    LOGIT: "logit",
    DIFFERENCE: "logit",
}
"""Measures that every scan has, and the arrays of `ScanRows` that hold them."""


@dataclass(frozen=True)
class ExcessConfig:
    """How the excess of a set is measured, and its interval."""

    measure: str = ACCURACY
    """What a drop is a drop of: accuracy, probability or logit (log-odds) of the right answer, or
    another metric of the scan."""
    n_resamples: int = 2000
    """Number of bootstrap resamples."""
    level: float = 0.95
    """Coverage of the interval; the one-sided level of a verdict is half of what it leaves."""
    seed: int = 0
    """Seed of the bootstrap; each case has its own stream, so that cases do not change others."""

    def __post_init__(self) -> None:
        if self.n_resamples < 100 or not 0 < self.level < 1:
            raise HcLensError(
                "expected at least 100 resamples and a level between 0 and 1, got "
                f"{self.n_resamples} and {self.level}; the defaults are 2000 and 0.95"
            )


DEFAULTS = ExcessConfig()


def subsets(pool: Iterable[Unit | str], max_size: int = 3) -> list[tuple[Unit, ...]]:
    """Every subset of a pool of units with one to `max_size` members, small ones first."""
    units = list(map(Unit.parse, pool))
    if len(set(units)) < max(2, len(units)) or max_size < 2:
        raise HcLensError(
            "expected a pool of two or more different units and max_size of at least 2, got "
            f"{list(map(str, units))} and {max_size}; remove repeats, or widen the pool"
        )
    sizes = range(1, max_size + 1)
    return [as_units(chosen) for size in sizes for chosen in combinations(units, size)]


def to_scan(measure: str, metrics: Metrics = ()) -> dict[str, Metric | str]:
    """The metrics that a scan for a measure is asked for; an unknown measure is an HcLensError."""
    asked = check_metrics(metrics)
    check_choice("a measure", measure, [*NAMED, *asked])
    return asked if measure in ALWAYS else {measure: measure, **asked}


def measured(rows: ScanRows, measure: str) -> Float[np.ndarray, "sets rows"]:
    """What a drop is a drop of, for every set and row of a scan."""
    found = {name: getattr(rows, array) for name, array in ALWAYS.items()}
    if rows.logits is not None:
        # A classifier's labels are all that there is, so both follow from the log-odds.
        found |= {ODDS: rows.logit, PROBABILITY: expit(rows.logit)}
    found |= rows.more
    if measure not in found:
        raise HcLensError(
            f"expected a measure among those of the scan, {', '.join(found)}, got {measure!r}; "
            "choose one, or scan with metrics=[...]"
        )
    return found[measure].astype(float)


def excess(
    rows: ScanRows, sets: Iterable[UnitSet] | None = None, config: ExcessConfig = DEFAULTS
) -> pd.DataFrame:
    """How much more each set loses than its members alone, per dataset and case.

    Columns: dataset, case, set, size, n (rows, with a label if the measure is of the right
    answer), full and joint (the measure's mean for the full model and without the set), drop (their
    difference, positive for worse), sum_of_drops (of the members, gains included), sum_of_losses
    (of the members that lose), excess (drop minus sum_of_losses), low and high (its interval, for
    each row by itself), p (that the excess is above zero), p_holm (corrected over all rows of the
    table), p_interaction (that the drop is above sum_of_drops, corrected likewise) and verdict (see
    `hc_lens.analyses.superadditive.verdicts.judge`).

    Args:
        rows: what `hc.scan_rows` returned, with the sets and each of their members alone.
        sets: the sets to look at; by default every scanned set with two members or more.
        config: the measure and its interval; all numbers are in the measure's own unit.
    """
    given_sets = [label for label in rows.sets if "+" in label] if sets is None else sets
    units = [as_units(given) for given in given_sets]
    labels = list(map(set_label, units))
    if min(map(len, units), default=0) < 2:
        raise HcLensError(
            f"expected sets of two or more units, got {labels[:3]}; scan joint sets with "
            "sets=[[...]]"
        )
    values = measured(rows, config.measure)
    labelled = rows.rows.reset_index(drop=True)
    if config.measure in OF_LABELLED:
        labelled = labelled.query("label >= 0")
    if labelled.empty:
        raise HcLensError("expected rows with labels, got none; scan a task with labels")
    # Only what is asked for is resampled: the full model is first, then each set and each member.
    asked = dict.fromkeys([*units, *((unit,) for given in units for unit in given)])
    at = {given: place for place, given in enumerate(asked, start=1)}
    chosen = [0, *map(rows.index, asked)]
    values, sign = values[chosen], -1 if config.measure in COSTS else 1
    records = []
    for dataset, of_dataset in labelled.groupby("dataset", sort=False):
        for case, of_case in of_dataset.groupby("case"):
            own = values[:, of_case.index]
            drops, means = sign * (own[0] - own), own.mean(1).round(DECIMALS)
            rng = np.random.default_rng([config.seed, zlib.crc32(f"{dataset}\n{case}".encode())])
            resampled = bootstrap_means(drops, config.n_resamples, rng)
            for given, label in zip(units, labels, strict=True):
                joint, alone = at[given], [at[unit,] for unit in given]
                about = {"dataset": dataset, "case": case, "set": label, "size": len(given)}
                about |= {"n": len(of_case), "full": means[0], "joint": means[joint]}
                parts = (array[each] for array in (drops, resampled.T) for each in (joint, alone))
                records.append(about | excess_of(*parts, level=config.level))
    return judge(pd.DataFrame(records), config.level, has_floor=config.measure in SHARES)


def minimal(table: pd.DataFrame) -> pd.DataFrame:
    """The super-additive sets that hold no smaller super-additive set, per dataset and case.

    The table is what `excess` returned for all subsets of a pool.
    """
    kept = []
    for _, part in table.loc[table["verdict"] == SUPERADDITIVE].groupby(["dataset", "case"]):
        sets = {index: frozenset(as_units(label)) for index, label in part["set"].items()}
        kept += [at for at, own in sets.items() if not any(other < own for other in sets.values())]
    return table.loc[sorted(kept)].reset_index(drop=True)


def layout(
    table: pd.DataFrame, core: Sequence[Unit | str], joint: Iterable[UnitSet] = ()
) -> pd.DataFrame:
    """The paper's Tables 3 and 4: accuracy and its change in percent, one row per ablation.

    Rows: None, the average over the heads outside the core that were scanned alone (their number
    is in the label), each core head, each joint set. Columns: (dataset, case, accuracy or change).
    The table is what `hc.scan` returned, with every head alone.
    """
    labels = [str(unit) for unit in core]
    joined = [set_label(given) for given in joint]
    scanned = table["set"].unique().tolist()
    missing = [label for label in (*labels, *joined) if label not in scanned]
    alone = [label for label in scanned if label != FULL and "+" not in label]
    others = [label for label in alone if Unit.parse(label).is_head and label not in labels]
    if missing or not others:
        raise HcLensError(
            "expected a scan of every head alone and of the joint sets, missing "
            f"{missing[:3] or 'all heads outside the core'}; scan them with hc.scan(...)"
        )
    values, case = ["accuracy", "change"], ["dataset", "case"]
    renamed = table.rename(columns={"accuracy_change": "change"})
    wide = renamed.pivot(index="set", columns=case, values=values).reorder_levels([1, 2, 0], axis=1)
    cases = table[case].drop_duplicates().itertuples(index=False, name=None)
    wide = 100 * wide[[(*given, value) for given in cases for value in values]]
    average = wide.loc[others].mean().to_frame(f"Avg. (non-core, {len(others)} heads)").T
    shown = pd.concat([wide.loc[[FULL]].rename({FULL: "None"}), average, wide.loc[labels + joined]])
    return shown.rename_axis(index="ablated", columns=["dataset", "case", "value"])
