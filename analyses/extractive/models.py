"""A language model as weights: what must hold of it, its components, and how weights are exchanged.

1. `language_model` loads a checkpoint, or takes a model, and refuses one whose blocks do not all
   add to one residual stream behind a norm: the scores are not defined there. `check_pair` refuses
   two models that are not the same model before and after fine-tuning.
2. Weights are a `State`, parameters by name. `with_weights` makes a copy of a model that has them;
   `graft` adds what training changed elsewhere.
3. Every parameter belongs to exactly one component. ``embed`` is the token and position embeddings,
   ``L{l}.H{h}`` a head, ``L{l}.MLP`` an MLP with its gate. With grouped-query attention the heads
   of a group share W_K, b_K, W_V and b_V, which are then a component ``L{l}.KV{g}`` of their own.
   What the paper leaves out is named too: ``L{l}.b_O``, the layer norms (``L{l}.ln1``, ...,
   ``ln_final``) and ``unembed``. So a `swap` of all components gives the other model exactly.
4. A component acts at a `Site`: it writes to the residual stream as part of the embeddings, of one
   layer's attention or of one layer's MLP, or it turns the stream into logits (the read-out).
Feng, Russell and Steinhardt 2024 (arXiv 2412.04614), section 3.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple, cast, get_args

from torch import Tensor
from transformer_lens.utilities.architectures import POST_NORM_ARCHITECTURES

from hc_lens.analyses.extractive.hooked import HookedTransformer
from hc_lens.errors import HcLensError
from hc_lens.masks.hooks import has_user_hooks
from hc_lens.models.loading import load
from hc_lens.protocols import LanguageModel

Checkpoint = LanguageModel | str | Path
"""A HookedTransformer, or the folder or Hub id to load it from."""
State = Mapping[str, Tensor]
"""Parameters by name."""
_SHAPE = (
    *("n_layers", "d_model", "n_heads", "n_key_value_heads", "d_head", "d_mlp", "n_ctx", "act_fn"),
    *("d_vocab", "d_vocab_out", "normalization_type", "positional_embedding_type", "rotary_base"),
    *("rotary_dim", "parallel_attn_mlp", "gated_mlp", "attn_only", "dtype"),
)
"""Entries of the configuration that two checkpoints of one model share."""
Kind = Literal["embed", "head", "kv", "bias", "norm", "mlp", "other", "unembed"]
"""What a component is, in the order of the forward pass."""
_BLOCK = re.compile(r"blocks\.(\d+)\.(.+)")
_QUERY_SIDE = ("W_Q", "b_Q", "W_O", "sinks")
_KEY_SIDE = ("W_K", "b_K", "W_V", "b_V")


def language_model(model: Checkpoint, device: str | None = None) -> LanguageModel:
    """The model of a checkpoint, on a device, or a model as it is; if it can be scored."""
    if isinstance(model, (str, Path)):
        model = cast("LanguageModel", load(model, device=device))
    if not isinstance(model, HookedTransformer):
        raise HcLensError(
            f"expected a HookedTransformer language model, got {type(model).__name__}; load the "
            "checkpoint with hc.load or HookedTransformer.from_pretrained"
        )
    cfg = model.cfg
    clash = {
        "a classifier, with no logit for each token": cfg.d_vocab_out != cfg.d_vocab,
        "post-norm blocks": cfg.original_architecture in POST_NORM_ARCHITECTURES,
        "a query-key norm across heads": cfg.original_architecture == "OlmoeForCausalLM",
        "shortformer positions": cfg.positional_embedding_type == "shortformer",
        "attention that is not causal": cfg.attention_dir != "causal",
    }
    for what, found in clash.items():
        if found:
            raise HcLensError(
                "expected a language model of pre-norm blocks with one residual stream, got "
                f"{what}; the scores are not defined there"
            )
    return model


def check_pair(before: LanguageModel, after: LanguageModel) -> None:
    """Raise unless the two models have one architecture and one vocabulary."""
    old, new = (
        {name: getattr(model.cfg, name, None) for name in _SHAPE} | _shapes(parameters(model))
        for model in (before, after)
    )
    if unlike := [f"{name} {old.get(name)} and {new.get(name)}" for name in _differing(old, new)]:
        raise HcLensError(
            f"expected two checkpoints of one architecture, got {', '.join(unlike[:3])} "
            f"({len(unlike)} differences in all); pass the model before and after fine-tuning, "
            "both loaded alike"
        )
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
    if differing := _differing(before.tokenizer.get_vocab(), after.tokenizer.get_vocab()):
        raise HcLensError(
            f"expected one tokenizer, got two with different ids for {differing[:3]} "
            f"({len(differing)} tokens in all); pass two checkpoints of one model"
        )


def _differing(one: Mapping[str, object], two: Mapping[str, object]) -> list[str]:
    return [name for name in {**one, **two} if one.get(name) != two.get(name)]


def _shapes(state: State) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in state.items()}


def parameters(model: LanguageModel) -> dict[str, Tensor]:
    """The model's parameters by name, detached (not copied)."""
    return {name: value.detach() for name, value in model.named_parameters()}


