"""Find a subnetwork: the smallest change of the model's own output at a given sparsity.

1. Freeze the model. Its own logits on the training rows are computed once and kept.
2. Draw hard-concrete gates (`hc_lens.pruning.gates`), one set for each row of the batch, and run
   the model under them.
3. Minimise KL(full || masked) + lambda_1 (t - s) + lambda_2 (t - s)^2 over the gates' log_alpha; s
   is their current sparsity, t its target, which rises over the warm-up (Wang, Wohlwend and Lei
   2020). The multipliers ascend; the gradient of lambda_2 is never negative, so it only grows.
4. At the end rank the units and remove exactly round(sparsity x units) of them.
(Bhaskar, Friedman and Chen 2024, section 3 and appendix B; `PruneConfig.reference` has the public
code's choices.) `hc_lens.pruning.baselines` has the other methods behind the same call.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor, nn
from tqdm.auto import tqdm

from hc_lens.errors import HcLensError
from hc_lens.masks.attached import warn_if_masked
from hc_lens.masks.finite import check_weights
from hc_lens.masks.replacements import Source, as_source
from hc_lens.protocols import BatchesLike, BatchLike, Model, check_batch
from hc_lens.pruning.baselines import at_random, by_importance, greedily
from hc_lens.pruning.config import Method, PruneConfig
from hc_lens.pruning.job import Job, PruneStep, Settings
from hc_lens.pruning.subnetwork import Subnetwork
from hc_lens.pruning.teacher import Teacher
from hc_lens.pruning.topk import straight_through
from hc_lens.pruning.warm import WARM_BATCHES, warm_start

KEPT_STEPS = 60
"""At most about this many steps are kept in a subnetwork's history."""


def prune(
    model: Model,
    batches: BatchesLike,
    means: Source | str,
    config: PruneConfig,
    *,
    callback: Callable[[PruneStep], None] | None = None,
    teacher: Teacher | None = None,
    progress: bool = True,
) -> Subnetwork:
    """Find a subnetwork of `model` with exactly the sparsity of `config`.

    Args:
        model: a hooked classifier or language model; its weights stay as they are and get no
            gradients.
        batches: the rows to be faithful on: of a task, or of `hc.Prompts` for a language model,
            which is faithful to its distribution over the next token.
        means: what replaces removed units: means, ``"zero"`` or another source.
        callback: called after each step.
        teacher: the full model's kept logits on these batches, to share between calls.
    """
    job = ready(model, batches, means, config, callback, teacher, progress)
    with frozen(model):
        return METHODS[config.method](job)


def ready(
    model: Model,
    batches: BatchesLike,
    means: Source | str,
    config: Settings,
    callback: Callable[[PruneStep], None] | None = None,
    teacher: Teacher | None = None,
    progress: bool = True,
) -> Job[Settings]:
    """What pruning and a path get, once it is seen that they can begin."""
    warn_if_masked(model)
    check_weights(model)
    source = as_source(means)
    job = Job(model, batches, source, config, teacher or Teacher(model), callback, progress)
    source.check(model, job.space)
    if len(batches) == 0:
        raise HcLensError("expected at least one batch to prune on, got none; check the split")
    check_batch(batches[0], "inputs", "rows")
    # A sparsity that cannot be reached is found before any run of the model.
    for sparsity in config.wanted:
        job.gates.binarize(sparsity)
    if not callable(config.loss):
        job.teacher.held(batches[0])  # a model that cannot be read is found out at once
    return job


