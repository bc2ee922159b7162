"""Layers with fused kernels, for a model that nobody hooks into.

1. Queries, keys and values come from one matrix product, attention from PyTorch's fused kernel,
   layer norms from ``layer_norm``: the model's arithmetic without its hook points.
2. Removing head h of a layer leaves that layer's attention alone: the residual stream changes by
   ``(value - z_h) W_O[h]`` only. So the children of a node share its attention, and each costs one
   product of rank d_head, the MLP and the layers above.
3. In the last layer one query per row matters, the one at the read position. Where keys depend on
   their tokens alone, ``q . (x W_K)`` is computed as ``(q W_K) . x`` and ``p (x W_V)`` as
   ``(p x) W_V``, so no token is projected to a key or a value.
4. Pads are never attended to; what a pad's own query sees is free, as nobody reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm, linear, scaled_dot_product_attention
from transformer_lens.components.attention import Attention
from transformer_lens.components.bert_block import BertBlock
from transformer_lens.components.grouped_query_attention import GroupedQueryAttention
from transformer_lens.components.layer_norm import LayerNorm
from transformer_lens.components.mlps.mlp import MLP
from transformer_lens.components.transformer_block import TransformerBlock
from transformer_lens.utilities.activation_functions import gelu_new, softcap_enabled
from transformer_lens.utilities.architectures import POST_NORM_ARCHITECTURES

from hc_lens.hooks import mlp_name, z_name
from hc_lens.models import EncoderClassifier
from hc_lens.sources import Source
from hc_lens.suffix.blocks import Blocks, Pick, Step, Stream, is_constant
from hc_lens.suffix.hooked import embed

_OFF = (
    "clip_qkv",
    "use_attention_sinks",
    "load_in_4bit",
    "use_normalization_before_and_after",
    "use_logn_attn",
    "use_dynamic_ntk_rope",
)
"""Settings of TransformerLens that the fused layers do not know; with one of them on, the model's
own blocks run instead."""


def can_fuse(model: Any) -> bool:
    """Whether the fused layers compute what the model's own blocks compute."""
    cfg = model.cfg
    caps = (
        getattr(cfg, "attn_scores_soft_cap", None),
        getattr(cfg, "output_logits_soft_cap", None),
    )
    return (
        cfg.positional_embedding_type in ("standard", "rotary")
        and cfg.original_architecture not in POST_NORM_ARCHITECTURES
        and not any(getattr(cfg, name, None) for name in _OFF)
        and not any(softcap_enabled(cap) for cap in caps)
        and all(type(block) in (BertBlock, TransformerBlock) for block in model.blocks)
        and all(type(block.attn) in (Attention, GroupedQueryAttention) for block in model.blocks)
    )


