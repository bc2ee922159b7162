"""Where gates begin: higher for the units that seem to matter, from a few batches.

1. Run the model under a mask of ones with one row per row of the batch. The squared gradient of a
   row's loss with respect to its mask, averaged over rows, says to second order what removing a
   unit costs.
2. KL has no gradient at the full model, where it is smallest. Its second derivative there is the
   Fisher information: the mean squared gradient of log p(y), with y drawn from the model's own
   distribution (Amari 1998, "Natural gradient works efficiently in learning"). The same holds, up
   to a factor, for the squared change of a metric with the gradient of the metric itself.
3. The logarithms, standardised over the learnt units, move log_alpha: a unit one standard deviation
   above the mean begins `warm_start` higher. A unit without any gradient counts as the least of the
   others does.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from hc_lens.metrics import KL, held_losses
from hc_lens.protocols import BatchLike
from hc_lens.pruning.job import Job
from hc_lens.pruning.losses import named_loss

WARM_BATCHES = 20
"""How many batches a warm start looks at."""


def fisher(
    job: Job[Any], batches: Sequence[BatchLike], generator: torch.Generator
) -> Float[Tensor, "units"]:
    """The mean squared gradient of every unit at the full model."""
    total, rows = torch.zeros(len(job.space), dtype=torch.float64), 0
    for batch in batches:
        shape = (len(batch.rows), len(job.space))
        mask = torch.ones(shape, device=job.model.cfg.device, requires_grad=True)
        with torch.enable_grad():
            loss = _loss(job, batch, job.run.held(batch, mask), generator)
        (gradient,) = torch.autograd.grad(loss, mask)
        total += gradient.double().square().sum(0).cpu()
        rows += len(batch.rows)
    return total / rows


def warm_start(job: Job[Any], batches: Sequence[BatchLike], generator: torch.Generator) -> None:
    """Move the gates of a job to where they begin."""
    found, free = fisher(job, batches, generator), job.gates.free.cpu()
    moved = torch.zeros_like(found)
    moved[free] = job.config.warm_start * standard_logs(found[free])
    with torch.no_grad():
        job.gates.log_alpha.add_(moved.to(job.gates.log_alpha))


def standard_logs(positive: Float[Tensor, "units"]) -> Float[Tensor, "units"]:
    """The logarithms with mean 0 and standard deviation 1, or zeros where all are the same; a zero
    counts as the least of the others."""
    if not positive.any():
        return torch.zeros_like(positive)
    logs = positive.clamp_min(positive[positive > 0].min()).log()
    spread = logs.std(correction=0)
    return (logs - logs.mean()) / spread if spread > 0 else torch.zeros_like(logs)


def _loss(
    job: Job[Any],
    batch: BatchLike,
    held: Float[Tensor, "batch width"],
    generator: torch.Generator,
) -> Float[Tensor, ""]:
    logits = job.teacher.readout.logits
    if job.config.loss != KL:
        loss = named_loss(job.config.loss, job.batches)
        return held_losses(loss, batch, held, logits, partial(job.teacher.held, batch)).sum()
    log_probs = logits(held).log_softmax(-1)
    drawn = torch.multinomial(log_probs.detach().exp().cpu(), 1, generator=generator)
    return log_probs.gather(1, drawn.to(log_probs.device)).sum()
