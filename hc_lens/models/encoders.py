"""An encoder family, and how its Hugging Face models become HookedEncoders.

1. An `EncoderFamily` says how a family differs from BERT: which module holds each part of the model
   and under which names the configuration has the sizes. What differs beyond names is a function.
2. `EncoderFamily.convert` builds an `EncoderClassifier` of the checkpoint's sizes, or for a masked
   language model an `EncoderLanguageModel`, with the family's own embedding and activation.
3. The weights are renamed through the family's table and reshaped to TransformerLens's layout
   ([head, d_model, d_head] for Q, K, V; [head, d_head, d_model] for O; matrices act from the
   right). Every parameter must be filled. The unembedding of a masked language model is what its
   decoder holds, weight and bias, whether they are tied to other weights or not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import einops
import torch
from torch import Tensor, nn
from transformer_lens.config.hooked_transformer_config import HookedTransformerConfig
from transformer_lens.utilities.activation_functions import SUPPORTED_ACTIVATIONS
from transformers.activations import ACT2FN

from hc_lens.errors import check_choice
from hc_lens.models.classifiers import EncoderClassifier, EncoderLanguageModel

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
MASKED_HEAD = {
    "mlm_head.W": "cls.predictions.transform.dense",
    "mlm_head.ln.w": "cls.predictions.transform.LayerNorm",
    "unembed.W_U": "cls.predictions.decoder",
}
"""The same for the head of a masked language model."""
_LAYOUTS = {
    **dict.fromkeys(("W_Q", "W_K", "W_V"), "(h d) m -> h m d"),
    **dict.fromkeys(("b_Q", "b_K", "b_V"), "(h d) -> h d"),
    "W_O": "m (h d) -> h d m",
}


@dataclass(frozen=True)
class EncoderFamily:
    """Where the parts of an encoder family are, and what it does differently from BERT."""

    pooler: str = "pooler.dense"
    """Module of the dense layer in front of the classifier."""
    classifier: str = "classifier"
    """Module of the classifier's last linear map."""
    layer: str = "encoder.layer.{l}."
    """Prefix of block `{l}`."""
    parts: Mapping[str, str] = field(default_factory=PARTS.copy)
    """Modules of a block, below its prefix; see `PARTS`."""
    masked: Mapping[str, str] = field(default_factory=MASKED_HEAD.copy)
    """Modules of the head of a masked language model; see `MASKED_HEAD`."""
    masked_act_fn: Callable[[Any], str] = lambda config: config.hidden_act
    """Activation in the head of a masked language model."""
    extra: Mapping[str, str] = field(default_factory=dict)
    """Further weights, named as in `PARTS`, and the modules of those checkpoints that have them."""
    d_mlp: str = "intermediate_size"
    """Name of the MLP's width in the configuration."""
    act_fn: str = "hidden_act"
    """Name of the MLP's activation in the configuration."""
    activation: type[nn.Module] = nn.Tanh
    """Activation of the dense layer in front of the classifier."""
    first_position: Callable[[Any], int] = lambda config: 0
    """Row of the position table that belongs to the first token."""
    embed: Callable[[HookedTransformerConfig, Any], nn.Module | None] = lambda cfg, config: None
    """The family's own embedding; None for BERT's."""

    def convert(
        self, hf_model: Any, *, device: str | None, dtype: torch.dtype
    ) -> EncoderClassifier | EncoderLanguageModel:
        """The family's ...ForSequenceClassification or ...ForMaskedLM as a HookedEncoder."""
        config = hf_model.config
        cfg = self._config(hf_model, device, dtype)
        embed = self.embed(cfg, config)
        if hf_model.get_output_embeddings() is None:
            head = {"pooler.W": self.pooler, "unembed.W_U": self.classifier}
            model = EncoderClassifier(cfg, dict(config.id2label), embed, self.activation())
        else:
            head, cfg.d_vocab_out = self.masked, config.vocab_size
            model = EncoderLanguageModel(cfg, embed, ACT2FN[self.masked_act_fn(config)])
        start = f"{hf_model.base_model_prefix}."
        theirs = {name.removeprefix(start): w for name, w in hf_model.state_dict().items()}
        state = self._state(theirs, cfg, self.first_position(config), head)
        # Strict, so that a parameter that the family's table leaves out is an error.
        model.load_state_dict(dict(model.named_buffers()) | state)
        return model

    def _config(
        self, hf_model: Any, device: str | None, dtype: torch.dtype
    ) -> HookedTransformerConfig:
        config = hf_model.config
        act_fn = getattr(config, self.act_fn)
        positions = getattr(config, "position_embedding_type", "absolute")
        check_choice("a checkpoint with an MLP activation", act_fn, SUPPORTED_ACTIVATIONS)
        check_choice("a checkpoint with positions", positions, ["absolute"])
        # With it, Hugging Face lets a token attend to earlier ones alone.
        is_decoder = getattr(config, "is_decoder", False)
        check_choice("an encoder with is_decoder", is_decoder, [False])
        return HookedTransformerConfig(
            d_model=config.hidden_size,
            n_layers=config.num_hidden_layers,
            n_heads=config.num_attention_heads,
            d_head=config.hidden_size // config.num_attention_heads,
            d_mlp=getattr(config, self.d_mlp),
            act_fn=act_fn,
            # DistilBERT's configuration does not name its epsilon.
            eps=getattr(config, "layer_norm_eps", 1e-12),
            d_vocab=config.vocab_size,
            d_vocab_out=config.num_labels,
            n_ctx=config.max_position_embeddings - self.first_position(config),
            attention_dir="bidirectional",
            normalization_type="LN",
            model_name=config.model_type,
            original_architecture=type(hf_model).__name__,
            device=device,
            dtype=dtype,
            init_weights=False,
        )

    def _state(
        self,
        theirs: Mapping[str, Tensor],
        cfg: HookedTransformerConfig,
        first: int,
        head: Mapping[str, str],
    ) -> dict[str, Tensor]:
        """The weights under HookedEncoder's names."""
        words = theirs["embeddings.word_embeddings.weight"]
        no_types = words.new_zeros(1, words.shape[1])
        types = theirs.get("embeddings.token_type_embeddings.weight", no_types)
        state = {
            "embed.embed.W_E": words,
            "embed.pos_embed.W_pos": theirs["embeddings.position_embeddings.weight"][first:],
            "embed.token_type_embed.W_token_type": types.repeat(2, 1) if len(types) == 1 else types,
        }
        modules = {"embed.ln.w": "embeddings.LayerNorm", **head}
        modules |= {ours: name for ours, name in self.extra.items() if f"{name}.weight" in theirs}
        for layer in range(cfg.n_layers):
            block = self.layer.format(l=layer)
            modules |= {f"blocks.{layer}.{ours}": block + name for ours, name in self.parts.items()}
        for weight, module in modules.items():
            bias = re.sub(r"\.[wW]", ".b", weight)
            for name, value in ((weight, "weight"), (bias, "bias")):
                state[name] = _laid_out(name, theirs[f"{module}.{value}"], cfg.n_heads)
        return state


def _laid_out(name: str, value: Tensor, n_heads: int) -> Tensor:
    kind = name.rpartition(".")[2]
    if kind in _LAYOUTS:
        return einops.rearrange(value, _LAYOUTS[kind], h=n_heads)
    return value.T if kind.startswith("W") else value
