"""How the engine runs one layer of a model for many ablations, in two ways.

1. `start` embeds a batch and works out who may attend to whom.
2. `step` takes the residual streams of some nodes, stacked along the batch, through the part of a
   layer that all their children share. What it returns finishes the layer for some children, each a
   node and what is removed here.
3. `held` is what is left where each row is read (`hc_lens.models.reading`).

`FusedLayers` runs the kernels of `hc_lens.blocks`, for a model that nobody hooks into. Removing
head h of a layer leaves that layer's attention alone: the stream changes by
``(value - z_h) W_O[h]``. So the children of a node share its attention, and each costs one product
of rank d_head, the MLP and the layers above. A removed MLP is skipped where its replacement does
not depend on what it computes. In the last layer only the query at the read position matters.

`HookedLayers` calls the model's own blocks, so that the user's hooks run. An
ablation is hooks of `hc_lens.masks.ablate`, put on after the user's and taken off again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hc_lens.blocks import Block, Context, PerHead, Resid
from hc_lens.errors import HcLensError
from hc_lens.masks.ablate import mask_edits
from hc_lens.masks.hooks import Handle, has_user_hooks, mlp_name, z_name
from hc_lens.masks.replacements import Source
from hc_lens.models.lens import known_parts
from hc_lens.models.parts import Entered
from hc_lens.models.reading import Readout, at_positions, read_positions
from hc_lens.models.views import ModelView, can_fuse
from hc_lens.protocols import BatchLike, Model
from hc_lens.units import Unit, UnitSpace


class Branch(NamedTuple):
    """One child of a node at some layer."""

    node: int
    """Index of the node in the stack."""
    part: tuple[Unit, ...]
    """The units of the layer that are removed."""
    sets: Sequence[int] = ()
    """The sets that the child stands for."""


Step = Callable[[Sequence[Branch]], Resid]
"""Finishes a layer: the residual streams of some children, stacked along the batch."""


@dataclass(frozen=True)
class Stream:
    """One batch at the entrance of layer 0, and what the layers need to know of it."""

    resid: Float[Tensor, "batch pos d_model"]
    """The embedded batch."""
    tokens: Int[Tensor, "batch pos"]
    """Its token ids."""
    source: Source
    """What replaces removed units, bound to the batch."""
    context: Context
    """Who may attend to whom, and where each row is read."""
    entered: Entered | None = None
    """What the model gives to its own blocks beside the stream, where they are run."""

    @property
    def n_rows(self) -> int:
        """Number of rows in the batch."""
        return len(self.tokens)

    def replacement(
        self, name: str, activation: Float[Tensor, "*shape"]
    ) -> Float[Tensor, "*shape"]:
        """What replaces the activation at a hook point, in its shape."""
        return self.source.value(name, activation).expand_as(activation)

    def without_heads(self, block: Block, layer: int, z: PerHead, heads: list[int]) -> Resid:
        """How replacing some heads of a layer moves the residual stream: ``(value - z) W_O``."""
        value = self.replacement(z_name(layer), z)
        moved = (value[:, :, heads] - z[:, :, heads]).flatten(2)
        return moved @ block.heads.W_O[heads].flatten(0, 1)


def check_runnable(model: Model) -> Model:
    """The model itself; an HcLensError unless it can be run block by block."""
    whole = known_parts(model).model
    if whole._forward_hooks or whole._forward_pre_hooks:
        raise HcLensError(
            "expected hooks on the model's hook points or submodules, got a forward hook on the "
            "model itself, which a scan of its blocks never calls; remove it for the scan"
        )
    return model


def layers_of(model: Model) -> FusedLayers | HookedLayers:
    """The faster way of the two that computes what the model computes."""
    fused = can_fuse(model) and not has_user_hooks(model)
    return FusedLayers(model) if fused else HookedLayers(model)


class FusedLayers:
    """Every layer of a model, with fused kernels."""

    watched = False
    """Whether hooks see the activations: then no stacks, and every position is computed."""

    def __init__(self, model: Model):
        self.view, self.readout = ModelView(model), Readout(model)
        self.held_bytes = sum(block.W_qkv.nbytes for block in self.view.blocks)
        """Bytes that are held for the whole scan beside the model."""
        heads = [block.heads for block in self.view.blocks]
        biased = any(each.bias is not None or each.pads_see_all for each in heads)
        masked = self.view.causal or biased or any(each.window for each in heads)
        # Numbers for each pair of tokens: the mask, and what scores have added.
        self._pairs = masked + 8 * biased * model.cfg.n_heads

    def start(self, batch: BatchLike, source: Source) -> Stream:
        """Embed a batch; the source is bound to it."""
        resid, context = self.view.start(batch)
        return Stream(resid, batch.inputs["input"], source, context)

    def step(self, stream: Stream, layer: int, resid: Resid, narrow: bool) -> Step:
        """Attend once for all children; with `narrow` at the read positions alone."""
        return _FusedStep(self.view.blocks[layer], layer, stream, resid, narrow)

    def held(self, stream: Stream, resid: Resid) -> Float[Tensor, "rows width"]:
        """What is left at the read positions; a `narrow` last layer has left these alone."""
        return self.view.left_to_read(self.readout, resid, stream.context)

    def row_bytes(self, pos: int, levels: int) -> int:
        """Bytes of activations for one row of `pos` tokens, when sets touch `levels` layers."""
        cfg = self.view.model.cfg
        # What recursion holds, and the widest moment above it.
        held = (3 * levels + 1 + cfg.parallel_attn_mlp) * cfg.d_model
        attention = 9 * cfg.d_model + self._pairs * pos
        mlp = 4 * cfg.d_model + (4 if cfg.gated_mlp else 2) * (cfg.d_mlp or 0)
        return pos * (held + max(attention, mlp)) * cfg.dtype.itemsize


class _FusedStep:
    """One layer of stacked nodes: their attention is done, their children are not."""

    def __init__(self, block: Block, index: int, stream: Stream, resid: Resid, narrow: bool):
        self._block, self._index, self._stream = block, index, stream
        context = stream.context
        resid = block.begin(resid, context)
        reads = block.attention_input(resid)
        if narrow:
            self._z = block.attend_at(reads, context)
            resid = context.at_reads(resid)
        else:
            self._z = block.attention(reads, context)
        self._base = block.attention_out(self._z).add_(resid)
        self._mlp_of_nodes = block.mlp_out(block.norm2(resid)) if block.parallel else None

    def __call__(self, branches: Sequence[Branch]) -> Resid:
        """Give each child its node's stream, move it by what its heads lose, run the MLP."""
        block, nodes = self._block, [branch.node for branch in branches]
        mid, removed = self._by_node(self._base)[nodes], []
        for child, branch in zip(mid, branches, strict=True):
            heads = [unit.head for unit in branch.part if unit.head is not None]
            removed.append(len(heads) < len(branch.part))  # what is no head is the MLP
            if heads:
                z = self._by_node(self._z)[branch.node]
                child += self._stream.without_heads(block, self._index, z, heads)
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


