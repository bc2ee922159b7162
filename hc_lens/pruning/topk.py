"""Prune by the top k units: a hard mask in the forward pass, a straight-through gradient.

1. Every unit has a score. At each step the units with the k largest scores plus noise are kept, all
   others are removed; k falls with the target sparsity of the settings, at least one unit removed.
2. The mask is exactly binary, so there is no penalty and no multiplier: the loss alone moves the
   scores. The gradient of the mask goes to the scores as it is (straight-through; Bengio, Léonard
   and Courville 2013, arXiv 1308.3432), so that removed units get one, too.
3. The noise is that of the hard-concrete gates, ``beta`` times a logistic draw for each row, so
   that units near the threshold are tried both ways. At the end the ranks decide, without noise.

`hc_lens.pruning.train.TopKTraining` is the training. Steps, warm-up, learning rate, loss and seed
are those of the settings; the multipliers' are unused.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from hc_lens.pruning.gates import EPS, HardConcrete


def straight_through(
    gates: HardConcrete, n_kept: int, n_rows: int | None
) -> Float[Tensor, "*rows units"]:
    """A mask of zeros and ones with the `n_kept` largest noisy scores; its gradient is theirs."""
    scores = gates.log_alpha
    shape = (len(scores),) if n_rows is None else (n_rows, len(scores))
    u = torch.rand(shape, generator=gates.generator) * (1 - 2 * EPS) + EPS
    noise = gates.beta * (torch.log(u) - torch.log1p(-u)).to(scores.device)
    noisy = (scores.detach() + noise).masked_fill(gates.kept, torch.inf)
    chosen = noisy.masked_fill(gates.removed, -torch.inf).topk(n_kept, dim=-1).indices
    hard = torch.zeros_like(noisy).scatter(-1, chosen, 1.0)
    learnt = torch.where(gates.free, scores - scores.detach(), torch.zeros_like(scores))
    return hard + learnt
