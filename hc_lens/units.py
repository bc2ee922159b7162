"""The units a subnetwork is made of: attention heads and MLP layers; and sets of them.

1. Heads come first, layer by layer, then the MLPs, layer by layer.
2. A unit's label is ``L{layer}.H{head}`` or ``L{layer}.MLP``; its index counts in that order.
3. Every mask in hc_lens is a vector over this order: 144 + 12 = 156 bits for bert-base
   (Bhaskar, Friedman and Chen 2024, section 3).
4. A set of units is a list of units or labels, one unit, or a label such as ``"L2.H5+L3.H7"``. Its
   own label joins its units with ``+`` in the order in which the model runs them: layer by layer,
   heads before the MLP. Two ways of writing one set have the same label.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from hc_lens.errors import HcLensError

if TYPE_CHECKING:
    from hc_lens.protocols import Model

_LABEL = re.compile(r"L(?P<layer>\d+)\.(?:H(?P<head>\d+)|MLP)")


@dataclass(frozen=True)
class Unit:
    """One attention head, or one MLP layer when `head` is None."""

    layer: int
    """Layer of the unit, counted from 0."""
    head: int | None = None
    """Head within the layer, counted from 0; None for the layer's MLP."""

    @classmethod
    def parse(cls, label: Unit | str) -> Unit:
        """Read a label such as ``"L4.H0"`` or ``"L4.MLP"``; a unit stays as it is."""
        if isinstance(label, Unit):
            return label
        if not isinstance(label, str):
            raise HcLensError(
                "expected units such as 'L4.H0' or hc.Unit(4, 0), got a "
                f"{type(label).__name__}; list the units with hc.UnitSpace.of(model).labels"
            )
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

    def __lt__(self, other: Unit) -> bool:
        ours, theirs = ((unit.head is None, unit.layer, unit.head or 0) for unit in (self, other))
        return ours < theirs


@dataclass(frozen=True, repr=False)
class UnitSpace:
    """All units of one architecture, in the order every mask follows."""

    n_heads: tuple[int, ...]
    """Number of heads in each layer."""
    mlps: tuple[int, ...]
    """Layers that have an MLP."""

    @classmethod
    def of(cls, model: Model) -> UnitSpace:
        """The units of a HookedEncoder, HookedTransformer or TransformerBridge."""
        cfg = getattr(model, "cfg", None)
        if cfg is None or not hasattr(cfg, "n_layers") or not hasattr(cfg, "n_heads"):
            raise HcLensError(
                "expected a model with a TransformerLens config (cfg.n_layers, cfg.n_heads), "
                f"got {type(model).__name__}; load one with hc.load(...)"
            )
        check_head(model)
        mlps = () if getattr(cfg, "attn_only", False) else tuple(range(cfg.n_layers))
        return cls((cfg.n_heads,) * cfg.n_layers, mlps)

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
        """Index of a unit in the mask order; a unit that is not here is an HcLensError."""
        if unit not in self:
            raise HcLensError(
                f"expected a unit of a model with {self}, got {unit}; "
                "list the units with hc.UnitSpace.of(model).labels"
            )
        return self._index[Unit.parse(unit)]

    @cached_property
    def _index(self) -> dict[Unit, int]:
        return {unit: index for index, unit in enumerate(self)}

    def indices(self, units: Iterable[Unit | str]) -> list[int]:
        """Indices of several units; a unit named twice is an HcLensError."""
        found = [Unit.parse(unit) for unit in ([units] if isinstance(units, str) else units)]
        _check_once("unit", found)
        return [self.index(unit) for unit in found]

    def head_slice(self, layer: int) -> slice:
        """Indices of the heads of one layer in the mask order."""
        start = sum(self.n_heads[:layer])
        return slice(start, start + self.n_heads[layer])

    def __contains__(self, unit: object) -> bool:
        return isinstance(unit, (str, Unit)) and Unit.parse(unit) in self._index

    def __len__(self) -> int:
        return sum(self.n_heads) + len(self.mlps)

    def __iter__(self) -> Iterator[Unit]:
        yield from self.heads
        yield from (Unit(layer) for layer in self.mlps)

    def __getitem__(self, index: int) -> Unit:
        return list(self)[index]

    def __str__(self) -> str:
        return f"{self.n_layers} layers, {sum(self.n_heads)} heads and {len(self.mlps)} MLPs"

    def __repr__(self) -> str:
        return f"UnitSpace({self})"


UnitSet = Iterable[Unit | str] | Unit | str
"""A set as a user writes it: ``["L2.H5", "L3.H7"]``, ``"L2.H5+L3.H7"`` or ``"L2.H5"``."""


def as_units(units: UnitSet) -> tuple[Unit, ...]:
    """A set as a user writes it, as units in the order in which the model runs them."""
    if isinstance(units, str):
        units = units.split("+")
    found = map(Unit.parse, units if isinstance(units, Iterable) else [units])
    return tuple(sorted(found, key=lambda unit: (unit.layer, unit.head is None, unit.head or 0)))


def set_label(units: UnitSet) -> str:
    """The label of a set, such as ``"L2.H5+L3.H7"``: its units in the order the model runs them."""
    return "+".join(str(unit) for unit in as_units(units))


def pairs(units: Iterable[Unit | str]) -> list[tuple[Unit, ...]]:
    """Every unit alone and every pair of them, as sets to ablate."""
    singles = [unit for given in units for unit in as_units(given)]
    _check_once("unit", singles)
    if len(singles) < 2:
        raise HcLensError(
            f"expected at least 2 units to pair, got {len(singles)}; name more, or pass "
            "hc.UnitSpace.of(model) for every unit of the model"
        )
    couples = [as_units(couple) for couple in itertools.combinations(singles, 2)]
    return [*((unit,) for unit in singles), *couples]


def resolve_sets(space: UnitSpace, sets: Iterable[UnitSet] | None) -> list[tuple[Unit, ...]]:
    """The sets to ablate, by default every unit alone; anything doubtful is an HcLensError."""
    if isinstance(sets, str | Unit):
        raise HcLensError(
            f"expected a list of sets, got the one set {sets}; write sets=[[...]] around its units"
        )
    found = [as_units(given) for given in (space if sets is None else sets)]
    if not found:
        raise HcLensError(
            "expected at least one set to ablate, got none; leave sets out for every unit alone"
        )
    for index, units in enumerate(found):
        if not units:
            raise HcLensError(
                f"expected units in every set, set {index} is empty; leave it out, as the full "
                f"model is always in the results as 'full'"
            )
        space.indices(units)
    _check_once("set", map(set_label, found))
    return found


def _check_once(what: str, named: Iterable[Unit | str]) -> None:
    seen: set[Unit | str] = set()
    for index, each in enumerate(named):
        if each in seen:
            raise HcLensError(
                f"expected each {what} once, got {each} more than once, again at index {index}; "
                "remove the repeats"
            )
        seen.add(each)


def check_head(model: Model) -> None:
    """Refuse a bridge whose checkpoint is a classifier, but whose model is something else."""
    inside = getattr(model, "original_model", None)
    named = (getattr(getattr(inside, "config", None), "architectures", None) or [""])[0]
    if named.endswith("ForSequenceClassification") and named != type(inside).__name__:
        raise HcLensError(
            f"expected the classifier that the checkpoint holds ({named}), got a bridge around a "
            f"{type(inside).__name__}, whose head is not in the checkpoint; load the checkpoint "
            "with hc.load(...), or call hc.register_adapters() before "
            "TransformerBridge.boot_transformers(...)"
        )
