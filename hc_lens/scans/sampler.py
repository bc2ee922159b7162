"""Measures each set on as many rows as are asked for, and says what they tell of all rows.

1. One pass over all rows: the full model, and the gradient of the target (`hc_lens.scans.target`)
   by every unit.
2. A `Population` is the rows of one case, or of a whole dataset. Those that stand out come first
   (`intervals.leverage`), the others follow in an order drawn from the seed. Every set is measured
   on a beginning of that order, however far, so sets share rows as much as they can.
3. `Sampler.measure` brings some sets of some populations up to some numbers of rows. Rows that need
   the same sets are batched together, by length, and only these sets are run on them.
4. `Population.estimates` gives means and intervals of sets that were measured equally far.

All is decided by the rows, the sets and the seed, so the same call does the same work: what a batch
left is kept in a store and read back after a stop, as for an exact scan.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hc_lens.data.batches import Batches, bucket
from hc_lens.metrics import OF_LABELLED, Metric, held_metrics
from hc_lens.protocols import BatchLike
from hc_lens.records import seed_of
from hc_lens.scans.intervals import Estimate, Known, Looks, estimate, leverage
from hc_lens.scans.runs import Runs
from hc_lens.scans.target import Target, check_labelled

TOKENS = 4096
"""About so many tokens in a batch of rows that were drawn."""
STAND_OUT = 0.0125
"""Share of the rows that are measured for certain."""
EVERY = "all"
"""The name of a population of the rows of all cases."""
AT_ONCE = 256
"""Sets whose intervals are computed together, which bounds the memory that they take."""

Parts = Mapping[str, Tensor]
"""Tensors by name, as a store keeps them."""
Kept = Callable[[str, BatchLike, Callable[[], Parts]], Parts]
"""What was made of a batch under a name, from a store if it is there; otherwise it is made."""


@dataclass
class Learned:
    """What one pass over all rows says of each."""

    full: Float[np.ndarray, "rows"]
    """The full model's value of what is differentiated, or of the target itself."""
    gradients: Float[np.ndarray, "rows parts"] | None
    """The derivatives; None without any."""
    metrics: Mapping[str, Float[np.ndarray, "rows"]]
    """The full model's metrics."""
    labels: Int[np.ndarray, "rows"]
    """Each row's label."""

    def of(self, rows: Int[np.ndarray, "some"]) -> Learned:
        """Of some of the rows."""
        gradients = None if self.gradients is None else self.gradients[rows]
        metrics = {name: values[rows] for name, values in self.metrics.items()}
        return Learned(self.full[rows], gradients, metrics, self.labels[rows])

    @property
    def shared(self) -> Float[np.ndarray, "rows known"]:
        """The full model's value, the label, and the value of rows with each label."""
        found = np.unique(self.labels)[1:]  # the first is told by the absence of the others
        labels = (self.labels[:, None] == found).astype(float)
        return np.column_stack([self.full, labels, labels * self.full[:, None]])


