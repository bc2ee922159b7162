"""How long a sweep will take, from a few updates and a few rows on this machine.

1. `measure` times one update of the gates and one evaluated row, each on the second of two batches:
   the first pays for what is set up once. Nothing of the model changes.
2. `seconds` adds up the updates and the warm starts of all prunings, the evaluations of all
   subnetworks, and two runs of the training rows for each checkpoint: for the means, and for the
   full model's own logits.
3. `expected` says it for as many processes as there will be.

Runs in several processes share the machine's memory, so that two of them take a little more than
half the time of one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hc_lens.data.batches import Batches
from hc_lens.masks.replacements import Zero
from hc_lens.protocols import Model
from hc_lens.pruning.config import PathConfig, PruneConfig
from hc_lens.pruning.job import Job
from hc_lens.pruning.teacher import Teacher
from hc_lens.pruning.train import GateTraining, frozen
from hc_lens.pruning.warm import WARM_BATCHES
from hc_lens.sweeps.config import SweepConfig
from hc_lens.sweeps.engines import cores


@dataclass(frozen=True)
class Speed:
    """What the parts of a sweep take on one process, in seconds."""

    update: float
    """One update of the gates."""
    row: float
    """One row of one evaluation."""


def measure(
    model: Model,
    train: Batches,
    evaluation: Mapping[str, Batches],
    config: PruneConfig | PathConfig,
) -> Speed:
    """The speed of a model on these rows; other methods than gates are not timed."""
    update = 0.0
    if isinstance(config, PathConfig) or config.method == "gates":
        training = GateTraining(Job(model, train, Zero(), config, Teacher(model)))
        with frozen(model):
            batches = [train[len(train) // 2]] * config.accumulate
            update = _second(lambda: training.step(1, batches))
    batch = max((rows[len(rows) // 2] for rows in evaluation.values()), key=len)
    return Speed(update, _second(lambda: Teacher(model).held(batch)) / len(batch))


def seconds(config: SweepConfig, speed: Speed, train_rows: int, evaluation_rows: int) -> float:
    """What a sweep takes on one process, in seconds."""
    prunings = len(config.checkpoints) * len(config.seeds)
    updates = sum(
        each.steps * each.accumulate + (WARM_BATCHES if each.warm_start else 0)
        for group in config.groups()
        for each in [config.prune_config(group[0], config.seeds[0])]
    )
    evaluated = (config.n_runs + len(config.checkpoints)) * evaluation_rows
    both_passes = 2 * len(config.checkpoints) * train_rows
    return speed.update * prunings * updates + speed.row * (evaluated + both_passes)


def expected(
    configs: Sequence[SweepConfig],
    model: Model,
    train: Batches,
    evaluation: Mapping[str, Batches],
    workers: int | None,
) -> str:
    """What is to be said of sweeps of checkpoints like this model before they start."""
    counts = len(train.rows), sum(len(batches.rows) for batches in evaluation.values())
    total = 0.0
    for config in configs:
        prune = config.prune_config(config.sparsities[0], config.seeds[0])
        total += seconds(config, measure(model, train, evaluation, prune), *counts)
    at_once = max(1, cores() if workers is None else workers)
    return (
        f"finding and evaluating {sum(config.n_runs for config in configs):,} subnetworks takes "
        f"about {in_words(total / at_once)}, {at_once} at a time"
    )


def in_words(duration: float) -> str:
    """A duration such as 3 h 20 min, to five minutes from an hour on."""
    minutes = max(1, round(duration / 60))
    if minutes < 60:
        return f"{minutes} min"
    hours, rest = divmod(5 * round(minutes / 5), 60)
    return f"{hours} h {rest} min" if rest else f"{hours} h"


def _second(run: Callable[[], object]) -> float:
    run()
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
