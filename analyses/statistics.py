"""Statistics that several analyses share: rank correlation, AUROC, bootstraps, Holm, intervals."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy.stats import rankdata, spearmanr
from scipy.stats import t as student

BLOCK = 4_000_000
"""Most resampled rows that are held at once."""


class Correlation(NamedTuple):
    """A rank correlation."""

    rho: float
    """Spearman's rho; NaN if one of the sides is constant."""
    p: float
    """Two-sided p-value, from the t distribution."""
    n: int
    """Number of pairs of values."""


def rank_correlation(
    first: Float[np.ndarray, "values"], second: Float[np.ndarray, "values"]
) -> Correlation:
    """Spearman's rank correlation of two lists of values."""
    if len(set(first)) < 2 or len(set(second)) < 2:
        return Correlation(math.nan, math.nan, len(first))
    found: Any = spearmanr(first, second)
    return Correlation(float(found.statistic), float(found.pvalue), len(first))


def auroc(scores: Float[np.ndarray, "values"], positive: Bool[np.ndarray, "values"]) -> float:
    """The chance that a positive's score is above a negative's, ties half; NaN with one kind."""
    n, ranks = int(positive.sum()), rankdata(scores)
    if n in (0, len(scores)):
        return math.nan
    above = ranks[positive].sum() - n * (n + 1) / 2
    return float(above / (n * (len(scores) - n)))


def bootstrap_means(
    values: Float[np.ndarray, "series rows"], n_resamples: int, rng: np.random.Generator
) -> Float[np.ndarray, "resamples series"]:
    """The means of bootstrap resamples, for rows that are all at hand (Efron 1979).

    Every resample draws as many rows as there are, with replacement, the same for every series.
    """
    n = values.shape[1]
    means, block = [], max(1, BLOCK // n)
    for first in range(0, n_resamples, block):
        size = min(block, n_resamples - first)
        means.append(rng.multinomial(n, np.full(n, 1 / n), size=size) @ values.T / n)
    return np.concatenate(means)


def poisson_weights(
    rows: Iterable[int], n_replicates: int, seed: int
) -> Int[np.ndarray, "rows replicates"]:
    """How often each row is drawn in each replicate of a bootstrap, for rows that stream past.

    It is Poisson(1), from a stream of the row's own: neither the batches nor other rows matter.
    """
    draws = [np.random.default_rng([seed, row]).poisson(1.0, n_replicates) for row in rows]
    return np.stack(draws)


def holm(p: Float[np.ndarray, "tests"]) -> Float[np.ndarray, "tests"]:
    """Holm's step-down correction of p-values for the number of tests (Holm 1979)."""
    order = np.argsort(p, kind="stable")
    stepped = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)).clip(max=1)
    corrected = np.empty_like(p)
    corrected[order] = stepped
    return corrected


class Interval(NamedTuple):
    """A value and its interval."""

    value: float
    """The estimate."""
    low: float
    """Lower end; NaN if there is no interval."""
    high: float
    """Upper end."""


def mean_interval(parts: Sequence[Interval]) -> Interval:
    """The mean of independent estimates, from the interval of each (Zou and Donner 2008)."""
    value, low, high = np.array(parts, dtype=float).reshape(-1, 3).T
    below, above = (math.sqrt(((end - value) ** 2).sum()) / len(value) for end in (low, high))
    mean = float(value.mean())
    return Interval(mean, mean - below, mean + above)


def difference_interval(first: Interval, second: Interval) -> Interval:
    """First minus second of two independent estimates, by the same method."""
    value = first.value - second.value
    below = math.hypot(first.value - first.low, second.high - second.value)
    above = math.hypot(first.high - first.value, second.value - second.low)
    return Interval(value, value - below, value + above)


def t_interval(values: Sequence[float], level: float = 0.95) -> Interval:
    """The mean of some values and Student's interval of it; no interval for fewer than two."""
    mean, n = float(np.mean(values)), len(values)
    if n < 2:
        return Interval(mean, math.nan, math.nan)
    half = float(student.ppf((1 + level) / 2, n - 1) * np.std(values, ddof=1)) / math.sqrt(n)
    return Interval(mean, mean - half, mean + half)
