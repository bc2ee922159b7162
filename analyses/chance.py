"""How many units independent random sets share.

1. Each of several sets holds k_r of the same n units, drawn at random and on its own.
2. `intersection` is the exact distribution of the number of units in all sets: of i units that are
   still shared, a set of k leaves a hypergeometric number.
3. `at_least` is the chance of one unit to be in at least so many sets (Poisson binomial); times n
   it is the exact mean number of such units.
4. `simulated` draws the number of units in at least so many sets, where no short exact form is
   known.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int
from scipy.stats import hypergeom


def intersection(n: int, kept: Sequence[int]) -> Float[np.ndarray, "sizes"]:
    """Probability of each size 0..n of the intersection of random sets of k_r out of n units.

    After each set the number j that is left of i shared units is hypergeometric:
    ``P(j) = sum over i of P(i) C(i, j) C(n - i, k - j) / C(n, k)``.
    """
    sizes = np.arange(n + 1)
    chances = np.zeros(n + 1)
    chances[n] = 1.0
    for k in kept:
        chances = chances @ hypergeom.pmf(sizes[None, :], n, sizes[:, None], k)
    return chances


def at_least(chances: Sequence[float], needed: int) -> float:
    """Probability of at least so many successes in independent trials with these chances."""
    counts = np.ones(1)
    for chance_of in chances:
        counts = np.convolve(counts, [1 - chance_of, chance_of])
    return float(counts[needed:].sum())


def simulated(
    n: int, kept: Sequence[int], needed: int, n_draws: int, rng: np.random.Generator
) -> Int[np.ndarray, "draws"]:
    """Simulated numbers of units that at least `needed` random sets share."""
    counts = np.zeros((n_draws, n), dtype=np.int64)
    for k in kept:
        ranks = rng.random((n_draws, n)).argsort(1)
        counts += ranks < k
    return (counts >= needed).sum(1)
