"""DeBERTa-v2 and v3 (He et al. 2021): BERT with disentangled attention.

1. Scores are ``(q_i . k_j + q_i . K(r(i - j)) + k_j . Q(r(i - j))) / sqrt(d_head * terms)`` with
   one, two or three terms (`pos_att_type`). r is a row of a table that all layers share, normed
   where `norm_rel_ebd` says so; its rows are logarithmic buckets of distances. With
   `share_att_key` its keys and queries are made by W_K and W_Q, else by weights of their own.
2. Positions may also be added to the embeddings (`position_biased_input`; not in v3), which are
   projected if they are narrower, then normed, and 0 at pads.
3. A pad's own query attends to every position alike.
4. With `conv_kernel_size` the first layer's output takes up a convolution of the embeddings.
5. The head is a dense layer at position 0, its activation, and a classifier.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from hc_lens.errors import check_count
from hc_lens.models.distances import log_bucket
from hc_lens.models.encoders import PARTS, EncoderFamily

TERMS = ("c2p", "p2c")
"""Content to position, and position to content."""


def _terms(config: Any) -> tuple[str, ...]:
    """The terms that an attention score has for positions."""
    return tuple(term for term in TERMS if term in (config.pos_att_type or ()))


def _scale(config: Any) -> float:
    """What scores are divided by, in float32 as in Hugging Face."""
    d_head = config.hidden_size // config.num_attention_heads
    factor = 1 + len(_terms(config))
    return float(torch.sqrt(torch.tensor(d_head, dtype=torch.float) * factor))


def _place(distance: Tensor, buckets: int, farthest: int) -> Tensor:
    """The row of a distance in the table of relative embeddings."""
    half = buckets if buckets > 0 else farthest
    return (log_bucket(distance, buckets, farthest) + half).clamp(0, 2 * half - 1)


def _farthest(config: Any) -> int:
    given = getattr(config, "max_relative_positions", -1)
    return given if given > 0 else config.max_position_embeddings


def _embed(cfg: Any, config: Any) -> nn.Module:
    from hc_lens.models.embeddings import MaskedEmbed
    from hc_lens.models.encoder_blocks import RelativeTable

    width = getattr(config, "embedding_size", config.hidden_size)
    embed = MaskedEmbed(cfg, width, config.position_biased_input)
    if config.relative_attention:
        buckets = getattr(config, "position_buckets", -1)
        rows = 2 * (buckets if buckets > 0 else _farthest(config))
        normed = getattr(config, "norm_rel_ebd", "none") == "layer_norm"
        embed.relative = RelativeTable(cfg, rows, cfg.d_model, normed)
    return embed


def _shape(model: Any, config: Any) -> None:
    """Disentangled attention everywhere, and the convolution behind the first layer."""
    from hc_lens.models.encoder_blocks import Convolution, ConvolvedBlock

    cfg = model.cfg
    if size := getattr(config, "conv_kernel_size", 0):
        # The kernels take it in front of the second.
        check_count("num_hidden_layers of a checkpoint with a convolution", cfg.n_layers, 2)
        act = ACT2FN[getattr(config, "conv_act", "tanh")]
        first = ConvolvedBlock(cfg)
        first.conv = Convolution(cfg, size, getattr(config, "conv_groups", 1), act)
        model.blocks[0] = first
    model.pooler.says = config.pooler_hidden_act
    for block in model.blocks:
        block.attn = _attention(cfg, config, getattr(model.embed, "relative", None))


def _attention(cfg: Any, config: Any, table: Any) -> nn.Module:
    from hc_lens.models.encoder_blocks import EncoderAttention, MakeDisentangled

    terms = _terms(config) if config.relative_attention else ()
    attention = EncoderAttention(cfg, pads_see_all=True)
    attention.says = f"{cfg.attn_scale}"
    if not terms:
        return attention
    shared = getattr(config, "share_att_key", False)
    end = "" if shared else "_pos"
    names = {
        term: (f"W_{kind}{end}", f"b_{kind}{end}") for term, kind in zip(TERMS, "KQ", strict=True)
    }
    numbers = getattr(config, "position_buckets", -1), _farthest(config)
    attention.make_bias = MakeDisentangled(
        table=table,
        place=partial(_place, buckets=numbers[0], farthest=numbers[1]),
        scale=cfg.attn_scale,
        keys=names["c2p"] if "c2p" in terms else None,
        queries=names["p2c"] if "p2c" in terms else None,
    )
    attention.says += f" {terms} {shared} {numbers}"
    for weight, bias in () if shared else (names[term] for term in terms):
        for name, like in ((weight, attention.W_Q), (bias, attention.b_Q)):
            setattr(attention, name, nn.Parameter(torch.empty_like(like)))
    return attention


FAMILY = EncoderFamily(
    parts={
        **PARTS,
        "attn.W_Q": "attention.self.query_proj",
        "attn.W_K": "attention.self.key_proj",
        "attn.W_V": "attention.self.value_proj",
        "attn.W_K_pos": "attention.self.pos_key_proj",
        "attn.W_Q_pos": "attention.self.pos_query_proj",
    },
    extra={
        "embed.W_project": "embeddings.embed_proj",
        "embed.relative.w": "encoder.rel_embeddings",
        "embed.relative.ln.w": "encoder.LayerNorm",
        "blocks.0.conv.w": "encoder.conv.conv",
        "blocks.0.conv.ln.w": "encoder.conv.LayerNorm",
    },
    activation=lambda config: ACT2FN[config.pooler_hidden_act],
    embed=_embed,
    shape=_shape,
    sizes=lambda config: {"use_attn_scale": True, "attn_scale": _scale(config)},
    known={
        "relative_attention": (True, False),
        "position_biased_input": (True, False),
        "pos_att_type": (None, [], ["c2p"], ["p2c"], ["c2p", "p2c"], ["p2c", "c2p"]),
        "share_att_key": (True, False),
        "norm_rel_ebd": ("none", "layer_norm"),
        "conv_kernel_size": (0, 1, 3, 5, 7, 9),
        "conv_act": tuple(ACT2FN),
        "pooler_hidden_act": tuple(ACT2FN),
        "z_steps": (0, 1),
    },
    exact="logits, patterns, scans; composition without a convolution",
    bridged=False,
)
