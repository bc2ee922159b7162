"""What stands in the blocks of an encoder that is not BERT, in TransformerLens 3.

1. `EncoderAttention` is TransformerLens's attention with a bias of its scores
   (`hc_lens.models.distances`), rotary positions or a local window. What it adds is the same
   function that the kernels of `hc_lens.blocks` take.
2. `PreNormBlock` is BERT's block with its norms in front of what they norm:
   ``m = x + attn(ln1(x)); m + mlp(ln2(m))``.
3. `ConvolvedBlock` is BERT's block with a convolution of its input behind it (DeBERTa-v2).
All keep TransformerLens's hook names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import conv1d, linear
from transformer_lens.components.attention import Attention
from transformer_lens.components.bert_block import BertBlock
from transformer_lens.components.layer_norm import LayerNorm
from transformer_lens.config.hooked_transformer_config import HookedTransformerConfig

from hc_lens.models.distances import Bucketed, Disentangled, Scores

Bias = Callable[[Tensor, Tensor, Tensor | None], Scores]
"""What is added to the scores, of queries, keys and the queries' positions."""
MakeBias = Callable[[Mapping[str, Tensor], bool], Bias]
"""Makes it from an attention's weights by name; the flag says that they will not change."""


class EncoderAttention(Attention):
    """An encoder's attention with what its family does beyond BERT's."""

    window: int | None = None
    """How many tokens back and ahead a token sees, itself included; None for all."""
    rotary: Rotary | None = None
    """Rotary positions."""
    pads_see_all: bool = False
    """Whether a pad's query attends to every token alike."""
    make_bias: MakeBias | None = None
    """What is added to the scores."""
    says: str = ""
    """What the weights do not say of it, for the model's fingerprint."""

    def __init__(self, cfg: HookedTransformerConfig, **given: Any):
        """TransformerLens's attention; `given` are some of the attributes above."""
        super().__init__(cfg)
        for name, value in given.items():
            setattr(self, name, value)
        for table in ("rotary_sin", "rotary_cos"):
            # TransformerLens's own, at the one base of its configuration.
            if hasattr(self, table):
                delattr(self, table)

    def bias(self, weights: Mapping[str, Tensor], fixed: bool) -> Bias | None:
        """What is added to the scores with these weights of the attention."""
        return None if self.make_bias is None else self.make_bias(weights, fixed)

    def calculate_attention_scores(
        self,
        q: Float[Tensor, "batch pos head d_head"],
        k: Float[Tensor, "batch pos head d_head"],
    ) -> Float[Tensor, "batch head pos pos"]:
        """TransformerLens's own, and the bias."""
        scores = super().calculate_attention_scores(q, k)
        bias = self.bias(dict(self.named_parameters(recurse=False)), False)
        return scores if bias is None else scores + bias(q, k, None)

    def apply_rotary(  # type: ignore[override]
        self, x: Float[Tensor, "batch pos head d_head"], *_: Any
    ) -> Float[Tensor, "batch pos head d_head"]:
        """Positions count from the first one, whatever the mask."""
        assert self.rotary is not None
        return self.rotary(x)

    def forward(  # type: ignore[override]
        self,
        query_input: Tensor,
        key_input: Tensor,
        value_input: Tensor,
        additive_attention_mask: Float[Tensor, "batch 1 1 pos"] | None = None,
    ) -> Float[Tensor, "batch pos d_model"]:
        """TransformerLens's own, whose mask also knows the window and the pads' queries."""
        q, k, v = self.calculate_qkv_matrices(query_input, key_input, value_input)
        if self.rotary is not None:
            q, k = self.hook_rot_q(self.apply_rotary(q)), self.hook_rot_k(self.apply_rotary(k))
        scores = self.calculate_attention_scores(q, k)
        mask = self._mask(scores, additive_attention_mask)
        scores = self.hook_attn_scores(scores if mask is None else scores + mask)
        if self.window is None:
            pattern = scores.softmax(-1)
        else:
            # A pad with nothing but pads in its window sees nothing, without a gradient of NaN.
            blind = (scores == -torch.inf).all(-1, keepdim=True)
            pattern = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
        z = self.calculate_z_scores(v, self.hook_pattern(pattern).to(v.dtype))
        if self.cfg.use_attn_result:
            return self.hook_result(torch.einsum("bphe,hed->bphd", z, self.W_O)).sum(2) + self.b_O
        return linear(z.flatten(2), self.W_O.flatten(0, 1).T, self.b_O)

    def _mask(
        self,
        scores: Float[Tensor, "batch head pos pos"],
        mask: Float[Tensor, "batch 1 1 pos"] | None,
    ) -> Float[Tensor, "#batch 1 #pos pos"] | None:
        """What is added to the scores where a token may not attend."""
        if mask is not None and self.pads_see_all:
            real = mask == 0
            # Added to a score, the lowest number is left: all scores of a pad's query are equal.
            low = torch.finfo(scores.dtype).min
            mask = torch.where(real & real.transpose(-1, -2), scores.new_zeros(()), low)
        pos = scores.shape[-1]
        if self.window is None or pos <= self.window:
            return mask
        places = torch.arange(pos, device=scores.device)
        far = (places - places[:, None]).abs() >= self.window
        band = scores.new_zeros(1, 1, pos, pos).masked_fill(far, -torch.inf)
        return band if mask is None else mask + band


