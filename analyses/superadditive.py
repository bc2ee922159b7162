"""Do units do more damage together than the sum of what each does alone?

Tables 3 and 4 of Bhaskar, Friedman and Chen (2024), with intervals.

1. The drop of a set S on a case is the full model's mean minus the mean with S ablated; the mean is
   over rows, of being right by default. A set is super-additive if its drop exceeds the sum of its
   members' drops: ``excess(S) = drop(S) - sum of drop({i})``.
2. The excess is the mean over rows of ``(c - c_S) - sum of (c - c_i)``, where c is 1 for a right
   answer. Its interval is the percentile bootstrap over rows, all sets on the same resamples.
3. `p` is one-sided, from the excess over its bootstrap standard error; `p_holm` is Holm's
   correction over all rows of the table, for whoever looks for the largest among many.
4. A super-additive set is minimal if no smaller set within it, of two members or more, is
   super-additive on the same case.

A drop in accuracy only shows where a decision flips: two units can each move a row half-way to the
boundary. ``measure="logit"`` asks the same of the gold label's log-odds, which have no boundary.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float
from matplotlib.figure import Figure
from scipy.special import expit
from scipy.stats import norm

from hc_lens.errors import HcLensError
from hc_lens.scan import ScanRows, scan_rows
from hc_lens.sources import Source
from hc_lens.suffix.sets import FULL, UnitSet, as_units, set_label
from hc_lens.units import Unit, UnitSpace

MEASURES = ("accuracy", "probability", "logit")
"""What a drop is a drop of: being right, the gold label's probability, or its log-odds."""
BLOCK = 4_000_000
"""Most resampled rows that are held at once."""


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
    model: Any,
    datasets: Any,
    means: Source | str,
    core: Sequence[Unit | str],
    *,
    joint: Iterable[UnitSet] | None = None,
    pool: Iterable[Unit | str] = (),
    max_size: int = 3,
    measure: str = "accuracy",
    n_resamples: int = 2000,
    level: float = 0.95,
    seed: int = 0,
    limit: int | None = None,
    memory: int | str = "1GB",
    store: str | Path | None = None,
    progress: bool = True,
) -> SuperAdditive:
    """Scan the core heads, every other head, the joint sets and the pool, and analyse all of it.

    Args:
        model: a classifier of `hc.load`.
        datasets: batches by name, or batches alone.
        means: what replaces a removed unit.
        core: the heads of the heuristic core, or whichever heads are the question.
        joint: the sets to ablate together; default all of `core` at once.
        pool: units within which minimal super-additive subsets are looked for.
        max_size: largest subset of the pool.
        measure: ``"accuracy"``, ``"probability"`` or ``"logit"``.
        n_resamples: bootstrap resamples.
        level: coverage of the interval.
        seed: of the bootstrap.
        limit, memory, store, progress: as in `hc.scan`.
    """
    units = list(as_units(core))
    together = [as_units(units)] if joint is None else [as_units(given) for given in joint]
    small = [given for given in together if len(given) < 2]
    if small:
        raise HcLensError(
            f"expected at least two units in a joint set, got {[set_label(s) for s in small]}; "
            "name more core heads, or give joint=[[...]]"
        )
    within = subsets(pool, max_size) if list(pool := list(pool)) else []
    singles = [(unit,) for unit in UnitSpace.of(model).heads]
    singles += [(unit,) for given in (*together, *within) for unit in given]
    wanted = list(dict.fromkeys([*singles, *together, *within]))
    scanned = scan_rows(
        model, datasets, means, wanted, limit=limit, memory=memory, store=store, progress=progress
    )
    asked = dict.fromkeys([*together, *(given for given in within if len(given) > 1)])
    settings = {"measure": measure, "n_resamples": n_resamples, "level": level, "seed": seed}
    table = excess(scanned, asked, **settings)
    in_pool = table["set"].isin([set_label(given) for given in within])
    found = minimal(table.loc[in_pool], level=level)
    return SuperAdditive(scanned, layout(scanned.table(), units, together), table, found)


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
    rows: ScanRows,
    sets: Iterable[UnitSet] | None = None,
    *,
    measure: str = "accuracy",
    n_resamples: int = 2000,
    level: float = 0.95,
    seed: int = 0,
) -> pd.DataFrame:
    """How much more each set loses than its members alone, per dataset and case.

    Columns: dataset, case, set, size, n (rows with a label), drop, sum_of_drops, excess (their
    difference), low and high (its interval), p, p_holm, superadditive (whether low is above zero).

    Args:
        rows: what `hc.scan_rows` returned, with the sets and each of their members alone.
        sets: the sets to look at; default every scanned set with two members or more.
        measure: what a drop is a drop of: ``"accuracy"``, ``"probability"`` or ``"logit"``.
        n_resamples: bootstrap resamples.
        level: coverage of the interval.
        seed: of the bootstrap; each case has its own stream, so that cases do not change others.
    """
    _check_settings(measure, n_resamples, level)
    chosen = [label for label in rows.sets if "+" in label] if sets is None else list(sets)
    units = [as_units(given) for given in chosen]
    if not units or any(len(given) < 2 for given in units):
        raise HcLensError(
            "expected sets of two or more units, got "
            f"{[set_label(given) for given in units][:3]}; scan joint sets with sets=[[...]]"
        )
    places = [rows.place(given) for given in units]
    members = [[rows.place((unit,)) for unit in given] for given in units]
    parts = []
    for dataset, case, at in _cases(rows):
        values = _values(rows, measure)[:, at]
        drops = values[0] - values
        summed = np.stack([drops[inside].sum(0) for inside in members])
        over = drops[places] - summed
        rng = np.random.default_rng([seed, zlib.crc32(f"{dataset}\n{case}".encode())])
        means = _bootstrap(over, n_resamples, rng)
        low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2], axis=0)
        columns = {
            "dataset": dataset,
            "case": case,
            "set": [set_label(given) for given in units],
            "size": [len(given) for given in units],
            "n": len(at),
            "drop": drops[places].mean(1),
            "sum_of_drops": summed.mean(1),
            "excess": over.mean(1),
            "low": low,
            "high": high,
            "p": _p_values(over.mean(1), means.std(0, ddof=1)),
        }
        parts.append(pd.DataFrame(columns))
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
    large = table.loc[is_large].sort_values(by="size", kind="stable")
    found: dict[tuple[str, str], list[frozenset[Unit]]] = {}
    kept = []
    for place, dataset, case, label in zip(
        large.index, large["dataset"], large["case"], large["set"], strict=True
    ):
        units, smaller = frozenset(as_units(label)), found.setdefault((dataset, case), [])
        if not any(inside < units for inside in smaller):
            kept.append(place)
            smaller.append(units)
    return table.loc[sorted(kept)].reset_index(drop=True)


