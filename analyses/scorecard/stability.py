"""Is a circuit found again, with another seed or on other rows?

1. `stability` takes several circuits of one model: how often each unit is in them, with Wilson's
   interval, and how alike two of them are (Jaccard), against what random circuits of the same sizes
   would be: the expected index, and p by drawing such circuits.
2. `resampled` makes such circuits from the effects of single rows: the units with the largest mean
   effect on each of many bootstrap samples of the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float

from hc_lens.analyses.scorecard.hypotheses import expected_jaccard, jaccard, rank_p
from hc_lens.analyses.statistics import bootstrap_means
from hc_lens.errors import HcLensError
from hc_lens.metrics import wilson

Circuits = Bool[np.ndarray, "circuits units"]


@dataclass(frozen=True)
class Stability:
    """How alike some circuits are."""

    units: pd.DataFrame
    """Each unit: unit, n (circuits with it), share, low, high (Wilson's interval)."""
    jaccard: float
    """Mean Jaccard index of two circuits."""
    chance: float
    """What it is for random circuits of the same sizes, on average."""
    p: float
    """p that random circuits are as alike."""


def stability(
    circuits: Circuits, labels: Sequence[str], n_draws: int = 500, seed: int = 0
) -> Stability:
    """How often each unit is in the circuits, and how alike two of them are."""
    if len(circuits) < 2 or circuits.shape[1] != len(labels):
        raise HcLensError(
            f"expected at least two circuits of {len(labels)} units, got {list(circuits.shape)}; "
            "prune with several seeds, or resample the rows"
        )
    n, share = len(circuits), circuits.mean(0)
    low, high = wilson(share, np.full(len(labels), float(n)))
    table = pd.DataFrame({"unit": list(labels), "n": circuits.sum(0), "share": share})
    counts = circuits.sum(1).tolist()
    pairs = list(combinations(counts, 2))
    chance = float(np.mean([expected_jaccard(a, b, len(labels)) for a, b in pairs]))
    rng, seen = np.random.default_rng(seed), mean_jaccard(circuits)
    drawn = np.array([mean_jaccard(_random(rng, counts, len(labels))) for _ in range(n_draws)])
    return Stability(table.assign(low=low, high=high), seen, chance, rank_p(seen, drawn))


def mean_jaccard(circuits: Circuits) -> float:
    """The mean over pairs of circuits."""
    return float(np.mean([jaccard(a, b) for a, b in combinations(circuits, 2)]))


def _random(rng: np.random.Generator, counts: Sequence[int], n_units: int) -> Circuits:
    return np.stack([rng.permutation(n_units) < count for count in counts])


def resampled(
    effects: Float[np.ndarray, "units rows"], size: int, n_resamples: int = 200, seed: int = 0
) -> Circuits:
    """The `size` units with the largest mean effect, on each bootstrap sample of the rows."""
    if not 0 < size < len(effects):
        raise HcLensError(
            f"expected a size between 1 and {len(effects) - 1} of {len(effects)} units, got {size}"
        )
    means = bootstrap_means(effects, n_resamples, np.random.default_rng(seed))
    ranks = (-means).argsort(axis=1, kind="stable").argsort(axis=1)
    return ranks < size