class FusedBlocks(Blocks):
    """Every layer of a classifier, fused."""

    stacks = True
    narrows = True

    def __init__(self, model: Any):
        self.model = model
        self.layers = [_Layer(block) for block in model.blocks]
        self.causal = not isinstance(model, EncoderClassifier)
        self.held_bytes = sum(layer.W_qkv.nbytes for layer in self.layers)

    def start(self, batch: Any, source: Source) -> Stream:
        """Embed a batch and work out who may attend to whom."""
        resid, mask = embed(self.model, batch.inputs)
        tokens = batch.inputs["input"]
        real = None if mask is None or bool(mask.all()) else mask.bool()
        if not self.causal:
            reads = torch.zeros_like(tokens[:, 0])
            attend = None if real is None else real[:, None, None, :]
            return Stream(resid, tokens, mask, source, reads, attend, real)
        reads = self.model.read_positions(tokens, batch.inputs.get("attention_mask"), resid)
        attend = self._causal(resid.shape[1], real, resid.device)
        read = torch.ones_like(tokens).bool() if real is None else real
        places = torch.arange(resid.shape[1], device=resid.device)
        read = read & (places <= reads[:, None])
        return Stream(resid, tokens, mask, source, reads, attend, read)

    def step(
        self, stream: Stream, layer: int, resid: Float[Tensor, "rows pos d_model"], narrow: bool
    ) -> Step:
        """Attend once for all children."""
        return _FusedStep(self.layers[layer], layer, stream, resid, narrow)

    def logits(
        self, stream: Stream, resid: Float[Tensor, "rows pos d_model"], narrow: bool
    ) -> Float[Tensor, "rows labels"]:
        """The classification head at the read positions."""
        model = self.model
        read = resid if narrow else at_reads(resid, stream)
        if not self.causal:
            return model.unembed(model.pooler(read))
        if model.cfg.normalization_type is not None:
            read = model.ln_final(read)
        return model.unembed(read).squeeze(1)

    def row_bytes(self, pos: int, levels: int) -> int:
        """Bytes of activations for one row: what recursion holds, and the widest moment above."""
        cfg = self.model.cfg
        d_mlp = cfg.d_mlp or 0
        held = (3 * levels + 1 + cfg.parallel_attn_mlp) * cfg.d_model
        attention = 9 * cfg.d_model + self.causal * pos
        mlp = 4 * cfg.d_model + (4 if cfg.gated_mlp else 2) * d_mlp
        return pos * (held + max(attention, mlp)) * torch.finfo(cfg.dtype).bits // 8

    @staticmethod
    def _causal(
        pos: int, real: Bool[Tensor, "batch pos"] | None, device: torch.device
    ) -> Bool[Tensor, "batch 1 pos pos"] | None:
        """Earlier tokens that are not pads; a pad sees itself, so that no softmax is empty."""
        if real is None:
            return None
        before = torch.ones(pos, pos, dtype=torch.bool, device=device).tril()
        itself = torch.eye(pos, dtype=torch.bool, device=device)
        return ((before & real[:, None, :]) | itself)[:, None]


