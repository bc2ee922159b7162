"""How the engine runs one layer: the interface that both ways of running it fill.

1. `Blocks.start` embeds a batch and keeps what every layer needs of it (masks, read positions).
2. `Blocks.step` takes the residual streams of some nodes, stacked along the batch, through the part
   of a layer that all their children share.
3. `Step.children` finishes the layer for some children, each a node and what it removes here.
4. `Blocks.logits` reads the classifier.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxtyping import Bool, Float, Int
from torch import Tensor

from hc_lens.means import Means
from hc_lens.sources import Source, Zero
from hc_lens.suffix.parts import Part

Pick = tuple[int, Part]
"""A child: the place of its node in the stack, and what it removes from the layer."""


@dataclass(frozen=True)
class Stream:
    """One batch at the entrance of layer 0, and what the layers need to know of it."""

    resid: Float[Tensor, "batch pos d_model"]
    """The embedded batch."""
    tokens: Int[Tensor, "batch pos"]
    """Its token ids."""
    mask: Int[Tensor, "batch pos"] | None
    """The 0/1 attention mask that the model hands to its layers, if it hands one."""
    source: Source
    """What replaces removed units, bound to the batch."""
    reads: Int[Tensor, "batch"]
    """Where the classifier reads each row."""
    attend: Bool[Tensor, "batch 1 queries pos"] | None = None
    """What may be attended to; None if everything (for a decoder: everything before)."""
    attend_read: Bool[Tensor, "batch pos"] | None = None
    """What the read position may attend to; None if everything."""

    @property
    def n_rows(self) -> int:
        """Number of rows in the batch."""
        return len(self.tokens)


class Step(ABC):
    """One layer of some nodes, after the work that their children share."""

    @abstractmethod
    def children(self, picks: Sequence[Pick]) -> Float[Tensor, "rows pos d_model"]:
        """The residual streams after the layer, one per pick, stacked along the batch."""


class Blocks(ABC):
    """The layers of one classifier."""

    stacks: bool
    """Whether several nodes may be stacked along the batch."""
    narrows: bool
    """Whether the last layer may be computed at the read positions alone."""
    held_bytes: int = 0
    """Bytes that are held for the whole scan beside the model."""

    @abstractmethod
    def start(self, batch: Any, source: Source) -> Stream:
        """Embed a batch."""

    @abstractmethod
    def step(
        self, stream: Stream, layer: int, resid: Float[Tensor, "rows pos d_model"], narrow: bool
    ) -> Step:
        """Begin a layer; with `narrow` at the read positions alone."""

    @abstractmethod
    def logits(
        self, stream: Stream, resid: Float[Tensor, "rows pos d_model"], narrow: bool
    ) -> Float[Tensor, "rows labels"]:
        """The classifier's output; after a `narrow` last layer each row has one position."""

    @abstractmethod
    def row_bytes(self, pos: int, levels: int) -> int:
        """Bytes of activations for one row of `pos` tokens, when sets touch `levels` layers."""


def is_constant(source: Source) -> bool:
    """Whether a source gives one value per unit, whatever the activation and the batch."""
    return type(source) is Zero or (type(source) is Means and source.by == "token")


def is_row_wise(source: Source) -> bool:
    """Whether a batch may be cut into smaller ones without changing what the source gives."""
    return type(source) in (Zero, Means)