def layout(
    table: pd.DataFrame, core: Sequence[Unit | str], joint: Iterable[UnitSet] = ()
) -> pd.DataFrame:
    """The paper's Tables 3 and 4: accuracy and its change in percent, one row an ablation.

    Rows: None, the average over the heads outside the core that were scanned alone (their number
    is in the label), each core head, each joint set. Columns: (dataset, case, accuracy or change).

    Args:
        table: what `hc.scan` returned, with every head alone.
        core: the core heads.
        joint: the joint sets.
    """
    labels = [set_label([unit]) for unit in core]
    joined = [set_label(given) for given in joint]
    scanned = list(dict.fromkeys(table["set"]))
    missing = [label for label in (*labels, *joined) if label not in scanned]
    others = [label for label in scanned if _is_head(label) and label not in labels]
    if missing or not others:
        raise HcLensError(
            "expected a scan of every head alone and of the joint sets, missing "
            f"{missing[:3] or 'all heads outside the core'}; scan them with hc.scan(...)"
        )
    values = table.rename(columns={"accuracy_change": "change"})
    wide = values.pivot_table(
        index="set",
        columns=["dataset", "case"],
        values=["accuracy", "change"],
        sort=False,
        dropna=False,
    )
    wide = 100 * wide.reorder_levels([1, 2, 0], axis=1)
    cases = list(dict.fromkeys(zip(table["dataset"], table["case"], strict=True)))
    wide = wide[[(*case, value) for case in cases for value in ("accuracy", "change")]]
    average = wide.loc[others].mean().to_frame(f"Avg. (non-core, {len(others)} heads)").T
    shown = pd.concat([wide.loc[[FULL]].rename({FULL: "None"}), average, wide.loc[labels + joined]])
    return shown.rename_axis(index="ablated", columns=["dataset", "case", "value"])