class Population:
    """Some rows in the order in which they are measured, and what was measured."""

    def __init__(
        self,
        name: str,
        rows: Int[np.ndarray, "rows"],
        learned: Learned,
        n_sets: int,
        seed: str,
    ):
        """Put the rows in order; `learned` is of these rows."""
        self.name, self.total = name, len(rows)
        self.certain = int(STAND_OUT * self.total)
        columns = [learned.full[:, None]]
        columns += [] if learned.gradients is None else [learned.gradients]
        standing_out = np.argsort(-leverage(np.column_stack(columns)), kind="stable")
        certain, others = np.split(standing_out, [self.certain])
        others.sort()
        drawn = np.random.default_rng(seed_of(seed)).permutation(others)
        order = np.concatenate([certain, drawn])
        self.rows, self.learned = rows[order], learned.of(order)
        self._shared = self.learned.shared
        self._shared -= self._shared[self.certain :].mean(0)
        self.effects = [np.empty(0) for _ in range(n_sets)]
        """What was measured of each set, in the order of the rows."""
        self.sums: dict[str, Float[np.ndarray, "sets"]] = defaultdict(lambda: np.zeros(n_sets))
        """Sums over the same rows of all metrics, less the full model's."""
        self.labelled = np.zeros(n_sets)
        """How many of these rows have a label."""

    @property
    def measured(self) -> Int[np.ndarray, "sets"]:
        """How many rows each set was measured on."""
        return np.array([len(effects) for effects in self.effects])

    def estimates(
        self, sets: Sequence[int], runs: Runs, target: Target, looks: Looks, precision: float
    ) -> Estimate:
        """The mean effects of sets that were measured on the same number of rows."""
        pieces = [sets[first : first + AT_ONCE] for first in range(0, len(sets), AT_ONCE)]
        found = [self._estimate(piece, runs, target, looks, precision) for piece in pieces]
        return Estimate(*(np.concatenate(parts) for parts in zip(*found, strict=True)))

    def _estimate(
        self, sets: Sequence[int], runs: Runs, target: Target, looks: Looks, precision: float
    ) -> Estimate:
        effects = np.stack([self.effects[index] for index in sets], axis=1)
        n, first = len(effects), None
        if self.learned.gradients is not None:
            effect = runs.first_order(self.learned.gradients, sets)
            first = target.foreseen(self.learned.full, effect.astype(float))
            first = first[:n] - first[self.certain :].mean(0)
        known = Known(first, self._shared[:n])
        return estimate(effects, known, self.certain, self.total, looks, precision)


