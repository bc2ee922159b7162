"""The sets with the largest effects, without measuring the others precisely.

1. Every set is measured on the rows that stand out and on `PILOT` rows that are drawn, from all
   rows of the dataset together (`hc_lens.scans.sampler`).
2. The intervals of all sets at all looks hold together with probability 1 - delta
   (`hc_lens.scans.intervals`). So a set is among the k largest if fewer than k of the others can be
   larger, and it is not if k of them are larger for certain (successive elimination; Even-Dar,
   Mannor and Mansour 2006). The size of an effect is its distance from no change, whatever the
   sign.
3. Sets that are decided are dropped, the others are measured on twice as many rows, until all are
   decided. On all rows the effects are exact; of equal ones the first in the order given counts as
   larger.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Int
from typing_extensions import Unpack

from hc_lens.data.batches import named_batches
from hc_lens.errors import HcLensError, check_count
from hc_lens.masks.replacements import Source
from hc_lens.metrics import LOGIT
from hc_lens.protocols import BatchesLike, Model
from hc_lens.scans.intervals import Looks
from hc_lens.scans.precise import PILOT, check_between, first_goal
from hc_lens.scans.sampler import Sampler
from hc_lens.scans.scan import ScanJob, ScanOptions
from hc_lens.units import UnitSet

Sizes = Float[np.ndarray, "sets"]


class TopOptions(ScanOptions, total=False):
    """What `top` takes by name."""

    by: str
    """The metric whose change is compared: ``"logit"`` by default, ``"kl"``, ``"accuracy"``,
    ``"agreement"`` or one of `metrics`."""
    seed: int
    """Which rows are drawn; 0 by default."""


class Largest(NamedTuple):
    """The sets with the largest effects, the largest first."""

    sets: Int[np.ndarray, "k"]
    """Their indices."""
    mean: Float[np.ndarray, "k"]
    """Estimates of their effects."""
    half: Float[np.ndarray, "k"]
    """Half the widths of the intervals."""
    n: Int[np.ndarray, "k"]
    """How many rows each was measured on."""


def top(
    model: Model,
    batches: Mapping[str, BatchesLike] | BatchesLike,
    means: Source | str,
    k: int = 10,
    delta: float = 0.05,
    sets: Iterable[UnitSet] | None = None,
    **options: Unpack[TopOptions],
) -> pd.DataFrame:
    """The k sets whose ablation has the largest effect on a dataset, with probability 1 - delta.

    Columns: rank, set, n (rows on which it was measured), the effect (`logit_change`, or the column
    of the metric `by`), low and high (intervals which all hold together with that probability). The
    ranks within the k are those of the estimates.

    Args:
        model, means: as in `hc.scan`.
        batches: one dataset; its cases count as its rows do.
        k: how many; all of them, if there are no more.
        delta: probability with which another set belongs among them.
        sets: the sets that compete; by default every unit alone. ``hc.pairs(units)`` gives some
            units and all their pairs.
        options: `TopOptions`: by, seed, metrics, limit, memory, store, progress.
    """
    check_top(k, delta)
    named = named_batches(batches)
    if len(named) > 1:
        raise HcLensError(
            f"expected the batches of one dataset to rank sets on, got {len(named)}: "
            f"{', '.join(named)}; call hc.top once for each"
        )
    by, seed = options.get("by", LOGIT), options.get("seed", 0)
    check_count("seed", seed, 0)
    others: Any = {name: value for name, value in options.items() if name not in ("by", "seed")}
    run = ScanJob(model, named, means, sets, **others)
    with run.bar() as bar:
        ((name, sampler),) = run.samplers(by, bar.update).items()
        found = largest(sampler, f"{seed} {name}", k, delta)
    labels = [run.labels[1:][index] for index in found.sets]
    return top_table({"set": labels}, found, sampler)


def check_top(k: object, delta: object) -> None:
    """Refuse a number of sets or a probability that is out of range."""
    check_count("k", k)
    check_between("delta", delta, 1, "such as 0.05")


def top_table(keys: dict[str, list[str]], found: Largest, sampler: Sampler) -> pd.DataFrame:
    """The table of `top`; `keys` name the sets that were found."""
    return pd.DataFrame(
        {
            "rank": np.arange(1, len(found.sets) + 1),
            **keys,
            "n": found.n,
            sampler.target.column: found.mean,
            "low": found.mean - found.half,
            "high": found.mean + found.half,
        }
    )


def largest(sampler: Sampler, seed: str, k: int, delta: float) -> Largest:
    """The k changes of a sampler with the largest effects, with probability 1 - delta."""
    (population,) = sampler.populations(seed, by_case=False)
    n_sets, target = sampler.runs.n_sets, sampler.target
    rest, goal = population.total - population.certain, first_goal(population)
    most = max(1, math.ceil(math.log2(rest / PILOT)))
    looks = Looks(1 - delta, most, n_sets, target.largest)
    mean, half = np.zeros(n_sets), np.full(n_sets, np.inf)
    chosen, open_ = np.zeros(n_sets, dtype=bool), np.ones(n_sets, dtype=bool)
    while open_.any():
        sets = np.flatnonzero(open_)
        sampler.measure([(population, np.where(open_, goal, 0))])
        found = population.estimates(sets.tolist(), sampler.runs, target, looks, 1.0)
        mean[sets], half[sets] = found.mean, found.half
        size = np.abs(found.mean - target.unchanged)
        exact = goal >= population.total
        inside, outside = decide(size, found.half, k - int(chosen.sum()), exact)
        chosen[sets[inside]] = True
        open_[sets[inside | outside]] = False
        # An odd number of rows at the end is not worth a look of its own.
        goal = population.certain + 2 * (goal - population.certain)
        goal = population.total if goal > population.total * 0.9 else goal
    size = np.where(chosen, np.abs(mean - target.unchanged), -1.0)
    order = np.argsort(-size, kind="stable")[: int(chosen.sum())]
    return Largest(order, mean[order], half[order], population.measured[order])


def decide(
    size: Sizes, half: Sizes, k: int, exact: bool = False
) -> tuple[Bool[np.ndarray, "sets"], Bool[np.ndarray, "sets"]]:
    """Which sets are for certain among the k largest, and which are for certain not.

    Args:
        size: distances of the estimates from no change.
        half: half the widths of their intervals.
        exact: whether the sizes are exact; then all is decided, and the first of equal ones wins.
    """
    if exact:
        inside = np.zeros(len(size), dtype=bool)
        inside[np.argsort(-size, kind="stable")[:k]] = True
        return inside, ~inside
    low, high = np.maximum(size - half, 0), size + half
    # Each set compares with the others: without itself, which can be as large as itself.
    may_be_larger = (high[None, :] >= low[:, None]).sum(1) - 1
    are_larger = (low[None, :] > high[:, None]).sum(1)
    return may_be_larger < k, are_larger >= k
