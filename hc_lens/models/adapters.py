"""Sequence classifiers for TransformerLens's bridges, as architecture adapters.

1. TransformerLens 4 puts a TransformerBridge around a Hugging Face model. An adapter says which of
   the model's modules is which component; TransformerLens has none for classifiers of text.
2. An encoder's adapter is made from its family's table (`hc_lens.models.families`), unless the
   table says that no component knows its blocks: the blocks, then ``pooler`` (the dense layer in
   front of the classifier) and ``unembed`` (the classifier).
3. A decoder's adapter is TransformerLens's own for the language model, with the matrix ``score`` as
   ``unembed``.
4. After `register`, or any `hc.load`, ``TransformerBridge.boot_transformers(folder)`` gives a
   classifier. TransformerLens also finds the adapters itself, as entry points of the group
   ``transformer_lens.architectures``. But up to 4.3 it looks for these only after it has chosen
   from its own table, so that without `register` they count only once another model has been
   booted. An adapter that the user has put into that table stays.
"""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar

import transformer_lens.model_bridge  # noqa: F401 (before its factories, which 4.0 imports in a circle)
import transformers as hf
from transformer_lens.factories.architecture_adapter_factory import (
    SUPPORTED_ARCHITECTURES,
    ArchitectureAdapterFactory,
)
from transformer_lens.model_bridge.architecture_adapter import ArchitectureAdapter
from transformer_lens.model_bridge.generalized_components import (
    AttentionBridge,
    BlockBridge,
    EmbeddingBridge,
    LinearBridge,
    MLPBridge,
    NormalizationBridge,
    PosEmbedBridge,
    UnembeddingBridge,
)
from transformer_lens.model_bridge.supported_architectures import BertArchitectureAdapter
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as CLASSIFIERS,
)

from hc_lens.errors import HcLensError, HcLensWarning, warn
from hc_lens.models.encoders import EncoderFamily
from hc_lens.models.families import ARCHITECTURES, ENCODERS, MASKED

Components = dict[str, Any]


class ClassifierAdapter(ArchitectureAdapter):
    """What the adapters of classifiers, and of language models unknown to it, have in common."""

    supports_generation = False
    supports_causal_loss = False

    def prepare_loading(self, model_name: str, model_kwargs: Components) -> None:
        """Let Hugging Face read the class that the checkpoint names.

        TransformerLens reads everything it has no other class for as a causal language model, and
        Hugging Face chooses the class by that of the configuration.
        """
        super().prepare_loading(model_name, model_kwargs)
        config = model_kwargs["config"]
        config.__class__ = _config_class(type(config), str(self.cfg.architecture))

    def prepare_model(self, hf_model: Any) -> None:
        """Give the configuration its own class back: one that was made here cannot be pickled."""
        super().prepare_model(hf_model)
        kind = type(hf_model.config)
        if kind.__module__ == __name__:
            hf_model.config.__class__ = kind.__base__

    def setup_hook_compatibility(self, bridge: Any) -> None:
        """Give a bridge the labels, the pad id and the tokenizer of its checkpoint.

        TransformerLens calls this when it makes a bridge, and when it changes the bridge's mode.
        """
        if "labels" in vars(bridge):
            return
        config = bridge.original_model.config
        bridge.labels = dict(config.id2label) if self.classifies else {}
        bridge.pad_token_id = config.pad_token_id
        if self.classifies and getattr(bridge.tokenizer, "name_or_path", None):
            _restore_tokenizer(bridge)

    @property
    def classifies(self) -> bool:
        """Whether the model is a classifier, by its architecture."""
        return str(self.cfg.architecture).endswith("ForSequenceClassification")


@cache
def _config_class(known: type, architecture: str) -> type:
    """A family's configuration whose causal language model is the given class."""
    wanted = getattr(hf, architecture)
    own = type(known.__name__, (known,), {})
    hf.AutoModelForCausalLM.register(own, wanted, exist_ok=True)
    return own


def _restore_tokenizer(bridge: Any) -> None:
    """Give a bridge the tokenizer of its checkpoint where TransformerLens has made another of it.

    TransformerLens puts a BOS in front, and some tokenizers then lose the special tokens with which
    the model was trained.
    """
    from hc_lens.models.loading import carry_tokenizer, read_tokenizer  # imports this module

    place = bridge.tokenizer.name_or_path
    try:
        own = read_tokenizer(place)
    except HcLensError as error:
        warn(f"{error}; texts are read with the tokenizer as TransformerLens has it", HcLensWarning)
        return
    pair = ("a", "b")
    if own(*pair)["input_ids"] != bridge.tokenizer(*pair)["input_ids"]:
        carry_tokenizer(bridge, own)


