"""Who may read whom: senders, receivers and the order between them.

1. A sender is a unit, or a set of units that are replaced together such as ``"L0.H6+L1.H1"``.
2. A receiver is one place that reads the residual stream: the query, key or value input of a head
   (``"L2.H4.q"``), all three (``"L2.H4"``), an MLP (``"L2.MLP"``) or the classifier
   (``"classifier"``).
3. A head writes after every head of its layer has read and before its layer's MLP reads; an MLP
   writes after both. Where attention and MLP run in parallel, both read before either writes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from hc_lens.blocks import KINDS as INPUTS
from hc_lens.errors import HcLensError
from hc_lens.units import Unit, UnitSet, UnitSpace, as_units, set_label

WHOLE = "qkv"
"""The kind of a receiver that is all inputs of a head."""
CLASSIFIER = "classifier"

_LABEL = re.compile(r"(?P<unit>L\d+\.H\d+)(?:\.(?P<kind>[qkv]))?")


@dataclass(frozen=True)
class Receiver:
    """One place that reads the residual stream."""

    unit: Unit | None
    """The head or MLP that reads; None for the classifier."""
    kind: str
    """``q``, ``k``, ``v``, ``qkv`` (all three), ``mlp`` or ``classifier``."""

    @classmethod
    def parse(cls, label: str) -> Receiver:
        """Read a label such as ``"L2.H4.q"``, ``"L2.H4"``, ``"L2.MLP"`` or ``"classifier"``."""
        if label == CLASSIFIER:
            return cls(None, CLASSIFIER)
        match = _LABEL.fullmatch(label)
        if match is not None:
            return cls(Unit.parse(match["unit"]), match["kind"] or WHOLE)
        if label.endswith(".MLP"):
            return cls(Unit.parse(label), "mlp")
        raise HcLensError(
            "expected a receiver such as 'L2.H4.q', 'L2.H4' (its q, k and v together), 'L2.MLP' "
            f"or 'classifier', got {label!r}; layers and heads count from 0"
        )

    @property
    def name(self) -> str:
        """The unit's label, or ``classifier``: the column `receiver` of the tables."""
        return CLASSIFIER if self.unit is None else str(self.unit)

    @property
    def inputs(self) -> tuple[str, ...]:
        """The kinds of single inputs that are meant."""
        return INPUTS if self.kind == WHOLE else (self.kind,)

    def __str__(self) -> str:
        return f"{self.name}.{self.kind}" if self.kind in INPUTS else self.name


Sender = tuple[Unit, ...]
"""One unit or a set of units, in the order in which the model runs them."""
Heard = Iterable[Receiver | str] | Receiver | str
"""The receivers of a path as a user writes them."""


def reads_after(receiver: Receiver, sender: Sender, parallel: bool) -> bool:
    """Whether a receiver reads what a unit of the sender has written."""
    reader = receiver.unit
    if reader is None or any(reader.layer > unit.layer for unit in sender):
        return True
    beside = any(reader.layer == unit.layer and unit.is_head for unit in sender)
    return receiver.kind == "mlp" and beside and not parallel


def receivers_of(space: UnitSpace, sender: Sender, parallel: bool = False) -> list[Receiver]:
    """Every single receiver that reads something of a sender, in the order of the model."""
    everything = [
        Receiver(unit, kind)
        for unit in as_units(space)
        for kind in (INPUTS if unit.is_head else ("mlp",))
    ]
    everything.append(Receiver(None, CLASSIFIER))
    return [receiver for receiver in everything if reads_after(receiver, sender, parallel)]


def as_senders(space: UnitSpace, senders: Iterable[UnitSet] | None) -> list[Sender]:
    """The senders that a user named; default every head alone."""
    if senders is None:
        return [(unit,) for unit in space.heads]
    if isinstance(senders, str | Unit):
        senders = [senders]
    found = [as_units(given) for given in senders]
    for sender in found:
        space.indices(sender)
    labels = [set_label(sender) for sender in found]
    if not found or not all(found) or len(set(labels)) < len(labels):
        raise HcLensError(
            "expected at least one sender, each once, such as ['L0.H6', 'L1.H1'], got "
            f"{labels}; list the units with hc.UnitSpace.of(model).labels"
        )
    return found


def as_receivers(
    space: UnitSpace, sender: Sender, receivers: Heard | None, parallel: bool = False
) -> list[Receiver]:
    """The receivers that a user named for a sender; default every one that reads it."""
    if receivers is None:
        return receivers_of(space, sender, parallel)
    if isinstance(receivers, str | Receiver):
        receivers = [receivers]
    found = [Receiver.parse(r) if isinstance(r, str) else r for r in receivers]
    strange = [receiver for receiver in found if not isinstance(receiver, Receiver)]
    if strange or not found:
        what = f"a {type(strange[0]).__name__}" if strange else "none"
        raise HcLensError(
            f"expected receivers such as 'L2.H4.q', 'L2.MLP' or 'classifier', got {what}; leave "
            "receivers out for every receiver of a sender"
        )
    space.indices({receiver.unit for receiver in found if receiver.unit is not None})
    for receiver in found:
        if not reads_after(receiver, sender, parallel):
            raise HcLensError(
                f"expected a receiver that reads after the sender {set_label(sender)} writes, got "
                f"{receiver}; a head is read by heads of later layers, by the MLPs from its own "
                "layer on (of later layers where attention and MLP run in parallel) and by the "
                "classifier"
            )
    if len(set(found)) < len(found):
        raise HcLensError(
            f"expected each receiver once, got {[str(r) for r in found]}; remove the repeats"
        )
    return found
