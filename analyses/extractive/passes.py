"""One forward pass, written down, and run again from any site with one change.

1. `write` computes what one site (the embeddings, an attention, an MLP, the read-out) writes: its
   output, each component's part of it and what is added to the residual stream. The weights may
   differ from the model's own. The read-out writes the logits of the last position.
2. `record` runs a model and keeps what every site read and wrote.
3. `resume` adds a change to what one site added and runs what comes after it. The blocks after it
   may be those of another model; the read-out (final norm, unembedding) stays the first model's.
The blocks are those of `hc_lens.blocks`. Where these do not know a model's attention (soft caps,
ALiBi, sinks), the model's own attention module computes the heads' outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.func import functional_call

from analyses.extractive.component import Site, sites
from analyses.extractive.models import State
from hc_lens.blocks import Block, Context
from hc_lens.models.views import can_view, view
from hc_lens.protocols import LanguageModel

Reads = Float[Tensor, "batch pos d_model"] | Int[Tensor, "batch pos"]
"""The residual stream that a site reads; the embeddings read tokens."""
Stream = Float[Tensor, "batch written width"]
"""What a site adds to the residual stream; of the read-out the logits at its one position."""
Parts = Float[Tensor, "batch written parts width"]
"""What each of a site's writers writes: the heads of an attention, or a single part elsewhere."""


@dataclass(frozen=True)
class Written:
    """What one site read and wrote."""

    reads: Reads
    """What it read."""
    parts: Parts
    """What each of its writers wrote."""
    output: Stream
    """The sum of the parts, with b_O in an attention."""
    adds: Stream
    """What is added to the stream: the output, or the norm of it (Gemma 2)."""

    def detach(self) -> Written:
        """The same values without a graph."""
        return Written(*(value.detach() for value in vars(self).values()))


Record = dict[Site, Written]
"""What every site read and wrote on one batch of prompts of one length, in order."""


@dataclass(frozen=True)
class _OwnAttention(Block):
    """A block in which the model's own attention module computes the heads' outputs."""

    module: Any = None
    """The module."""
    replaced: State = field(default_factory=dict)
    """Parameters that take the place of the module's own."""

    def attention(
        self, x: Float[Tensor, "batch pos d_model"], context: Context
    ) -> Float[Tensor, "batch pos heads d_head"]:
        """The output of every head that reads `x`, at every position."""
        kept: list[Tensor] = []
        handle = self.module.hook_z.register_forward_hook(lambda m, given, z: kept.append(z))
        inputs = {f"{name}_input": x for name in ("query", "key", "value")}
        try:
            functional_call(self.module, dict(self.replaced), (), inputs)
        finally:
            handle.remove()
        return kept[0]


def block_of(model: LanguageModel, layer: int, weights: State | None = None) -> Block:
    """One block of a model; parameters named in `weights` replace the model's own."""
    block = view(model, layer, weights)
    if can_view(model):
        return block
    start = f"blocks.{layer}.attn."
    named = (weights or {}).items()
    replaced = {name.removeprefix(start): w for name, w in named if name.startswith(start)}
    return _OwnAttention(**vars(block), module=model.blocks[layer].attn, replaced=replaced)


def blocks_of(model: LanguageModel) -> list[Block]:
    """Every block of a model."""
    return [block_of(model, layer) for layer in range(model.cfg.n_layers)]


def write(model: LanguageModel, site: Site, reads: Reads, weights: State | None = None) -> Written:
    """What a site writes if it reads `reads`; parameters in `weights` replace the model's own."""
    if site.kind in ("embed", "read-out"):
        assert isinstance(model, nn.Module)
        options: dict[str, Any] = {"stop_at_layer": 0, "attention_mask": torch.ones_like(reads)}
        given = reads
        if site.kind == "read-out":
            # No block is left, so this is the final norm, the unembedding and any soft cap.
            given, options = reads[:, -1:], {"start_at_layer": model.cfg.n_layers}
        output = functional_call(model, dict(weights or {}), (given,), options, strict=False)
        return Written(reads, output[:, :, None], output, output)
    block = block_of(model, site.layer, weights)
    if site.kind == "attention":
        z = block.attention(block.attention_input(reads), Context())
        output, parts = block.attention_out(z), block.written_by_heads(z)
    else:
        assert block.mlp is not None
        output = block.mlp(block.norm2(reads))
        parts = output[:, :, None]
    return Written(reads, parts, output, normed(block, site, output))


def normed(block: Block, site: Site, output: Stream) -> Stream:
    """What the attention or MLP of a block adds to the stream if its output is `output`."""
    return (block.attention_norm if site.kind == "attention" else block.mlp_out_norm)(output)


def record(
    model: LanguageModel, tokens: Int[Tensor, "batch pos"], *, differentiable: bool = False
) -> Record:
    """Run the model on tokens and write down what every site read and wrote.

    With `differentiable` the embeddings are the root of a graph: all that follows can be
    differentiated with respect to what any site wrote.
    """
    first, *others = sites(model)
    stream = write(model, first, tokens).output
    if differentiable:
        stream = stream.detach().requires_grad_()
    written = {first: Written(tokens, stream[:, :, None], stream, stream)}
    reads = stream
    for site in others:
        if site.kind != "mlp" or not model.cfg.parallel_attn_mlp:
            reads = stream
        written[site] = write(model, site, reads)
        if site.kind != "read-out":
            stream = stream + written[site].adds
    return written


def resume(
    model: LanguageModel,
    blocks: Sequence[Block],
    kept: Record,
    site: Site,
    change: Float[Tensor, "copies batch written width"],
) -> Float[Tensor, "copies batch vocab"]:
    """Logits after adding `change` to what one site added, with these blocks after it."""
    if site.kind == "read-out":
        return (kept[site].adds + change)[:, :, -1]
    cfg = model.cfg
    read_out, reader = Site(cfg.n_layers, "read-out"), Site(site.layer + 1, "attention")
    if site.kind == "attention" and not (cfg.attn_only or cfg.parallel_attn_mlp):
        reader = Site(site.layer, "mlp")
    stream = (kept.get(reader, kept[read_out]).reads + change).flatten(0, 1)
    if reader.kind == "mlp":
        stream = blocks[site.layer].finish(stream)
    for block in blocks[site.layer + 1 :]:
        stream = block(stream, Context())
    return write(model, read_out, stream).output[:, -1].unflatten(0, (len(change), -1))
