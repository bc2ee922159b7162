"""The components of a model that can hold a fact: every parameter belongs to exactly one.

1. ``embed``: token and position embeddings.
2. ``L{l}.H{h}``: an attention head: its slices of W_Q, b_Q, W_K, b_K, W_V, b_V and W_O.
3. ``L{l}.KV{g}``: with grouped-query attention the heads of a group share W_K, b_K, W_V and b_V.
   These are then a component of their own, and a head is its W_Q, b_Q and W_O.
4. ``L{l}.MLP``: all weights and biases of the MLP, the gate included.
5. What the paper leaves out is named too: ``L{l}.b_O``, the layer norms (``L{l}.ln1``, ...,
   ``ln_final``) and ``unembed``. So swapping all components gives the other model exactly.
6. A component acts at a `Site`: it writes to the residual stream as part of the embeddings, of one
   layer's attention or of one layer's MLP, or it turns the stream into logits (the read-out).
Feng, Russell and Steinhardt 2024 (arXiv 2412.04614), section 3.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

from torch import Tensor

from analyses.extractive.models import State
from hc_lens.protocols import LanguageModel

Place = Literal["embed", "attention", "mlp", "read-out"]
Kind = Literal["embed", "head", "kv", "bias", "norm", "mlp", "other", "unembed"]

_BLOCK = re.compile(r"blocks\.(\d+)\.(.+)")
_QUERY_SIDE = ("W_Q", "b_Q", "W_O", "sinks")
_KEY_SIDE = ("W_K", "b_K", "W_V", "b_V")
_RANK = {kind: rank for rank, kind in enumerate(get_args(Kind))}


class Site(NamedTuple):
    """Where in the forward pass something is written."""

    layer: int
    """The layer; -1 for the embeddings, the number of layers for the read-out."""
    kind: Place
    """What writes there."""


def sites(model: LanguageModel) -> list[Site]:
    """Every site of a model, in the order of the forward pass."""
    n_layers: int = model.cfg.n_layers
    kinds: list[Place] = ["attention"] if model.cfg.attn_only else ["attention", "mlp"]
    inside = [Site(layer, kind) for layer in range(n_layers) for kind in kinds]
    return [Site(-1, "embed"), *inside, Site(n_layers, "read-out")]


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
    """What it is."""
    site: Site
    """Where it acts."""
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
    return sorted(made, key=lambda each: (each.site.layer, _RANK[each.kind], each.index or 0))


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
