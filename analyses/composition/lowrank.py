"""The MLP behind a head that moved: its first product has the head's rank.

1. Patching head h moves the stream u in front of the MLP's norm by ``dz W_O[h]``.
2. The norm is linear but for its scale: ``n(u) W_in = (c(u) w) W_in / s(u) + b W_in``. So
   ``(c(u + dz W_O[h]) w) W_in`` is that of u, computed once, plus ``dz G[h]`` with
   ``G[h] = (c(W_O[h]) w) W_in``: a product of rank d_head instead of d_model.
3. Activation and second product as ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import gelu, linear
from transformer_lens.components.layer_norm import LayerNorm
from transformer_lens.components.mlps.mlp import MLP
from transformer_lens.utilities.activation_functions import gelu_new

from analyses.composition.layers import Layer, Resid


def is_plain(layer: Layer, block: Any) -> bool:
    """Whether the MLP reads the moved stream through a LayerNorm and is no gated one."""
    if not layer.has_mlp or layer.parallel or type(block.mlp) is not MLP:
        return False
    norm = block.ln1 if layer.post_norm else block.ln2
    return type(norm) is LayerNorm and not block.mlp.cfg.is_layer_norm_activation()


class MovedMlp:
    """One layer behind its attention, for streams that one head moved."""

    def __init__(self, layer: Layer, block: Any):
        """Multiply out what the heads write with what the MLP reads."""
        norm = block.ln1 if layer.post_norm else block.ln2
        self.layer, self.eps = layer, norm.eps
        self.weight, self.bias = norm.w.detach(), norm.b.detach()
        mlp = block.mlp
        self._in, self._out = mlp.W_in.detach(), mlp.W_out.detach().T
        self._b_out = mlp.b_out.detach()
        self._by_head = self._read(layer.W_O)
        self._offset = self.bias @ self._in + mlp.b_in.detach()
        same = mlp.act_fn is gelu_new  # PyTorch has this one as a single kernel
        self._act = partial(gelu, approximate="tanh") if same else mlp.act_fn

    def _read(self, x: Float[Tensor, "... d_model"]) -> Float[Tensor, "... d_mlp"]:
        """What the MLP's first weights make of a stream, before the norm's scale and bias."""
        return ((x - x.mean(-1, keepdim=True)) * self.weight) @ self._in

    def start(self, base: Resid) -> Float[Tensor, "rows pos d_mlp"]:
        """What all moved streams share."""
        return self._read(base)

    def finish(
        self,
        base: Resid,
        shared: Float[Tensor, "rows pos d_mlp"],
        moves: Sequence[tuple[int, Float[Tensor, "rows pos d_head"]]],
    ) -> Float[Tensor, "stacked pos d_model"]:
        """The streams behind the layer, one per head and change of its output, stacked."""
        rows = len(base)
        moved = base.new_empty(len(moves) * rows, *base.shape[1:])
        hidden = shared.new_empty(len(moves) * rows, *shared.shape[1:])
        for place, (head, dz) in enumerate(moves):
            at, flat = slice(place * rows, (place + 1) * rows), dz.flatten(0, 1)
            for start, weight, into in (
                (base, self.layer.W_O[head], moved),
                (shared, self._by_head[head], hidden),
            ):
                torch.addmm(start.flatten(0, 1), flat, weight, out=into[at].flatten(0, 1))
        shape = [base.shape[-1]]
        normed, _, inverse = torch.native_layer_norm(moved, shape, self.weight, self.bias, self.eps)
        out = linear(self._act(hidden.mul_(inverse).add_(self._offset)), self._out, self._b_out)
        return self.layer.norm2(out.add_(normed)) if self.layer.post_norm else out.add_(moved)
