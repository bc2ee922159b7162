"""MPNet (Song et al. 2020): RoBERTa without token types, whose scores have a number for distances.

1. Positions count the tokens that are not pads, from 2 on, whatever the pad id of the
   configuration: Hugging Face takes id 1 for pads.
2. Every score of a head has one number of 32 added, by the bucket of the distance of the two
   positions in the row (`hc_lens.models.distances.t5_bucket`). All layers share the table.
3. The head is a tanh layer at position 0 and a linear layer.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from hc_lens.models.encoders import PARTS, EncoderFamily

PAD, BUCKETS = 1, 32
"""Hugging Face computes with these numbers, whatever the configuration says."""


def _embed(cfg: Any, config: Any) -> nn.Module:
    from hc_lens.models.embeddings import PadAwareEmbed
    from hc_lens.models.encoder_blocks import RelativeTable

    embed = PadAwareEmbed(cfg, PAD)
    embed.relative = RelativeTable(cfg, BUCKETS, cfg.n_heads)
    return embed


def _shape(model: Any, config: Any) -> None:
    """Attention with the shared table everywhere."""
    from hc_lens.models.encoder_blocks import EncoderAttention, MakeBucketed

    for block in model.blocks:
        block.attn = EncoderAttention(model.cfg, make_bias=MakeBucketed(model.embed.relative))


FAMILY = EncoderFamily(
    pooler="classifier.dense",
    classifier="classifier.out_proj",
    parts={
        **PARTS,
        "attn.W_Q": "attention.attn.q",
        "attn.W_K": "attention.attn.k",
        "attn.W_V": "attention.attn.v",
        "attn.W_O": "attention.attn.o",
        "ln1.w": "attention.LayerNorm",
    },
    extra={"embed.relative.w": "encoder.relative_attention_bias"},
    first_position=lambda config: PAD + 1,
    embed=_embed,
    shape=_shape,
    known={"relative_attention_num_buckets": (BUCKETS,), "pad_token_id": (PAD,)},
    bridged=False,
)
