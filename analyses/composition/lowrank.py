"""The MLP behind a head that moved: its first product has the head's rank.

1. Patching head h moves the stream u in front of the MLP's norm by ``dz W_O[h]``.
2. The norm is linear but for its scale: ``n(u) W_in = (c(u) w) W_in / s(u) + b W_in``. So
   ``(c(u + dz W_O[h]) w) W_in`` is that of u, computed once, plus ``dz G[h]`` with
   ``G[h] = (c(W_O[h]) w) W_in``: a product of rank d_head instead of d_model.
3. Activation and second product as ever.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import linear

from hc_lens.blocks import Block, Mlp, Resid


class MovedMlp:
    """One layer behind its attention, for streams that one head moved."""

    @classmethod
    def of(cls, block: Block) -> MovedMlp | None:
        """The layer's MLP, if it reads the moved stream through a layer norm and has no gate."""
        mlp, norm = block.mlp, block.mlp_norm
        if not isinstance(mlp, Mlp) or mlp.W_gate is not None or block.parallel:
            return None
        if not norm.centres or norm.weight is None or norm.bias is None:
            return None
        return cls(block, mlp, norm.weight, norm.bias)

    def __init__(self, block: Block, mlp: Mlp, weight: Tensor, bias: Tensor):
        """Multiply what the heads write with what the MLP reads behind its norm."""
        self.block, self.mlp, self.weight, self.bias = block, mlp, weight, bias
        self._out = mlp.W_out.T
        self._by_head = self.read(block.heads.W_O)
        self._offset = bias @ mlp.W_in + mlp.b_in

    def read(self, x: Float[Tensor, "... d_model"]) -> Float[Tensor, "... d_mlp"]:
        """What the MLP's first weights make of a stream, before the norm's scale and bias."""
        return ((x - x.mean(-1, keepdim=True)) * self.weight) @ self.mlp.W_in

    def finish(
        self,
        base: Resid,
        shared: Float[Tensor, "rows pos d_mlp"],
        moves: Sequence[tuple[int, Float[Tensor, "rows pos d_head"]]],
    ) -> Float[Tensor, "stacked pos d_model"]:
        """The streams behind the layer, one per head and change of its output, stacked.

        `shared` is what all of them share: `read` of the clean stream `base`.
        """
        rows = len(base)
        moved = base.new_empty(len(moves) * rows, *base.shape[1:])
        hidden = shared.new_empty(len(moves) * rows, *shared.shape[1:])
        for index, (head, dz) in enumerate(moves):
            at, flat = slice(index * rows, (index + 1) * rows), dz.flatten(0, 1)
            for start, weight, into in (
                (base, self.block.heads.W_O[head], moved),
                (shared, self._by_head[head], hidden),
            ):
                torch.addmm(start.flatten(0, 1), flat, weight, out=into[at].flatten(0, 1))
        shape, eps = [base.shape[-1]], self.block.mlp_norm.eps
        normed, _, inverse = torch.native_layer_norm(moved, shape, self.weight, self.bias, eps)
        hidden = self.mlp.act(hidden.mul_(inverse).add_(self._offset))
        out = linear(hidden, self._out, self.mlp.b_out)
        return self.block.norm2(out.add_(normed)) if self.block.post_norm else out.add_(moved)
