"""Layers through the model's own TransformerLens modules, so that the user's hooks run.

1. A block is called as the model itself calls it; an ablation is hooks of `hc_lens.masks.ablate` on
   that block, put on after the user's, and taken off again.
2. Nodes are not stacked and every position is computed: a user's hook sees the shapes it expects.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hc_lens.blocks import Context, Resid
from hc_lens.errors import HcLensError
from hc_lens.masks.ablate import mask_edits
from hc_lens.masks.hooks import Handle
from hc_lens.masks.replacements import Source
from hc_lens.models.classifiers import DecoderClassifier, EncoderClassifier
from hc_lens.models.views import embed
from hc_lens.protocols import BatchLike, Model
from hc_lens.scans.layers import Layers, Part, Step, Stream
from hc_lens.units import Unit, UnitSpace


def check_classifier(model: Model) -> EncoderClassifier | DecoderClassifier:
    """The model itself; an HcLensError unless the engine can run it block by block."""
    if not isinstance(model, EncoderClassifier | DecoderClassifier):
        raise HcLensError(
            f"expected a classifier of hc.load to scan, got a {type(model).__name__}; "
            "load the checkpoint with hc.load(...)"
        )
    if model._forward_hooks or model._forward_pre_hooks:
        raise HcLensError(
            "expected hooks on the model's hook points or submodules, got a forward hook on the "
            "model itself, which a scan of its blocks never calls; remove it for the scan"
        )
    return model


def has_user_hooks(model: nn.Module) -> bool:
    """Whether anything hooks into the forward pass of the model or replaces a part of it."""
    return any(
        module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
        for module in model.modules()
    )


class HookedLayers(Layers):
    """The model's own blocks, one node at a time."""

    stacks = False
    narrows = False

    def __init__(self, model: EncoderClassifier | DecoderClassifier):
        self.model, self.space = model, UnitSpace.of(model)

    def start(self, batch: BatchLike, source: Source) -> Stream:
        """Embed a batch."""
        resid, mask = embed(self.model, batch.inputs)
        return Stream(resid, batch.inputs["input"], source, Context(mask))

    def step(self, stream: Stream, layer: int, resid: Resid, narrow: bool) -> Step:
        """Run the block once per child; a `narrow` layer is never asked for."""
        assert not narrow
        return lambda picks: torch.cat([self._run(stream, layer, resid, p) for _, p in picks])

    def logits(self, stream: Stream, resid: Resid, narrow: bool) -> Float[Tensor, "rows labels"]:
        """The classification head, with its hooks."""
        assert not narrow
        model = self.model
        if isinstance(model, EncoderClassifier):
            return model.unembed(model.pooler(resid))
        return model(
            resid,
            start_at_layer=model.cfg.n_layers,
            attention_mask=stream.context.mask,
            tokens=stream.tokens,
        )

    def row_bytes(self, pos: int, levels: int) -> int:
        """Bytes of activations for one row: TransformerLens holds several attention patterns."""
        cfg = self.model.cfg
        d_mlp = cfg.d_mlp or 0
        per_token = (12 + levels) * cfg.d_model + 4 * d_mlp + 6 * cfg.n_heads * pos
        return pos * per_token * torch.finfo(cfg.dtype).bits // 8

    def _run(self, stream: Stream, layer: int, resid: Resid, part: Part) -> Resid:
        """One block, with the hooks of one ablation on it."""
        block, attended = self.model.blocks[layer], stream.context.mask
        mask = torch.ones(len(self.space), device=resid.device)
        removed = [Unit(layer, head) for head in part.heads] + [Unit(layer)] * part.mlp
        mask[self.space.indices(removed)] = 0.0
        with Handle(self.model, mask_edits(self.space, mask, stream.source)):
            if not isinstance(self.model, EncoderClassifier):
                return block(resid, attention_mask=attended)
            if attended is not None:
                # Minus infinity at the pads, as HookedEncoder gives it to its blocks.
                attended = torch.where(attended == 0, -torch.inf, 0.0)[:, None, None, :]
            return block(resid, attended)
