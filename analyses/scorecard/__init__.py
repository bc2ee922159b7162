"""Is the circuit right? One table of everything that is asked of a circuit.

1. `analyse` measures the circuit, the model without it, its faithfulness at every size if it is the
   beginning of a ranking, and random circuits and rankings beside them
   (`hc_lens.analyses.scorecard.curves`).
2. Its tests have p-values (`hc_lens.analyses.scorecard.hypotheses`).
3. Several circuits of other seeds say how stable it is (`hc_lens.analyses.scorecard.stability`).
4. Circuits are read and written as the JSON of the Mechanistic Interpretability Benchmark
   (`hc_lens.analyses.scorecard.circuits`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from hc_lens.analyses.scorecard.circuits import Ranking, as_ranking, from_mib, to_mib, without
from hc_lens.analyses.scorecard.curves import SHARES, Measured, areas, curve, curves, sizes
from hc_lens.analyses.scorecard.figures import figure
from hc_lens.analyses.scorecard.hypotheses import (
    equivalence_p,
    independence_p,
    minimality_p,
    rank_p,
)
from hc_lens.analyses.scorecard.stability import Stability, resampled, stability
from hc_lens.analyses.statistics import Interval, bootstrap_means, holm
from hc_lens.errors import HcLensError, check_count
from hc_lens.masks.replacements import Source
from hc_lens.metrics import Metrics
from hc_lens.protocols import BatchesLike, Model
from hc_lens.pruning.subnetwork import Subnetwork
from hc_lens.units import Unit, UnitSet, as_units

__all__ = [
    "SHARES",
    "Measured",
    "Ranking",
    "Scorecard",
    "ScorecardConfig",
    "Stability",
    "analyse",
    "areas",
    "as_ranking",
    "curve",
    "curves",
    "figure",
    "from_mib",
    "resampled",
    "sizes",
    "stability",
    "to_mib",
]


@dataclass(frozen=True)
class ScorecardConfig:
    """What is measured, and how many random circuits stand beside the circuit."""

    measure: str = "logit"
    """What a circuit is to keep: accuracy, probability, logit (log-odds of the right answer),
    margin, kl or another metric of the scan."""
    size: int | None = None
    """Units of the circuit, where a ranking is given; without it the fewest on its curve that are
    `faithful`."""
    faithful: float = 0.9
    """Faithfulness from which on the beginning of a ranking counts as its circuit."""
    shares: tuple[float, ...] = SHARES
    """Shares of the units at which a ranking is measured."""
    n_random: int = 50
    """Random circuits of the circuit's size."""
    n_rankings: int = 10
    """Random rankings."""
    n_added: int = 50
    """Most units outside that are added to the circuit, for minimality."""
    n_permutations: int = 200
    """Permutations of the test of independence."""
    tolerance: float = 0.1
    """How far from one half the chance of doing better than the model may be, for equivalence."""
    n_resamples: int = 2000
    """Bootstrap resamples of the rows."""
    level: float = 0.95
    """Coverage of the intervals; one minus it is the level of the tests."""
    limit: int | None = None
    """Number of rows to use, always the same sample; without it, all rows."""
    memory: int | str = "1GB"
    """Most bytes to hold beside the model and the results."""
    seed: int = 0
    """Seed of everything that is drawn."""

    def __post_init__(self) -> None:
        for name in ("n_random", "n_rankings", "n_added", "n_permutations", "n_resamples"):
            check_count(name, getattr(self, name))
        if self.size is not None:
            check_count("size", self.size)
        if not (0 < self.level < 1 and 0 <= self.tolerance < 0.5):
            raise HcLensError(
                "expected a level between 0 and 1 and a tolerance from 0 to below 0.5, got "
                f"{self.level} and {self.tolerance}; the defaults are 0.95 and 0.1"
            )


DEFAULTS = ScorecardConfig()


@dataclass(frozen=True)
class Scorecard:
    """What `analyse` found."""

    circuit: tuple[Unit, ...]
    """The units of the circuit, in mask order."""
    summary: pd.DataFrame
    """One line for each question: question, value, low, high, p, random (the mean of random
    circuits or rankings), n."""
    units: pd.DataFrame
    """Each unit of the circuit: unit, change (of the faithfulness without it), p, p_holm."""
    curve: pd.DataFrame
    """The curve of the ranking and of random ones (see `curves`); empty for a circuit alone."""
    stability: Stability | None = None
    """How alike circuits of other seeds are, if there are any."""

    def figure(self) -> Figure:
        """Draw the curve; see `figure`."""
        return figure(self.curve, len(self.circuit))


