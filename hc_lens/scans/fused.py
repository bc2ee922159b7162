"""Layers with the kernels of `hc_lens.blocks`, for a model that nobody hooks into.

1. Removing head h of a layer leaves that layer's attention alone: the residual stream changes by
   ``(value - z_h) W_O[h]`` only. So the children of a node share its attention, and each costs one
   product of rank d_head, the MLP and the layers above.
2. Removing an MLP skips it, where its replacement does not depend on what it computes.
3. In the last layer one query per row matters, the one at the read position.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from transformer_lens.utilities.activation_functions import softcap_enabled

from hc_lens.blocks import Block, Resid
from hc_lens.masks.hooks import mlp_name
from hc_lens.masks.replacements import Source
from hc_lens.models.classifiers import DecoderClassifier, EncoderClassifier
from hc_lens.models.views import ClassifierView, can_view
from hc_lens.protocols import BatchLike
from hc_lens.scans.layers import Layers, Pick, Step, Stream


def can_fuse(model: EncoderClassifier | DecoderClassifier) -> bool:
    """Whether the kernels compute what the model computes, and a layer's output adds its heads'."""
    cfg = model.cfg
    return (
        can_view(model)
        and not cfg.use_normalization_before_and_after
        and not softcap_enabled(getattr(cfg, "output_logits_soft_cap", None))
    )


class FusedLayers(Layers):
    """Every layer of a classifier, with fused kernels."""

    stacks = True
    narrows = True

    def __init__(self, model: EncoderClassifier | DecoderClassifier):
        """Bring the weights into the shapes that the kernels read."""
        self.view = ClassifierView(model)
        self.held_bytes = sum(block.W_qkv.nbytes for block in self.view.blocks)

    def start(self, batch: BatchLike, source: Source) -> Stream:
        """Embed a batch and work out who may attend to whom."""
        resid, context = self.view.start(batch.inputs)
        return Stream(resid, batch.inputs["input"], source, context)

    def step(self, stream: Stream, layer: int, resid: Resid, narrow: bool) -> Step:
        """Attend once for all children."""
        return _FusedStep(self.view.blocks[layer], layer, stream, resid, narrow)

    def logits(self, stream: Stream, resid: Resid, narrow: bool) -> Float[Tensor, "rows labels"]:
        """The classification head at the read positions."""
        read = resid if narrow else stream.context.at_reads(resid)
        return self.view.logits(self.view.final(read))

    def row_bytes(self, pos: int, levels: int) -> int:
        """Bytes of activations for one row: what recursion holds, and the widest moment above."""
        cfg = self.view.model.cfg
        d_mlp = cfg.d_mlp or 0
        held = (3 * levels + 1 + cfg.parallel_attn_mlp) * cfg.d_model
        attention = 9 * cfg.d_model + self.view.causal * pos
        mlp = 4 * cfg.d_model + (4 if cfg.gated_mlp else 2) * d_mlp
        return pos * (held + max(attention, mlp)) * torch.finfo(cfg.dtype).bits // 8


class _FusedStep:
    """One layer of stacked nodes: their attention is done, their children are not."""

    def __init__(self, block: Block, index: int, stream: Stream, resid: Resid, narrow: bool):
        self._block, self._index, self._stream = block, index, stream
        reads, context = block.attention_input(resid), stream.context
        if narrow:
            self._z = block.attend_at(reads, context)
            resid = context.at_reads(resid)
        else:
            self._z = block.attention(reads, context)
        self._base = block.attention_out(self._z).add_(resid)
        self._mlp_of_nodes = block.mlp_out(block.norm2(resid)) if block.parallel else None

    def __call__(self, picks: Sequence[Pick]) -> Resid:
        """Give each child its node's stream, move it by what its heads lose, run the MLP."""
        block, nodes = self._block, [node for node, _ in picks]
        mid = self._by_node(self._base)[nodes]
        for child, (node, part) in zip(mid, picks, strict=True):
            if part.heads:
                z = self._by_node(self._z)[node]
                child += self._stream.without_heads(block, self._index, z, list(part.heads))
        removed = [part.mlp for _, part in picks]
        if self._mlp_of_nodes is not None:
            # Attention and MLP side by side: the MLP's output belongs to the node.
            made, name = self._by_node(self._mlp_of_nodes)[nodes], mlp_name(self._index)
            for child, out, gone in zip(mid, made, removed, strict=True):
                child += self._stream.replacement(name, out) if gone else out
        mid = mid.flatten(0, 1)
        if block.mlp is None or block.parallel:
            return mid
        mlp_in = block.mlp_norm(mid)
        if block.post_norm:
            return block.norm2(mlp_in.add_(self._mlp_out(mlp_in, removed)))
        return mid.add_(self._mlp_out(mlp_in, removed))

    def _by_node(self, stacked: Tensor) -> Float[Tensor, "nodes batch ..."]:
        return stacked.unflatten(0, (-1, self._stream.n_rows))

    def _mlp_out(self, x: Resid, removed: list[bool]) -> Resid:
        """The MLP's output of each child, or what replaces it."""
        if not any(removed):
            return self._block.mlp_out(x)
        out = torch.empty_like(x)
        for child, into, gone in zip(self._by_node(x), self._by_node(out), removed, strict=True):
            skipped = gone and self._stream.source.constant
            made = child if skipped else self._block.mlp_out(child)
            into.copy_(self._stream.replacement(mlp_name(self._index), made) if gone else made)
        return out
