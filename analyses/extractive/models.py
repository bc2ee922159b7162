"""A language model and its weights: what must hold of them, and how weights are exchanged.

1. `language_model` loads a checkpoint, or takes a model, and refuses one whose blocks do not all
   add to one residual stream behind a norm: the scores are not defined there.
2. `check_pair` refuses two models that are not the same model before and after fine-tuning.
3. Weights are a `State`, parameters by name. `fill` copies one into a model, `loaded` for the time
   of a ``with`` block, `with_weights` into a copy; `graft` adds what training changed elsewhere.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from torch import Tensor
from transformer_lens import HookedTransformer
from transformer_lens.utilities.architectures import POST_NORM_ARCHITECTURES

from hc_lens.errors import HcLensError
from hc_lens.models.loading import load
from hc_lens.protocols import LanguageModel
from hc_lens.scans.hooked import has_user_hooks

State = Mapping[str, Tensor]
"""Parameters by name."""

_SHAPE = (
    *("n_layers", "d_model", "n_heads", "n_key_value_heads", "d_head", "d_mlp", "n_ctx", "act_fn"),
    *("d_vocab", "d_vocab_out", "normalization_type", "positional_embedding_type", "rotary_base"),
    *("rotary_dim", "parallel_attn_mlp", "gated_mlp", "attn_only", "dtype"),
)
"""Entries of the configuration that two checkpoints of one model share."""


def language_model(model: LanguageModel | str | Path) -> LanguageModel:
    """The model, or the one in a checkpoint's folder or on the Hub, if it can be scored."""
    if isinstance(model, (str, Path)):
        model = cast("LanguageModel", load(model))
    if not isinstance(model, HookedTransformer):
        raise HcLensError(
            f"expected a HookedTransformer language model, got {type(model).__name__}; load the "
            "checkpoint with hc.load or HookedTransformer.from_pretrained"
        )
    cfg = model.cfg
    if cfg.d_vocab_out != cfg.d_vocab:
        raise HcLensError(
            f"expected a language model with a logit for each of its {cfg.d_vocab} tokens, got "
            f"{cfg.d_vocab_out} logits; pass a causal language model, not a classifier"
        )
    clash = {
        "post-norm blocks": cfg.original_architecture in POST_NORM_ARCHITECTURES,
        "a query-key norm across heads": cfg.original_architecture == "OlmoeForCausalLM",
        "shortformer positions": cfg.positional_embedding_type == "shortformer",
        "attention that is not causal": cfg.attention_dir != "causal",
    }
    for what, found in clash.items():
        if found:
            raise HcLensError(
                f"expected pre-norm blocks with one residual stream, got {what}; "
                "the scores are not defined there"
            )
    return model


def check_pair(before: LanguageModel, after: LanguageModel) -> None:
    """Raise unless the two models have one architecture and one vocabulary."""
    pairs = [(name, *(getattr(m.cfg, name, None) for m in (before, after))) for name in _SHAPE]
    unlike = [f"{name} {old} and {new}" for name, old, new in pairs if old != new]
    if unlike:
        raise HcLensError(
            f"expected two checkpoints of one architecture, got {', '.join(unlike)}; "
            "pass the model before and after fine-tuning, both loaded alike"
        )
    check_states({"before": parameters(before), "after": parameters(after)})
    for label, model in (("before", before), ("after", after)):
        if has_user_hooks(cast("HookedTransformer", model)):
            raise HcLensError(
                f"expected a model without hooks, got hooks on the model {label} fine-tuning; "
                "remove them, as the scores run the weights alone"
            )
        if model.tokenizer is None:
            raise HcLensError(
                f"expected a tokenizer on the model {label} fine-tuning, got none; "
                "set model.tokenizer, or load the checkpoint with hc.load(..., tokenizer=...)"
            )
        if model.cfg.tokenizer_prepends_bos is None:
            raise HcLensError(
                f"expected the model {label} fine-tuning to know whether its tokenizer puts a BOS, "
                "got no answer in its configuration; call model.set_tokenizer(tokenizer)"
            )
    differing = _differing(before.tokenizer.get_vocab(), after.tokenizer.get_vocab())
    if differing:
        raise HcLensError(
            f"expected one tokenizer, got two with different ids for {differing[:3]} "
            f"({len(differing)} tokens in all); pass two checkpoints of one model"
        )


def _differing(one: Mapping[str, object], two: Mapping[str, object]) -> list[str]:
    return sorted(name for name in {*one, *two} if one.get(name) != two.get(name))


def check_states(states: Mapping[str, State]) -> None:
    """Raise unless all states hold floating-point tensors of the same names and shapes."""
    (first, reference), *others = states.items()
    for name, value in reference.items():
        if not value.is_floating_point():
            raise HcLensError(
                f"expected weights only, got {name} of type {value.dtype} in {first}; pass "
                "extractive.parameters(model) rather than model.state_dict()"
            )
    shapes = {name: value.shape for name, value in reference.items()}
    for label, state in others:
        differing = _differing(shapes, {name: value.shape for name, value in state.items()})
        if differing:
            raise HcLensError(
                f"expected the same parameters in {first} and {label}, got differences in "
                f"{differing[:3]} ({len(differing)} in all); use checkpoints of one architecture"
            )


def parameters(model: LanguageModel) -> dict[str, Tensor]:
    """The model's parameters by name, detached (not copied)."""
    return {name: value.detach() for name, value in model.named_parameters()}


def copied(model: LanguageModel) -> dict[str, Tensor]:
    """A copy of the model's parameters by name."""
    return {name: value.clone() for name, value in parameters(model).items()}


def fill(model: LanguageModel, state: State) -> None:
    """Copy weights into the model, in place."""
    for name, value in parameters(model).items():
        value.copy_(state[name])


@contextmanager
def loaded(model: LanguageModel, state: State | None) -> Iterator[LanguageModel]:
    """The model with other weights for the time of a ``with`` block; None keeps its own."""
    own = copied(model)
    try:
        fill(model, own if state is None else state)
        yield model
    finally:
        fill(model, own)


def with_weights(model: LanguageModel, state: State) -> LanguageModel:
    """A copy of the model with other weights; both share the tokenizer."""
    twin = copy.deepcopy(model, {id(model.tokenizer): model.tokenizer})
    fill(twin, state)
    return twin


def graft(base: State, plus: State, minus: State) -> dict[str, Tensor]:
    """Weights ``base + (plus - minus)``: what training changed from `minus` to `plus`."""
    check_states({"base": base, "plus": plus, "minus": minus})
    return {name: base[name] + (plus[name] - minus[name]) for name in base}
