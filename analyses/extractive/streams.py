"""One forward pass, written down, and re-run from any place with one change.

1. `record` runs a model and keeps the residual stream before every block, what each sublayer (the
   attention, the MLP) adds to it, and each head's share of the attention's sum.
2. `attention`, `feed_forward`, `embedding` and `read_out` are the pieces of that pass as functions
   of their input and of weights that may differ from the model's own.
3. `resume` adds a change to what one sublayer wrote and runs what comes after. The blocks after it
   may be those of another model; the read-out (final norm, unembedding) stays the first model's.
Only the last position is read out. The pass is TransformerLens's own, block by block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.func import functional_call

Stream = Float[Tensor, "*rows pos d_model"]
"""A residual stream, or something added to it."""


@dataclass(frozen=True)
class Record:
    """What a model computed on one batch of prompts of one length."""

    streams: tuple[Float[Tensor, "batch pos d_model"], ...]
    """The residual stream before each block, and after the last one."""
    middles: tuple[Float[Tensor, "batch pos d_model"], ...]
    """The residual stream after each block's attention."""
    heads: tuple[Float[Tensor, "batch pos head d_model"], ...]
    """Each head's share of the attention's output, layer by layer."""
    attention: tuple[Float[Tensor, "batch pos d_model"], ...]
    """The attention's output, b_O included."""
    mlps: tuple[Float[Tensor, "batch pos d_model"], ...]
    """The MLP's output; empty for attention-only models."""
    attention_adds: tuple[Float[Tensor, "batch pos d_model"], ...]
    """What the attention adds to the stream: its output, or the post-norm of it (Gemma 2)."""
    mlp_adds: tuple[Float[Tensor, "batch pos d_model"], ...]
    """What the MLP adds to the stream."""
    logits: Float[Tensor, "batch vocab"]
    """Logits at the last position."""

    def mlp_input(self, layer: int, parallel: bool) -> Float[Tensor, "batch pos d_model"]:
        """The residual stream that the MLP of a layer reads."""
        return self.streams[layer] if parallel else self.middles[layer]

    def detach(self) -> Record:
        """The same values without a graph."""
        values: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            values[field.name] = (
                value.detach() if isinstance(value, Tensor) else tuple(v.detach() for v in value)
            )
        return Record(**values)


class _Attention(nn.Module):
    """The attention of a block with the norm before it: stream in, head outputs or sum out."""

    def __init__(self, block: Any):
        super().__init__()
        self.block = block

    def forward(self, stream: Tensor) -> tuple[Tensor, Tensor]:
        kept: list[Tensor] = []
        attn = self.block.attn
        handle = attn.hook_z.register_forward_hook(lambda module, given, z: kept.append(z))
        try:
            read = self.block.ln1(stream)
            out = attn(query_input=read, key_input=read, value_input=read)
        finally:
            handle.remove()
        return torch.einsum("bphe,hed->bphd", kept[0], attn.W_O), out


class _FeedForward(nn.Module):
    """The MLP of a block with the norm before it."""

    def __init__(self, block: Any):
        super().__init__()
        self.block = block

    def forward(self, stream: Tensor) -> Tensor:
        return self.block.mlp(self.block.ln2(stream))


class _Embedding(nn.Module):
    """Tokens to the residual stream before the first block."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens, stop_at_layer=0, attention_mask=torch.ones_like(tokens))


class _ReadOut(nn.Module):
    """The last residual stream to the logits of its last position."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = model

    def forward(self, stream: Tensor) -> Tensor:
        # The blocks are skipped, so this is the final norm, the unembedding and any soft cap.
        return self.model(stream[..., -1:, :], start_at_layer=self.model.cfg.n_layers)[..., -1, :]


Weights = Mapping[str, Tensor]
"""Parameters of the whole model by name; those not named keep the model's value."""


def _in_block(layer: int, weights: Weights) -> dict[str, Tensor]:
    start = f"blocks.{layer}."
    return {
        f"block.{name[len(start) :]}": value
        for name, value in weights.items()
        if name.startswith(start)
    }


def attention(
    model: Any, layer: int, stream: Stream, weights: Weights
) -> tuple[Float[Tensor, "*rows pos head d_model"], Stream]:
    """Each head's share, and the attention's whole output, on a given residual stream."""
    return functional_call(
        _Attention(model.blocks[layer]), _in_block(layer, weights), (stream,), strict=False
    )


