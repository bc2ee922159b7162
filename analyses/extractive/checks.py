"""What must hold before two checkpoints, or a set of questions, can be scored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hc_lens.errors import HcLensError

_SHAPE = (
    "n_layers",
    "d_model",
    "n_heads",
    "n_key_value_heads",
    "d_head",
    "d_mlp",
    "d_vocab",
    "d_vocab_out",
    "n_ctx",
    "act_fn",
    "normalization_type",
    "positional_embedding_type",
    "parallel_attn_mlp",
    "gated_mlp",
    "attn_only",
    "rotary_base",
    "rotary_dim",
)


def check_states(states: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Raise unless all states hold floating-point tensors of the same names and shapes."""
    (first, reference), *others = states.items()
    for name, value in reference.items():
        if not value.is_floating_point():
            raise HcLensError(
                f"expected weights only, got {name} of type {value.dtype} in {first}; pass "
                "extractive.parameters(model) rather than model.state_dict()"
            )
    for label, state in others:
        differing = [
            name
            for name in sorted({*reference, *state})
            if name not in state
            or name not in reference
            or state[name].shape != reference[name].shape
        ]
        if differing:
            raise HcLensError(
                f"expected the same parameters in {first} and {label}, got differences in "
                f"{differing[:3]} ({len(differing)} in all); use checkpoints of one architecture"
            )


def check_supported(model: Any) -> None:
    """Raise unless the model is a decoder whose blocks add to one residual stream, pre-norm."""
    from transformer_lens import HookedTransformer
    from transformer_lens.utilities.architectures import POST_NORM_ARCHITECTURES

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


def check_pair(before: Any, after: Any) -> None:
    """Raise unless the two models have one architecture and one vocabulary."""
    check_supported(before)
    check_supported(after)
    unlike = {
        name: (getattr(before.cfg, name, None), getattr(after.cfg, name, None))
        for name in _SHAPE
        if getattr(before.cfg, name, None) != getattr(after.cfg, name, None)
    }
    if unlike:
        listed = ", ".join(f"{name} {old} and {new}" for name, (old, new) in unlike.items())
        raise HcLensError(
            f"expected two checkpoints of one architecture, got {listed}; "
            "pass the model before and after fine-tuning"
        )
    if before.cfg.dtype != after.cfg.dtype:
        raise HcLensError(
            f"expected one dtype, got {before.cfg.dtype} and {after.cfg.dtype}; load both alike"
        )
    check_states(
        {"before": dict(before.named_parameters()), "after": dict(after.named_parameters())}
    )
    check_tokenizers(before, after)


def check_tokenizers(before: Any, after: Any) -> None:
    """Raise unless both models have tokenizers with the same vocabulary."""
    for label, model in (("before", before), ("after", after)):
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
    old, new = before.tokenizer.get_vocab(), after.tokenizer.get_vocab()
    differing = sorted(token for token in {*old, *new} if old.get(token) != new.get(token))
    if differing:
        raise HcLensError(
            f"expected one tokenizer, got two with different ids for {differing[:3]} "
            f"({len(differing)} tokens in all); pass two checkpoints of one model"
        )
