"""Hugging Face models as HookedEncoders and HookedTransformers of TransformerLens 3.

1. An encoder becomes an `EncoderClassifier` of the checkpoint's sizes, or as a masked language
   model an `EncoderLanguageModel`, with the family's own embedding and activation.
2. The weights are renamed through the family's table and reshaped to TransformerLens's layout
   ([head, d_model, d_head] for Q, K, V; [head, d_head, d_model] for O; matrices act from the
   right). Every parameter must be filled. The unembedding of a masked language model is what its
   decoder holds, weight and bias, whether they are tied to other weights or not.
3. A decoder goes through TransformerLens's own converters (`hc_lens.models.decoders`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import einops
import torch
from torch import Tensor
from transformer_lens.config.hooked_transformer_config import HookedTransformerConfig
from transformers.activations import ACT2FN

from hc_lens.errors import check_choice
from hc_lens.models.classifiers import (
    DecoderClassifier,
    DecoderLanguageModel,
    EncoderClassifier,
    EncoderLanguageModel,
)
from hc_lens.models.decoders import convert_decoder
from hc_lens.models.encoders import EncoderFamily

HookedModel = EncoderClassifier | EncoderLanguageModel | DecoderClassifier | DecoderLanguageModel

_LAYOUTS = {
    **dict.fromkeys(("W_Q", "W_K", "W_V", "W_Q_pos", "W_K_pos"), "(h d) m -> h m d"),
    **dict.fromkeys(("b_Q", "b_K", "b_V", "b_Q_pos", "b_K_pos"), "(h d) -> h d"),
    "W_O": "m (h d) -> h d m",
}


def convert(
    hf_model: Any, family: EncoderFamily | str, *, device: str | None, dtype: torch.dtype
) -> HookedModel:
    """A Hugging Face model as a hooked model; the family of a decoder is a name."""
    if isinstance(family, EncoderFamily):
        model = _encoder(family, hf_model, device=device, dtype=dtype)
    else:
        model = convert_decoder(hf_model, device=device, dtype=dtype)
    model.to(model.cfg.device or "cpu", print_details=False)
    return model


def _encoder(
    family: EncoderFamily, hf_model: Any, device: str | None, dtype: torch.dtype
) -> EncoderClassifier | EncoderLanguageModel:
    """A family's ...ForSequenceClassification or ...ForMaskedLM as a HookedEncoder."""
    config = hf_model.config
    # DeBERTa's last layer may be set to run again, which no configuration says.
    again = getattr(hf_model.base_model, "z_steps", 0)
    check_choice("a model with z_steps", again, (0, 1))
    cfg = _config(family, hf_model, device, dtype)
    embed = family.embed(cfg, config)
    if hf_model.get_output_embeddings() is None:
        head = {"pooler.W": family.pooler, "unembed.W_U": family.classifier}
        activation = family.activation(config)
        model = EncoderClassifier(cfg, dict(config.id2label), embed, activation)
    else:
        head, cfg.d_vocab_out = family.masked, config.vocab_size
        model = EncoderLanguageModel(cfg, embed, ACT2FN[family.masked_act_fn(config)])
    start = f"{hf_model.base_model_prefix}."
    family.shape(model, config)
    model.setup()  # the hook points of what has come
    theirs = {name.removeprefix(start): w for name, w in hf_model.state_dict().items()}
    state = _state(model, family.unfuse(theirs, config), family, head, config)
    # Strict, so that a parameter that the family's table leaves out is an error.
    model.load_state_dict(dict(model.named_buffers()) | state)
    return model


def _config(
    family: EncoderFamily, hf_model: Any, device: str | None, dtype: torch.dtype
) -> HookedTransformerConfig:
    config = hf_model.config
    family.check(config)
    return HookedTransformerConfig(
        d_model=config.hidden_size,
        n_layers=family.layers(config),
        n_heads=config.num_attention_heads,
        d_head=config.hidden_size // config.num_attention_heads,
        d_mlp=getattr(config, family.d_mlp),
        act_fn=family.act(config),
        eps=family.eps(config),
        d_vocab=config.vocab_size,
        d_vocab_out=config.num_labels,
        n_ctx=family.n_ctx(config),
        attention_dir="bidirectional",
        normalization_type="LN",
        model_name=config.model_type,
        original_architecture=type(hf_model).__name__,
        device=device,
        dtype=dtype,
        init_weights=False,
        **family.sizes(config),
    )


def _state(
    model: EncoderClassifier | EncoderLanguageModel,
    theirs: Mapping[str, Tensor],
    family: EncoderFamily,
    head: Mapping[str, str],
    config: Any,
) -> dict[str, Tensor]:
    """The weights under HookedEncoder's names, as far as the model has them."""
    own, n_heads = model.state_dict(), model.cfg.n_heads
    state = _tables(own, theirs, family, family.first_position(config))
    modules = {"embed.ln.w": family.embed_norm, **head}
    modules |= {ours: name for ours, name in family.extra.items() if f"{name}.weight" in theirs}
    for layer in range(model.cfg.n_layers):
        block = family.block_prefix(config, layer)
        modules |= {f"blocks.{layer}.{ours}": block + name for ours, name in family.parts.items()}
    for weight, module in modules.items():
        bias = re.sub(r"\.[wW]", ".b", weight)
        if weight in own:
            state[weight] = _laid_out(weight, theirs[f"{module}.weight"], n_heads)
        if bias in own:
            # A layer without a bias has one of zeros.
            given = theirs.get(f"{module}.bias")
            zeros = torch.zeros_like(own[bias])
            state[bias] = zeros if given is None else _laid_out(bias, given, n_heads)
    return state


def _tables(
    own: Mapping[str, Tensor], theirs: Mapping[str, Tensor], family: EncoderFamily, first: int
) -> dict[str, Tensor]:
    """The tables of the embedding; of HookedEncoder's two token types, absent ones are zeros."""
    found = {ours: theirs.get(f"{module}.weight") for ours, module in family.tables.items()}
    words = found["embed.embed.W_E"]
    assert words is not None
    state = {}
    for name, table in found.items():
        if name.endswith("W_token_type"):
            table = words.new_zeros(1, words.shape[1]) if table is None else table
            table = table.repeat(2, 1) if len(table) == 1 else table
        elif name.endswith("W_pos") and table is not None:
            table = table[first:]
        if table is not None and name in own:
            state[name] = table
    return state


def _laid_out(name: str, value: Tensor, n_heads: int) -> Tensor:
    kind = name.rpartition(".")[2]
    if kind in _LAYOUTS:
        return einops.rearrange(value, _LAYOUTS[kind], h=n_heads)
    return value.T if kind.startswith("W") else value
