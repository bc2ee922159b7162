"""Optimal ablation: the constant in a unit's place that costs least (Li and Janson 2024).

1. The optimal constant of a unit is the one that minimises the expected loss of the model in which
   the unit alone is replaced by it (arXiv 2409.09951). It takes the unit's information away and
   adds as little else as a constant can; a mean or a zero may also mislead what reads it.
2. All constants are learnt at once: in each row of a batch one unit, drawn from the seed, is
   replaced, and the loss of the row has a gradient by this unit's constant alone. They start at the
   given means, or at zero.
3. The loss is how far the row is from the full model, by default KL, as in pruning.
4. What comes out are means of the usual kind with other numbers, so that every function takes them,
   and they are saved and loaded alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from hc_lens.errors import HcLensError, check_count
from hc_lens.masks.attached import warn_if_masked
from hc_lens.masks.finite import check_weights
from hc_lens.masks.hooks import hook_points, hooked_units
from hc_lens.masks.means import Means
from hc_lens.masks.replacements import Source
from hc_lens.masks.run import MaskedRun
from hc_lens.metrics import held_losses
from hc_lens.models.fingerprint import fingerprint
from hc_lens.models.reading import read_units
from hc_lens.protocols import BatchesLike, Model
from hc_lens.pruning.config import LossName
from hc_lens.pruning.losses import faithful_loss
from hc_lens.pruning.teacher import Teacher
from hc_lens.pruning.train import frozen


@dataclass(frozen=True)
class OptimalConfig:
    """How the constants are learnt."""

    steps: int = 300
    """Number of updates, a batch each."""
    lr: float = 0.02
    """Learning rate of Adam at the start, as a share of the size of a unit's activations; it falls
    linearly to zero."""
    loss: LossName | Callable[..., Any] = "kl"
    """What the ablated model is to be close in; see `hc.PruneConfig`."""
    seed: int = 0
    """Decides the order of the batches and which unit is replaced in which row."""

    def __post_init__(self) -> None:
        check_count("steps", self.steps)
        if not self.lr > 0:
            raise HcLensError(
                f"expected a learning rate above 0, got {self.lr}; the default is 0.02"
            )


DEFAULTS = OptimalConfig()


class _Learnt(Source):
    """The constants while they are learnt, as shares of each hook point's size."""

    def __init__(self, constants: dict[str, Tensor], sizes: dict[str, float]):
        self.constants, self.sizes = constants, sizes

    @property
    def constant(self) -> bool:
        """Always."""
        return True

    def value(self, name: str, activation: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """The constant of each unit at a hook point."""
        return (self.constants[name] * self.sizes[name]).to(activation)


def optimal_constants(
    model: Model,
    batches: BatchesLike,
    means: Means,
    config: OptimalConfig = DEFAULTS,
    *,
    progress: bool = True,
) -> Means:
    """The constant of each unit that costs the model least in its place, learnt from the means.

    Args:
        model: a hooked classifier or language model; its weights stay as they are.
        batches: the rows on which the ablated model is to be close to the full one.
        means: where the constants start; `hc.collect_means` by token.
        config: steps, learning rate, loss and seed.
    """
    warn_if_masked(model)
    check_weights(model)
    space = hooked_units(model)
    means.check(model, space)
    if means.at_position is not None:
        raise HcLensError(
            "expected means by token, got means by position, which are no constants; collect them "
            "with hc.collect_means(model, batches)"
        )
    if len(batches) == 0:
        raise HcLensError("expected at least one batch, got none; check the split")
    start = {name: means.at_token[name] for name in hook_points(space)}
    sizes = _sizes(model, batches)
    constants = {
        name: (value / sizes[name]).clone().requires_grad_(True) for name, value in start.items()
    }
    source = _Learnt(constants, sizes)
    with frozen(model):
        _learn(model, batches, source, config, progress)
    learnt = {name: source.value(name, means.at_token[name]).detach() for name in constants}
    return Means(
        learnt,
        fingerprint(model),
        means.n_rows,
        means.n_tokens,
        None,
        getattr(batches, "fingerprint", ""),
    )


@torch.no_grad()
def _sizes(model: Model, batches: BatchesLike) -> dict[str, float]:
    """Root mean square of the activations at each hook point, on the first batch."""
    found: dict[str, float] = {}

    def read(name: str, value: Tensor) -> None:
        found[name] = float(value.square().mean().sqrt()) or 1.0

    read_units(model, batches[0].inputs, read)
    return found


def _learn(
    model: Model, batches: BatchesLike, source: _Learnt, config: OptimalConfig, progress: bool
) -> None:
    """Move the constants."""
    run, teacher = MaskedRun(model, source, first=0), Teacher(model)
    loss, n_units = faithful_loss(config.loss, batches), len(run.space)
    generator = torch.Generator().manual_seed(config.seed)
    optimiser = torch.optim.Adam(source.constants.values(), lr=config.lr)
    order: list[int] = []
    for step in tqdm(range(config.steps), desc="optimal", disable=not progress, leave=False):
        order = order or torch.randperm(len(batches), generator=generator).tolist()
        batch = batches[order.pop()]
        gone = torch.randint(n_units, (len(batch.rows),), generator=generator)
        mask = torch.ones(len(batch.rows), n_units).scatter(1, gone[:, None], 0.0)
        optimiser.param_groups[0]["lr"] = config.lr * (1 - step / config.steps)
        optimiser.zero_grad()
        with torch.enable_grad():
            held = run.held(batch, mask.to(model.cfg.device))
            full = partial(teacher.held, batch)
            rows = held_losses(loss, batch, held, teacher.readout.logits, full)
            rows.mean().backward()
        optimiser.step()
