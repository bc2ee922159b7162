"""ModernBERT (Warner et al. 2024): a pre-norm encoder with rotary positions and local windows.

1. ``m = x + attn(ln1(x)); m + mlp(ln2(m))``; the first block has no ln1, and a norm stands behind
   the last block. Queries, keys and values are one matrix in the checkpoint, and so are the two of
   the gated MLP: ``act(x W_gate) * (x W_in)``. Biases that a checkpoint lacks are zeros.
2. Positions are rotary, with a base for global and one for local layers. In a local layer a token
   sees those at most ``local_attention // 2`` away. A pad of a row padded on the left by more than
   that sees nothing, and its heads write zeros, as with Hugging Face's default attention.
3. The classifier reads position 0 or the mean of all tokens (`classifier_pooling`), through a dense
   layer, its activation and a norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from transformers.activations import ACT2FN

from hc_lens.errors import check_choice
from hc_lens.models.encoders import EncoderFamily

GLOBAL, LOCAL = "full_attention", "sliding_attention"
"""The kinds of layers."""


def _unfuse(theirs: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Queries, keys and values apart, and the two matrices of the MLP."""
    split = {"attn.Wqkv": ("attn.q", "attn.k", "attn.v"), "mlp.Wi": ("mlp.gate", "mlp.linear")}
    found = dict(theirs)
    for name, weight in theirs.items():
        module, _, kind = name.rpartition(".")
        for fused, parts in split.items():
            if module.endswith(fused):
                names = (module.removesuffix(fused) + part for part in parts)
                pieces = zip(names, weight.chunk(len(parts)), strict=True)
                found |= {f"{part}.{kind}": piece for part, piece in pieces}
    return found


def _shape(model: Any, config: Any) -> None:
    """Pre-norm blocks with rotary attention, a norm behind them, and the pooler."""
    from transformer_lens.components.layer_norm import LayerNorm

    from hc_lens.models.classifiers import Pooler
    from hc_lens.models.embeddings import WordEmbed
    from hc_lens.models.encoder_blocks import PreNormBlock

    cfg, model.embed = model.cfg, WordEmbed(model.cfg)
    for layer, kind in enumerate(config.layer_types):
        block: Any = PreNormBlock(cfg)
        block.attn = _attention(cfg, config, kind)
        model.blocks[layer] = block
    model.blocks[0].ln1 = nn.Identity()
    model.ln_final = LayerNorm(cfg)
    activation = ACT2FN[config.classifier_activation]
    model.pooler = Pooler(cfg, config.classifier_pooling == "mean", activation)


def _attention(cfg: Any, config: Any, kind: str) -> nn.Module:
    from hc_lens.models.encoder_blocks import EncoderAttention, Rotary

    check_choice("a modernbert checkpoint with layer_types", kind, (GLOBAL, LOCAL))
    rope = config.rope_parameters[kind]
    check_choice("a modernbert checkpoint with rope_type", rope["rope_type"], ("default",))
    window = config.local_attention // 2 + 1 if kind == LOCAL else None
    attention = EncoderAttention(cfg, window=window, rotary=Rotary(rope["rope_theta"], cfg.d_head))
    attention.says = f"{window} {rope['rope_theta']}"
    return attention


FAMILY = EncoderFamily(
    pooler="head.dense",
    layer="layers.{l}.",
    parts={
        "attn.W_Q": "attn.q",
        "attn.W_K": "attn.k",
        "attn.W_V": "attn.v",
        "attn.W_O": "attn.Wo",
        "ln1.w": "attn_norm",
        "ln2.w": "mlp_norm",
        "mlp.W_gate": "mlp.gate",
        "mlp.W_in": "mlp.linear",
        "mlp.W_out": "mlp.Wo",
    },
    extra={"ln_final.w": "final_norm", "pooler.ln.w": "head.norm"},
    tables={"embed.embed.W_E": "embeddings.tok_embeddings"},
    embed_norm="embeddings.norm",
    act_fn="hidden_activation",
    norm_eps="norm_eps",
    unfuse=_unfuse,
    shape=_shape,
    sizes=lambda config: {
        "gated_mlp": True,
        "positional_embedding_type": "rotary",
        "rotary_dim": config.hidden_size // config.num_attention_heads,
        "rotary_base": config.rope_parameters[GLOBAL]["rope_theta"],
    },
    known={
        "classifier_pooling": ("cls", "mean"),
        "classifier_activation": tuple(ACT2FN),
        "mlp_bias": (False,),
        "sparse_prediction": (False,),
    },
    bridged=False,
)