class EncoderAdapter(ClassifierAdapter, BertArchitectureAdapter):
    """An encoder of one family: a classifier, or a masked language model.

    TransformerLens's BERT says how its weights are processed in compatibility mode; the modules are
    those of the family's table.
    """

    family: ClassVar[EncoderFamily]
    """The table of the family."""
    prefix: ClassVar[str]
    """The module of the encoder in the model."""

    def __init__(self, cfg: Any):
        super().__init__(cfg)
        self.cfg.attention_dir = "bidirectional"
        family, tables = self.family, f"{self.prefix}.embeddings"
        layers, _, _ = family.layer.partition(".{l}.")
        self.component_mapping = {
            "embed": EmbeddingBridge(name=f"{tables}.word_embeddings"),
            "pos_embed": PosEmbedBridge(name=f"{tables}.position_embeddings"),
            "embed_ln": self._norm(f"{tables}.LayerNorm"),
            "blocks": BlockBridge(
                name=f"{self.prefix}.{layers}",
                submodules=self._block(),
                # The two halves of the MLP stand beside each other; only their own hooks fire.
                hook_alias_overrides={
                    "hook_mlp_in": "mlp.in.hook_in",
                    "hook_mlp_out": "mlp.out.hook_out",
                },
            ),
        }

    def prepare_model(self, hf_model: Any) -> None:
        """Add the head that the model has, and the sizes of its configuration."""
        super().prepare_model(hf_model)
        config, family, cfg = hf_model.config, self.family, self.cfg
        family.check(config)
        cfg.act_fn, cfg.eps = family.act(config), family.eps(config)
        cfg.d_mlp, cfg.n_ctx = getattr(config, family.d_mlp), family.n_ctx(config)
        base = getattr(hf_model, self.prefix)
        if hasattr(base.embeddings, "token_type_embeddings"):
            name = f"{self.prefix}.embeddings.token_type_embeddings"
            self.components["token_type_embed"] = EmbeddingBridge(name=name)
        if hf_model.get_output_embeddings() is None:
            cfg.d_vocab_out = config.num_labels
            inside = hasattr(base, family.pooler.split(".")[0])
            pooler = f"{self.prefix}.{family.pooler}" if inside else family.pooler
            self.components["pooler"] = LinearBridge(name=pooler)
            self.components["unembed"] = UnembeddingBridge(name=family.classifier)
        else:
            self.components["mlm_head"] = LinearBridge(name=family.masked["mlm_head.W"])
            self.components["ln_final"] = self._norm(family.masked["mlm_head.ln.w"])
            self.components["unembed"] = UnembeddingBridge(name=family.masked["unembed.W_U"])

    def _norm(self, name: str) -> NormalizationBridge:
        return NormalizationBridge(name=name, config=self.cfg, use_native_layernorm_autograd=True)

    def _block(self) -> Components:
        """The components of a block."""
        parts = self.family.parts
        # BERT's output projection stands in the same module as its queries: "attention".
        attention = parts["attn.W_Q"].split(".")[0]
        inside = {name: parts[f"attn.W_{name.upper()}"].split(".", 1)[1] for name in "qkvo"}
        projections: Components = {
            name: LinearBridge(name=module) for name, module in inside.items()
        }
        halves: Components = {
            name: LinearBridge(name=parts[f"mlp.W_{name}"]) for name in ("in", "out")
        }
        return {
            "ln1": self._norm(parts["ln1.w"]),
            "ln2": self._norm(parts["ln2.w"]),
            "attn": AttentionBridge(name=attention, config=self.cfg, submodules=projections),
            "mlp": MLPBridge(name=None, config=self.cfg, submodules=halves),
        }


class DecoderAdapter(ClassifierAdapter):
    """A decoder's classifier; a subclass names TransformerLens's adapter behind this one."""

    def __init__(self, cfg: Any):
        super().__init__(cfg)
        self.components["unembed"] = UnembeddingBridge(name="score")

    def prepare_model(self, hf_model: Any) -> None:
        """One column per label."""
        super().prepare_model(hf_model)
        self.cfg.d_vocab_out = hf_model.config.num_labels


def encoder_adapter(family: EncoderFamily, model_class: Any) -> type[EncoderAdapter]:
    """The adapter of a family for one of its Hugging Face classes."""
    about = {"family": family, "prefix": model_class.base_model_prefix}
    return type(model_class.__name__, (EncoderAdapter,), about)


def decoder_adapter(language_model: str, classifier: str) -> type[DecoderAdapter]:
    """The adapter of a decoder's classifier, from that of its language model."""
    return type(classifier, (DecoderAdapter, SUPPORTED_ARCHITECTURES[language_model]), {})


def _adapters() -> dict[str, type[ClassifierAdapter]]:
    """The adapters of every family: its classifiers, and masked language models without one."""
    found: dict[str, type[ClassifierAdapter]] = {}
    for kind, family in ENCODERS.items():
        if not family.bridged:
            continue
        masked = {MASKED[kind]} if kind in MASKED else set()
        for name in (CLASSIFIERS[kind], *(masked - SUPPORTED_ARCHITECTURES.keys())):
            found[name] = encoder_adapter(family, getattr(hf, name))
    for kind, language_model in ARCHITECTURES.items():
        found[CLASSIFIERS[kind]] = decoder_adapter(language_model, CLASSIFIERS[kind])
    return found


ADAPTERS = _adapters()
"""Hugging Face architecture -> the adapter of it."""


def __getattr__(name: str) -> Any:
    """An adapter by the name of its architecture, for the entry points."""
    if name not in ADAPTERS:
        raise AttributeError(f"{__name__!r} has no attribute {name!r}; it has {list(ADAPTERS)}")
    return ADAPTERS[name]


def register() -> None:
    """Let TransformerLens know the adapters, in each of the two places where it looks.

    From then on ``TransformerBridge.boot_transformers(folder)`` gives a classifier. An adapter that
    the user has put there for one of these architectures stays.
    """
    # First, as it warns of a name that it knows already.
    ArchitectureAdapterFactory.discover_entry_points()
    for name, adapter in ADAPTERS.items():
        if SUPPORTED_ARCHITECTURES.setdefault(name, adapter) is adapter:
            ArchitectureAdapterFactory.register_adapter(name, adapter)


for _name, _adapter in ADAPTERS.items():
    # The first place; the entry points are the way into the second.
    SUPPORTED_ARCHITECTURES.setdefault(_name, _adapter)
