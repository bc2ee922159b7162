"""An encoder family: how its Hugging Face models differ from BERT.

An `EncoderFamily` says which module holds each part of a model and under which names the
configuration has the sizes. What differs beyond names is a function. With this one table a
checkpoint is converted to a HookedEncoder (`hc_lens.models.conversion`), and a bridge is put around
it (`hc_lens.models.adapters`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from transformer_lens.utilities.activation_functions import SUPPORTED_ACTIVATIONS

from hc_lens.errors import check_choice

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
TABLES = {
    "embed.embed.W_E": "embeddings.word_embeddings",
    "embed.pos_embed.W_pos": "embeddings.position_embeddings",
    "embed.token_type_embed.W_token_type": "embeddings.token_type_embeddings",
}
"""The same for the tables of the embedding."""
MASKED_HEAD = {
    "mlm_head.W": "cls.predictions.transform.dense",
    "mlm_head.ln.w": "cls.predictions.transform.LayerNorm",
    "unembed.W_U": "cls.predictions.decoder",
}
"""The same for the head of a masked language model."""


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
    norm_eps: str = "layer_norm_eps"
    """Name of the norms' epsilon in the configuration."""
    activation: Callable[[Any], nn.Module] = lambda config: nn.Tanh()
    """Activation of the dense layer in front of the classifier, of the configuration."""
    first_position: Callable[[Any], int] = lambda config: 0
    """Row of the position table that belongs to the first token."""
    embed: Callable[[Any, Any], nn.Module | None] = lambda cfg, config: None
    """A HookedEncoder's own embedding, of its configuration and Hugging Face's; None for BERT's."""
    tables: Mapping[str, str] = field(default_factory=TABLES.copy)
    """Modules of the embedding's tables; see `TABLES`."""
    embed_norm: str = "embeddings.LayerNorm"
    """Module of the norm behind the embedding."""
    layers: Callable[[Any], int] = lambda config: config.num_hidden_layers
    """How many blocks a model runs."""
    prefix: Callable[[Any, int], str] | None = None
    """Prefix of a block where `layer` cannot say it, of the configuration and the block."""
    sizes: Callable[[Any], Mapping[str, Any]] = lambda config: {}
    """Further settings of TransformerLens's configuration."""
    unfuse: Callable[[Mapping[str, Tensor], Any], Mapping[str, Tensor]] = lambda theirs, config: (
        theirs
    )
    """Takes apart weights that a checkpoint holds in one."""
    shape: Callable[[Any, Any], None] = lambda model, config: None
    """Gives a HookedEncoder of BERT's shape the blocks, norms and pooler of the family."""
    known: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Entries of the configuration that change what is computed, and their values that we know."""
    exact: str = "logits, patterns, scans, composition"
    """What is computed as Hugging Face does, for users who ask."""
    bridged: bool = True
    """Whether TransformerLens 4 has what a bridge of the family needs."""

    def check(self, config: Any) -> None:
        """Refuse a configuration whose model is not computed as we compute it."""
        positions = getattr(config, "position_embedding_type", "absolute")
        check_choice("a checkpoint with an MLP activation", self.act(config), SUPPORTED_ACTIVATIONS)
        check_choice("a checkpoint with positions", positions, ["absolute"])
        # With it, Hugging Face lets a token attend to earlier ones alone.
        is_decoder = getattr(config, "is_decoder", False)
        check_choice("an encoder with is_decoder", is_decoder, [False])
        for name, values in self.known.items():
            if hasattr(config, name):
                what = f"a {config.model_type} checkpoint with {name}"
                check_choice(what, getattr(config, name), values)

    def block_prefix(self, config: Any, layer: int) -> str:
        """Prefix of the modules of a block."""
        return self.layer.format(l=layer) if self.prefix is None else self.prefix(config, layer)

    def act(self, config: Any) -> str:
        """Name of the MLP's activation."""
        return getattr(config, self.act_fn)

    def eps(self, config: Any) -> float:
        """Epsilon of the norms, which DistilBERT's configuration does not name."""
        return getattr(config, self.norm_eps, 1e-12)

    def n_ctx(self, config: Any) -> int:
        """Most tokens of a row."""
        return config.max_position_embeddings - self.first_position(config)