class HookedLayers:
    """The model's own blocks, one child at a time and at every position."""

    watched = True
    held_bytes = 0

    def __init__(self, model: Model):
        self.model, self.parts = model, known_parts(model)
        self.space, self.readout = UnitSpace.of(model), Readout(model)

    def start(self, batch: BatchLike, source: Source) -> Stream:
        """Embed a batch; the source is bound to it."""
        entered = self.parts.enter(batch.inputs, blocks=True)
        reads = read_positions(self.model, batch)
        context = Context(entered.mask, reads=reads, mean=self.parts.reads_mean)
        return Stream(entered.resid, batch.inputs["input"], source, context, entered)

    def step(self, stream: Stream, layer: int, resid: Resid, narrow: bool) -> Step:
        """Run the block under the hooks of one ablation; a `narrow` layer is never asked for."""
        assert not narrow
        assert stream.entered is not None
        block = self.parts.block(layer, stream.entered)

        def run(branches: Sequence[Branch]) -> Resid:
            (branch,) = branches
            mask = torch.ones(len(self.space), device=resid.device)
            mask[self.space.indices(branch.part)] = 0.0
            with Handle(self.model, mask_edits(self.space, mask, stream.source)):
                return block(resid)

        return run

    def held(self, stream: Stream, resid: Resid) -> Float[Tensor, "rows width"]:
        """What is left at the read positions, or the logits there, with the hooks of the head."""
        reads = stream.context.reads
        assert reads is not None
        if self.readout.split:
            return at_positions(resid, reads)
        logits = self.parts.head(resid, stream.context.mask)
        return logits if logits.ndim == 2 else at_positions(logits, reads)

    def row_bytes(self, pos: int, levels: int) -> int:
        """As for `FusedLayers`; TransformerLens holds several attention patterns."""
        cfg = self.model.cfg
        per_token = (12 + levels) * cfg.d_model + 4 * (cfg.d_mlp or 0) + 6 * cfg.n_heads * pos
        return pos * per_token * cfg.dtype.itemsize