def feed_forward(model: Any, layer: int, stream: Stream, weights: Weights) -> Stream:
    """The MLP's output on a given residual stream."""
    return functional_call(
        _FeedForward(model.blocks[layer]), _in_block(layer, weights), (stream,), strict=False
    )


def embedding(
    model: Any, tokens: Int[Tensor, "batch pos"], weights: Weights
) -> Float[Tensor, "batch pos d_model"]:
    """The residual stream before the first block."""
    named = {f"model.{name}": value for name, value in weights.items()}
    return functional_call(_Embedding(model), named, (tokens,), strict=False)


def read_out(model: Any, stream: Stream, weights: Weights) -> Float[Tensor, "*rows vocab"]:
    """Logits at the last position of the residual stream after the last block."""
    named = {f"model.{name}": value for name, value in weights.items()}
    return functional_call(_ReadOut(model), named, (stream,), strict=False)


def after_attention(
    model: Any, layer: int, output: Stream, weights: Weights | None = None
) -> Stream:
    """What an attention's output adds to the stream: itself, or its post-norm (Gemma 2)."""
    return _post(model.blocks[layer], "ln1_post", output, layer, weights or {})


def after_mlp(model: Any, layer: int, output: Stream, weights: Weights | None = None) -> Stream:
    """What an MLP's output adds to the stream: itself, or its post-norm (Gemma 2)."""
    return _post(model.blocks[layer], "ln2_post", output, layer, weights or {})


def _post(block: Any, name: str, output: Stream, layer: int, weights: Weights) -> Stream:
    norm = getattr(block, name, None)
    if norm is None:
        return output
    start = f"blocks.{layer}.{name}."
    named = {key[len(start) :]: value for key, value in weights.items() if key.startswith(start)}
    return functional_call(norm, named, (output,))


def record(model: Any, tokens: Int[Tensor, "batch pos"], *, differentiable: bool = False) -> Record:
    """Run the model on tokens and write down what every sublayer did.

    With `differentiable` the embeddings are the root of a graph: all that follows can be
    differentiated with respect to what any place wrote.
    """
    stream = embedding(model, tokens, {})
    if differentiable:
        stream = stream.detach().requires_grad_()
    streams, middles, heads, outputs, mlps = [stream], [], [], [], []
    adds, mlp_adds = [], []
    for layer in range(model.cfg.n_layers):
        shares, output = attention(model, layer, stream, {})
        heads.append(shares)
        outputs.append(output)
        adds.append(after_attention(model, layer, output))
        middles.append(stream + adds[-1])
        if not model.cfg.attn_only:
            read = stream if model.cfg.parallel_attn_mlp else middles[-1]
            mlps.append(feed_forward(model, layer, read, {}))
            mlp_adds.append(after_mlp(model, layer, mlps[-1]))
        stream = middles[-1] + mlp_adds[-1] if mlp_adds else middles[-1]
        streams.append(stream)
    logits = read_out(model, stream, {})
    parts = map(tuple, (streams, middles, heads, outputs, mlps, adds, mlp_adds))
    return Record(*parts, logits=logits)


def resume(
    model: Any,
    late: Any,
    kept: Record,
    place: str,
    layer: int,
    change: Float[Tensor, "copies batch pos d_model"],
) -> Float[Tensor, "copies batch vocab"]:
    """Logits after adding `change` to what one place wrote, the blocks after it being `late`'s.

    `place` is "embed", "attention" or "mlp"; the change is added to the residual stream there, so
    a post-norm is already part of it.
    """
    copies = change.shape[0]
    if place == "embed":
        stream, following = kept.streams[0] + change, late.blocks
    elif place == "attention":
        stream, following = kept.middles[layer] + change, late.blocks[layer + 1 :]
        if model.cfg.parallel_attn_mlp:
            stream = stream + kept.mlp_adds[layer]
        elif not model.cfg.attn_only:
            block, flat = late.blocks[layer], stream.flatten(0, 1)
            stream = (flat + block.apply_mlp(block.ln2(flat))).unflatten(0, (copies, -1))
    else:
        stream, following = kept.streams[layer + 1] + change, late.blocks[layer + 1 :]
    stream = stream.flatten(0, 1)
    for block in following:
        stream = block(stream)
    return read_out(model, stream, {}).unflatten(0, (copies, -1))
