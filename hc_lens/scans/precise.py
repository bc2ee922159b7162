"""A scan to a stated precision: each set on as many rows as its own interval needs.

1. Every set is measured on the rows that stand out and on `PILOT` rows that are drawn
   (`hc_lens.scans.sampler`), case by case.
2. Its interval is looked at (`hc_lens.scans.intervals`). If half of it is at most the precision,
   the set is done in this case. Otherwise its spread says how many rows it is likely to need, and
   it is measured up to there; the others have been dropped.
3. There are at most `LOOKS` looks. A set that is not precise after the last of them is measured on
   all rows of the case, and then its value is exact.

A case of so few rows that the pilot would be most of it is measured on all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
import pandas as pd
from jaxtyping import Float, Int

from hc_lens.errors import HcLensError, HcLensWarning, check_count, warn
from hc_lens.metrics import ACCURACY, AGREEMENT, FULL, KL, LOGIT, OF_LABELLED
from hc_lens.scans.intervals import Looks
from hc_lens.scans.sampler import Population, Sampler

PILOT = 32
"""Rows that are drawn before the first look."""
LOOKS = 5
"""Most looks at an interval."""
MARGIN = 1.1
"""More rows than the spread says, as it is itself an estimate."""
STEP = 1.15
"""Numbers of rows are powers of this, so that sets are measured together."""
ALMOST = 0.95
"""A set that needs more than this share of the rows is measured on all of them."""
SMALL = 2
"""A case of at most so many times the rows of the first look is measured whole."""


class WholeCaseWarning(HcLensWarning):
    """Cases are so small that they were measured on all their rows."""


@dataclass(frozen=True)
class Precision:
    """How precise a scan is to be."""

    precision: float
    """Half the width of an interval, in the unit of the metric."""
    confidence: float = 0.95
    """Probability with which an interval holds the full scan's value."""
    simultaneous: bool = False
    """Whether all intervals of the scan hold together with this probability."""
    of: str = LOGIT
    """The metric whose change is to be precise."""
    by_case: bool = True
    """Whether each case has its own estimates; otherwise one for all rows of a dataset."""
    seed: int = 0
    """Which rows are drawn."""

    def __post_init__(self) -> None:
        """Refuse numbers out of range."""
        check_between("precision", self.precision, inf, "such as 0.02")
        check_between("confidence", self.confidence, 1, "such as 0.95")
        check_count("seed", self.seed, 0)


def check_between(what: str, given: object, most: float, example: str) -> None:
    """Refuse anything but a number between 0 and `most`, both excluded."""
    number = float(given) if isinstance(given, (int, float)) else 0.0
    if isinstance(given, bool) or not 0 < number < most:
        above = "above 0" if most == inf else f"between 0 and {most}"
        raise HcLensError(
            f"expected {what} as a number {above}, {example}, got {given!r}; correct it"
        )


@dataclass(frozen=True)
class Measured:
    """One population after a precise scan."""

    dataset: str
    """The name of its dataset."""
    population: Population
    """What was measured."""
    mean: Float[np.ndarray, "sets"]
    """Estimates of the target."""
    half: Float[np.ndarray, "sets"]
    """Half the widths of their intervals."""


def measure_precisely(samplers: Mapping[str, Sampler], settings: Precision) -> Iterator[Measured]:
    """Measure every set in every case of every dataset as precisely as was asked."""
    found = {
        name: sampler.populations(f"{settings.seed} {name}", settings.by_case)
        for name, sampler in samplers.items()
    }
    _say_whole([each for populations in found.values() for each in populations])
    cases = sum(map(len, found.values()))
    for name, populations in found.items():
        sampler = samplers[name]
        sets = cases * sampler.runs.n_sets if settings.simultaneous else 1
        looks = Looks(settings.confidence, LOOKS, sets, sampler.target.largest)
        yield from _Rounds(name, sampler, populations, settings, looks).run()


def _say_whole(populations: Sequence[Population]) -> None:
    """Warn of cases that are too small to draw from."""
    whole = [each.name for each in populations if first_goal(each) == each.total]
    if whole:
        more = f" and {len(whole) - 3} more" if len(whole) > 3 else ""
        warn(
            f"expected cases of more than {SMALL * PILOT} rows to draw from, got "
            f"{', '.join(map(repr, whole[:3]))}{more} with fewer: there the scan is exact, every "
            "set on every row; leave precision= out, or give more rows",
            WholeCaseWarning,
        )


