"""What sets of units lose together and alone: tables from a scan.

1. `subsets` lists the sets within a pool of units, for a scan.
2. `excess` compares the drop of each set with the sum of its members' drops, with an interval.
3. `minimal` keeps the super-additive sets that hold no smaller one.
4. `layout` is the layout of Tables 3 and 4 of Bhaskar, Friedman and Chen (2024).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations

import numpy as np
import pandas as pd
from jaxtyping import Float, Int
from scipy.special import expit
from scipy.stats import norm

from analyses.statistics import bootstrap_means, holm
from analyses.superadditive.config import ExcessConfig
from hc_lens.errors import HcLensError
from hc_lens.metrics import FULL
from hc_lens.scans.scan import ScanRows
from hc_lens.units import Unit, UnitSet, as_units, set_label

DEFAULTS = ExcessConfig()


def subsets(pool: Iterable[Unit | str], max_size: int = 3) -> list[tuple[Unit, ...]]:
    """Every subset of a pool of units with one to `max_size` members, small ones first."""
    units = [as_units(unit)[0] for unit in pool]
    if len(set(units)) < max(2, len(units)) or max_size < 2:
        raise HcLensError(
            "expected a pool of two or more different units and max_size of at least 2, got "
            f"{[str(unit) for unit in units]} and {max_size}; remove repeats, or widen the pool"
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
    chosen = [label for label in rows.sets if "+" in label] if sets is None else list(sets)
    units = [as_units(given) for given in chosen]
    if not units or any(len(given) < 2 for given in units):
        raise HcLensError(
            "expected sets of two or more units, got "
            f"{[set_label(given) for given in units][:3]}; scan joint sets with sets=[[...]]"
        )
    joint = [rows.index(given) for given in units]
    members = [[rows.index((unit,)) for unit in given] for given in units]
    # What a drop is a drop of, for every set and row.
    values = (rows.correct if config.measure == "accuracy" else rows.logit).astype(np.float64)
    values = expit(values) if config.measure == "probability" else values
    names = {"set": [set_label(given) for given in units], "size": [len(given) for given in units]}
    parts = []
    for dataset, case, at in _cases(rows):
        drops = values[0, at] - values[:, at]
        summed = np.stack([drops[inside].sum(0) for inside in members])
        rng = np.random.default_rng([config.seed, zlib.crc32(f"{dataset}\n{case}".encode())])
        about = {"dataset": dataset, "case": case, **names, "n": len(at)}
        means = {"drop": drops[joint].mean(1), "sum_of_drops": summed.mean(1)}
        interval = _interval(drops[joint] - summed, config, rng)
        parts.append(pd.DataFrame({**about, **means, **interval}))
    table = pd.concat(parts, ignore_index=True)
    table["p_holm"] = holm(table["p"].to_numpy())
    table["superadditive"] = table["low"] > 0
    return table


def minimal(table: pd.DataFrame, *, corrected: bool = False, level: float = 0.95) -> pd.DataFrame:
    """The super-additive sets that hold no smaller super-additive set, per dataset and case.

    Args:
        table: what `excess` returned, for all subsets of a pool.
        corrected: ask for ``p_holm`` below ``(1 - level) / 2`` instead of an interval above zero.
        level: coverage, used with `corrected`.
    """
    is_large = table["p_holm"] < (1 - level) / 2 if corrected else table["superadditive"]
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
    labels = [set_label([unit]) for unit in core]
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


def _cases(rows: ScanRows) -> Iterator[tuple[str, str, Int[np.ndarray, "rows"]]]:
    """The rows with a label of each dataset and case, cases by name."""
    labelled = rows.rows.reset_index(drop=True).query("label >= 0")
    if labelled.empty:
        raise HcLensError("expected rows with labels, got none; scan a task with labels")
    for dataset, part in labelled.groupby("dataset", sort=False):
        for case, inside in part.groupby("case"):
            yield str(dataset), str(case), inside.index.to_numpy()
