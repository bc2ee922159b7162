"""From a Hugging Face encoder classifier to a HookedEncoder, for every encoder family.

1. Read the sizes from the configuration under the family's spelling.
2. Build an `EncoderClassifier` of that shape, with the family's own embedding or activation.
3. Fill it through the table of names; every parameter must be filled, none may be left over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformer_lens.config.hooked_transformer_config import HookedTransformerConfig
from transformer_lens.utilities.activation_functions import SUPPORTED_ACTIVATIONS

from hc_lens.errors import HcLensError
from hc_lens.models.classifiers import EncoderClassifier
from hc_lens.models.names import ConfigNames, EncoderNames, hooked_state_dict


def encoder_config(
    config: Any, names: ConfigNames, n_ctx: int, device: Any, dtype: torch.dtype
) -> HookedTransformerConfig:
    """TransformerLens's configuration of a Hugging Face encoder classifier."""
    act_fn = getattr(config, names.act_fn)
    if act_fn not in SUPPORTED_ACTIVATIONS:
        raise HcLensError(
            f"expected an MLP activation among {sorted(SUPPORTED_ACTIVATIONS)}, got {act_fn!r} in "
            f"the {config.model_type} configuration; this checkpoint cannot be hooked"
        )
    if getattr(config, "position_embedding_type", "absolute") != "absolute":
        raise HcLensError(
            f"expected absolute positions, got {config.position_embedding_type!r} in the "
            f"{config.model_type} configuration; this checkpoint cannot be hooked"
        )
    d_model, n_heads = getattr(config, names.d_model), getattr(config, names.n_heads)
    return HookedTransformerConfig(
        n_layers=getattr(config, names.n_layers),
        d_model=d_model,
        n_heads=n_heads,
        d_head=d_model // n_heads,
        d_mlp=getattr(config, names.d_mlp),
        d_vocab=config.vocab_size,
        d_vocab_out=config.num_labels,
        n_ctx=n_ctx,
        eps=1e-12 if names.eps is None else getattr(config, names.eps),
        act_fn=act_fn,
        attention_dir="bidirectional",
        normalization_type="LN",
        model_name=config.model_type,
        original_architecture=(config.architectures or [None])[0],
        device=device,
        dtype=dtype,
        init_weights=False,
    )


def build_encoder(
    hf_model: Any,
    names: EncoderNames,
    config_names: ConfigNames,
    *,
    device: Any,
    dtype: torch.dtype,
    embed: Callable[[HookedTransformerConfig], nn.Module] | None = None,
    activation: nn.Module | None = None,
    first_position: int = 0,
    extra: Mapping[str, Tensor] | None = None,
) -> EncoderClassifier:
    """An `EncoderClassifier` with the weights of `hf_model`; positions start at a table row."""
    config = hf_model.config
    n_ctx = config.max_position_embeddings - first_position
    cfg = encoder_config(config, config_names, n_ctx, device, dtype)
    model = EncoderClassifier(
        cfg, dict(config.id2label), embed and embed(cfg), activation=activation
    )
    state = hooked_state_dict(hf_model.state_dict(), names, cfg.n_layers, cfg.n_heads)
    state["embed.pos_embed.W_pos"] = state["embed.pos_embed.W_pos"][first_position:]
    types = state.get("embed.token_type_embed.W_token_type")
    if types is None:
        types = torch.zeros(2, state["embed.embed.W_E"].shape[1])
    elif len(types) == 1:
        types = types.repeat(2, 1)
    state["embed.token_type_embed.W_token_type"] = types
    state |= extra or {}
    missing = set(dict(model.named_parameters())) - set(state)
    if missing:
        raise HcLensError(
            f"expected a weight for every parameter, missing {sorted(missing)[:3]}; "
            "is the checkpoint complete?"
        )
    model.load_state_dict({name: value.to(dtype) for name, value in state.items()}, strict=False)
    return model
