"""The mean effect over a population of rows from a sample of them, with an interval that holds.

1. The N rows of a case are the whole population: the target is the mean over all of them, as an
   exact scan gives it. Rows are drawn without replacement, so that the error of n rows shrinks by
   ``sqrt(1 - n / N)``, and all N of them leave none (Cochran 1977, chapter 2).
2. Effects have heavy tails: a few rows in a thousand may hold nearly all of the variance, and a
   sample without them looks far more certain than it is. The rows that stand out by what is known
   beforehand (`leverage`) are therefore measured for certain, and only the rest is drawn (a stratum
   that is taken whole; Cochran 1977, chapter 5A).
3. `controlled` takes from each measured effect what is foreseen of it. Foreseen is what is known of
   every row: the first-order effect of the set, and what the full model says of the row. With these
   numbers centred on their means over the population, ``effect - c . known`` has the same mean as
   the effect for any c that was found on other rows, and a smaller spread for a good one (the
   regression estimator; Cochran 1977, chapter 7). c is cross-fitted: a fifth of the rows is
   corrected with what the other four fifths say. Three choices compete for each set, nothing, the
   first order, and everything known; that of the smallest spread wins. Where the first order is
   useless its c is zero.
4. `Looks.half_width` is Student's. The error that is allowed, ``1 - confidence``, is shared out
   evenly over the looks that there may be at most, so that all intervals of a set hold together
   with the stated confidence (Bonferroni): one may stop at whichever look one likes, for whatever
   reason. With `sets` it is shared out over these too.
5. A row as extreme as the most extreme that was seen may hide among the others. So `HIDDEN` rows of
   that size are added to the squares: with the spread s and the largest deviation R the half width
   is ``t sqrt((s^2 + HIDDEN R^2 / n) / n)``. For a sample without any spread this is about the rule
   of three, ``log(2 / error) R / n`` at an error of 1%. The form is that of an empirical Bernstein
   bound (Maurer and Pontil 2009), with a range that is seen, as that of a log-odds is not known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from scipy.stats import t as student

FOLDS = 5
"""Parts of the sample; each is corrected with what the others say."""
HIDDEN = 5
"""Rows as extreme as the most extreme one that may hide among those that were not drawn."""

Sample = Float[np.ndarray, "rows sets"]
"""A number for each row of a sample and each set."""
PerSet = Float[np.ndarray, "sets"]


class Known(NamedTuple):
    """What is known of some rows beforehand, centred on the means over the rows that are drawn."""

    first: Sample | None
    """The effect of each set to first order, if there is a derivative."""
    shared: Float[np.ndarray, "rows known"]
    """What the full model says of each row, for all sets the same."""


class Estimate(NamedTuple):
    """What some rows say of the mean effects over all rows."""

    mean: PerSet
    """The estimates."""
    half: PerSet
    """Half the widths of their intervals."""
    enough: PerSet
    """Drawn rows after which the intervals are likely to be as precise as was asked."""


@dataclass(frozen=True)
class Looks:
    """What the allowed error is shared out over, and how far one row can change."""

    confidence: float
    """Of all intervals together."""
    most: int
    """Most looks at intervals before all rows are measured."""
    sets: int = 1
    """Sets whose intervals are to hold together."""
    largest: float = 0.0
    """A change of one row that is possible, whatever was seen: 1 where rows are right or wrong."""

    def factor(self, n: int) -> float:
        """Student's quantile for n rows."""
        error = (1 - self.confidence) / (self.most * self.sets)
        return float(student.isf(error / 2, n - 1))

    def half_width(self, spread: PerSet, largest: PerSet, n: int, total: int) -> PerSet:
        """Half the width of the interval of a mean from n of `total` rows."""
        squares = spread**2 + HIDDEN * largest**2 / n
        return self.factor(n) * np.sqrt(squares * (1 - n / total) / n)

    def enough(
        self, spread: PerSet, largest: PerSet, n: int, total: int, precision: float
    ) -> PerSet:
        """Rows at which `half_width` is the precision, if spread and largest stay as they are."""
        # Without an end of the population n^2 = a n + b; its end is the same correction as above.
        a = (self.factor(n) * spread / precision) ** 2
        b = (self.factor(n) * largest / precision) ** 2 * HIDDEN
        without_end = a / 2 + np.sqrt(a**2 / 4 + b)
        return without_end / (1 + without_end / total)