class _Layer:
    """The weights of one block in the shapes that the fused kernels read."""

    def __init__(self, block: Any):
        attn = block.attn
        grouped = type(attn) is GroupedQueryAttention
        keys = (attn._W_K, attn._b_K) if grouped else (attn.W_K, attn.b_K)
        values = (attn._W_V, attn._b_V) if grouped else (attn.W_V, attn.b_V)
        projections = [(attn.W_Q, attn.b_Q), keys, values]
        self.attn = attn
        self.W_qkv = torch.cat([rearrange(w.detach(), "h d e -> (h e) d") for w, _ in projections])
        self.b_qkv = torch.cat([b.detach().flatten() for _, b in projections])
        self.heads = [len(w) for w, _ in projections]
        self.W_O, self.b_O = attn.W_O.detach(), attn.b_O.detach()
        self.rotary = attn.cfg.positional_embedding_type == "rotary"
        self.plain_keys = not (self.rotary or grouped or attn.cfg.use_qk_norm)
        self.window = attn.cfg.window_size if attn.attn_type == "local" else None
        self.post_norm = type(block) is BertBlock
        self.parallel = bool(block.cfg.parallel_attn_mlp)
        self.ln1 = _norm(block.ln1)
        self.has_mlp = not block.cfg.attn_only
        if self.has_mlp:
            self.ln2, self.mlp = _norm(block.ln2), _mlp(block.mlp)

    def attend(
        self, x: Float[Tensor, "rows pos d_model"], stream: Stream, causal: bool
    ) -> Float[Tensor, "rows pos heads d_head"]:
        """The output of every head at every position."""
        q, k, v = self._qkv(x, stream)
        allowed = self._windowed(stream.attend, x, causal)
        if allowed is not None:
            allowed = _repeated(allowed, len(x))
        scale, only_causal = 1 / self.attn.attn_scale, causal and allowed is None
        z = scaled_dot_product_attention(
            q, k, v, attn_mask=allowed, is_causal=only_causal, scale=scale
        )
        return z.transpose(1, 2)

    def attend_at_reads(
        self, x: Float[Tensor, "rows pos d_model"], stream: Stream
    ) -> Float[Tensor, "rows 1 heads d_head"]:
        """The output of every head at the position that the classifier reads."""
        allowed = stream.attend_read
        if allowed is not None:
            if self.window is not None:
                places = torch.arange(x.shape[1], device=x.device)
                allowed = allowed & (places > stream.reads[:, None] - self.window)
            allowed = _repeated(allowed, len(x))[:, None]
        if not self.plain_keys:
            q, k, v = self._qkv(x, stream)
            rows = torch.arange(len(x), device=x.device)
            q = q[rows, :, _repeated(stream.reads, len(x))][:, :, None]
            allowed = None if allowed is None else allowed[:, None]
            scale = 1 / self.attn.attn_scale
            z = scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=scale)
            return z.transpose(1, 2)
        n_heads, attn = self.heads[0], self.attn
        read = at_reads(x, stream)[:, 0]
        width = n_heads * self.W_O.shape[1]
        q = linear(read, self.W_qkv[:width], self.b_qkv[:width])
        q = rearrange(q, "rows (h e) -> h rows e", h=n_heads)
        # Keys as (q W_K) . x: their bias moves all scores of a head alike and drops out.
        keyed = rearrange(q @ attn.W_K.detach().transpose(1, 2), "h rows d -> rows h d")
        scores = torch.bmm(keyed, x.transpose(1, 2)) / attn.attn_scale
        if allowed is not None:
            scores = scores.masked_fill(~allowed, -torch.inf)
        mixed = rearrange(torch.bmm(scores.softmax(-1), x), "rows h d -> h rows d")
        z = mixed @ attn.W_V.detach() + attn.b_V.detach()[:, None]
        return rearrange(z, "h rows e -> rows 1 h e")

    def _qkv(self, x: Tensor, stream: Stream) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [rows, heads, pos, d_head], rotated where the model rotates."""
        d_head, n_heads = self.W_O.shape[1], self.heads[0]
        split = linear(x, self.W_qkv, self.b_qkv).split([n * d_head for n in self.heads], dim=-1)
        q, k, v = (rearrange(part, "r p (h e) -> r p h e", e=d_head) for part in split)
        if self.attn.cfg.use_qk_norm:
            q = self.attn._apply_qk_norm(q, self.attn.q_norm)
            k = self.attn._apply_qk_norm(k, self.attn.k_norm)
        if self.rotary:
            mask = None if stream.mask is None else _repeated(stream.mask, len(x))
            q, k = self.attn.apply_rotary(q, 0, mask), self.attn.apply_rotary(k, 0, mask)
        if self.heads[1] != n_heads:
            repeats = n_heads // self.heads[1]
            k, v = k.repeat_interleave(repeats, dim=2), v.repeat_interleave(repeats, dim=2)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def _windowed(self, allowed: Tensor | None, x: Tensor, causal: bool) -> Tensor | None:
        if self.window is None or not causal:
            return allowed
        pos = x.shape[1]
        near = torch.ones(pos, pos, dtype=torch.bool, device=x.device).tril()
        near &= ~near.tril(-self.window)
        return near[None, None] if allowed is None else allowed & near


class _FusedStep(Step):
    """One layer of stacked nodes: their attention is done, their children are not."""

    def __init__(self, layer: _Layer, index: int, stream: Stream, resid: Tensor, narrow: bool):
        self._layer, self._index, self._stream = layer, index, stream
        self._nodes = len(resid) // stream.n_rows
        normed = resid if layer.post_norm else layer.ln1(resid)
        if narrow:
            self._z = layer.attend_at_reads(normed, stream)
            resid = at_reads(resid, stream)
        else:
            self._z = layer.attend(normed, stream, causal=not layer.post_norm)
        attn_out = linear(self._z.flatten(2), layer.W_O.flatten(0, 1).T, layer.b_O)
        self._base = attn_out.add_(resid)
        self._mlp_of_nodes = layer.mlp(layer.ln2(resid)) if layer.parallel else None

    def children(self, picks: Sequence[Pick]) -> Float[Tensor, "rows pos d_model"]:
        """Give each child its node's stream, move it by what its heads lose, run the MLP."""
        layer, nodes = self._layer, [node for node, _ in picks]
        mid = self._by_node(self._base)[nodes]
        for place, (node, part) in enumerate(picks):
            if part.heads:
                mid[place] += self._change(node, list(part.heads))
        removed = [part.mlp for _, part in picks]
        if not layer.has_mlp:
            return mid.flatten(0, 1)
        if self._mlp_of_nodes is not None:
            return self._parallel(mid, nodes, removed)
        mid = mid.flatten(0, 1)
        if layer.post_norm:
            normed = layer.ln1(mid)
            return layer.ln2(normed.add_(self._mlp_out(normed, removed)))
        return mid.add_(self._mlp_out(layer.ln2(mid), removed))

    def _by_node(self, stacked: Tensor) -> Float[Tensor, "nodes batch ..."]:
        return stacked.unflatten(0, (-1, self._stream.n_rows))

    def _change(self, node: int, heads: list[int]) -> Float[Tensor, "batch pos d_model"]:
        """(value - z) W_O of the removed heads."""
        z = self._by_node(self._z)[node]
        value = self._stream.source.value(z_name(self._index), z).expand_as(z)
        moved = (value[:, :, heads] - z[:, :, heads]).flatten(2)
        return moved @ self._layer.W_O[heads].flatten(0, 1)

    def _mlp_out(self, x: Tensor, removed: list[bool]) -> Tensor:
        """The MLP's output of each child, or what replaces it."""
        if not any(removed):
            return self._layer.mlp(x)
        out = torch.empty_like(x)
        source, name = self._stream.source, mlp_name(self._index)
        for child, into, gone in zip(self._by_node(x), self._by_node(out), removed, strict=True):
            if gone and is_constant(source):
                into.copy_(source.value(name, child).expand_as(child))
            else:
                made = self._layer.mlp(child)
                into.copy_(source.value(name, made).expand_as(made) if gone else made)
        return out

    def _parallel(self, mid: Tensor, nodes: list[int], removed: list[bool]) -> Tensor:
        """Attention and MLP side by side: the MLP's output belongs to the node."""
        assert self._mlp_of_nodes is not None
        made = self._by_node(self._mlp_of_nodes)
        source, name = self._stream.source, mlp_name(self._index)
        for child, node, gone in zip(mid, nodes, removed, strict=True):
            child += source.value(name, made[node]) if gone else made[node]
        return mid.flatten(0, 1)


