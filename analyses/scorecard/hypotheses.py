"""The tests of a circuit, on numbers alone (Shi et al. 2024, arXiv 2410.13032).

1. *Equivalence*: does the circuit do better than the model as often as worse? With K of n rows on
   which it does better (ties say nothing), H0 is ``|P - 1/2| <= tolerance``; p is the binomial
   probability of a count at least as far from n/2, at the edge of H0. A small p: not equivalent.
2. *Independence*: does the model without the circuit still know of the task? H0: what it says of a
   row is independent of what the model says. The statistic is HSIC with Gaussian kernels at the
   median distance (Gretton et al. 2007), p is from permutations. A small p: it still knows.
3. *Minimality*: does each unit add more than a random one would? The change that a unit's removal
   makes to the circuit is compared with the changes that units outside make when the circuit is
   inflated by them. H0: it is one of these. A small p: the unit is needed. (Shi et al. look at
   edges, and reject minimality; here the unit that is needed rejects.)
4. Against random circuits of the same size: *sufficiency* (is the circuit as faithful as a random
   one?) and *partial necessity* (does the model lose as little without it?), by rank.

A p-value from n draws is ``(1 + draws at least as extreme) / (1 + n)``.
"""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Bool, Float
from scipy.stats import binom


def equivalence_p(
    circuit: Float[np.ndarray, "rows"], model: Float[np.ndarray, "rows"], tolerance: float = 0.1
) -> float:
    """p that the circuit does better than the model as often as worse; 1 if they never differ."""
    differs = ~np.isclose(circuit, model, rtol=0, atol=1e-9)
    n, better = int(differs.sum()), int((circuit > model)[differs].sum())
    if n == 0:
        return 1.0
    # The side that was seen more often, and its tail where H0 makes it likeliest.
    most = max(better, n - better)
    tails = [
        binom.sf(most - 1, n, 0.5 + tolerance),
        binom.sf(most - 1, n, 0.5 - tolerance),
    ]
    return min(1.0, float(sum(tails)))


def hsic(first: Float[np.ndarray, "rows rows"], second: Float[np.ndarray, "rows rows"]) -> float:
    """The Hilbert-Schmidt independence criterion of two kernel matrices, the first centred."""
    return float((first * second).mean())


def kernel(values: Float[np.ndarray, "rows"]) -> Float[np.ndarray, "rows rows"]:
    """Gaussian similarities, as wide as the median distance; all ones for constant values."""
    distance = np.abs(values[:, None] - values)
    apart = distance[np.triu_indices(len(values), 1)]
    width = float(np.median(apart)) if len(apart) else 0.0
    if width == 0.0:
        width = float(apart.max()) if len(apart) and apart.max() > 0 else 1.0
    return np.exp(-0.5 * (distance / width) ** 2)


def independence_p(
    left: Float[np.ndarray, "rows"],
    model: Float[np.ndarray, "rows"],
    rng: np.random.Generator,
    n_permutations: int = 200,
) -> float:
    """p that what is left without the circuit is independent of what the model says."""
    ours, theirs = kernel(left), kernel(model)
    centred = ours - ours.mean(0) - ours.mean(1)[:, None] + ours.mean()
    seen = hsic(centred, theirs)
    drawn = []
    for _ in range(n_permutations):
        order = rng.permutation(len(model))
        drawn.append(hsic(centred, theirs[np.ix_(order, order)]))
    return rank_p(seen, np.array(drawn))


def rank_p(seen: float, drawn: Float[np.ndarray, "draws"]) -> float:
    """Share of the draws, the seen one among them, that are at least as large."""
    slack = 1e-12 * max(1.0, abs(seen))
    return float((1 + (drawn >= seen - slack).sum()) / (1 + len(drawn)))


def minimality_p(
    removed: Float[np.ndarray, "units"], added: Float[np.ndarray, "draws"]
) -> Float[np.ndarray, "units"]:
    """p of each unit that its removal changes no more than adding a random unit does."""
    return np.array([rank_p(change, added) for change in removed])


def expected_jaccard(first: int, second: int, n_units: int) -> float:
    """Mean Jaccard index of two independent random sets of these sizes."""
    total = math.comb(n_units, second)
    shared = range(max(0, first + second - n_units), min(first, second) + 1)
    return sum(
        math.comb(first, k) * math.comb(n_units - first, second - k) / total
        * (k / (first + second - k) if first + second > k else 1.0)
        for k in shared
    )  # fmt: skip


def jaccard(first: Bool[np.ndarray, "units"], second: Bool[np.ndarray, "units"]) -> float:
    """Shared units among those of either; 1 for two empty sets."""
    either = int((first | second).sum())
    return int((first & second).sum()) / either if either else 1.0
