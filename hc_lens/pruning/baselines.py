"""Other ways to choose which units to remove, behind the same call as pruning.

- ``random``: a random set of the right size.
- ``importance``: the units of the lowest gradient importance (Michel, Levy and Neubig 2019), one
  shot.
- ``greedy``: one unit at a time, the one whose removal leaves the lowest KL to the full model, all
  remaining units measured anew each time.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from hc_lens.masks.ablate import mask_edits
from hc_lens.masks.hooks import Handle
from hc_lens.masks.replacements import Source
from hc_lens.metrics import kl_divergence
from hc_lens.protocols import BatchesLike, Model
from hc_lens.pruning.config import n_removed
from hc_lens.pruning.importance import importance
from hc_lens.pruning.job import Job
from hc_lens.pruning.subnetwork import Subnetwork
from hc_lens.pruning.teacher import Teacher
from hc_lens.units import UnitSpace


def at_random(job: Job) -> Subnetwork:
    """Without units that are drawn from the seed."""
    generator = torch.Generator().manual_seed(job.config.seed)
    return job.without_lowest(torch.rand(len(job.space), generator=generator))


def by_importance(job: Job) -> Subnetwork:
    """Without the units of the lowest gradient importance."""
    table = importance(job.model, job.batches, job.source, progress=job.progress)
    return job.without_lowest(torch.tensor(table["importance"].to_numpy(dtype="float32")))


def greedily(job: Job) -> Subnetwork:
    """Without the units that cost least, one after the other.

    A unit's score is the round in which it goes: 0 for the first, infinity for those that stay.
    """
    taken = torch.full((len(job.space),), torch.inf)
    mask = torch.ones(len(job.space), device=job.model.cfg.device)
    rounds = range(n_removed(job.config.sparsity, len(job.space)))
    for turn in tqdm(rounds, desc="greedy", disable=not job.progress, leave=False):
        costs: dict[int, float] = {}
        for index in (job.gates.free & (mask == 1)).nonzero().flatten().tolist():
            mask[index] = 0.0
            costs[index] = masked_kl(job.model, job.batches, job.source, mask, job.teacher)
            mask[index] = 1.0
        best = min(costs, key=lambda index: costs[index])
        mask[best], taken[best] = 0.0, float(turn)
    return job.without_lowest(taken)


def masked_kl(
    model: Model,
    batches: BatchesLike,
    source: Source,
    mask: Float[Tensor, "units"],
    teacher: Teacher,
) -> float:
    """Mean over rows of KL(full || masked)."""
    total, n_rows = 0.0, 0
    space = UnitSpace.of(model)
    for batch in batches:
        full = teacher.logits(batch)
        with torch.no_grad(), Handle(model, mask_edits(space, mask, source.on(batch))):
            total += kl_divergence(full, model(**batch.inputs)).sum().item()
        n_rows += len(batch.rows)
    return total / n_rows