def at_reads(
    x: Float[Tensor, "rows pos d_model"], stream: Stream
) -> Float[Tensor, "rows 1 d_model"]:
    """Each row at the position that the classifier reads."""
    rows = torch.arange(len(x), device=x.device)
    return x[rows, _repeated(stream.reads, len(x))][:, None]


def _repeated(per_row: Tensor, rows: int) -> Tensor:
    """What belongs to the rows of a batch, for several nodes stacked along it."""
    if len(per_row) == 1:
        return per_row.expand(rows, *per_row.shape[1:])
    copies = rows // len(per_row)
    return per_row if copies == 1 else per_row.repeat(copies, *[1] * (per_row.ndim - 1))


def _norm(module: nn.Module) -> Callable[[Tensor], Tensor]:
    if type(module) is not LayerNorm:
        return module
    return lambda x: layer_norm(x, (module.length,), module.w, module.b, module.eps)


def _mlp(module: nn.Module) -> Callable[[Tensor], Tensor]:
    if type(module) is not MLP or module.cfg.is_layer_norm_activation():
        return module
    same = module.act_fn is gelu_new  # PyTorch has this one as a single kernel
    act = partial(gelu, approximate="tanh") if same else module.act_fn

    def run(x: Tensor) -> Tensor:
        hidden = act(torch.addmm(module.b_in, x.flatten(0, -2), module.W_in))
        return torch.addmm(module.b_out, hidden, module.W_out).view_as(x)

    return run
