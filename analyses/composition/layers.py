"""One layer in the pieces that path patching needs, and how a change passes its layer norms.

A layer norm is ``n(u) = c(u) / s(u) * w + b`` with c(u) = u minus its mean (u itself for RMS norms)
and ``s(u) = sqrt(mean(c(u)^2) + eps)``. A change d of its input u arrives behind it as

- ``frozen``: ``c(d) / s(u_clean) * w``, linear in d, the scale that of the clean run;
- ``recomputed``: ``n(u + d) - n(u)``;
- ``tangent``: the derivative of ``recomputed`` at d = 0, in closed form
  ``(c(d) - h mean(h c(d))) / s(u) * w`` with ``h = c(u) / s(u)``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention
from transformer_lens.components.layer_norm import LayerNorm
from transformer_lens.components.layer_norm_pre import LayerNormPre
from transformer_lens.components.rms_norm import RMSNorm
from transformer_lens.components.rms_norm_pre import RMSNormPre

from analyses.composition.receivers import INPUTS
from hc_lens.errors import HcLensError
from hc_lens.suffix.blocks import Stream
from hc_lens.suffix.fused import can_fuse
from hc_lens.suffix.hooked import has_user_hooks

FROZEN, RECOMPUTED, TANGENT = "frozen", "recomputed", "tangent"
NORMS = (FROZEN, RECOMPUTED)
"""How a sender's direct contribution passes layer norms, as a user chooses it."""
_KNOWN_NORMS = (LayerNorm, LayerNormPre, RMSNorm, RMSNormPre, nn.Identity)

SUPPORTED = (
    "classifiers of hc.load: post-norm encoders (BERT, RoBERTa, XLM-RoBERTa, DistilBERT, ELECTRA) "
    "and pre-norm decoders (GPT-2, GPT-Neo, GPT-NeoX, Llama, Mistral, Qwen2)"
)
"""The block structures that path patching knows."""

Resid = Float[Tensor, "rows pos d_model"]
Read = Float[Tensor, "rows 1 d_model"]
Heads = Float[Tensor, "rows pos heads d_head"]


def check_supported(model: Any) -> None:
    """Raise an HcLensError unless path patching knows how the model's blocks are built."""
    from hc_lens.models import DecoderClassifier, EncoderClassifier

    known = isinstance(model, EncoderClassifier | DecoderClassifier)
    if not known or not has_known_blocks(model):
        what = f"a {type(model).__name__}" + (" with other blocks" if known else "")
        raise HcLensError(
            f"expected a model whose block structure is known, got {what}; supported are "
            f"{SUPPORTED}"
        )
    if has_user_hooks(model):
        raise HcLensError(
            "expected a model without hooks, got one with hooks on it, which path patching would "
            "not run; remove them with model.reset_hooks() or leave their with block"
        )


def has_known_blocks(model: Any) -> bool:
    """Whether every block is one of those in `SUPPORTED`."""
    norms = [
        getattr(block, name)
        for block in model.blocks
        for name in ("ln1", "ln2")
        if hasattr(block, name)
    ]
    return (
        can_fuse(model)
        and not getattr(model.cfg, "use_qk_norm", False)
        and all(type(norm) in _KNOWN_NORMS for norm in norms)
    )


class Norm:
    """A layer norm and the three ways in which a change passes it."""

    def __init__(self, module: nn.Module, run: Callable[[Tensor], Tensor] | None = None):
        self._run = module if run is None else run
        self.identity = type(module) is nn.Identity
        self.centres = type(module) in (LayerNorm, LayerNormPre)
        self.eps = getattr(module, "eps", 0.0)
        weight: Any = getattr(module, "w", None)
        self.weight = 1.0 if weight is None else weight.detach()

    def __call__(self, x: Float[Tensor, "... d_model"]) -> Float[Tensor, "... d_model"]:
        """The norm itself."""
        return self._run(x)

    def centred(self, x: Float[Tensor, "... d_model"]) -> Float[Tensor, "... d_model"]:
        """c(x)."""
        return x - x.mean(-1, keepdim=True) if self.centres else x

    def scale(self, x: Float[Tensor, "... d_model"]) -> Float[Tensor, "... 1"]:
        """s(x)."""
        return (self.centred(x).pow(2).mean(-1, keepdim=True) + self.eps).sqrt()

    def carry(self, at: Resid, change: Resid, clean: Resid, how: str) -> Resid:
        """The change behind the norm whose input is `at`, in the clean run `clean`."""
        if self.identity:
            return change
        if how == RECOMPUTED:
            return self(at + change) - self(at)
        moved = self.centred(change)
        if how == FROZEN:
            return moved / self.scale(clean) * self.weight
        scale = self.scale(at)
        unit = self.centred(at) / scale
        return (moved - unit * (unit * moved).mean(-1, keepdim=True)) / scale * self.weight