def analyse(
    model: Model,
    batches: BatchesLike,
    given: Ranking | UnitSet,
    means: Source | str,
    config: ScorecardConfig = DEFAULTS,
    *,
    others: Sequence[Subnetwork] = (),
    metrics: Metrics = (),
    progress: bool = True,
) -> Scorecard:
    """The scorecard of a circuit, or of a ranking and the circuit that it begins with.

    Args:
        model: a hooked classifier or language model.
        batches: the rows.
        given: a `Subnetwork` or a set of units to keep; or a ranking: all units in order, their
            scores by label, or a table with the columns unit and score.
        means: what replaces the units outside: means, ``"zero"`` or another source.
        others: subnetworks of other seeds, for the stability.
        metrics: further measures, as in `hc.scan`.
    """
    options = {"limit": config.limit, "memory": config.memory, "progress": progress}
    measure = Measured(model, batches, means, config.measure, metrics=metrics, **options)
    return _Card(measure, given, config).card(others)


class _Card:
    """One scorecard in the making."""

    def __init__(self, measure: Measured, given: Any, config: ScorecardConfig):
        self.measure, self.space, self.config = measure, measure.space, config
        self.rng = np.random.default_rng(config.seed)
        self.ranking, self.circuit = self._read(given)
        if not 0 < len(self.circuit) < len(self.space):
            raise HcLensError(
                f"expected a circuit of 1 to {len(self.space) - 1} of {len(self.space)} units, got "
                f"{len(self.circuit)}; give size=, or units to keep"
            )

    def _read(self, given: Any) -> tuple[tuple[Unit, ...] | None, tuple[Unit, ...]]:
        """The ranking, if there is one, and the circuit."""
        space = self.space
        if isinstance(given, Subnetwork) and given.space == space:
            kept = tuple(Unit.parse(label) for label in given.kept)
            return (None if given.scores is None else as_ranking(space, given)), kept
        if isinstance(given, (Subnetwork, pd.DataFrame, dict)):
            return self._begin(as_ranking(space, given))
        units = [given] if isinstance(given, Unit) else given
        listed = list(as_units(units)) if isinstance(units, str) else [*map(Unit.parse, units)]
        if sorted(listed) == sorted(space):
            return self._begin(tuple(listed))
        space.indices(listed)
        return None, tuple(sorted(listed))

    def _begin(self, ranking: tuple[Unit, ...]) -> tuple[tuple[Unit, ...], tuple[Unit, ...]]:
        """A ranking, and the units with which it begins."""
        size = self.config.size
        if size is None:
            table = curve(self.measure, ranking, self.config.shares)
            inside = table.loc[(table["n_units"] > 0) & (table["n_units"] < len(self.space))]
            enough = inside.loc[inside["faithfulness"] >= self.config.faithful, "n_units"]
            size = int(enough.min() if len(enough) else inside["n_units"].max())
        return ranking, tuple(sorted(ranking[:size]))

    def card(self, others: Sequence[Subnetwork]) -> Scorecard:
        """Everything that is asked of the circuit."""
        units, lines = self._minimality(), [*self._sides(), *self._paired()]
        needed = int((units["p_holm"] < 1 - self.config.level).sum())
        lines.append({"question": "minimality", "value": needed / len(units), "n": len(units)})
        table = pd.DataFrame()
        if self.ranking is not None:
            table, of_curve = self._curves(self.ranking)
            lines += of_curve
        stable = None
        if others:
            stable = self._stability(others)
            about = {"value": stable.jaccard, "p": stable.p, "random": stable.chance}
            lines.append({"question": "stability", **about, "n": len(others)})
        columns = ["question", "value", "low", "high", "p", "random", "n"]
        summary = pd.DataFrame(lines).reindex(columns=columns)
        return Scorecard(self.circuit, summary, units, table, stable)

    @cached_property
    def _random(self) -> list[tuple[Unit, ...]]:
        """Random circuits of the same size."""
        every, size = list(self.space), len(self.circuit)
        return [
            tuple(every[index] for index in self.rng.permutation(len(every))[:size])
            for _ in range(self.config.n_random)
        ]

    def _sides(self) -> list[dict[str, object]]:
        """Faithfulness of the circuit and of the model without it, against random circuits."""
        lines, outside = [], without(self.space, self.circuit)
        beside = [without(self.space, drawn) for drawn in self._random]
        self.measure.run([self.circuit, outside, *self._random, *beside])
        for question, own, drawn, sign in (
            ("faithfulness", self.circuit, self._random, 1),
            ("completeness", outside, beside, -1),
        ):
            f, random = self._interval(own), np.array(self._each(drawn))
            p = rank_p(sign * f.value, sign * random)
            lines.append(
                {
                    "question": question,
                    **f._asdict(),
                    "p": p,
                    "random": random.mean(),
                    "n": len(drawn),
                }
            )
        return lines

    def _each(self, circuits: Iterable[Iterable[Unit]]) -> list[float]:
        return [self.measure.faithfulness(circuit) for circuit in circuits]

    def _interval(self, circuit: Iterable[Unit]) -> Interval:
        """f of a circuit, with the percentile interval over resampled rows."""
        known = [circuit, self.measure.none, self.measure.all]
        series = np.stack([self.measure.values(each) for each in known])
        own, none, full = bootstrap_means(series, self.config.n_resamples, self.rng).T
        with np.errstate(divide="ignore", invalid="ignore"):
            f = (own - none) / (full - none)
        tail = (1 - self.config.level) / 2
        low, high = np.nanquantile(f[np.isfinite(f)], [tail, 1 - tail])
        return Interval(self.measure.faithfulness(circuit), float(low), float(high))

    def _paired(self) -> list[dict[str, object]]:
        """Equivalence and independence, from single rows."""
        own, full = (self.measure.values(each) for each in (self.circuit, self.measure.all))
        left = self.measure.values(without(self.space, self.circuit))
        better = float(np.mean((own > full) + 0.5 * (own == full)))
        n = len(full)
        equal = equivalence_p(own, full, self.config.tolerance)
        knows = independence_p(left, full, self.rng, self.config.n_permutations)
        return [
            {"question": "equivalence", "value": better, "p": equal, "random": 0.5, "n": n},
            {"question": "independence", "p": knows, "n": n},
        ]

    def _minimality(self) -> pd.DataFrame:
        """What each unit's removal changes, against units outside that are added."""
        own, f = set(self.circuit), self.measure.faithfulness
        outside = list(without(self.space, self.circuit))
        order = self.rng.permutation(len(outside))[: self.config.n_added]
        smaller = [own - {unit} for unit in self.circuit]
        larger = [own | {outside[index]} for index in order]
        self.measure.run([own, *smaller, *larger])
        removed = np.array([f(each) - f(own) for each in smaller])
        added = np.array([f(each) - f(own) for each in larger])
        p = minimality_p(np.abs(removed), np.abs(added))
        table = pd.DataFrame({"unit": [str(unit) for unit in self.circuit], "change": removed})
        return table.assign(p=p, p_holm=holm(p)).sort_values("change", ignore_index=True)

    def _curves(self, ranking: tuple[Unit, ...]) -> tuple[pd.DataFrame, list[dict[str, object]]]:
        """The curve of the ranking beside random ones, and its areas."""
        every = list(self.space)
        named: dict[str, Any] = {"given": ranking}
        for number in range(self.config.n_rankings):
            named[f"random-{number}"] = [every[index] for index in self.rng.permutation(len(every))]
        table = curves(self.measure, named, self.config.shares)
        found = table.drop_duplicates("ranker").set_index("ranker")
        lines = []
        for area, sign in (("cpr", 1), ("cmd", -1)):
            own, drawn = found.loc["given", area], found.drop("given")[area].to_numpy()
            p = rank_p(sign * float(own), sign * drawn)
            lines.append(
                {"question": area, "value": own, "p": p, "random": drawn.mean(), "n": len(drawn)}
            )
        return table, lines

    def _stability(self, others: Sequence[Subnetwork]) -> Stability:
        """The circuit beside those of other seeds."""
        strange = [str(other.space) for other in others if other.space != self.space]
        if strange:
            raise HcLensError(
                f"expected subnetworks of this model ({self.space}) for the stability, got "
                f"{strange[0]}; give those of the same model"
            )
        own = np.array([unit in self.circuit for unit in self.space])
        circuits = np.stack([own, *(other.keep.numpy() for other in others)])
        return stability(circuits, self.space.labels, seed=self.config.seed)
