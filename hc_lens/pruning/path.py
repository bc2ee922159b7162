"""All sparsities of a seed from one training of gates.

1. Train gates as for one subnetwork (`hc_lens.pruning.train`), with a target sparsity that rises
   through all the sparsities of the path and a little beyond the highest.
2. The gates follow their target with a delay. So the mask of a sparsity is read off when the target
   is a `lead` above it, and that of the highest at the end. Each mask removes exactly the requested
   number of units.
3. A `State` is all that the training needs to go on from where a mask was read off. It is a few
   numbers a unit, so that it can be kept beside each mask, and a path that was stopped continues as
   if it had not been.

Pruning along a rising target is gradual pruning (Zhu and Gupta 2017, "To prune, or not to prune");
that every point of it is kept is what saves the other runs. Subnetworks of one path are more alike
than those of separate runs: compare sparsities with `hc.prune`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import astuple

import torch
from torch import Tensor

from hc_lens.errors import HcLensWarning, warn
from hc_lens.masks.replacements import Source
from hc_lens.protocols import BatchesLike, Model
from hc_lens.pruning.config import PathConfig, n_removed
from hc_lens.pruning.job import PruneStep
from hc_lens.pruning.subnetwork import Subnetwork
from hc_lens.pruning.teacher import Teacher
from hc_lens.pruning.train import GateTraining, frozen, ready


class SameCountWarning(HcLensWarning):
    """Two sparsities of a path remove the same number of units."""


State = dict[str, Tensor]
"""All that a training of gates needs to go on: the gates, the multipliers, the optimiser's moments,
the random generator and the recorded steps."""


def prune_path(
    model: Model,
    batches: BatchesLike,
    means: Source | str,
    config: PathConfig,
    *,
    callback: Callable[[PruneStep], None] | None = None,
    teacher: Teacher | None = None,
    progress: bool = True,
) -> list[Subnetwork]:
    """Find one subnetwork of `model` for each sparsity of `config`, in a single run.

    The arguments are those of `hc.prune`.
    """
    walked = walk(
        model, batches, means, config, callback=callback, teacher=teacher, progress=progress
    )
    return [found for found, _ in walked]


def walk(
    model: Model,
    batches: BatchesLike,
    means: Source | str,
    config: PathConfig,
    *,
    state: State | None = None,
    callback: Callable[[PruneStep], None] | None = None,
    teacher: Teacher | None = None,
    progress: bool = True,
) -> Iterator[tuple[Subnetwork, State]]:
    """The subnetworks of a path as they are found, each with the state from which to go on.

    Args:
        state: the state that came with the last subnetwork of a path that was stopped.
    """
    job = ready(model, batches, means, config, callback, teacher, progress)
    _say_same_counts(config, len(job.space))
    training = GateTraining(job)
    if state is not None:
        go_on(training, state)
    last = 0.0 if state is None else state["sparsity"].item()
    left = [sparsity for sparsity in config.sparsities if sparsity > last]
    steps = (record.step for record in training.run(lambda: left[0]))
    with frozen(model):
        # A path may have been stopped between two masks that are read off after one step.
        for step in itertools.chain([training.done], steps):
            while left and config.passed(left[0], step):
                sparsity = left.pop(0)
                found = training.subnetwork(sparsity)
                yield (
                    found,
                    state_of(training) | {"sparsity": torch.tensor(sparsity, dtype=torch.float64)},
                )


def state_of(training: GateTraining) -> State:
    """The state of a training after a step."""
    records = torch.tensor([astuple(each) for each in training.records], dtype=torch.float64)
    state = {"generator": training.gates.generator.get_state(), "records": records}
    for name, parameter in training.learnt.items():
        state[name] = parameter.detach().cpu().clone()
        for moment, value in training.optimiser.state[parameter].items():
            state[f"{name}.{moment}"] = value.detach().cpu().clone()
    return state


def go_on(training: GateTraining, state: State) -> None:
    """Put a new training where another was."""
    training.gates.generator.set_state(state["generator"])
    for step, *numbers in state["records"].tolist():
        training.records.append(PruneStep(int(step), *numbers))
    training.done = training.records[-1].step
    for name, parameter in training.learnt.items():
        with torch.no_grad():
            parameter.copy_(state[name])
        for key, value in state.items():
            owner, _, moment = key.partition(".")
            if owner == name and moment:
                # AdamW counts its steps on the CPU.
                device = "cpu" if moment == "step" else parameter.device
                training.optimiser.state[parameter][moment] = value.clone().to(device)


def _say_same_counts(config: PathConfig, n_units: int) -> None:
    for one, other in itertools.pairwise(config.sparsities):
        removed = n_removed(one, n_units)
        if removed == n_removed(other, n_units):
            warn(
                f"expected sparsities that remove different numbers of units, got {one:g} and "
                f"{other:g}, which both remove {removed} of {n_units}; leave one of them out",
                SameCountWarning,
            )