class Layer:
    """One block, piece by piece; the arithmetic is that of `hc_lens.suffix.fused`."""

    def __init__(self, block: Any, fused: Any):
        """Name the pieces of `block`, whose fused weights `hc_lens.suffix` has already made."""
        self._fused, self.attn = fused, block.attn
        self.post_norm, self.parallel = fused.post_norm, fused.parallel
        self.has_mlp = fused.has_mlp
        self.norm1 = Norm(block.ln1, fused.ln1)
        self.W_O = fused.W_O
        width = self.W_O.shape[1]
        sizes = [n * width for n in fused.heads]
        weights, biases = fused.W_qkv.split(sizes), fused.b_qkv.split(sizes)
        pairs = zip(INPUTS, zip(weights, biases, strict=True), strict=True)
        self._projections: dict[str, tuple[Tensor, Tensor]] = dict(pairs)
        self._repeats = fused.heads[0] // fused.heads[1]
        if self.has_mlp:
            self.norm2, self.mlp = Norm(block.ln2, fused.ln2), fused.mlp

    def project(self, x: Resid, kind: str, bias: bool = True) -> Heads:
        """Queries, keys or values of every head, before any rotation."""
        weight, offset = self._projections[kind]
        out = linear(x, weight, offset if bias else None)
        out = rearrange(out, "r p (h e) -> r p h e", e=self.W_O.shape[1])
        if kind != "q" and self._repeats > 1:
            out = out.repeat_interleave(self._repeats, dim=2)
        return out

    def attend(self, q: Heads, k: Heads, v: Heads, stream: Stream) -> Heads:
        """The output of every head."""
        if self._fused.rotary:
            q, k = (self.attn.apply_rotary(x, 0, stream.mask) for x in (q, k))
        causal = not self.post_norm
        allowed = self._allowed(stream, q) if causal else stream.attend
        z = scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)),
            attn_mask=allowed,
            is_causal=causal and allowed is None,
            scale=1 / self.attn.attn_scale,
        )
        return z.transpose(1, 2)

    def _allowed(self, stream: Stream, q: Tensor) -> Tensor | None:
        """What a decoder's token may attend to; None for everything before it."""
        window = self._fused.window
        if window is None:
            return stream.attend
        near = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=q.device).tril()
        near &= ~near.tril(-window)
        return near[None, None] if stream.attend is None else stream.attend & near

    def attention_input(self, x: Resid) -> Resid:
        """What the heads read."""
        return x if self.post_norm else self.norm1(x)

    def attention_out(self, z: Heads) -> Resid:
        """What the heads write together."""
        return linear(z.flatten(2), self._fused.W_O.flatten(0, 1).T, self._fused.b_O)

    @property
    def mlp_norm(self) -> Norm:
        """The norm in front of the MLP."""
        return self.norm1 if self.post_norm else self.norm2

    def before_mlp(self, x: Resid, attention: Resid) -> Resid:
        """The input of the norm in front of the MLP."""
        return x if self.parallel else x + attention

    def close(self, x: Resid, attention: Resid, mlp_in: Resid, mlp_out: Resid) -> Resid:
        """The residual stream behind the layer, before a post-norm encoder's last norm."""
        return mlp_in + mlp_out if self.post_norm else x + attention + mlp_out

    def finish(self, moved: Resid, parallel_mlp_out: Resid | None) -> Resid:
        """The stream behind the layer, when `moved` is its stream behind attention.

        In a parallel layer the MLP does not read `moved`, so what it writes is given.
        """
        if not self.has_mlp:
            return moved
        if parallel_mlp_out is not None:
            return moved + parallel_mlp_out
        mlp_in = self.mlp_norm(moved)
        if self.post_norm:
            return self.norm2(mlp_in + self.mlp(mlp_in))
        return moved + self.mlp(mlp_in)
