"""ALBERT (Lan et al. 2020): BERT whose layers share their weights.

1. The embeddings, already normalised, pass through one linear map into the residual stream.
2. A model of 12 layers runs the few layers of its groups again and again. Here it has a block for
   each application, with hook points and units of its own; the parameters of blocks that are the
   same layer are the same tensors, so an edit of one is an edit of all.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from hc_lens.models.encoders import EncoderFamily


def _embed(cfg: Any, config: Any) -> nn.Module:
    from hc_lens.models.embeddings import ProjectedEmbed

    return ProjectedEmbed(cfg, config.embedding_size)


def _prefix(config: Any, layer: int) -> str:
    """The module of the layer that is applied at a place."""
    application, inner = divmod(layer, config.inner_group_num)
    group = int(application / (config.num_hidden_layers / config.num_hidden_groups))
    return f"encoder.albert_layer_groups.{group}.albert_layers.{inner}."


def _shape(model: Any, config: Any) -> None:
    """Blocks of one layer have the same parameters."""
    first: dict[str, nn.Module] = {}
    for layer, block in enumerate(model.blocks):
        source = first.setdefault(_prefix(config, layer), block)
        for name, parameter in source.named_parameters():
            module, _, own = name.rpartition(".")
            setattr(block.get_submodule(module), own, parameter)


FAMILY = EncoderFamily(
    pooler="pooler",
    parts={
        "attn.W_Q": "attention.query",
        "attn.W_K": "attention.key",
        "attn.W_V": "attention.value",
        "attn.W_O": "attention.dense",
        "ln1.w": "attention.LayerNorm",
        "mlp.W_in": "ffn",
        "mlp.W_out": "ffn_output",
        "ln2.w": "full_layer_layer_norm",
    },
    extra={"embed.W_project": "encoder.embedding_hidden_mapping_in"},
    embed=_embed,
    layers=lambda config: config.num_hidden_layers * config.inner_group_num,
    prefix=_prefix,
    shape=_shape,
    bridged=False,
)
