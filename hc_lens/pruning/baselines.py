"""Other ways to choose which units to remove, behind the same call as pruning."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from hc_lens.metrics import KL
from hc_lens.pruning.config import PruneConfig, n_removed
from hc_lens.pruning.importance import mean_gradients
from hc_lens.pruning.job import Job
from hc_lens.pruning.losses import CROSS_ENTROPY
from hc_lens.pruning.subnetwork import Subnetwork


def at_random(job: Job[PruneConfig]) -> Subnetwork:
    """Without a random set of units, drawn from the seed."""
    generator = torch.Generator().manual_seed(job.config.seed)
    return job.without_lowest(torch.rand(len(job.space), generator=generator))


def by_importance(job: Job[PruneConfig]) -> Subnetwork:
    """Without the units of the lowest gradient importance (Michel, Levy and Neubig 2019).

    KL has no gradient at the full model; where it is the loss, the cross-entropy stands in for it.
    """
    loss = CROSS_ENTROPY if job.config.loss == KL else job.config.loss
    table = mean_gradients(job.model, job.batches, job.source, loss, job.progress)
    return job.without_lowest(torch.tensor(table["importance"].to_numpy(dtype="float32")))


def greedily(job: Job[PruneConfig]) -> Subnetwork:
    """One unit at a time, the one whose removal now leaves the lowest loss.

    A unit's score is the round in which it goes: 0 for the first, infinity for those that stay.
    """
    taken = torch.full((len(job.space),), torch.inf)
    mask = torch.ones(len(job.space), device=job.model.cfg.device)
    rounds = range(n_removed(job.config.sparsity, len(job.space)))
    for turn in tqdm(rounds, desc="greedy", disable=not job.progress, leave=False):
        costs: dict[int, float] = {}
        for index in (job.gates.free & (mask == 1)).nonzero().flatten().tolist():
            mask[index] = 0.0
            costs[index] = masked_loss(job, mask)
            mask[index] = 1.0
        best = min(costs, key=lambda index: costs[index])
        mask[best], taken[best] = 0.0, float(turn)
    return job.without_lowest(taken)


def masked_loss(job: Job[PruneConfig], mask: Float[Tensor, "units"]) -> float:
    """Mean over rows of the loss that the settings name, by default KL(full || masked)."""
    total, n_rows = 0.0, 0
    for batch in job.batches:
        with torch.no_grad():
            total += job.losses(mask, batch).sum().item()
        n_rows += len(batch.rows)
    return total / n_rows
