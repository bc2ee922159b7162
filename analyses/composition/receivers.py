"""Who may read whom: senders, receivers and the order between them.

1. A sender is a unit, or a set of units that are replaced together such as ``"L0.H6+L1.H1"``.
2. A receiver is whatever reads the residual stream: the query, key or value input of a head
   (``"L2.H4.q"``), all three (``"L2.H4"``), an MLP (``"L2.MLP"``) and what makes the answer: the
   ``"classifier"``, or the ``"unembed"`` of a language model (a masked one's head included).
3. A head writes after every head of its layer has read and before its layer's MLP reads; an MLP
   writes after both. Where attention and MLP run in parallel, both read before either writes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from hc_lens.blocks import KINDS as INPUTS
from hc_lens.errors import HcLensError
from hc_lens.models.reading import is_classifier
from hc_lens.protocols import Model
from hc_lens.units import Unit, UnitSet, UnitSpace, as_units, set_label

WHOLE = "qkv"
"""The kind of a receiver that is all inputs of a head."""
CLASSIFIER, UNEMBED = LAST = ("classifier", "unembed")
"""The receiver behind the last layer, of a classifier and of a language model."""

_LABEL = re.compile(r"(?P<head>L\d+\.H\d+)(?:\.(?P<kind>[qkv]))?|(?P<mlp>L\d+\.MLP)")


@dataclass(frozen=True)
class Receiver:
    """What reads the residual stream."""

    unit: Unit | None
    """The head or MLP that reads; None for the last receiver."""
    kind: str
    """``q``, ``k``, ``v``, ``qkv`` (all three), ``mlp``, ``classifier`` or ``unembed``."""

    @classmethod
    def parse(cls, label: str) -> Receiver:
        """Read a label such as ``"L2.H4.q"``, ``"L2.H4"``, ``"L2.MLP"`` or ``"classifier"``."""
        if label in LAST:
            return cls(None, label)
        match = _LABEL.fullmatch(label)
        if match is None:
            raise HcLensError(
                "expected a receiver such as 'L2.H4.q', 'L2.H4' (its q, k and v together), "
                f"'L2.MLP', 'classifier' or 'unembed', got {label!r}; layers and heads count from 0"
            )
        if match["mlp"]:
            return cls(Unit.parse(label), "mlp")
        return cls(Unit.parse(match["head"]), match["kind"] or WHOLE)

    @property
    def layer(self) -> int | None:
        """Layer of the unit that reads; None for the last receiver."""
        return None if self.unit is None else self.unit.layer

    @property
    def name(self) -> str:
        """The unit's label, or the last receiver's kind: the column `receiver` of the tables."""
        return self.kind if self.unit is None else str(self.unit)

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


def last_receiver(model: Model) -> Receiver:
    """What makes a model's answer from the residual stream."""
    return Receiver(None, CLASSIFIER if is_classifier(model) else UNEMBED)


def reads_after(model: Model, receiver: Receiver, sender: Sender) -> bool:
    """Whether a receiver reads what a unit of the sender has written."""
    layer = receiver.layer
    if layer is None or any(layer > unit.layer for unit in sender):
        return True
    beside = any(layer == unit.layer and unit.is_head for unit in sender)
    return receiver.kind == "mlp" and beside and not model.cfg.parallel_attn_mlp


def as_senders(model: Model, senders: Iterable[UnitSet] | None) -> list[Sender]:
    """The senders that a user named; default every head alone."""
    space = UnitSpace.of(model)
    if senders is None:
        return [(unit,) for unit in space.heads]
    found = list(map(as_units, [senders] if isinstance(senders, str | Unit) else senders))
    for sender in found:
        space.indices(sender)
    if not found or not all(found) or len(set(found)) < len(found):
        raise HcLensError(
            "expected at least one sender, each once, such as ['L0.H6', 'L1.H1'], got "
            f"{list(map(set_label, found))}; list the units with hc.UnitSpace.of(model).labels"
        )
    return found


def as_receivers(model: Model, sender: Sender, receivers: Heard | None = None) -> list[Receiver]:
    """The receivers that a user named for a sender; default every single one that reads it."""
    space = UnitSpace.of(model)
    if receivers is None:
        kinds = [(unit, INPUTS if unit.is_head else ("mlp",)) for unit in as_units(space)]
        everything = [Receiver(unit, kind) for unit, inputs in kinds for kind in inputs]
        everything.append(last_receiver(model))
        return [receiver for receiver in everything if reads_after(model, receiver, sender)]
    given = [receivers] if isinstance(receivers, str | Receiver) else receivers
    # A receiver is its label: one that is no text is read like one.
    found = [Receiver.parse(str(receiver)) for receiver in given]
    space.indices({receiver.unit for receiver in found if receiver.unit is not None})
    last = last_receiver(model)
    for receiver in found:
        if receiver.unit is None and receiver != last:
            raise HcLensError(
                f"expected {str(last)!r} as the last receiver of a {type(model).__name__}, got "
                f"{str(receiver)!r}; a classifier has a 'classifier', a language model an 'unembed'"
            )
        if not reads_after(model, receiver, sender):
            raise HcLensError(
                f"expected a receiver that reads after the sender {set_label(sender)} writes, got "
                f"{receiver}; a head is read by heads of later layers, by the MLPs from its own "
                "layer on (of later layers where attention and MLP run in parallel) and by the "
                f"{last}"
            )
    if not found or len(set(found)) < len(found):
        raise HcLensError(
            f"expected receivers such as 'L2.H4.q', 'L2.MLP' or {str(last)!r}, each once, got "
            f"{list(map(str, found)) or 'none'}; leave receivers out for every receiver of a sender"
        )
    return found
