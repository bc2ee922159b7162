"""The units a subnetwork is made of: attention heads and MLP layers.

1. Heads come first, layer by layer, then the MLPs, layer by layer.
2. A unit's label is ``L{layer}.H{head}`` or ``L{layer}.MLP``; its index is its place in that order.
3. Every mask in hc_lens is a vector over this order: 144 + 12 = 156 bits for bert-base
   (Bhaskar, Friedman and Chen 2024, section 3).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from hc_lens.errors import HcLensError

_LABEL = re.compile(r"L(?P<layer>\d+)\.(?:H(?P<head>\d+)|MLP)")


@dataclass(frozen=True)
class Unit:
    """One attention head, or one MLP layer when `head` is None."""

    layer: int
    """Layer of the unit, counted from 0."""
    head: int | None = None
    """Head within the layer, counted from 0; None for the layer's MLP."""

    @classmethod
    def parse(cls, label: str) -> Unit:
        """Read a label such as ``"L4.H0"`` or ``"L4.MLP"``."""
        match = _LABEL.fullmatch(label)
        if match is None:
            raise HcLensError(
                f"expected a unit label such as 'L4.H0' or 'L4.MLP', got {label!r}; "
                "layers and heads count from 0"
            )
        head = match["head"]
        return cls(int(match["layer"]), None if head is None else int(head))

    @property
    def is_head(self) -> bool:
        """Whether the unit is an attention head (otherwise it is an MLP)."""
        return self.head is not None

    def __str__(self) -> str:
        return f"L{self.layer}.MLP" if self.head is None else f"L{self.layer}.H{self.head}"

    def _order(self) -> tuple[bool, int, int]:
        return (self.head is None, self.layer, self.head or 0)

    def __lt__(self, other: Unit) -> bool:
        return self._order() < other._order()


@dataclass(frozen=True)
class UnitSpace:
    """All units of one architecture, in the order every mask follows."""

    n_heads: tuple[int, ...]
    """Number of heads in each layer."""
    mlps: tuple[int, ...]
    """Layers that have an MLP."""

    @classmethod
    def of(cls, model: Any) -> UnitSpace:
        """The units of a HookedEncoder, HookedTransformer or TransformerBridge."""
        cfg = getattr(model, "cfg", None)
        if cfg is None or not hasattr(cfg, "n_layers") or not hasattr(cfg, "n_heads"):
            raise HcLensError(
                "expected a model with a TransformerLens config (cfg.n_layers, cfg.n_heads), "
                f"got {type(model).__name__}; load one with hc.load(...)"
            )
        attn_only = bool(getattr(cfg, "attn_only", False))
        layers = range(cfg.n_layers)
        return cls((cfg.n_heads,) * cfg.n_layers, () if attn_only else tuple(layers))

    @property
    def n_layers(self) -> int:
        """Number of layers."""
        return len(self.n_heads)

    @property
    def heads(self) -> list[Unit]:
        """The attention heads, layer by layer."""
        return [Unit(layer, head) for layer, n in enumerate(self.n_heads) for head in range(n)]

    @property
    def labels(self) -> list[str]:
        """The label of every unit, in order."""
        return [str(unit) for unit in self]

    def index(self, unit: Unit | str) -> int:
        """Place of a unit in the mask order; a unit that is not here is an HcLensError."""
        unit = Unit.parse(unit) if isinstance(unit, str) else unit
        if unit not in self:
            raise HcLensError(
                f"expected a unit of a model with {self}, got {unit}; "
                "list the units with hc.UnitSpace.of(model).labels"
            )
        if unit.head is None:
            return sum(self.n_heads) + self.mlps.index(unit.layer)
        return sum(self.n_heads[: unit.layer]) + unit.head

    def indices(self, units: Iterable[Unit | str]) -> list[int]:
        """Places of several units; a unit named twice is an HcLensError."""
        if isinstance(units, str):
            units = [units]
        places = [self.index(unit) for unit in units]
        twice = sorted({place for place in places if places.count(place) > 1})
        if twice:
            raise HcLensError(
                f"expected each unit once, got {self[twice[0]]} more than once; remove the repeats"
            )
        return places

    def head_slice(self, layer: int) -> slice:
        """Where the heads of one layer stand in the mask order."""
        start = sum(self.n_heads[:layer])
        return slice(start, start + self.n_heads[layer])

    def __contains__(self, unit: object) -> bool:
        if isinstance(unit, str):
            unit = Unit.parse(unit)
        if not isinstance(unit, Unit):
            return False
        if unit.head is None:
            return unit.layer in self.mlps
        return 0 <= unit.layer < self.n_layers and 0 <= unit.head < self.n_heads[unit.layer]

    def __len__(self) -> int:
        return sum(self.n_heads) + len(self.mlps)

    def __iter__(self) -> Iterator[Unit]:
        yield from self.heads
        yield from (Unit(layer) for layer in self.mlps)

    def __getitem__(self, place: int) -> Unit:
        return list(self)[place]

    def __str__(self) -> str:
        return f"{self.n_layers} layers, {sum(self.n_heads)} heads and {len(self.mlps)} MLPs"
