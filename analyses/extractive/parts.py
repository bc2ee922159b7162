"""The parts of a model that a fact can be stored in: every parameter belongs to exactly one.

1. ``embed``: token and position embeddings.
2. ``L{l}.H{h}``: an attention head: its slices of W_Q, b_Q, W_K, b_K, W_V, b_V and W_O.
3. ``L{l}.KV{g}``: with grouped-query attention the heads of a group share W_K, b_K, W_V and b_V.
   These are then a component of their own, and a head is its W_Q, b_Q and W_O.
4. ``L{l}.MLP``: all weights and biases of the MLP, the gate included.
5. What the paper leaves out is named too: ``L{l}.b_O``, the layer norms (``L{l}.ln1``, ...,
   ``ln_final``) and ``unembed``. So swapping all components gives the other model exactly.
Feng, Russell and Steinhardt 2024 (arXiv 2412.04614), section 3.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from analyses.extractive.checks import check_states

State = Mapping[str, Tensor]
"""Parameters by name."""

_BLOCK = re.compile(r"blocks\.(\d+)\.(.+)")
_QUERY_SIDE = ("W_Q", "b_Q", "W_O", "sinks")
_KEY_SIDE = ("W_K", "b_K", "W_V", "b_V")
_RANK = {"head": 1, "kv": 2, "bias": 3, "norm": 4, "mlp": 5, "other": 6}


@dataclass(frozen=True)
class Component:
    """One part of a model, as the parameters (or slices of parameters) it is made of."""

    name: str
    """Its label, such as ``L2.H3``, ``L2.MLP`` or ``embed``."""
    kind: str
    """embed, head, kv, mlp, bias, norm, unembed or other."""
    layer: int | None
    """Its layer; None outside the blocks."""
    index: int | None
    """Number of the head, or of the key-value group; None for all others."""
    parameters: tuple[str, ...]
    """Names of its parameters; of a head or group only the slice `index` belongs to it."""

    @property
    def place(self) -> str:
        """Where it acts: "embed", "attention", "mlp" or "read-out"."""
        if self.layer is None:
            return "embed" if self.kind == "embed" else "read-out"
        return "mlp" if self.name.split(".")[1] in ("MLP", "ln2", "ln2_post") else "attention"

    def part(self, value: Tensor) -> Tensor:
        """The part of one of its parameters that belongs to the component (a view)."""
        return value if self.index is None else value[self.index]

    def __str__(self) -> str:
        return self.name


def components(model: Any) -> list[Component]:
    """Every component of a HookedTransformer, in the order of the forward pass."""
    cfg = model.cfg
    found: dict[tuple[str, str, int | None, int | None], list[str]] = {}
    for name, _ in model.named_parameters():
        for owner in _owners(name, cfg.n_heads, cfg.n_key_value_heads):
            found.setdefault(owner, []).append(name)
    made = [
        Component(label, kind, layer, index, tuple(names))
        for (label, kind, layer, index), names in found.items()
    ]
    return sorted(made, key=_order)


def _order(component: Component) -> tuple[int, int, int]:
    if component.kind == "embed":
        return (-1, 0, 0)
    if component.layer is None:
        return (10**9, 0 if component.kind == "norm" else 1, 0)
    return (component.layer, _RANK[component.kind], component.index or 0)


def _owners(
    name: str, n_heads: int, n_groups: int | None
) -> list[tuple[str, str, int | None, int | None]]:
    """The components that a parameter belongs to, each as (name, kind, layer, index)."""
    match = _BLOCK.fullmatch(name)
    if match is None:
        top = name.split(".")[0]
        if top in ("embed", "pos_embed"):
            return [("embed", "embed", None, None)]
        kind = {"unembed": "unembed", "ln_final": "norm"}.get(top, "other")
        return [(top, kind, None, None)]
    layer, rest = int(match[1]), match[2]
    part, _, leaf = rest.partition(".")
    if part == "mlp":
        return [(f"L{layer}.MLP", "mlp", layer, None)]
    if part.startswith("ln"):
        return [(f"L{layer}.{part}", "norm", layer, None)]
    leaf = leaf.removeprefix("_")
    if leaf in _QUERY_SIDE or (leaf in _KEY_SIDE and n_groups is None):
        return [(f"L{layer}.H{head}", "head", layer, head) for head in range(n_heads)]
    if leaf in _KEY_SIDE and n_groups is not None:
        return [(f"L{layer}.KV{group}", "kv", layer, group) for group in range(n_groups)]
    if leaf == "b_O":
        return [(f"L{layer}.b_O", "bias", layer, None)]
    kind = "norm" if leaf.split(".")[0] in ("q_norm", "k_norm") else "other"
    return [(f"L{layer}.{leaf.split('.')[0] or part}", kind, layer, None)]


def parameters(model: Any) -> dict[str, Tensor]:
    """The model's parameters by name, detached (not copied)."""
    return {name: value.detach() for name, value in model.named_parameters()}


def swap(before: State, after: State, chosen: Iterable[Component]) -> dict[str, Tensor]:
    """`before` with the chosen components taken from `after`; neither argument is changed."""
    state = dict(before)
    copied: set[str] = set()
    for component in chosen:
        for name in component.parameters:
            if name not in copied:
                state[name] = before[name].clone()
                copied.add(name)
            component.part(state[name]).copy_(component.part(after[name]))
    return state


def graft(base: State, plus: State, minus: State) -> dict[str, Tensor]:
    """Weights ``base + (plus - minus)``: what training changed from `minus` to `plus`, on `base`.

    The three states must hold the same floating-point tensors under the same names.
    """
    check_states({"base": base, "plus": plus, "minus": minus})
    return {name: base[name] + (plus[name] - minus[name]) for name in base}
