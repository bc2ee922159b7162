"""The one table of name mappings: TransformerLens parameter -> Hugging Face parameter.

1. An encoder family is described by where its parts live in a Hugging Face state dict
   (`EncoderNames`) and by how its configuration spells its sizes (`ConfigNames`).
2. `hooked_state_dict` reads the parts, reshapes them to TransformerLens's layout
   ([head, d_model, d_head] for Q, K, V; [head, d_head, d_model] for O; matrices act from the right)
   and returns them under TransformerLens's names.
3. What differs beyond names (RoBERTa's positions, ELECTRA's projection) stays in the family's file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import einops
from torch import Tensor

StateDict = Mapping[str, Tensor]


@dataclass(frozen=True)
class ConfigNames:
    """How a family's Hugging Face configuration spells the sizes that TransformerLens needs."""

    d_model: str = "hidden_size"
    """Width of the residual stream."""
    n_layers: str = "num_hidden_layers"
    """Number of blocks."""
    n_heads: str = "num_attention_heads"
    """Heads per block."""
    d_mlp: str = "intermediate_size"
    """Width of the MLP's hidden layer."""
    act_fn: str = "hidden_act"
    """Activation of the MLP."""
    eps: str | None = "layer_norm_eps"
    """Epsilon of the layer norms; None where the family fixes it at 1e-12."""


@dataclass(frozen=True)
class EncoderNames:
    """Where the parts of one encoder family live in its Hugging Face state dict."""

    embeddings: str
    """Prefix of the embedding tables and their layer norm."""
    layer: str
    """Prefix of block `{l}`."""
    pooler: str
    """Prefix of the dense layer in front of the classifier."""
    classifier: str
    """Prefix of the classifier's last linear map."""
    query: str = "attention.self.query"
    """Query projection, below the block."""
    key: str = "attention.self.key"
    """Key projection, below the block."""
    value: str = "attention.self.value"
    """Value projection, below the block."""
    output: str = "attention.output.dense"
    """Output projection of the attention, below the block."""
    ln1: str = "attention.output.LayerNorm"
    """Layer norm after the attention, below the block."""
    mlp_in: str = "intermediate.dense"
    """First linear map of the MLP, below the block."""
    mlp_out: str = "output.dense"
    """Second linear map of the MLP, below the block."""
    ln2: str = "output.LayerNorm"
    """Layer norm after the MLP, below the block."""


def _attention(state: StateDict, names: EncoderNames, prefix: str, n_heads: int) -> StateDict:
    parts: dict[str, Tensor] = {}
    for letter, place in (("Q", names.query), ("K", names.key), ("V", names.value)):
        weight, bias = state[f"{prefix}{place}.weight"], state[f"{prefix}{place}.bias"]
        parts[f"W_{letter}"] = einops.rearrange(weight, "(h d) m -> h m d", h=n_heads)
        parts[f"b_{letter}"] = einops.rearrange(bias, "(h d) -> h d", h=n_heads)
    out = state[f"{prefix}{names.output}.weight"]
    parts["W_O"] = einops.rearrange(out, "m (h d) -> h d m", h=n_heads)
    parts["b_O"] = state[f"{prefix}{names.output}.bias"]
    return parts


def hooked_state_dict(
    state: StateDict, names: EncoderNames, n_layers: int, n_heads: int
) -> dict[str, Tensor]:
    """The Hugging Face `state` of an encoder classifier under HookedEncoder's names."""
    tables = names.embeddings
    hooked = {
        "embed.embed.W_E": state[f"{tables}word_embeddings.weight"],
        "embed.pos_embed.W_pos": state[f"{tables}position_embeddings.weight"],
        "embed.ln.w": state[f"{tables}LayerNorm.weight"],
        "embed.ln.b": state[f"{tables}LayerNorm.bias"],
        "pooler.W": state[f"{names.pooler}.weight"].T,
        "pooler.b": state[f"{names.pooler}.bias"],
        "unembed.W_U": state[f"{names.classifier}.weight"].T,
        "unembed.b_U": state[f"{names.classifier}.bias"],
    }
    token_types = state.get(f"{tables}token_type_embeddings.weight")
    if token_types is not None:
        hooked["embed.token_type_embed.W_token_type"] = token_types
    for layer in range(n_layers):
        prefix, block = names.layer.format(l=layer), f"blocks.{layer}."
        for name, value in _attention(state, names, prefix, n_heads).items():
            hooked[f"{block}attn.{name}"] = value
        for ours, theirs in (("ln1", names.ln1), ("ln2", names.ln2)):
            hooked[f"{block}{ours}.w"] = state[f"{prefix}{theirs}.weight"]
            hooked[f"{block}{ours}.b"] = state[f"{prefix}{theirs}.bias"]
        for ours, theirs in (("in", names.mlp_in), ("out", names.mlp_out)):
            hooked[f"{block}mlp.W_{ours}"] = state[f"{prefix}{theirs}.weight"].T
            hooked[f"{block}mlp.b_{ours}"] = state[f"{prefix}{theirs}.bias"]
    return hooked