@contextmanager
def frozen(model: Model) -> Iterator[None]:
    """No gradients for the weights inside; their own setting is put back."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


def penalty(
    gap: Float[Tensor, ""], lambda_1: Float[Tensor, ""], lambda_2: Float[Tensor, ""]
) -> Float[Tensor, ""]:
    """What the gates minimise and the multipliers maximise; the gap is target minus sparsity."""
    return lambda_1 * gap + lambda_2 * gap.square()


class GateTraining:
    """The state of one training of gates."""

    def __init__(self, job: Job[Any]):
        self.job, self.config, self.gates = job, job.config, job.gates
        device = job.model.cfg.device
        self.multipliers = [nn.Parameter(torch.zeros((), device=device)) for _ in range(2)]
        self.optimiser = torch.optim.AdamW(  # the rates are set at each step
            [
                {"params": [self.gates.log_alpha]},
                *({"params": [multiplier], "maximize": True} for multiplier in self.multipliers),
            ],
            betas=(0.9, job.config.momentum_2),
            weight_decay=job.config.weight_decay,
        )
        self.learnt = {
            "log_alpha": self.gates.log_alpha,
            **{f"lambda_{number}": each for number, each in enumerate(self.multipliers, 1)},
        }
        """What is trained, by name."""
        self.done = 0
        """Steps that have been made."""
        self.records: list[PruneStep] = []
        """What was seen at about `KEPT_STEPS` of them, and at the last."""

    def mask(self, sparsity: float) -> Float[Tensor, "units"]:
        """The binary mask that the gates give at this step."""
        by_module = self.gates.deterministic_by_module() if self.config.by_module else None
        return self.gates.binarize(sparsity, by_module)

    def order(self) -> Iterator[BatchLike]:
        """The batches again and again, in a new order each time round."""
        generator = torch.Generator().manual_seed(self.config.seed)
        while True:
            for index in torch.randperm(len(self.job.batches), generator=generator).tolist():
                yield self.job.batches[index]

    def run(self, sparsity: Callable[[], float]) -> Iterator[PruneStep]:
        """Every step that is left; an error holds the last good subnetwork of `sparsity`."""
        config = self.config
        if self.done == 0 and config.warm_start:
            warm_start(
                self.job, list(itertools.islice(self.order(), WARM_BATCHES)), self.gates.generator
            )
        supply = itertools.islice(self.order(), self.done * config.accumulate, None)
        steps, hidden = range(self.done + 1, config.steps + 1), not self.job.progress
        for step in (bar := tqdm(steps, desc="prune", leave=False, disable=hidden)):
            good = self.gates.log_alpha.detach().clone()
            try:
                record = self.step(step, [next(supply) for _ in range(config.accumulate)])
            except HcLensError as error:  # before the gates have moved
                error.finished = self.subnetwork(sparsity()) if self.records else None
                raise
            if not math.isfinite(record.loss) or not self.gates.log_alpha.isfinite().all():
                with torch.no_grad():
                    self.gates.log_alpha.copy_(good)
                error = HcLensError(
                    f"expected a finite loss, got {record.loss} at step {step} (sparsity "
                    f"{record.sparsity:.2f}); likely the loss function divides by zero, or lr "
                    "is too high. The last good subnetwork is in the error's `finished`"
                )
                error.finished = self.subnetwork(sparsity())
                raise error
            self.keep(record)
            bar.set_postfix(vars(record), refresh=False)
            if self.job.callback is not None:
                self.job.callback(record)
            yield record

    def step(self, step: int, batches: Sequence[BatchLike]) -> PruneStep:
        """One update of the gates and the multipliers."""
        config = self.config
        target, rate = config.target(step), config.rate(step)
        decay = rate if config.decay_lambdas else 1.0
        rates = (config.lr * rate, config.lambda_lr * decay, config.lambda_2_lr * decay)
        for group, lr in zip(self.optimiser.param_groups, rates, strict=True):
            group["lr"] = lr
        self.optimiser.zero_grad()
        n_rows = sum(len(batch.rows) for batch in batches)
        total, current = 0.0, 0.0
        for batch in batches:
            sampled = self.gates.sample(len(batch.rows) if config.per_row else None)
            with torch.enable_grad():
                # One that is not finite stops the training, which keeps what it has.
                rows = self.job.losses(sampled, batch, finite=False)
            drawn = 1.0 - sampled.mean()
            sparsity = self.gates.expected_sparsity() if config.expected_sparsity else drawn
            share, loss = len(batch.rows) / n_rows, rows.mean()
            (share * (loss + penalty(target - sparsity, *self.multipliers))).backward()
            total += share * loss.item()
            current += share * sparsity.item()
        if config.clip is not None:
            everything = [self.gates.log_alpha, *self.multipliers]
            torch.nn.utils.clip_grad_norm_(everything, config.clip)
        self.optimiser.step()
        lambda_1, lambda_2 = (multiplier.item() for multiplier in self.multipliers)
        return PruneStep(step, target, current, total, lambda_1, lambda_2)

    def keep(self, record: PruneStep) -> None:
        """Note a step; the one before goes, unless it is among those that stay."""
        if self.records and self.records[-1].step % max(1, self.config.steps // KEPT_STEPS):
            self.records.pop()
        self.records.append(record)
        self.done = record.step

    def subnetwork(self, sparsity: float) -> Subnetwork:
        """The result that the gates give at this step."""
        history = pd.DataFrame(self.records)
        # A copy, as a path goes on with the gates.
        scores = self.gates.log_alpha.detach().cpu().clone()
        return self.job.subnetwork(self.mask(sparsity), scores, history, sparsity=sparsity)


class TopKTraining(GateTraining):
    """The state of one training of scores."""

    def step(self, step: int, batches: Sequence[BatchLike]) -> PruneStep:
        """One update of the scores."""
        config, gates = self.config, self.gates
        target, n_units = config.target(step), len(gates.log_alpha)
        # With every unit kept the loss has no gradient but rounding.
        n_kept = n_units - max(1, round(target * n_units))
        self.optimiser.param_groups[0]["lr"] = config.lr * config.rate(step)
        self.optimiser.zero_grad()
        n_rows, total = sum(len(batch.rows) for batch in batches), 0.0
        for batch in batches:
            with torch.enable_grad():
                mask = straight_through(gates, n_kept, len(batch.rows) if config.per_row else None)
                rows = self.job.losses(mask, batch, finite=False)
            share, loss = len(batch.rows) / n_rows, rows.mean()
            (share * loss).backward()
            total += share * loss.item()
        if config.clip is not None:
            torch.nn.utils.clip_grad_norm_([gates.log_alpha], config.clip)
        self.optimiser.step()
        return PruneStep(step, target, 1 - n_kept / n_units, total, 0.0, 0.0)


def by_gates(job: Job[PruneConfig]) -> Subnetwork:
    """Without the units whose trained gates are the lowest."""
    return _trained(job, GateTraining(job))


def by_top_k(job: Job[PruneConfig]) -> Subnetwork:
    """Without the units of the lowest scores, trained under a hard mask."""
    return _trained(job, TopKTraining(job))


def _trained(job: Job[PruneConfig], training: GateTraining) -> Subnetwork:
    """The result of a training, which may stop early."""
    config = job.config
    still, last = 0, training.mask(config.sparsity)
    for record in training.run(lambda: config.sparsity):
        if config.patience is not None and record.step > config.warmup_steps:
            before, last = last, training.mask(config.sparsity)
            still = still + 1 if torch.equal(before, last) else 0
            if still >= config.patience:
                break
    return training.subnetwork(config.sparsity)


METHODS: dict[Method, Callable[[Job[PruneConfig]], Subnetwork]] = {
    "gates": by_gates,
    "random": at_random,
    "importance": by_importance,
    "greedy": greedily,
    "top-k": by_top_k,
}
"""The function of each method."""
