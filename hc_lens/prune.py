"""Find a subnetwork: the smallest change of the model's own output at a given sparsity.

1. Freeze the model. Its own logits on the training rows are computed once and kept.
2. Draw hard-concrete gates (`hc_lens.gates`), one set for each row of the batch, and run the model
   under them.
3. Minimise KL(full || masked) plus the sparsity penalty (`hc_lens.lagrangian`) over the gates'
   log_alpha; the multipliers ascend.
4. At the end rank the units and remove exactly round(sparsity x units) of them.
(Bhaskar, Friedman and Chen 2024, section 3 and appendix B; `PruneConfig.reference` has the public
code's choices.) `hc_lens.baselines` has the other methods behind the same call.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from hc_lens import baselines
from hc_lens.ablate import mask_edits
from hc_lens.errors import HcLensError
from hc_lens.evaluate import kl_divergence
from hc_lens.gates import HardConcrete, n_removed
from hc_lens.hooks import Handle, check_hook_names
from hc_lens.importance import Loss, cross_entropy
from hc_lens.lagrangian import Lagrangian, target_sparsity
from hc_lens.models.fingerprint import fingerprint
from hc_lens.pruneconfig import PruneConfig
from hc_lens.sources import Source, as_source
from hc_lens.store import Subnetwork
from hc_lens.teacher import Teacher
from hc_lens.units import UnitSpace

KEPT_STEPS = 60
"""At most about this many steps are kept in a subnetwork's history."""


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


def prune(
    model: Any,
    batches: Any,
    means: Source | str,
    config: PruneConfig,
    *,
    callback: Callable[[PruneStep], None] | None = None,
    teacher: Teacher | None = None,
    progress: bool = True,
) -> Subnetwork:
    """Find a subnetwork of `model` with exactly the sparsity of `config`.

    Args:
        model: a hooked classifier; its weights stay as they are and get no gradients.
        batches: `hc.Batches` to be faithful on.
        means: what replaces removed units: means, ``"zero"`` or another source.
        config: the settings.
        callback: called with a `PruneStep` after each step.
        teacher: the full model's kept logits on these batches, to share between calls.
        progress: show a progress bar with target, sparsity, loss and multiplier.
    """
    space, source = UnitSpace.of(model), as_source(means)
    check_hook_names(model, space)
    source.check(model, space)
    n_removed(config.sparsity, len(space))
    with frozen(model):
        if config.method == "gates":
            run = _Run(model, batches, source, config, space, teacher or Teacher(model))
            return run.train(callback, progress)
        return baselines.find(model, batches, source, config, space, progress)


