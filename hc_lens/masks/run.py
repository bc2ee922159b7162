"""A model under masks, run up to where each row is read.

1. A model that nobody hooks into is run by the kernels of `hc_lens.blocks`: the functions of the
   mask change what the heads and the MLPs write, as the hooks would, and the last block runs at
   the read positions alone, where the replacement does not need the others.
2. Below the first layer that a mask may touch, every run of a batch does the same, and so do the
   heads of that layer. What they leave is computed once and kept, as long as the memory allows.
3. Any other model runs as a whole, with the functions as hooks (`hc_lens.masks.ablate`).

The result is that of the hooks, with the same sums in another order. Gradients flow into the mask.
In bfloat16 attention is computed step by step: PyTorch's fused kernel is slow in its backward pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from hc_lens.blocks import Block, Context, PerHead, Resid, forward_mode, in_precision
from hc_lens.masks.ablate import Mask, mask_edits
from hc_lens.masks.finite import check_finite, is_finite
from hc_lens.masks.hooks import Edit, Handle, has_user_hooks, mlp_name, z_name
from hc_lens.masks.replacements import Source
from hc_lens.models.reading import Readout
from hc_lens.models.views import ModelView, can_fuse
from hc_lens.protocols import BatchLike, Model
from hc_lens.units import UnitSpace

KEPT_BYTES = 2**28
"""Most bytes that are kept of what no mask touches."""


class Begun(NamedTuple):
    """A batch at the first layer that a mask may touch."""

    resid: Resid
    """The stream in front of the layer."""
    z: PerHead
    """What the layer's heads write, before any mask."""
    context: Context
    """Who may attend to whom, and where each row is read."""

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return self.resid.nbytes + self.z.nbytes


class MaskedRun:
    """Runs one model under one mask after the other."""

    def __init__(
        self, model: Model, source: Source, *, first: int | None = None, bfloat16: bool = False
    ):
        """Prepare the kernels, or the hooks.

        Args:
            source: what replaces removed units.
            first: the first layer that any of the masks will touch, if batches come again; None
                keeps nothing of them.
            bfloat16: whether matrix products are taken in bfloat16 (``torch.autocast``).
        """
        self.model, self.source, self.bfloat16 = model, source, bfloat16
        self.space, self.readout = UnitSpace.of(model), Readout(model)
        fused = can_fuse(model) and not has_user_hooks(model)
        self.view = ModelView(model) if fused else None
        if self.view is not None and bfloat16:
            # Autocast would convert frozen weights anew at every use.
            blocks = self.view.blocks
            self.view.blocks = [in_precision(block, torch.bfloat16) for block in blocks]
        self._first, self._room = first or 0, 0 if first is None else KEPT_BYTES
        self._kept: dict[tuple[int, ...], Begun] = {}

    def held(
        self, batch: BatchLike, mask: Mask, of: str = "the model under a mask"
    ) -> Float[Tensor, "batch width"]:
        """What the model under a mask leaves to read; see `Readout.held`. An error names `of`."""
        source = self.source.on(batch)
        edits = mask_edits(self.space, mask, source)
        with self._precision():
            if self.view is None:
                with Handle(self.model, edits):
                    held = self.readout.held(batch)
            else:
                held = self._by_kernels(self.view, batch, edits, source.constant)
        held = held.to(self.model.cfg.dtype)
        if not is_finite(held):
            with Handle(self.model, edits):
                check_finite(self.model, batch.inputs, held, of)
        return held

    def _precision(self) -> AbstractContextManager[object]:
        stack = ExitStack()
        if self.bfloat16:
            device = torch.device(self.model.cfg.device).type
            stack.enter_context(torch.autocast(device, torch.bfloat16))
            stack.enter_context(forward_mode())
        return stack

    def _by_kernels(
        self, view: ModelView, batch: BatchLike, edits: Mapping[str, Edit], constant: bool
    ) -> Float[Tensor, "batch width"]:
        resid, z, context = self._begun(view, batch)
        last = len(view.blocks) - 1
        for layer in range(self._first, len(view.blocks)):
            block, narrow = view.blocks[layer], layer == last and constant
            if layer > self._first:
                resid = block.begin(resid, context)
                z = _attend(block, resid, context, narrow)
            elif narrow:
                z = context.at_reads(z)
            resid = _behind(block, layer, context.at_reads(resid) if narrow else resid, z, edits)
        return view.left_to_read(self.readout, resid, context)

    def _begun(self, view: ModelView, batch: BatchLike) -> Begun:
        key = tuple(batch.rows.tolist())
        if key in self._kept:
            return self._kept[key]
        with torch.no_grad():
            resid, context = view.start(batch)
            for block in view.blocks[: self._first]:
                resid = block(resid, context)
            block = view.blocks[self._first]
            resid = block.begin(resid, context)
            begun = Begun(resid, _attend(block, resid, context), context)
        if begun.nbytes <= self._room:
            self._kept[key] = begun
            self._room -= begun.nbytes
        return begun


def _attend(
    block: Block, resid: Resid, context: Context, narrow: bool = False
) -> Float[Tensor, "rows _ heads d_head"]:
    """What the heads of a block write; with `narrow` at the read positions alone."""
    reads = block.attention_input(resid)
    return block.attend_at(reads, context) if narrow else block.attention(reads, context)


def _behind(block: Block, layer: int, resid: Resid, z: PerHead, edits: Mapping[str, Edit]) -> Resid:
    """The stream behind a block whose heads and MLP write what the functions of a mask give."""

    def edited(name: str, x: Tensor) -> Tensor:
        changed = edits[name](x) if name in edits else None
        return x if changed is None else changed

    attention = block.attention_norm(block.attention_out(edited(z_name(layer), z)))
    if block.mlp is None:
        return resid + attention
    mlp_in = block.mlp_norm(block.before_mlp(resid, attention))
    mlp_out = edited(mlp_name(layer), block.mlp_out(mlp_in))
    out = block.close(resid, attention, mlp_in, mlp_out)
    return block.norm2(out) if block.post_norm else out
