"""The sparsity constraint of pruning: a rising target and two multipliers.

1. The target rises linearly from 0 to the requested sparsity over the warm-up, then stays.
2. penalty = lambda_1 * (t - s) + lambda_2 * (t - s)^2, with s the current sparsity
   (Wang, Wohlwend and Lei 2020; Bhaskar, Friedman and Chen 2024, section 3).
3. The gates descend on the penalty, the multipliers ascend: each is a parameter whose optimiser
   maximises. The gradient of lambda_2 is never negative, so it only grows.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn


def target_sparsity(step: int, sparsity: float, warmup: int) -> float:
    """The scheduled sparsity at a step."""
    return sparsity * min(1.0, step / warmup) if warmup > 0 else sparsity


class Lagrangian(nn.Module):
    """The two multipliers, starting at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.lambda_1 = nn.Parameter(torch.zeros(()))
        self.lambda_2 = nn.Parameter(torch.zeros(()))

    def penalty(self, sparsity: Float[Tensor, ""], target: float) -> Float[Tensor, ""]:
        """What the gates minimise and the multipliers maximise."""
        gap = target - sparsity
        return self.lambda_1 * gap + self.lambda_2 * gap.square()