def first_goal(population: Population) -> int:
    """How many rows every set is measured on before the first look."""
    first = population.certain + PILOT
    return population.total if population.total <= SMALL * first else first


def next_goal(
    population: Population, n: int, enough: Float[np.ndarray, "sets"]
) -> Int[np.ndarray, "sets"]:
    """How many rows sets are measured on next, that were measured on n and need `enough`."""
    drawn = n - population.certain
    wanted = np.maximum(enough * MARGIN, drawn * STEP)
    steps = np.ceil(np.log(wanted / PILOT) / np.log(STEP))
    goal = population.certain + np.ceil(PILOT * STEP**steps)
    return np.where(goal > ALMOST * population.total, population.total, goal).astype(int)


class _Rounds:
    """The looks at the populations of one dataset."""

    def __init__(
        self,
        name: str,
        sampler: Sampler,
        populations: list[Population],
        settings: Precision,
        looks: Looks,
    ):
        self._name, self._sampler, self._populations = name, sampler, populations
        self._settings, self._looks = settings, looks
        shape = len(populations), sampler.runs.n_sets
        self._mean, self._half = np.zeros(shape), np.full(shape, np.inf)

    def run(self) -> Iterator[Measured]:
        """Look until everything is precise."""
        n_sets = self._sampler.runs.n_sets
        goals = [np.full(n_sets, first_goal(each)) for each in self._populations]
        for look in range(LOOKS + 1):
            self._sampler.measure(zip(self._populations, goals, strict=True))
            last = look == LOOKS - 1
            goals = [self._look(index, last) for index in range(len(self._populations))]
            if not any(map(np.any, goals)):
                break
        for index, population in enumerate(self._populations):
            yield Measured(self._name, population, self._mean[index], self._half[index])

    def _look(self, index: int, last: bool) -> Int[np.ndarray, "sets"]:
        """Estimate what is not yet precise in a population; the goals of what still is not."""
        population, asked = self._populations[index], self._settings.precision
        measured, mean, half = population.measured, self._mean[index], self._half[index]
        goals = np.zeros_like(measured)
        active = half > asked
        for n in np.unique(measured[active]):
            sets = np.flatnonzero(active & (measured == n))
            found = population.estimates(
                sets.tolist(), self._sampler.runs, self._sampler.target, self._looks, asked
            )
            mean[sets], half[sets] = found.mean, found.half
            wide = found.half > asked
            goal = population.total if last else next_goal(population, int(n), found.enough)
            goals[sets] = np.where(wide, goal, 0)
        return goals


def precise_table(
    samplers: Mapping[str, Sampler], labels: Sequence[str], more: Sequence[str], settings: Precision
) -> pd.DataFrame:
    """The table of a precise scan; `labels` are those of the sets, without the full model."""
    parts = [
        _lines(found, labels, samplers[found.dataset], more)
        for found in measure_precisely(samplers, settings)
    ]
    return pd.concat(parts, ignore_index=True)


def _lines(
    found: Measured, labels: Sequence[str], sampler: Sampler, more: Sequence[str]
) -> pd.DataFrame:
    """The lines of one case, the full model's first."""
    population, target = found.population, sampler.target
    n = population.measured
    table = pd.DataFrame({"set": [FULL, *labels], "n": [population.total, *n]})
    table.insert(0, "dataset", found.dataset)
    table.insert(1, "case", population.name)
    labelled = population.learned.labels >= 0
    for name in (ACCURACY, KL, AGREEMENT, LOGIT, *more):
        of_labelled = name in OF_LABELLED
        count = np.where(population.labelled > 0, population.labelled, np.nan) if of_labelled else n
        full = population.learned.metrics[name]
        level = float(np.mean(full[labelled])) if of_labelled and labelled.any() else np.nan
        level = level if of_labelled else float(np.mean(full))
        change = population.sums[name] / count
        if name == target.name:
            change = found.mean if target.is_change else found.mean - level
        table[name] = level + np.concatenate([[0.0], change])
        table[f"{name}_change"] = np.concatenate([[0.0], change])
    middle = table[target.column].to_numpy()
    half = np.concatenate([[0.0], found.half])
    return table.assign(low=middle - half, high=middle + half)