def leverage(known: Float[np.ndarray, "rows known"]) -> Float[np.ndarray, "rows"]:
    """How far each row stands out: its largest share in the squares of any of the columns."""
    squares = (known - known.mean(0)) ** 2
    totals = squares.sum(0)
    return (squares / np.where(totals > 0, totals, 1.0)).max(1, initial=0.0)


def estimate(
    effects: Sample, known: Known, certain: int, total: int, looks: Looks, precision: float = 1.0
) -> Estimate:
    """The mean effects of a population of which the first rows were measured.

    Args:
        effects: of the rows that were measured, those that are measured for certain first, the
            others in the random order in which they were drawn.
        certain: how many are measured for certain.
        total: rows of the population.
        precision: for which `Estimate.enough` counts the rows.
    """
    n, rest = len(effects) - certain, total - certain
    if n == rest:
        zero = np.zeros(effects.shape[1])
        return Estimate(effects.mean(0), zero, zero + n)
    corrected = controlled(effects, known, certain)
    drawn = corrected[certain:]
    mean, spread = drawn.mean(0), drawn.std(0, ddof=1)
    largest = np.maximum(np.abs(corrected - mean).max(0), looks.largest)
    share = rest / total
    return Estimate(
        (effects[:certain].sum(0) + rest * mean) / total,
        looks.half_width(spread, largest, n, rest) * share,
        looks.enough(spread, largest, n, rest, precision / share),
    )


def controlled(effects: Sample, known: Known, certain: int) -> Sample:
    """The effects without what is foreseen of them, as `estimate` gets them."""
    found, spread = effects, effects[certain:].std(0, ddof=1)
    for shared in (known.shared[:, :0], known.shared):
        width = shared.shape[1] + (known.first is not None)
        # So many coefficients need as many rows of other folds twice over.
        if width and (len(effects) - certain) * (FOLDS - 1) >= 2 * FOLDS * (width + 1):
            corrected = _corrected(effects, Known(known.first, shared), certain)
            other = corrected[certain:].std(0, ddof=1)
            found = np.where(other < spread, corrected, found)
            spread = np.minimum(other, spread)
    return found


def _corrected(effects: Sample, known: Known, certain: int) -> Sample:
    """The effects without what a regression on the drawn rows of other folds foresees."""
    fold = (np.arange(len(effects)) - certain) % FOLDS
    fold[:certain] = FOLDS  # these have no fold: all drawn rows are others
    found = effects.copy()
    for here in range(FOLDS + bool(certain)):
        others = np.flatnonzero(fold != here)
        at, others = fold == here, others[others >= certain]
        first = None if known.first is None else known.first[others]
        c = _coefficients(effects[others], Known(first, known.shared[others]))
        found[at] -= known.shared[at] @ c[:, : known.shared.shape[1]].T
        if known.first is not None:
            found[at] -= known.first[at] * c[:, -1]
    return found


def _coefficients(effects: Sample, known: Known) -> Float[np.ndarray, "sets coefficients"]:
    """Least squares of each set's effects on what is shared and, last, its own first order.

    One row's worth of zeros keeps the coefficients small where the rows say little.
    """
    n, width = known.shared.shape
    e, z = effects - effects.mean(0), known.shared - known.shared.mean(0)
    size = width + (known.first is not None)
    squares, products = np.empty((e.shape[1], size, size)), np.empty((e.shape[1], size))
    squares[:, :width, :width], products[:, :width] = z.T @ z, e.T @ z
    if known.first is not None:
        own = known.first - known.first.mean(0)
        squares[:, width, :width] = squares[:, :width, width] = own.T @ z
        squares[:, width, width], products[:, width] = (own**2).sum(0), (own * e).sum(0)
    diagonal = np.einsum("sii->si", squares)
    # What does not vary in these rows gets no coefficient.
    diagonal += np.where(diagonal > 0, diagonal / n, 1.0)
    return np.linalg.solve(squares, products[..., None])[..., 0]