class Rotary:
    """Rotary positions as in GPT-NeoX: both halves of a vector turn together."""

    def __init__(self, base: float, d_head: int):
        """The frequencies fall from 1 to nearly ``1 / base``."""
        self.base, self.d_head = base, d_head

    def __call__(
        self, x: Float[Tensor, "rows pos heads d_head"], mask: Tensor | None = None
    ) -> Float[Tensor, "rows pos heads d_head"]:
        """Queries or keys, turned by their positions; tables are float32, as in Hugging Face."""
        steps = torch.arange(0, self.d_head, 2, dtype=torch.float32, device=x.device)
        places = torch.arange(x.shape[1], dtype=torch.float32, device=x.device)
        angles = places[:, None] * (1.0 / self.base ** (steps / self.d_head))
        angles = angles.repeat(1, 2)[:, None]
        wide = x if x.dtype == torch.float64 else x.float()
        cos, sin = (table.to(x.dtype).to(wide.dtype) for table in (angles.cos(), angles.sin()))
        one, other = wide.chunk(2, dim=-1)
        return (wide * cos + torch.cat([-other, one], dim=-1) * sin).to(x.dtype)


class RelativeTable(nn.Module):
    """Embeddings of distances, which all layers share, and the norm of some models (DeBERTa)."""

    def __init__(self, cfg: HookedTransformerConfig, rows: int, width: int, normed: bool = False):
        super().__init__()
        self.w = nn.Parameter(torch.empty(rows, width, dtype=cfg.dtype))
        self.ln = LayerNorm(cfg) if normed else None

    def forward(self, rows: Int[Tensor, "distances"]) -> Float[Tensor, "distances width"]:
        """Some of its rows."""
        return self.w[rows] if self.ln is None else self.ln(self.w[rows])


@dataclass(frozen=True)
class MakeDisentangled:
    """Makes DeBERTa's terms from the weights of an attention."""

    table: RelativeTable
    """The relative embeddings."""
    place: Callable[[Tensor], Tensor]
    """The row of each distance."""
    scale: float
    """The terms are divided by it."""
    keys: tuple[str, str] | None
    """Names of the weight and bias that make keys of relative embeddings, if any."""
    queries: tuple[str, str] | None
    """The same for queries."""

    def __call__(self, weights: Mapping[str, Tensor], fixed: bool) -> Disentangled:
        """The terms with these weights."""

        def project(names: tuple[str, str], distance: Tensor) -> Tensor:
            rows = self.table(self.place(distance))
            weight, bias = (weights[name] for name in names)
            return (rows.detach() if fixed else rows) @ weight + bias[:, None]

        keys, queries = (
            None if names is None else partial(project, names)
            for names in (self.keys, self.queries)
        )
        return Disentangled(self.scale, keys, queries, fixed)


@dataclass(frozen=True)
class MakeBucketed:
    """Makes MPNet's bias, which no weight of an attention plays a part in."""

    table: RelativeTable
    """One number for each bucket and head."""

    def __call__(self, weights: Mapping[str, Tensor], fixed: bool) -> Bucketed:
        """The bias."""
        return Bucketed(self.table.w.detach() if fixed else self.table.w)


class PreNormBlock(BertBlock):
    """BERT's block with its norms in front of the attention and the MLP."""

    def __init__(self, cfg: HookedTransformerConfig):
        super().__init__(cfg)
        # What they would show is not computed here.
        for name in ("q_input", "k_input", "v_input", "mlp_in", "normalized_resid_post"):
            delattr(self, f"hook_{name}")

    def forward(
        self,
        resid_pre: Float[Tensor, "batch pos d_model"],
        additive_attention_mask: Float[Tensor, "batch 1 1 pos"] | None = None,
    ) -> Float[Tensor, "batch pos d_model"]:
        """The stream behind the block."""
        resid_pre = self.hook_resid_pre(resid_pre)
        reads = (self.ln1(resid_pre),) * 3
        attn_out = self.attn(*reads, additive_attention_mask=additive_attention_mask)
        resid_mid = self.hook_resid_mid(resid_pre + self.hook_attn_out(attn_out))
        return self.hook_resid_post(resid_mid + self.hook_mlp_out(self.mlp(self.ln2(resid_mid))))


class Convolution(nn.Module):
    """A convolution over positions, its activation and a norm (DeBERTa-v2)."""

    def __init__(
        self, cfg: HookedTransformerConfig, size: int, groups: int, act: Callable[[Tensor], Tensor]
    ):
        super().__init__()
        self.groups, self.act, self.says = groups, act, f"{groups} {act}"
        shape = (cfg.d_model, cfg.d_model // groups, size)
        self.w = nn.Parameter(torch.empty(shape, dtype=cfg.dtype))
        self.b = nn.Parameter(torch.zeros(cfg.d_model, dtype=cfg.dtype))
        self.ln = LayerNorm(cfg)

    def forward(
        self, x: Float[Tensor, "batch pos d_model"], mask: Int[Tensor, "batch pos"] | None
    ) -> Float[Tensor, "batch pos d_model"]:
        """What it adds to the stream, in front of the norm; nothing at pads, but for act(0)."""
        padding = (self.w.shape[2] - 1) // 2
        out = conv1d(x.mT, self.w, self.b, padding=padding, groups=self.groups).mT
        return self.act(out if mask is None else out * mask[..., None])


class ConvolvedBlock(BertBlock):
    """BERT's block, whose output takes up a convolution of its input, is normed, and 0 at pads."""

    conv: Convolution

    def forward(
        self,
        resid_pre: Float[Tensor, "batch pos d_model"],
        additive_attention_mask: Float[Tensor, "batch 1 1 pos"] | None = None,
    ) -> Float[Tensor, "batch pos d_model"]:
        """The stream behind the block."""
        mask = additive_attention_mask
        real = None if mask is None else (mask[:, 0, 0] == 0).long()
        behind = super().forward(resid_pre, additive_attention_mask)
        out = self.conv.ln(behind + self.conv(resid_pre, real))
        return out if real is None else out * real[..., None]
