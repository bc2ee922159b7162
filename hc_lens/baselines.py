"""Other ways to choose which units to remove, behind the same call as pruning.

- ``random``: a random set of the right size.
- ``importance``: the units of the lowest gradient importance (Michel, Levy and Neubig 2019), one
  shot.
- ``greedy``: one unit at a time, the one whose removal leaves the lowest KL to the full model, all
  remaining units measured anew each time.

Each returns a `Subnetwork` with exactly the requested number of units removed.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from hc_lens.ablate import mask_edits
from hc_lens.errors import HcLensError
from hc_lens.evaluate import kl_divergence
from hc_lens.gates import n_removed
from hc_lens.hooks import Handle
from hc_lens.importance import importance
from hc_lens.models.fingerprint import fingerprint
from hc_lens.pruneconfig import PruneConfig
from hc_lens.sources import Source
from hc_lens.store import Subnetwork
from hc_lens.teacher import Teacher
from hc_lens.units import UnitSpace


def find(
    model: Any,
    batches: Any,
    source: Source,
    config: PruneConfig,
    space: UnitSpace,
    progress: bool,
) -> Subnetwork:
    """The subnetwork of a baseline method."""
    kept = set(space.indices(config.kept_units(space)))
    free = [place for place in range(len(space)) if place not in kept]
    count = n_removed(config.sparsity, len(space))
    if count > len(free):
        raise HcLensError(
            f"expected a sparsity that removes at most the {len(free)} units that are not kept, "
            f"got {config.sparsity}, which removes {count}; keep fewer units or lower the sparsity"
        )
    if config.method == "random":
        generator = torch.Generator().manual_seed(config.seed)
        scores = torch.rand(len(space), generator=generator)
    elif config.method == "importance":
        table = importance(model, batches, source, progress=progress)
        scores = torch.tensor(table["importance"].to_numpy(), dtype=torch.float32)
    else:
        scores = greedy_order(model, batches, source, config, free, progress)
    order = sorted(free, key=lambda place: scores[place].item())
    keep = torch.ones(len(space), dtype=torch.bool)
    keep[order[:count]] = False
    return Subnetwork(
        space=space,
        keep=keep,
        model=fingerprint(model),
        scores=scores,
        config=config.describe(),
        means=getattr(source, "fingerprint", type(source).__name__),
        data=getattr(batches, "fingerprint", ""),
    )


def masked_kl(
    model: Any, batches: Any, source: Source, mask: Float[Tensor, "units"], teacher: Teacher
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


def greedy_order(
    model: Any,
    batches: Any,
    source: Source,
    config: PruneConfig,
    free: list[int],
    progress: bool,
) -> Float[Tensor, "units"]:
    """When greedy removal takes each unit: 0 for the first, infinity for those it leaves."""
    space, teacher = UnitSpace.of(model), Teacher(model)
    taken = torch.full((len(space),), torch.inf)
    mask = torch.ones(len(space), device=model.cfg.device)
    rounds = range(n_removed(config.sparsity, len(space)))
    for turn in tqdm(rounds, desc="greedy", disable=not progress, leave=False):
        costs: dict[int, float] = {}
        for place in free:
            if mask[place] == 1:
                mask[place] = 0.0
                costs[place] = masked_kl(model, batches, source, mask, teacher)
                mask[place] = 1.0
        best = min(costs, key=lambda place: costs[place])
        mask[best], taken[best] = 0.0, float(turn)
    return taken