def figure(table: pd.DataFrame, units: UnitSet) -> Figure:
    """Bars of one set by case: the sum of its members' drops, and the drop of all together.

    The whisker is the interval of the excess, drawn from the sum of the drops.

    Args:
        table: what `excess` returned.
        units: the set to draw.
    """
    label = set_label(units)
    chosen = table.loc[table["set"] == label]
    if chosen.empty:
        raise HcLensError(
            f"expected a set of the table, got {label}; it has {list(table['set'].unique())[:5]}"
        )
    drawing = Figure(figsize=(max(5.0, 0.9 * len(chosen) + 2), 3.6), layout="constrained")
    axes = drawing.subplots()
    places = np.arange(len(chosen))
    axes.bar(places - 0.2, chosen["sum_of_drops"], 0.38, color="#56B4E9", label="sum of each alone")
    axes.bar(places + 0.2, chosen["drop"], 0.38, color="#D55E00", label="together")
    ends = np.stack([chosen["excess"] - chosen["low"], chosen["high"] - chosen["excess"]])
    axes.errorbar(
        places + 0.2,
        chosen["drop"],
        yerr=ends.clip(min=0),
        fmt="none",
        ecolor="black",
        capsize=3,
        label="interval of the excess",
    )
    several = len(set(chosen["dataset"])) > 1
    names = chosen["dataset"] + "\n" + chosen["case"] if several else chosen["case"]
    axes.set_xticks(places, list(names), rotation=30, ha="right")
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set(ylabel="drop", title=label)
    axes.legend()
    return drawing


def holm(p: Float[np.ndarray, "tests"]) -> Float[np.ndarray, "tests"]:
    """Holm's step-down correction of p-values."""
    order = np.argsort(p, kind="stable")
    stepped = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)).clip(max=1)
    corrected = np.empty_like(p)
    corrected[order] = stepped
    return corrected


def _bootstrap(
    values: Float[np.ndarray, "sets rows"], n_resamples: int, rng: np.random.Generator
) -> Float[np.ndarray, "resamples sets"]:
    """Means over rows drawn with replacement, the same draws for every set."""
    n = values.shape[1]
    means, block = [], max(1, BLOCK // n)
    for first in range(0, n_resamples, block):
        size = min(block, n_resamples - first)
        means.append(rng.multinomial(n, np.full(n, 1 / n), size=size) @ values.T / n)
    return np.concatenate(means)


def _p_values(
    excess: Float[np.ndarray, "sets"], error: Float[np.ndarray, "sets"]
) -> Float[np.ndarray, "sets"]:
    """One-sided; where no resample differs the excess is either there or not."""
    exact = error == 0
    p = norm.sf(excess / np.where(exact, 1.0, error))
    return np.where(exact, (excess <= 0).astype(float), p)


def _cases(rows: ScanRows) -> Iterator[tuple[str, str, np.ndarray]]:
    """The rows with a label of each dataset and case, cases by name."""
    names = {column: rows.rows[column].to_numpy() for column in ("dataset", "case", "label")}
    labelled = names["label"] >= 0
    if not labelled.any():
        raise HcLensError("expected rows with labels, got none; scan a task with labels")
    for dataset in dict.fromkeys(names["dataset"][labelled]):
        inside = labelled & (names["dataset"] == dataset)
        for case in sorted(set(names["case"][inside])):
            yield dataset, case, np.flatnonzero(inside & (names["case"] == case))


def _values(rows: ScanRows, measure: str) -> Float[np.ndarray, "sets rows"]:
    if measure == "accuracy":
        return rows.correct.astype(np.float64)
    logit = rows.logit.astype(np.float64)
    return logit if measure == "logit" else expit(logit)


def _is_head(label: str) -> bool:
    return label != FULL and "+" not in label and Unit.parse(label).is_head


def _check_settings(measure: str, n_resamples: int, level: float) -> None:
    if measure not in MEASURES:
        raise HcLensError(f"expected a measure among {MEASURES}, got {measure!r}; choose one")
    if n_resamples < 100 or not 0 < level < 1:
        raise HcLensError(
            "expected at least 100 resamples and a level between 0 and 1, got "
            f"{n_resamples} and {level}; the defaults are 2000 and 0.95"
        )