def with_weights(model: LanguageModel, state: State) -> LanguageModel:
    """A copy of the model with other weights; both share the tokenizer and the buffers."""
    buffers = [each for module in model.modules() for each in module.buffers(recurse=False)]
    twin = copy.deepcopy(model, {id(each): each for each in (model.tokenizer, *buffers)})
    for name, value in parameters(twin).items():
        value.copy_(state[name])
    return twin


def graft(base: State, plus: State, minus: State) -> dict[str, Tensor]:
    """Weights ``base + (plus - minus)``: what training changed from `minus` to `plus`."""
    for name, value in base.items():
        if not value.is_floating_point():
            raise HcLensError(
                f"expected weights only, got {name} of type {value.dtype}; pass "
                "extractive.parameters(model) rather than model.state_dict()"
            )
    for label, state in (("plus", plus), ("minus", minus)):
        if differing := _differing(_shapes(base), _shapes(state)):
            raise HcLensError(
                f"expected the same parameters in base and {label}, got differences in "
                f"{differing[:3]} ({len(differing)} in all); use checkpoints of one architecture"
            )
    return {name: base[name] + (plus[name] - minus[name]) for name in base}


class Site(NamedTuple):
    """Where in the forward pass something is written."""

    layer: int
    """The layer; -1 for the embeddings, the number of layers for the read-out."""
    kind: Literal["embed", "attention", "mlp", "read-out"]


def sites(model: LanguageModel) -> list[Site]:
    """Every site of a model, in the order of the forward pass."""
    kinds = ("attention",) if model.cfg.attn_only else ("attention", "mlp")
    inside = (Site(layer, kind) for layer in range(model.cfg.n_layers) for kind in kinds)
    return [Site(-1, "embed"), *inside, Site(model.cfg.n_layers, "read-out")]


def writers(model: LanguageModel, site: Site) -> list[str]:
    """Names of the components whose outputs add up to what a site writes (beside b_O)."""
    if site.kind == "attention":
        return [f"L{site.layer}.H{head}" for head in range(model.cfg.n_heads)]
    return [f"L{site.layer}.MLP" if site.kind == "mlp" else site.kind]


@dataclass(frozen=True)
class Component:
    """One part of a model, as the parameters (or slices of parameters) it is made of."""

    name: str
    """Its label, such as ``L2.H3``, ``L2.MLP`` or ``embed``."""
    kind: Kind
    site: Site
    index: int | None
    """Number of the head, or of the key-value group; None for all others."""
    parameters: tuple[str, ...] = ()
    """Names of its parameters; of a head or group only the slice `index` belongs to it."""

    @property
    def layer(self) -> int | None:
        """Its layer; None outside the blocks."""
        return None if self.site.kind in ("embed", "read-out") else self.site.layer

    def part(self, value: Tensor) -> Tensor:
        """The part of one of its parameters that belongs to the component (a view)."""
        return value if self.index is None else value[self.index]

    def __str__(self) -> str:
        return self.name


def components(model: LanguageModel) -> list[Component]:
    """Every component of a HookedTransformer, in the order of the forward pass."""
    found: dict[Component, list[str]] = {}
    for name, _ in model.named_parameters():
        for owner in _owners(name, model):
            found.setdefault(owner, []).append(name)
    made = [replace(owner, parameters=tuple(names)) for owner, names in found.items()]
    kinds = get_args(Kind)
    return sorted(made, key=lambda each: (each.site.layer, kinds.index(each.kind), each.index or 0))


def _owners(name: str, model: LanguageModel) -> list[Component]:
    """The components that a parameter belongs to, their parameters left out."""
    match = _BLOCK.fullmatch(name)
    if match is None:
        top = name.split(".")[0]
        if top in ("embed", "pos_embed"):
            return [Component("embed", "embed", Site(-1, "embed"), None)]
        kinds: dict[str, Kind] = {"unembed": "unembed", "ln_final": "norm"}
        site = Site(model.cfg.n_layers, "read-out")
        return [Component(top, kinds.get(top, "other"), site, None)]
    layer = int(match[1])
    part, _, leaf = match[2].partition(".")
    site = Site(layer, "mlp" if part in ("mlp", "ln2", "ln2_post") else "attention")
    if part == "mlp":
        return [Component(f"L{layer}.MLP", "mlp", site, None)]
    if part.startswith("ln"):
        return [Component(f"L{layer}.{part}", "norm", site, None)]
    leaf, groups = leaf.removeprefix("_").split(".")[0], model.cfg.n_key_value_heads
    if leaf in _KEY_SIDE and groups is not None:
        return [Component(f"L{layer}.KV{group}", "kv", site, group) for group in range(groups)]
    if leaf in (*_QUERY_SIDE, *_KEY_SIDE):
        heads = writers(model, site)
        return [Component(label, "head", site, head) for head, label in enumerate(heads)]
    kinds = {"b_O": "bias", "q_norm": "norm", "k_norm": "norm"}
    return [Component(f"L{layer}.{leaf or part}", kinds.get(leaf, "other"), site, None)]


def swap(before: State, after: State, chosen: Iterable[Component]) -> dict[str, Tensor]:
    """`before` with the chosen components taken from `after`; neither argument is changed."""
    state = dict(before)
    for component in chosen:
        for name in component.parameters:
            if state[name] is before[name]:
                state[name] = before[name].clone()
            component.part(state[name]).copy_(component.part(after[name]))
    return state
