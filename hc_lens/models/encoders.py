"""From a Hugging Face encoder classifier to a HookedEncoder, for every encoder family.

1. Read the sizes from the configuration under the family's names.
2. Build an `EncoderClassifier` of that shape, with the family's own embedding or activation.
3. Rename the weights through the family's table and reshape them to TransformerLens's layout
   ([head, d_model, d_head] for Q, K, V; [head, d_head, d_model] for O; matrices act from the
   right). Every parameter must be filled.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import einops
import torch
from torch import Tensor
from transformer_lens.config.hooked_transformer_config import HookedTransformerConfig
from transformer_lens.utilities.activation_functions import SUPPORTED_ACTIVATIONS

from hc_lens.errors import HcLensError
from hc_lens.models import bert, distilbert, electra, roberta
from hc_lens.models.classifiers import EncoderClassifier
from hc_lens.models.families import EncoderFamily

FAMILIES: dict[str, EncoderFamily] = {
    "bert": bert.FAMILY,
    "roberta": roberta.FAMILY,
    "xlm-roberta": roberta.FAMILY,
    "distilbert": distilbert.FAMILY,
    "electra": electra.FAMILY,
}
"""Hugging Face model type -> how the family differs from BERT."""
FIXED_EPS = 1e-12
"""Epsilon of the layer norms of a family whose configuration does not name one."""
_LAYOUTS = {
    **dict.fromkeys(("W_Q", "W_K", "W_V"), "(h d) m -> h m d"),
    **dict.fromkeys(("b_Q", "b_K", "b_V"), "(h d) -> h d"),
    "W_O": "m (h d) -> h d m",
}


def convert_encoder(hf_model: Any, *, device: str | None, dtype: torch.dtype) -> EncoderClassifier:
    """An encoder's ...ForSequenceClassification as a HookedEncoder with its classifier."""
    config = hf_model.config
    family = FAMILIES[config.model_type]
    cfg = _config(config, family, device, dtype)
    embed, activation = family.embed(cfg, config), family.activation()
    model = EncoderClassifier(cfg, dict(config.id2label), embed, activation)
    state = _state(hf_model.state_dict(), family, cfg, family.first_position(config))
    # Strict, so that a parameter that the family's table leaves out is an error.
    model.load_state_dict(dict(model.named_buffers()) | state)
    return model


def _config(
    config: Any, family: EncoderFamily, device: str | None, dtype: torch.dtype
) -> HookedTransformerConfig:
    sizes = {ours: getattr(config, name) for ours, name in family.sizes.items()}
    sizes.setdefault("eps", FIXED_EPS)
    positions = getattr(config, "position_embedding_type", "absolute")
    for what, given, known in (
        ("an MLP activation", sizes["act_fn"], SUPPORTED_ACTIVATIONS),
        ("positions", positions, ["absolute"]),
    ):
        if given not in known:
            raise HcLensError(
                f"expected {what} among {sorted(known)}, got {given!r} in the {config.model_type} "
                "configuration; this checkpoint cannot be hooked"
            )
    return HookedTransformerConfig(
        **sizes,
        d_head=sizes["d_model"] // sizes["n_heads"],
        d_vocab=config.vocab_size,
        d_vocab_out=config.num_labels,
        n_ctx=config.max_position_embeddings - family.first_position(config),
        attention_dir="bidirectional",
        normalization_type="LN",
        model_name=config.model_type,
        original_architecture=(config.architectures or [None])[0],
        device=device,
        dtype=dtype,
        init_weights=False,
    )


def _state(
    theirs: Mapping[str, Tensor], family: EncoderFamily, cfg: HookedTransformerConfig, first: int
) -> dict[str, Tensor]:
    """The weights of an encoder classifier under HookedEncoder's names."""
    tables = f"{family.prefix}embeddings."
    words = theirs[f"{tables}word_embeddings.weight"]
    types = theirs.get(f"{tables}token_type_embeddings.weight", words.new_zeros(1, words.shape[1]))
    ours = {
        "embed.embed.W_E": words,
        "embed.pos_embed.W_pos": theirs[f"{tables}position_embeddings.weight"][first:],
        "embed.token_type_embed.W_token_type": types.repeat(2, 1) if len(types) == 1 else types,
    }
    modules = {
        "embed.ln.w": f"{tables}LayerNorm",
        "pooler.W": family.pooler,
        "unembed.W_U": family.classifier,
    }
    modules |= {ours: name for ours, name in family.extra.items() if f"{name}.weight" in theirs}
    for layer in range(cfg.n_layers):
        block = family.prefix + family.layer.format(l=layer)
        modules |= {f"blocks.{layer}.{ours}": block + part for ours, part in family.parts.items()}
    for weight, module in modules.items():
        bias = re.sub(r"\.[wW]", ".b", weight)
        for name, value in ((weight, "weight"), (bias, "bias")):
            ours[name] = _laid_out(name, theirs[f"{module}.{value}"], cfg.n_heads)
    return ours


def _laid_out(name: str, value: Tensor, n_heads: int) -> Tensor:
    kind = name.rpartition(".")[2]
    if kind in _LAYOUTS:
        return einops.rearrange(value, _LAYOUTS[kind], h=n_heads)
    return value.T if kind.startswith("W") else value
