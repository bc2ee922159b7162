"""The hard-concrete distribution: gates that are exactly 0 or 1 with positive probability.

1. u ~ U(eps, 1 - eps); s = sigmoid((log u - log(1 - u) + log_alpha) / beta), beta = 2/3.
2. Stretch s to [left, right] = [-0.1, 1.1] and clamp to [0, 1] (Louizos, Welling and Kingma 2018,
   equations 10 and 11; the values are those of the Heuristic Core's code).
3. P(z > 0) = sigmoid(log_alpha - beta * log(-left / right)), their equation 12; P(z = 1) and the
   mean follow from the same distribution function.
4. To make a subnetwork, rank all units by log_alpha and remove the lowest (`binarize`). The public
   code first zeroes per module and then searches a threshold (`binarize_by_module`).

Every draw comes from the object's own generator.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from hc_lens.errors import HcLensError
from hc_lens.pruning.config import BETA, STRETCH, n_removed
from hc_lens.units import Unit, UnitSpace

EPS = 1e-6
"""Distance of the uniform noise from 0 and 1."""
SHARPEN = 0.8
"""Factor of the public code on log_alpha / beta in its deterministic gates."""


class HardConcrete(nn.Module):
    """One hard-concrete gate per unit of a model."""

    def __init__(
        self,
        space: UnitSpace,
        *,
        seed: int,
        init_mean: float = 10.0,
        init_std: float = 0.01,
        beta: float = BETA,
        stretch: tuple[float, float] = STRETCH,
        keep: Iterable[Unit | str] = (),
        remove: Iterable[Unit | str] = (),
    ):
        """Gates with log_alpha ~ N(init_mean, init_std); draws are made on the CPU and moved.

        Args:
            init_mean: 10, with a standard deviation of 0.01, is the public code's.
            beta: temperature; lower is closer to binary.
            stretch: the interval that is clamped to [0, 1]; must contain it.
            keep: units whose gate is always 1.
            remove: units whose gate is always 0.
        """
        super().__init__()
        if beta <= 0 or not (stretch[0] < 0 and stretch[1] > 1):
            raise HcLensError(
                "expected beta > 0 and a stretch that contains [0, 1] such as (-0.1, 1.1), got "
                f"beta={beta}, stretch={stretch}; gates could otherwise never be exactly 0 or 1"
            )
        self.space, self.beta, self.stretch = space, beta, stretch
        self.generator = torch.Generator().manual_seed(seed)
        start = torch.randn(len(space), generator=self.generator) * init_std + init_mean
        self.log_alpha = nn.Parameter(start)
        kept, removed = space.indices(keep), space.indices(remove)
        both = sorted(set(kept) & set(removed))
        if both:
            raise HcLensError(
                f"expected each unit either kept or removed, got {space[both[0]]} in both; "
                "take it out of one"
            )
        self.kept = nn.Buffer(torch.tensor([index in kept for index in range(len(space))]))
        self.removed = nn.Buffer(torch.tensor([index in removed for index in range(len(space))]))

    @property
    def free(self) -> Bool[Tensor, "units"]:
        """Units whose gate is learnt."""
        return ~(self.kept | self.removed)

    def _frozen(self, values: Float[Tensor, "*n units"]) -> Float[Tensor, "*n units"]:
        return values.masked_fill(self.kept, 1.0).masked_fill(self.removed, 0.0)

    def _stretched(self, logits: Float[Tensor, "*n units"]) -> Float[Tensor, "*n units"]:
        left, right = self.stretch
        return self._frozen((torch.sigmoid(logits) * (right - left) + left).clamp(0.0, 1.0))

    def from_noise(self, u: Float[Tensor, "*n units"]) -> Float[Tensor, "*n units"]:
        """Gates from uniform noise (Louizos et al. 2018, equations 10 and 11)."""
        return self._stretched((torch.log(u) - torch.log1p(-u) + self.log_alpha) / self.beta)

    def sample(self, n: int | None = None) -> Float[Tensor, "*n units"]:
        """Gates drawn from the distribution: [units], or [n, units]."""
        shape = (len(self.space),) if n is None else (n, len(self.space))
        u = torch.rand(shape, generator=self.generator) * (1 - 2 * EPS) + EPS
        return self.from_noise(u.to(self.log_alpha.device))

    def prob_above(self, x: float) -> Float[Tensor, "units"]:
        """Probability that a learnt gate, stretched but not yet clamped, lies above `x`."""
        left, right = self.stretch
        return torch.sigmoid(self.log_alpha - self.beta * math.log((x - left) / (right - x)))

    def expected_l0(self) -> Float[Tensor, "units"]:
        """Probability that each gate is not zero (Louizos et al. 2018, equation 12)."""
        return self._frozen(self.prob_above(0.0))

    def expected_sparsity(self) -> Float[Tensor, ""]:
        """Expected fraction of units whose gate is zero."""
        return 1.0 - self.expected_l0().mean()

    def deterministic(self) -> Float[Tensor, "units"]:
        """Gates without noise (Louizos et al. 2018, equation 13)."""
        return self._stretched(self.log_alpha)

    @torch.no_grad()
    def binarize(
        self, sparsity: float, scores: Float[Tensor, "units"] | None = None
    ) -> Float[Tensor, "units"]:
        """The mask that removes exactly round(sparsity x units): the lowest log_alpha of all.

        With `scores` the lowest scores go first, and log_alpha only orders equal scores.
        """
        removed = n_removed(sparsity, len(self.space))
        least, most = int(self.removed.sum()), len(self.space) - int(self.kept.sum())
        if not least <= removed <= most:
            raise HcLensError(
                f"expected a sparsity that removes between {least} and {most} of "
                f"{len(self.space)} units, as some are frozen, got {sparsity}, which removes "
                f"{removed}; freeze fewer units or change the sparsity"
            )
        scores = self.log_alpha if scores is None else scores
        scores = scores.masked_fill(self.kept, math.inf).masked_fill(self.removed, -math.inf)
        order = torch.argsort(self.log_alpha, stable=True)
        order = order[torch.argsort(scores[order], stable=True)]
        mask = torch.ones_like(self.log_alpha)
        mask[order[:removed]] = 0.0
        return mask

    @torch.no_grad()
    def deterministic_by_module(self) -> Float[Tensor, "units"]:
        """The public code's gates: soft values, with the expected number zeroed in each module.

        A module is the heads of one layer, or one MLP. The soft value is
        sigmoid(0.8 * log_alpha / beta); in a module of k gates the round(k - sum of P(z > 0))
        smallest become 0.
        """
        soft = torch.sigmoid(self.log_alpha / self.beta * SHARPEN)
        alive = self.prob_above(0.0)
        modules = [self.space.head_slice(layer) for layer in range(self.space.n_layers)]
        modules += [slice(i, i + 1) for i in range(len(self.space.heads), len(self.space))]
        for module in modules:
            gates = soft[module]
            zeros = int(torch.round(len(gates) - alive[module].sum()))
            gates[torch.argsort(gates, stable=True)[:zeros]] = 0.0
        return self._frozen(soft)

    @torch.no_grad()
    def binarize_by_module(self, sparsity: float, stride: float = 0.05) -> Float[Tensor, "units"]:
        """The public code's discretisation: per-module zeros, then the threshold on a grid whose
        number of removed units is nearest to the target. The count is not exact."""
        removed = n_removed(sparsity, len(self.space))
        soft = self.deterministic_by_module()
        masks = [(soft > least).float() for least in torch.arange(0.0, 1.0, stride).tolist()]
        return min(masks, key=lambda mask: abs(int((mask == 0).sum()) - removed))
