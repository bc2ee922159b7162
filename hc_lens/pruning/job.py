"""What every pruning method gets and gives.

1. `Job` holds the model, the rows, what replaces removed units, the settings and the full model's
   own logits on the rows (`hc_lens.pruning.teacher`).
2. A method is a function of a job that returns `Job.subnetwork`, or `Job.without_lowest` if it
   gives each unit a score. Either removes exactly the requested number of units.
3. `hc_lens.pruning.train.METHODS` has them by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Generic, TypeVar

import pandas as pd
from jaxtyping import Float
from torch import Tensor

from hc_lens.masks.ablate import Mask
from hc_lens.masks.hooks import hooked_units
from hc_lens.masks.replacements import Source
from hc_lens.masks.run import MaskedRun
from hc_lens.metrics import Loss, held_losses
from hc_lens.models.fingerprint import fingerprint
from hc_lens.protocols import BatchesLike, BatchLike, Model
from hc_lens.pruning.config import PathConfig, PruneConfig
from hc_lens.pruning.gates import HardConcrete
from hc_lens.pruning.losses import faithful_loss
from hc_lens.pruning.subnetwork import Subnetwork
from hc_lens.pruning.teacher import Teacher
from hc_lens.units import UnitSpace

Settings = TypeVar("Settings", bound=PruneConfig | PathConfig)
"""The settings of one sparsity, or of a path."""


@dataclass(frozen=True)
class PruneStep:
    """What a callback sees after each step."""

    step: int
    """Step, counted from 1."""
    target: float
    """Scheduled sparsity."""
    sparsity: float
    """Current sparsity of the gates."""
    loss: float
    """Loss without the penalty, mean over the step's rows."""
    lambda_1: float
    """First multiplier."""
    lambda_2: float
    """Second multiplier."""


@dataclass(frozen=True)
class Job(Generic[Settings]):
    """One subnetwork to find, or those of a path."""

    model: Model
    """The hooked model, with frozen weights."""
    batches: BatchesLike
    """The rows to be faithful on."""
    source: Source
    """What replaces removed units."""
    config: Settings
    """The settings."""
    teacher: Teacher
    """The full model's kept logits on the batches."""
    callback: Callable[[PruneStep], None] | None = None
    """Called after each step of training."""
    progress: bool = True
    """Whether to show a progress bar."""

    @cached_property
    def space(self) -> UnitSpace:
        """The model's units."""
        return hooked_units(self.model)

    @cached_property
    def gates(self) -> HardConcrete:
        """Gates at their start, with the units that the settings keep."""
        config = self.config
        mlps = [str(unit) for unit in self.space if config.heads_only and not unit.is_head]
        return HardConcrete(
            self.space,
            seed=config.seed,
            init_mean=config.init_mean,
            init_std=config.init_std,
            beta=config.beta,
            stretch=config.stretch,
            keep=dict.fromkeys([*config.keep, *mlps]),
        ).to(self.model.cfg.device)

    @cached_property
    def loss(self) -> Loss:
        """The loss of each row that the settings name."""
        return faithful_loss(self.config.loss, self.batches)

    @cached_property
    def run(self) -> MaskedRun:
        """The model under the masks of the gates."""
        free = zip(self.space, self.gates.free.tolist(), strict=True)
        first = min((unit.layer for unit, learnt in free if learnt), default=0)
        return MaskedRun(self.model, self.source, first=first, bfloat16=self.config.bfloat16)

    def losses(self, mask: Mask, batch: BatchLike, finite: bool = True) -> Float[Tensor, "batch"]:
        """The loss of each row of the model under a mask."""
        held = self.run.held(batch, mask)
        logits, full = self.teacher.readout.logits, partial(self.teacher.held, batch)
        return held_losses(self.loss, batch, held, logits, full, finite)

    def without_lowest(self: Job[PruneConfig], scores: Float[Tensor, "units"]) -> Subnetwork:
        """The subnetwork without the units of the lowest scores, but for those that are kept."""
        # Ranks instead of scores: of equal scores, the first in mask order is removed first.
        ranks = scores.argsort(stable=True).argsort().to(self.gates.log_alpha)
        return self.subnetwork(self.gates.binarize(self.config.sparsity, ranks), scores)

    def subnetwork(
        self,
        mask: Float[Tensor, "units"],
        scores: Float[Tensor, "units"],
        history: pd.DataFrame | None = None,
        **found: Any,
    ) -> Subnetwork:
        """A result, with where it came from; `found` is what its settings do not say of it."""
        return Subnetwork(
            space=self.space,
            keep=mask.bool().cpu(),
            model=fingerprint(self.model),
            scores=scores,
            config=self.config.describe() | found,
            means=self.source.fingerprint or type(self.source).__name__,
            data=getattr(self.batches, "fingerprint", ""),
            history=history,
        )
