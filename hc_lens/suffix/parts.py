"""A set of units as what it removes from each layer.

1. Within a layer the heads act before the MLP, so a set is a sequence of `Part`, one per layer.
2. Two sets share all work up to the first layer in which their parts differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hc_lens.units import Unit


@dataclass(frozen=True)
class Part:
    """What one set of units removes from one layer."""

    heads: tuple[int, ...] = ()
    """Heads that are removed, in order."""
    mlp: bool = False
    """Whether the MLP is removed."""

    def __bool__(self) -> bool:
        return bool(self.heads) or self.mlp


Branch = tuple[int, Part, list[int]]
"""A way on from a node: the node's place, what is removed, the sets that go this way."""


def parts_of(units: Iterable[Unit], n_layers: int) -> tuple[Part, ...]:
    """The parts of a set, one per layer."""
    heads: list[list[int]] = [[] for _ in range(n_layers)]
    mlps = [False] * n_layers
    for unit in units:
        if unit.head is None:
            mlps[unit.layer] = True
        else:
            heads[unit.layer].append(unit.head)
    return tuple(Part(tuple(sorted(h)), mlp) for h, mlp in zip(heads, mlps, strict=True))


def children(
    nodes: Sequence[Sequence[int]], parts: Sequence[Sequence[Part]], layer: int
) -> list[Branch]:
    """The branches of some nodes, each a list of sets, at a layer."""
    found: list[Branch] = []
    for place, members in enumerate(nodes):
        groups: dict[Part, list[int]] = {}
        for member in members:
            groups.setdefault(parts[member][layer], []).append(member)
        found += [(place, part, group) for part, group in groups.items()]
    return found
