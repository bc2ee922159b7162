"""How an encoder family differs from BERT, as data that `hc_lens.models.encoders` reads.

1. `EncoderFamily` says which Hugging Face module holds each part of the model and under which names
   the configuration has the sizes that TransformerLens needs. BERT's are the defaults.
2. What differs beyond names is a function: `first_position` and `embed`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformer_lens.config.hooked_transformer_config import HookedTransformerConfig

PARTS = {
    "attn.W_Q": "attention.self.query",
    "attn.W_K": "attention.self.key",
    "attn.W_V": "attention.self.value",
    "attn.W_O": "attention.output.dense",
    "ln1.w": "attention.output.LayerNorm",
    "mlp.W_in": "intermediate.dense",
    "mlp.W_out": "output.dense",
    "ln2.w": "output.LayerNorm",
}
"""TransformerLens's name of each weight of a block, and the module that holds it in BERT."""
SIZES = {
    "d_model": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "d_mlp": "intermediate_size",
    "act_fn": "hidden_act",
    "eps": "layer_norm_eps",
}
"""TransformerLens's name of each size, and the name in BERT's configuration."""


@dataclass(frozen=True)
class EncoderFamily:
    """Where the parts of an encoder family are, and what it does differently from BERT."""

    prefix: str
    """Prefix of the encoder's parameters."""
    pooler: str
    """Module of the dense layer in front of the classifier."""
    classifier: str
    """Module of the classifier's last linear map."""
    layer: str = "encoder.layer.{l}."
    """Prefix of block `{l}`, below the encoder."""
    parts: Mapping[str, str] = field(default_factory=PARTS.copy)
    """Modules of a block, below its prefix; see `PARTS`."""
    extra: Mapping[str, str] = field(default_factory=dict)
    """Further weights, named as in `PARTS`, and the modules of those checkpoints that have them."""
    sizes: Mapping[str, str] = field(default_factory=SIZES.copy)
    """Names in the configuration; see `SIZES`."""
    activation: type[nn.Module] = nn.Tanh
    """Activation of the dense layer in front of the classifier."""
    first_position: Callable[[Any], int] = lambda config: 0
    """Row of the position table that belongs to the first token."""
    embed: Callable[[HookedTransformerConfig, Any], nn.Module | None] = lambda cfg, config: None
    """The family's own embedding; None for BERT's."""
