"""Layers through the model's own TransformerLens modules, so that the user's hooks run.

1. A block is called as the model itself calls it; an ablation is hooks of `hc_lens.ablate` on that
   block, put on after the user's, and taken off again.
2. Nodes are not stacked and every position is computed: a user's hook sees the shapes it expects.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hc_lens.ablate import mask_edits
from hc_lens.errors import HcLensError
from hc_lens.hooks import Handle
from hc_lens.models import EncoderClassifier
from hc_lens.sources import Source
from hc_lens.suffix.blocks import Blocks, Pick, Step, Stream
from hc_lens.units import Unit, UnitSpace


def check_classifier(model: Any) -> None:
    """Raise an HcLensError unless the engine can run the model block by block."""
    from hc_lens.models import DecoderClassifier

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


def has_user_hooks(model: nn.Module) -> bool:
    """Whether anything hooks into the forward pass of the model or replaces a part of it."""
    return any(
        module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
        for module in model.modules()
    )


def embed(model: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    """The residual stream at layer 0, and the attention mask that the model gives its blocks."""
    tokens = inputs["input"]
    if isinstance(model, EncoderClassifier):
        mask = inputs.get("one_zero_attention_mask")
        return model.hook_full_embed(model.embed(tokens, inputs.get("token_type_ids"))), mask
    resid, _, _, mask = model.input_to_embed(
        tokens, prepend_bos=False, attention_mask=inputs.get("attention_mask")
    )
    return resid, mask


class HookedBlocks(Blocks):
    """The model's own blocks, one node at a time."""

    stacks = False
    narrows = False

    def __init__(self, model: Any):
        self.model = model
        self.space = UnitSpace.of(model)

    def start(self, batch: Any, source: Source) -> Stream:
        """Embed a batch."""
        resid, mask = embed(self.model, batch.inputs)
        tokens = batch.inputs["input"]
        return Stream(resid, tokens, mask, source, torch.zeros_like(tokens[:, 0]))

    def step(
        self, stream: Stream, layer: int, resid: Float[Tensor, "rows pos d_model"], narrow: bool
    ) -> Step:
        """Children share nothing within a layer here."""
        return _HookedStep(self, stream, layer, resid)

    def logits(
        self, stream: Stream, resid: Float[Tensor, "rows pos d_model"], narrow: bool
    ) -> Float[Tensor, "rows labels"]:
        """The classification head, with its hooks."""
        model = self.model
        if isinstance(model, EncoderClassifier):
            return model.unembed(model.pooler(resid))
        return model(
            resid,
            start_at_layer=model.cfg.n_layers,
            attention_mask=stream.mask,
            tokens=stream.tokens,
        )

    def row_bytes(self, pos: int, levels: int) -> int:
        """Bytes of activations for one row: TransformerLens holds several attention patterns."""
        cfg = self.model.cfg
        d_mlp = cfg.d_mlp or 0
        per_token = (12 + levels) * cfg.d_model + 4 * d_mlp + 6 * cfg.n_heads * pos
        return pos * per_token * torch.finfo(cfg.dtype).bits // 8

    def run(self, stream: Stream, layer: int, resid: Tensor, pick: Pick) -> Tensor:
        """One block, with the hooks of one ablation on it."""
        _, part = pick
        block = self.model.blocks[layer]
        mask = torch.ones(len(self.space), device=resid.device)
        removed = [Unit(layer, head) for head in part.heads] + [Unit(layer)] * part.mlp
        mask[self.space.indices(removed)] = 0.0
        with Handle(self.model, mask_edits(self.space, mask, stream.source)):
            if isinstance(self.model, EncoderClassifier):
                return block(resid, additive_mask(stream.mask))
            return block(resid, attention_mask=stream.mask)


class _HookedStep(Step):
    def __init__(self, blocks: HookedBlocks, stream: Stream, layer: int, resid: Tensor):
        self._run = lambda pick: blocks.run(stream, layer, resid, pick)

    def children(self, picks: Sequence[Pick]) -> Float[Tensor, "rows pos d_model"]:
        """Run the block once per child."""
        return torch.cat([self._run(pick) for pick in picks])


def additive_mask(mask: Tensor | None) -> Float[Tensor, "batch 1 1 pos"] | None:
    """Minus infinity at the pads, as HookedEncoder gives it to its blocks."""
    if mask is None:
        return None
    return torch.where(mask == 0, -torch.inf, 0.0)[:, None, None, :]
