"""One transformer block in the shapes that the kernels read, for every engine.

1. `Heads` holds the weights of the attention, `Norm` a normalisation, `Mlp` a plain or gated MLP.
   They are plain tensors: a `Block` is made by a view of a model (`hc_lens.models.views`), which
   may replace any weight, and everything here can be differentiated with respect to them.
2. Queries, keys and values come from one matrix product, attention from PyTorch's fused kernel,
   layer norms from ``layer_norm``: the model's own arithmetic without its hook points.
3. Where only one position of each row matters, `Block.attend_at` computes the attention there. If
   keys depend on their tokens alone, ``q . (x W_K)`` is computed as ``(q W_K) . x`` and
   ``p (x W_V)`` as ``(p x) W_V``, so no token is projected to a key or a value.
4. What follows the attention depends on where the norms stand:
   post-norm (BERT) ``n = norm1(x + a); norm2(n + mlp(n))``, pre-norm (GPT-2)
   ``m = x + a; m + mlp(norm2(m))``, parallel (GPT-NeoX) ``x + a + mlp(norm2(x))``. Gemma 2 also
   normalises what the attention and the MLP write.
5. Pads are never attended to; what a pad's own query sees is free, as nobody reads it. DeBERTa's
   sees every token alike, which counts where rows are padded on the left.
6. What a family adds to its scores for the distance of two tokens (`Heads.bias`) goes into the
   fused kernel as its mask.

A new kind of model needs one new view and nothing here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, TypeVar

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import layer_norm, linear, scaled_dot_product_attention

Kind = Literal["q", "k", "v"]
"""What a head makes of its input: queries, keys or values."""
KINDS: tuple[Kind, ...] = ("q", "k", "v")

Resid = Float[Tensor, "rows pos d_model"]
"""A residual stream, or something added to it."""
PerHead = Float[Tensor, "rows pos heads d_head"]
"""Queries, keys, values or outputs of every head."""


@dataclass(frozen=True)
class Context:
    """Who may attend to whom in a batch; without arguments a batch without pads."""

    mask: Int[Tensor, "batch pos"] | None = None
    """The 0/1 attention mask that the model hands to its layers; rotary positions depend on it."""
    allowed: Bool[Tensor, "batch 1 queries pos"] | None = None
    """What each token may attend to; None for all tokens (in a causal model all earlier ones)."""
    reads: Int[Tensor, "batch"] | None = None
    """The position at which each row is read, for `Block.attend_at`."""
    allowed_at_reads: Bool[Tensor, "batch 1 1 pos"] | None = None
    """What the token at the read position may attend to; None for all tokens."""
    mean: bool = False
    """Whether each row is read at all its tokens, as their mean, and not at one position."""
    beside: Resid | None = None
    """What the stream takes up where a block has an `entrance`."""

    @classmethod
    def of(
        cls,
        mask: Int[Tensor, "batch pos"] | None,
        reads: Int[Tensor, "batch"],
        pos: int,
        causal: bool,
        mean: bool = False,
    ) -> Context:
        """The context of a batch of `pos` positions with its attention mask and read positions."""
        real = None if mask is None or bool(mask.all()) else mask.bool()[:, None, None]
        if not causal:
            return cls(mask, real, reads, real, mean)
        keys = torch.arange(pos, device=reads.device)
        queries, before_read = keys[:, None], keys <= reads[:, None, None, None]
        if real is None:
            return cls(mask, None, reads, before_read)
        # A pad sees itself, so that no softmax is empty.
        allowed = (real & (keys <= queries)) | (keys == queries)
        return cls(mask, allowed, reads, real & before_read)

    def at_reads(self, x: Shaped[Tensor, "rows pos *rest"]) -> Shaped[Tensor, "rows _ *rest"]:
        """Each row at the position where it is read; all of it where its mean is read."""
        if self.mean:
            return x
        assert self.reads is not None
        rows = torch.arange(len(x), device=x.device)
        return x[rows, repeated(self.reads, len(x))][:, None]

    def pooled(self, x: Float[Tensor, "rows pos width"]) -> Float[Tensor, "rows 1 width"]:
        """What is read, of what `at_reads` leaves: itself, or the mean over the tokens."""
        if not self.mean:
            return x
        return mean_of_tokens(x, None if self.mask is None else repeated(self.mask, len(x)))


def mean_of_tokens(
    x: Float[Tensor, "rows pos width"], mask: Int[Tensor, "rows pos"] | None
) -> Float[Tensor, "rows 1 width"]:
    """The mean of each row over its tokens that are not pads."""
    if mask is None:
        return x.mean(1, keepdim=True)
    return (x * mask[..., None]).sum(1, keepdim=True) / mask.sum(1)[:, None, None]


def repeated(per_row: Tensor, rows: int) -> Tensor:
    """What belongs to the rows of a batch, for several copies of the batch stacked along it."""
    if len(per_row) == 1:
        return per_row.expand(rows, *per_row.shape[1:])
    copies = rows // len(per_row)
    return per_row if copies == 1 else per_row.repeat(copies, *[1] * (per_row.ndim - 1))


@dataclass(frozen=True)
class Norm:
    """A layer norm ``c(x) / s(x) * weight + bias``, or an RMS norm, which does not centre."""

    centres: bool
    """Whether c(x) is x minus its mean, as in a layer norm, or x itself, as in an RMS norm."""
    eps: float
    weight: Float[Tensor, "width"] | None = None
    """None where it is folded into the weights behind the norm."""
    bias: Float[Tensor, "width"] | None = None
    identity: bool = False
    """Whether the model has no norm here."""

    def __call__(self, x: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows width"]:
        """The normalised input."""
        if self.identity:
            return x
        if self.centres and self.weight is not None:
            return layer_norm(x, (len(self.weight),), self.weight, self.bias, self.eps)
        wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
        centred = self.centred(wide)
        normed = (centred / self._scale_of(centred)).to(x.dtype)
        return normed if self.weight is None else normed * self.weight

    def centred(self, x: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows width"]:
        """c(x)."""
        return x - x.mean(-1, keepdim=True) if self.centres else x

    def scale(self, x: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows 1"]:
        """``s(x) = sqrt(mean(c(x)^2) + eps)``."""
        return self._scale_of(self.centred(x))

    def _scale_of(self, centred: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows 1"]:
        return (centred.pow(2).mean(-1, keepdim=True) + self.eps).sqrt()


NO_NORM = Norm(centres=False, eps=0.0, identity=True)


@dataclass(frozen=True)
class Mlp:
    """``act(x W_in + b_in) W_out + b_out``, or gated: ``(act(x W_gate) * x W_in + b_in) W_out``."""

    W_in: Float[Tensor, "d_model d_mlp"]
    b_in: Float[Tensor, "d_mlp"]
    W_out: Float[Tensor, "d_mlp d_model"]
    b_out: Float[Tensor, "d_model"]
    act: Callable[[Tensor], Tensor]
    W_gate: Float[Tensor, "d_model d_mlp"] | None = None

    def __call__(self, x: Float[Tensor, "*rows d_model"]) -> Float[Tensor, "*rows d_model"]:
        """What the MLP writes."""
        flat = x.flatten(0, -2)
        if self.W_gate is None:
            hidden = self.act(torch.addmm(self.b_in, flat, self.W_in))
        else:
            hidden = self.act(flat @ self.W_gate) * (flat @ self.W_in) + self.b_in
        return torch.addmm(self.b_out, hidden, self.W_out).view_as(x)


@dataclass(frozen=True)
class Heads:
    """The weights of one layer's attention; keys and values may be shared by groups of heads."""

    W_Q: Float[Tensor, "heads d_model d_head"]
    W_K: Float[Tensor, "groups d_model d_head"]
    W_V: Float[Tensor, "groups d_model d_head"]
    b_Q: Float[Tensor, "heads d_head"]  # noqa: N815
    b_K: Float[Tensor, "groups d_head"]  # noqa: N815
    b_V: Float[Tensor, "groups d_head"]  # noqa: N815
    W_O: Float[Tensor, "heads d_head d_model"]
    b_O: Float[Tensor, "d_model"]  # noqa: N815
    scale: float
    """Scores are divided by it."""
    causal: bool
    """Whether a token sees only itself and earlier tokens."""
    window: int | None = None
    """How many tokens back (and ahead, unless causal) a token sees, itself included; None: all."""
    rotate: Callable[[Tensor, Tensor | None], Tensor] | None = None
    """Rotary positions: queries or keys and the attention mask to the rotated ones."""
    norm_q: Norm = NO_NORM
    """Norm of each head's queries."""
    norm_k: Norm = NO_NORM
    """Norm of each head's keys."""
    bias: Callable[[PerHead, PerHead, Tensor | None], Tensor] | None = None
    """What is added to the scores [rows, heads, queries, keys]: of queries, keys and, where there
    is one query for each row, its position (`hc_lens.models.distances`)."""
    pads_see_all: bool = False
    """Whether a pad's query attends to every token alike."""

    @property
    def shared(self) -> int:
        """How many heads share their keys and values."""
        return len(self.W_Q) // len(self.W_K)

    @property
    def plain_keys(self) -> bool:
        """Whether keys are a linear map of their tokens, one for each head."""
        keyed = self.rotate is None and self.bias is None and not self.pads_see_all
        return keyed and self.norm_k.identity and self.shared == 1

    def expanded(self, groups: Tensor, dim: int) -> Tensor:
        """What belongs to groups of heads along a dimension, for every head."""
        return groups if self.shared == 1 else groups.repeat_interleave(self.shared, dim=dim)