@dataclass
class Sampler:
    """Measures the changes of a model on rows of one dataset."""

    runs: Runs
    batches: Batches
    target: Target
    metrics: Mapping[str, Metric | str]
    """What is measured of each row, the target among it."""
    kept: Kept
    report: Callable[[int], object]
    """Is told how many rows of sets were measured."""

    def __post_init__(self) -> None:
        """Look up what the batches know of their rows."""
        self._lengths = np.array(self.batches.column("length"))
        self._cases = np.array(self.batches.column("case"), dtype=object)
        self.evaluations = 0

    def populations(self, seed: str, by_case: bool = True) -> list[Population]:
        """The populations of the dataset, after one pass over its rows.

        Of a target that only rows with a label have, these are the rows with a label.
        """
        rows = np.arange(self.batches.n_rows)
        if self.target.of_labelled:
            rows = rows[np.array(self.batches.column("label")) >= 0]
            check_labelled(self.target.name, len(rows))
        learned = self._learn(rows)
        cases = self._cases[rows] if by_case else np.full(len(rows), EVERY, dtype=object)
        found = []
        for name in sorted(set(cases)):
            at = np.flatnonzero(cases == name)
            of_case = learned.of(at)
            text = f"{seed} {name}"
            found.append(Population(name, rows[at], of_case, self.runs.n_sets, text))
        return found

    def measure(self, goals: Iterable[tuple[Population, Int[np.ndarray, "sets"]]]) -> None:
        """Measure each set of each population on at least so many rows as its goal says."""
        jobs: dict[tuple[int, ...], list[tuple[Population, int, int]]] = defaultdict(list)
        for population, goal in goals:
            done = population.measured
            goal = np.minimum(goal, population.total)
            for index in np.flatnonzero(goal > done):
                more = np.full(goal[index] - done[index], np.nan)
                population.effects[index] = np.concatenate([population.effects[index], more])
            edges = np.unique(np.concatenate([done, goal]))
            for start, stop in itertools.pairwise(edges.tolist()):
                sets = tuple(np.flatnonzero((done <= start) & (goal >= stop)).tolist())
                if sets:
                    jobs[sets].append((population, start, stop))
        for sets, parts in jobs.items():
            self._measure(sets, parts)

    def _measure(self, sets: tuple[int, ...], parts: list[tuple[Population, int, int]]) -> None:
        """Measure some sets on the rows between two ranks of each population."""
        at = [
            (population, rank) for population, start, stop in parts for rank in range(start, stop)
        ]
        rows = np.array([population.rows[rank] for population, rank in at])
        for chosen, batch in self._batches(rows):
            values = self._values(batch, sets)
            effects = values[self.target.name]
            for column, (population, rank) in enumerate(at[index] for index in chosen):
                for index, effect in zip(sets, effects[:, column], strict=True):
                    population.effects[index][rank] = effect
            labelled = (batch.labels >= 0).cpu().numpy()
            self._add_up(sets, [at[index][0] for index in chosen], values, labelled)
            self.evaluations += len(sets) * len(chosen)
            self.report(len(sets) * len(chosen))

    def _add_up(
        self,
        sets: Sequence[int],
        populations: Sequence[Population],
        values: Mapping[str, Float[np.ndarray, "sets rows"]],
        labelled: Bool[np.ndarray, "rows"],
    ) -> None:
        """Add the values of a batch to the sums of the populations of its rows."""
        for population in dict.fromkeys(populations):
            here = np.array([each is population for each in populations])
            population.labelled[list(sets)] += (here & labelled).sum()
            for name, changes in values.items():
                of = here & labelled if name in OF_LABELLED else here
                population.sums[name][list(sets)] += changes[:, of].sum(1)

    def _values(
        self, batch: BatchLike, sets: Sequence[int]
    ) -> dict[str, Float[np.ndarray, "sets rows"]]:
        """The metrics of some sets on a batch, less the full model's where they are changes."""

        def run() -> Parts:
            return {"held": self.runs.held(batch, sets).cpu().contiguous()}

        name = "sets-" + "-".join(map(str, sets))
        held = self.kept(name, batch, run)["held"].to(batch.labels.device)
        with torch.no_grad():
            found = held_metrics(self.batches, batch, held, self.runs.logits, self.metrics)
        values = {name: value.cpu().numpy() for name, value in found.items()}
        own = self.target.name
        if not self.target.is_change:
            return {name: v[1:] if name == own else v[1:] - v[:1] for name, v in values.items()}
        return {name: v[1:] - v[:1] for name, v in values.items()}

    def _learn(self, rows: Int[np.ndarray, "rows"]) -> Learned:
        """One pass over some rows."""
        loss, parts = self.target.loss(self.batches), []
        order = []
        for chosen, batch in self._batches(rows):

            def run(batch: BatchLike = batch) -> Parts:
                if loss is None:
                    return {"held": self.runs.full(batch).cpu().contiguous()}
                found = self.runs.gradients(batch, loss)
                made = {"held": found.held, "full": found.losses, "gradients": found.gradients}
                return {name: value.cpu().contiguous() for name, value in made.items()}

            made = dict(self.kept(f"learned-{self.target.name}", batch, run))
            held = made.pop("held").to(batch.labels.device)
            with torch.no_grad():
                found = held_metrics(
                    self.batches, batch, held[None], self.runs.logits, self.metrics
                )
            values = {f"metric {name}": value[0].cpu() for name, value in found.items()}
            parts.append({**made, **values, "label": batch.labels.cpu()})
            order.append(chosen)
        back = np.argsort(np.concatenate(order), kind="stable")
        joined = {name: torch.cat([p[name] for p in parts]).numpy()[back] for name in parts[0]}
        metrics = {name: joined[f"metric {name}"] for name in self.metrics}
        full = joined.get("full", metrics[self.target.name]).astype(float)
        return Learned(full, joined.get("gradients"), metrics, joined["label"])

    def _batches(self, rows: Int[np.ndarray, "rows"]) -> Iterator[tuple[list[int], BatchLike]]:
        """Batches of some rows, by their positions in the batches' own, and which of these."""
        lengths = self._lengths[rows].tolist()
        for chosen in bucket(lengths, max(TOKENS, max(lengths)), seed=0):
            yield chosen, self.batches.gather(rows[chosen].tolist())