@contextmanager
def frozen(model: Any) -> Iterator[None]:
    """No gradients for the weights inside; their own setting is put back."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


class _Run:
    """The state of one mask training."""

    def __init__(
        self,
        model: Any,
        batches: Any,
        source: Source,
        config: PruneConfig,
        space: UnitSpace,
        teacher: Teacher,
    ):
        self.model, self.batches, self.source = model, batches, source
        self.config, self.space, self.teacher = config, space, teacher
        self.gates = HardConcrete(
            space,
            seed=config.seed,
            init_mean=config.init_mean,
            init_std=config.init_std,
            beta=config.beta,
            stretch=config.stretch,
            keep=config.kept_units(space),
            device=model.cfg.device,
        )
        self.mask(self.gates)  # frozen units that leave no room are found before any step
        self.lagrangian = Lagrangian().to(model.cfg.device)
        self.row_loss = self._row_loss()
        self.generator = torch.Generator().manual_seed(config.seed)
        self.optimiser = torch.optim.AdamW(  # the rates are set at each step
            [
                {"params": [self.gates.log_alpha]},
                {"params": [self.lagrangian.lambda_1], "maximize": True},
                {"params": [self.lagrangian.lambda_2], "maximize": True},
            ],
            betas=(0.9, config.momentum_2),
            weight_decay=config.weight_decay,
        )

    def _row_loss(self) -> Loss:
        if self.config.loss == "kl":
            return lambda logits, batch: kl_divergence(self.teacher.logits(batch), logits)
        if self.config.loss == "cross-entropy":
            return cross_entropy(self.batches)
        assert callable(self.config.loss)
        return self.config.loss

    def mask(self, gates: HardConcrete) -> Float[Tensor, "units"]:
        """The binary mask of the gates as they stand."""
        by_module = gates.deterministic_by_module() if self.config.by_module else None
        return gates.binarize(self.config.sparsity, by_module)

    def order(self) -> Iterator[Any]:
        """The batches again and again, in a new order each time round."""
        while True:
            for place in torch.randperm(len(self.batches), generator=self.generator).tolist():
                yield self.batches[place]

    def train(self, callback: Callable[[PruneStep], None] | None, progress: bool) -> Subnetwork:
        """Run all steps and binarise."""
        config, supply = self.config, self.order()
        records: list[PruneStep] = []
        still, last = 0, self.mask(self.gates)
        bar = tqdm(range(1, config.steps + 1), desc="prune", disable=not progress, leave=False)
        for step in bar:
            good = self.gates.log_alpha.detach().clone()
            record = self.step(step, [next(supply) for _ in range(config.accumulate)])
            if not math.isfinite(record.loss) or not self.gates.log_alpha.isfinite().all():
                raise self._lost(record, good, records)
            records.append(record)
            bar.set_postfix(
                target=f"{record.target:.2f}",
                sparsity=f"{record.sparsity:.2f}",
                loss=f"{record.loss:.4f}",
                lambda_1=f"{record.lambda_1:.2f}",
                refresh=False,
            )
            if callback is not None:
                callback(record)
            if config.patience is not None and step > config.warmup_steps:
                mask = self.mask(self.gates)
                still = still + 1 if torch.equal(mask, last) else 0
                last = mask
                if still >= config.patience:
                    break
        return self.subnetwork(records)

    def step(self, step: int, batches: list[Any]) -> PruneStep:
        """One update of the gates and the multipliers."""
        config = self.config
        target = target_sparsity(step, config.sparsity, config.warmup_steps)
        self._set_rates(step)
        self.optimiser.zero_grad()
        n_rows = sum(len(batch.rows) for batch in batches)
        total, current = 0.0, 0.0
        for batch in batches:
            sampled = self.gates.sample(len(batch.rows) if config.per_row else None)
            edits = mask_edits(self.space, sampled, self.source.on(batch))
            with torch.enable_grad():
                with Handle(self.model, edits):
                    logits = self.model(**batch.inputs)
                # Outside the handle: the teacher may have to run the full model here.
                rows = self.row_loss(logits, batch)
            if config.expected_sparsity:
                sparsity = self.gates.expected_sparsity()
            else:
                sparsity = 1.0 - sampled.mean()
            share = len(batch.rows) / n_rows
            loss = rows.mean()
            (share * (loss + self.lagrangian.penalty(sparsity, target))).backward()
            total += share * loss.item()
            current += share * sparsity.item()
        self._clip_and_update()
        return PruneStep(
            step,
            target,
            current,
            total,
            self.lagrangian.lambda_1.item(),
            self.lagrangian.lambda_2.item(),
        )

    def _set_rates(self, step: int) -> None:
        config, rate = self.config, self.config.rate(step)
        decay = rate if config.decay_lambdas else 1.0
        rates = (config.lr * rate, config.lambda_lr * decay, config.lambda_2_lr * decay)
        for group, lr in zip(self.optimiser.param_groups, rates, strict=True):
            group["lr"] = lr

    def _clip_and_update(self) -> None:
        if self.config.clip is not None:
            everything = [self.gates.log_alpha, *self.lagrangian.parameters()]
            torch.nn.utils.clip_grad_norm_(everything, self.config.clip)
        self.optimiser.step()

    def _lost(self, record: PruneStep, good: Tensor, records: list[PruneStep]) -> HcLensError:
        with torch.no_grad():
            self.gates.log_alpha.copy_(good)
        error = HcLensError(
            f"expected a finite loss, got {record.loss} at step {record.step} (sparsity "
            f"{record.sparsity:.2f}); likely the model gives infinite logits on this batch, the "
            "loss function divides by zero, or lr is too high. The last good subnetwork is in the "
            "error's `finished`"
        )
        error.finished = self.subnetwork(records)
        return error

    def subnetwork(self, records: list[PruneStep]) -> Subnetwork:
        """The result as the gates stand."""
        every = max(1, len(records) // KEPT_STEPS)
        kept = [record for record in records if record.step % every == 0 or record is records[-1]]
        return Subnetwork(
            space=self.space,
            keep=self.mask(self.gates).bool().cpu(),
            model=fingerprint(self.model),
            scores=self.gates.log_alpha.detach().cpu(),
            config=self.config.describe(),
            means=getattr(self.source, "fingerprint", type(self.source).__name__),
            data=getattr(self.batches, "fingerprint", ""),
            history=pd.DataFrame([dataclasses.asdict(record) for record in kept]),
        )