Weights = TypeVar("Weights", Heads, Mlp)


@dataclass(frozen=True)
class Block:
    """One transformer block."""

    heads: Heads
    norm1: Norm
    """In front of the heads; in a post-norm block behind the attention."""
    norm2: Norm = NO_NORM
    """In front of the MLP; in a post-norm block behind it."""
    mlp: Mlp | Callable[[Tensor], Tensor] | None = None
    """None in a model with attention alone."""
    post_norm: bool = False
    parallel: bool = False
    """Whether the MLP reads what the heads read, not what they wrote."""
    attention_norm: Norm = NO_NORM
    """Norm of what the heads write together (Gemma 2)."""
    mlp_out_norm: Norm = NO_NORM
    """Norm of what the MLP writes (Gemma 2)."""
    entrance: Norm = NO_NORM
    """Norm of the stream and `Context.beside`, behind a convolution (DeBERTa-v2)."""

    @cached_property
    def W_qkv(self) -> Float[Tensor, "rows d_model"]:  # noqa: N802
        """The weights of queries, keys and values, one below the other."""
        parts = (self.heads.W_Q, self.heads.W_K, self.heads.W_V)
        return torch.cat([rearrange(weight, "h d e -> (h e) d") for weight in parts])

    @cached_property
    def b_qkv(self) -> Float[Tensor, "rows"]:
        """The biases of queries, keys and values, one behind the other."""
        return torch.cat([b.flatten() for b in (self.heads.b_Q, self.heads.b_K, self.heads.b_V)])

    @property
    def mlp_norm(self) -> Norm:
        """The norm in front of the MLP."""
        return self.norm1 if self.post_norm else self.norm2

    def begin(self, x: Resid, context: Context) -> Resid:
        """The stream in front of the block, from that behind the last one."""
        if self.entrance.identity:
            return x
        assert context.beside is not None
        out = self.entrance(x + repeated(context.beside, len(x)))
        return out if context.mask is None else out * repeated(context.mask, len(x))[..., None]

    def attention_input(self, x: Resid) -> Resid:
        """What the heads read."""
        return x if self.post_norm else self.norm1(x)

    def project(self, x: Resid, kind: Kind, bias: bool = True) -> PerHead:
        """Queries, keys or values of every head, before any norm and rotation of them."""
        index = KINDS.index(kind)
        offset = self.b_qkv.split(self._sizes)[index] if bias else None
        out = self._per_head(linear(x, self.W_qkv.split(self._sizes)[index], offset))
        return out if kind == "q" else self.heads.expanded(out, dim=2)

    def attention(self, x: Resid, context: Context) -> PerHead:
        """The output of every head that reads `x`, at every position."""
        return self._mixed(*self._qkv(x, context), self._allowed(x, context))

    def attend(self, q: PerHead, k: PerHead, v: PerHead, context: Context) -> PerHead:
        """The output of every head with its queries, keys and values as `project` gives them."""
        return self._mixed(*self._turned(q, k, context), v, self._allowed(q, context))

    def attend_at(self, x: Resid, context: Context) -> Float[Tensor, "rows _ heads d_head"]:
        """The output of every head that reads `x`, at each row's read position."""
        if context.mean:
            return self.attention(x, context)
        heads, allowed = self.heads, self._allowed(x, context, at_reads=True)
        if not heads.plain_keys:
            q, k, v = self._qkv(x, context)
            return self._mixed(context.at_reads(q), k, v, allowed, context.reads)
        q = rearrange(self.project(context.at_reads(x), "q"), "rows 1 h e -> h rows e")
        # Keys as (q W_K) . x: their bias moves all scores of a head alike and drops out.
        keyed = rearrange(q @ heads.W_K.transpose(1, 2), "h rows d -> rows h d")
        scores = torch.bmm(keyed, x.transpose(1, 2)) / heads.scale
        if allowed is not None:
            scores = scores.masked_fill(~allowed[:, 0], -torch.inf)
        mixed = rearrange(torch.bmm(scores.softmax(-1), x), "rows h d -> h rows d")
        return rearrange(mixed @ heads.W_V + heads.b_V[:, None], "h rows e -> rows 1 h e")

    def attention_out(self, z: PerHead) -> Resid:
        """What the heads write together, before `attention_norm`."""
        return linear(z.flatten(2), self.heads.W_O.flatten(0, 1).T, self.heads.b_O)

    def written_by_heads(self, z: PerHead) -> Float[Tensor, "rows pos heads d_model"]:
        """What each head writes; with b_O their sum is `attention_out`."""
        return torch.einsum("rphe,hed->rphd", z, self.heads.W_O)

    def mlp_out(self, mlp_in: Resid) -> Resid:
        """What the MLP adds to the stream if it reads `mlp_in`."""
        assert self.mlp is not None
        return self.mlp_out_norm(self.mlp(mlp_in))

    def before_mlp(self, x: Resid, attention: Resid) -> Resid:
        """The input of the norm in front of the MLP, from what the attention adds to the stream."""
        return x if self.parallel else x + attention

    def close(self, x: Resid, attention: Resid, mlp_in: Resid, mlp_out: Resid) -> Resid:
        """The stream behind the block, before the last norm of a post-norm block."""
        return mlp_in + mlp_out if self.post_norm else x + attention + mlp_out

    def finish(self, moved: Resid, parallel_mlp_out: Resid | None = None) -> Resid:
        """The stream behind the block, when `moved` is its stream behind the attention.

        In a parallel block the MLP does not read `moved`, so what it adds is given.
        """
        if self.mlp is None:
            return moved
        if parallel_mlp_out is not None:
            return moved + parallel_mlp_out
        mlp_in = self.mlp_norm(moved)
        if self.post_norm:
            return self.norm2(mlp_in + self.mlp_out(mlp_in))
        return moved + self.mlp_out(mlp_in)

    def __call__(self, x: Resid, context: Context) -> Resid:
        """The stream behind the block."""
        x = self.begin(x, context)
        return self._behind(x, self.attention(self.attention_input(x), context))

    def at_reads(self, x: Resid, context: Context) -> Float[Tensor, "rows _ d_model"]:
        """The stream behind the block at each row's read position alone."""
        x = self.begin(x, context)
        z = self.attend_at(self.attention_input(x), context)
        return self._behind(context.at_reads(x), z)

    def _behind(self, x: Resid, z: PerHead) -> Resid:
        moved = x + self.attention_norm(self.attention_out(z))
        return self.finish(moved, self.mlp_out(self.norm2(x)) if self.parallel else None)

    @cached_property
    def _sizes(self) -> list[int]:
        """Rows of `W_qkv` that make queries, keys and values."""
        return [b.numel() for b in (self.heads.b_Q, self.heads.b_K, self.heads.b_V)]

    def _per_head(self, x: Float[Tensor, "rows pos width"]) -> PerHead:
        return x.unflatten(-1, (-1, self.heads.W_O.shape[1]))

    def _qkv(self, x: Resid, context: Context) -> tuple[PerHead, PerHead, PerHead]:
        """Queries, keys and values of every head from one product, normalised and rotated."""
        split = linear(x, self.W_qkv, self.b_qkv).split(self._sizes, dim=-1)
        q, k, v = map(self._per_head, split)
        q, k = self._turned(q, k, context)
        return q, self.heads.expanded(k, dim=2), self.heads.expanded(v, dim=2)

    def _turned(
        self, q: PerHead, k: Float[Tensor, "rows pos groups d_head"], context: Context
    ) -> tuple[PerHead, Float[Tensor, "rows pos groups d_head"]]:
        """Queries and keys normalised and rotated, where the model does so."""
        q, k = self.heads.norm_q(q), self.heads.norm_k(k)
        if self.heads.rotate is None:
            return q, k
        mask = None if context.mask is None else repeated(context.mask, len(q))
        return self.heads.rotate(q, mask), self.heads.rotate(k, mask)

    def _mixed(
        self,
        q: Float[Tensor, "rows queries heads d_head"],
        k: PerHead,
        v: PerHead,
        allowed: Bool[Tensor, "rows 1 #queries pos"] | None,
        at: Int[Tensor, "batch"] | None = None,
    ) -> Float[Tensor, "rows queries heads d_head"]:
        return scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)),
            attn_mask=self._added(q, k, allowed, at),
            is_causal=self.heads.causal and allowed is None,
            scale=1 / self.heads.scale,
        ).transpose(1, 2)

    def _added(
        self,
        q: Float[Tensor, "rows queries heads d_head"],
        k: PerHead,
        allowed: Bool[Tensor, "rows 1 #queries pos"] | None,
        at: Int[Tensor, "batch"] | None,
    ) -> Tensor | None:
        """What the fused kernel takes as its mask: what is allowed, or what is added to scores."""
        heads = self.heads
        bias = None if heads.bias is None else heads.bias(q, k, at)
        if allowed is None or (bias is None and not heads.pads_see_all):
            return allowed if bias is None else bias.to(q.dtype).expand(len(q), -1, -1, -1)
        # With the lowest number, all scores of a pad's query are equal; with infinity it has none.
        low = torch.finfo(q.dtype).min if heads.pads_see_all else -torch.inf
        added = torch.zeros((), dtype=q.dtype, device=q.device) if bias is None else bias
        return torch.where(allowed, added.to(q.dtype), low)

    def _allowed(
        self, x: Float[Tensor, "rows pos *rest"], context: Context, at_reads: bool = False
    ) -> Bool[Tensor, "rows 1 queries pos"] | None:
        """What each token may attend to; None for everything, or everything before it."""
        heads, allowed = self.heads, context.allowed_at_reads if at_reads else context.allowed
        keys = torch.arange(x.shape[1], device=x.device)
        queries = keys[None, None, :, None]
        if at_reads:
            assert context.reads is not None
            queries = context.reads[:, None, None, None]
        if heads.pads_see_all and allowed is not None:
            assert context.mask is not None
            seeing = context.at_reads(context.mask) if at_reads else context.mask
            allowed = allowed & seeing.bool()[:, None, :, None]
        if heads.window is not None and (heads.causal or x.shape[1] > heads.window):
            near = keys > queries - heads.window
            near = near & (keys <= queries if heads.causal else keys < queries + heads.window)
            allowed = near if allowed is None else allowed & near
        return None if allowed is None else repeated(allowed, len(x))


def in_precision(block: Block, dtype: torch.dtype) -> Block:
    """The block with its matrices in another precision; norms and biases stay as they are."""
    mlp = _matrices_in(block.mlp, dtype) if isinstance(block.mlp, Mlp) else block.mlp
    return replace(block, heads=_matrices_in(block.heads, dtype), mlp=mlp)


def _matrices_in(weights: Weights, dtype: torch.dtype) -> Weights:
    matrices = {name: value.to(dtype) for name, value in vars(weights).items()
                if name.startswith("W_") and value is not None}  # fmt: skip
    return replace(weights, **matrices)


def forward_mode() -> AbstractContextManager[object]:
    """A context in which attention also has forward-mode derivatives (``torch.func.jvp``)."""
    return sdpa_kernel(SDPBackend.MATH)
