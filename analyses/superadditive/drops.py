"""What sets of units lose together and alone: tables from a scan.

1. The drop of a set S on a case is the full model's mean minus the mean with S ablated; the mean is
   over rows, of being right by default. A set is super-additive if its drop exceeds the sum of its
   members' drops: ``excess(S) = drop(S) - sum of drop({i})``.
2. The excess is the mean over rows of ``(c - c_S) - sum of (c - c_i)``, where c is 1 for a right
   answer. Its interval is the percentile bootstrap over rows, all sets on the same resamples.
3. `p` is one-sided, from the excess over its bootstrap standard error; `p_holm` is Holm's
   correction over all rows of the table, for readers who look for the largest among many.
4. A super-additive set is minimal if no smaller set within it, of two members or more, is
   super-additive on the same case.

A drop in accuracy only shows where a decision flips: two units can each move a row half-way to the
boundary. ``measure="logit"`` asks the same of the gold label's log-odds, which have no boundary.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal, get_args

import numpy as np
import pandas as pd
from jaxtyping import Float
from scipy.special import expit
from scipy.stats import norm

from hc_lens.analyses.statistics import bootstrap_means, holm
from hc_lens.errors import HcLensError, check_choice
from hc_lens.metrics import FULL
from hc_lens.scans.scan import ScanRows
from hc_lens.units import Unit, UnitSet, as_units, set_label

Measure = Literal["accuracy", "probability", "logit"]
"""What a drop is a drop of: being right, the gold label's probability, or its log-odds."""


@dataclass(frozen=True)
class ExcessConfig:
    """How the excess of a set is measured, and its interval."""

    measure: Measure = "accuracy"
    """What a drop is a drop of: accuracy, the gold label's probability, or its log-odds."""
    n_resamples: int = 2000
    """Number of bootstrap resamples."""
    level: float = 0.95
    """Coverage of the interval."""
    seed: int = 0
    """Seed of the bootstrap; each case has its own stream, so that cases do not change others."""

    def __post_init__(self) -> None:
        check_choice("a measure", self.measure, get_args(Measure))
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


def excess(
    rows: ScanRows, sets: Iterable[UnitSet] | None = None, config: ExcessConfig = DEFAULTS
) -> pd.DataFrame:
    """How much more each set loses than its members alone, per dataset and case.

    Columns: dataset, case, set, size, n (rows with a label), drop, sum_of_drops, excess (their
    difference), low and high (its interval), p, p_holm, superadditive (whether low is above zero).

    Args:
        rows: what `hc.scan_rows` returned, with the sets and each of their members alone.
        sets: the sets to look at; by default every scanned set with two members or more.
        config: the measure and its interval.
    """
    chosen = [label for label in rows.sets if "+" in label] if sets is None else sets
    units = [as_units(given) for given in chosen]
    labels, sizes = list(map(set_label, units)), list(map(len, units))
    if min(sizes, default=0) < 2:
        raise HcLensError(
            f"expected sets of two or more units, got {labels[:3]}; scan joint sets with "
            "sets=[[...]]"
        )
    labelled = rows.rows.reset_index(drop=True).query("label >= 0")
    if labelled.empty:
        raise HcLensError("expected rows with labels, got none; scan a task with labels")
    joint = [rows.index(given) for given in units]
    members = [[rows.index(unit) for unit in given] for given in units]
    # What a drop is a drop of, for every set and row.
    values = (rows.correct if config.measure == "accuracy" else rows.logit).astype(np.float64)
    values = expit(values) if config.measure == "probability" else values
    parts = []
    for dataset, of_dataset in labelled.groupby("dataset", sort=False):
        for case, of_case in of_dataset.groupby("case"):
            drops = values[0, of_case.index] - values[:, of_case.index]
            summed = np.stack([drops[alone].sum(0) for alone in members])
            rng = np.random.default_rng([config.seed, zlib.crc32(f"{dataset}\n{case}".encode())])
            about = {"dataset": dataset, "case": case, "set": labels, "size": sizes}
            means = {"drop": drops[joint].mean(1), "sum_of_drops": summed.mean(1)}
            interval = _interval(drops[joint] - summed, config, rng)
            parts.append(pd.DataFrame({**about, "n": len(of_case), **means, **interval}))
    table = pd.concat(parts, ignore_index=True)
    table["p_holm"] = holm(table["p"].to_numpy())
    table["superadditive"] = table["low"] > 0
    return table


def _interval(
    values: Float[np.ndarray, "sets rows"], config: ExcessConfig, rng: np.random.Generator
) -> dict[str, Float[np.ndarray, "sets"]]:
    """The mean excess of each set, its bootstrap interval, and a one-sided p-value."""
    mean = values.mean(1)
    resampled = bootstrap_means(values, config.n_resamples, rng)
    ends = [(1 - config.level) / 2, (1 + config.level) / 2]
    low, high = np.quantile(resampled, ends, axis=0)
    error = resampled.std(0, ddof=1)
    # Where no resample differs the excess is either there or not.
    exact = error == 0
    p = np.where(exact, mean <= 0, norm.sf(mean / np.where(exact, 1.0, error)))
    return {"excess": mean, "low": low, "high": high, "p": p}


def minimal(table: pd.DataFrame, *, corrected: bool = False) -> pd.DataFrame:
    """The super-additive sets that hold no smaller super-additive set, per dataset and case.

    The table is what `excess` returned for all subsets of a pool. `corrected` asks for ``p_holm``
    below 0.025 instead of an interval above zero.
    """
    is_large = table["p_holm"] < 0.025 if corrected else table["superadditive"]
    kept = []
    for _, part in table.loc[is_large].groupby(["dataset", "case"]):
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
