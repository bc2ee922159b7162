"""How the engine runs one layer: the interface that both ways of running it fill.

1. `Layers.start` embeds a batch and works out who may attend to whom.
2. `Layers.step` takes the residual streams of some nodes, stacked along the batch, through the part
   of a layer that all their children share. What it returns finishes the layer for some children,
   each a node and what it removes here.
3. `Layers.logits` reads the classifier.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from hc_lens.blocks import Block, Context, PerHead, Resid
from hc_lens.masks.hooks import z_name
from hc_lens.masks.replacements import Source
from hc_lens.protocols import BatchLike


@dataclass(frozen=True)
class Part:
    """What one set of units removes from one layer."""

    heads: tuple[int, ...] = ()
    """Heads that are removed, in order."""
    mlp: bool = False
    """Whether the MLP is removed."""

    def __bool__(self) -> bool:
        return bool(self.heads) or self.mlp


Pick = tuple[int, Part]
"""A child: the index of its node in the stack, and what it removes from the layer."""
Step = Callable[[Sequence[Pick]], Resid]
"""Finishes a layer: the residual streams of some children, stacked along the batch."""


@dataclass(frozen=True)
class Stream:
    """One batch at the entrance of layer 0, and what the layers need to know of it."""

    resid: Float[Tensor, "batch pos d_model"]
    """The embedded batch."""
    tokens: Int[Tensor, "batch pos"]
    """Its token ids."""
    source: Source
    """What replaces removed units, bound to the batch."""
    context: Context
    """Who may attend to whom, and where the classifier reads each row."""

    @property
    def n_rows(self) -> int:
        """Number of rows in the batch."""
        return len(self.tokens)

    def replacement(
        self, name: str, activation: Float[Tensor, "*shape"]
    ) -> Float[Tensor, "*shape"]:
        """What replaces the activation at a hook point, in its shape."""
        return self.source.value(name, activation).expand_as(activation)

    def without_heads(self, block: Block, layer: int, z: PerHead, heads: list[int]) -> Resid:
        """How replacing some heads of a layer moves the residual stream: ``(value - z) W_O``."""
        value = self.replacement(z_name(layer), z)
        moved = (value[:, :, heads] - z[:, :, heads]).flatten(2)
        return moved @ block.heads.W_O[heads].flatten(0, 1)


class Layers(ABC):
    """The layers of one classifier."""

    stacks: bool
    """Whether several nodes may be stacked along the batch."""
    narrows: bool
    """Whether the last layer may be computed at the read positions alone."""
    held_bytes: int = 0
    """Bytes that are held for the whole scan beside the model."""

    @abstractmethod
    def start(self, batch: BatchLike, source: Source) -> Stream:
        """Embed a batch; the source is bound to it."""

    @abstractmethod
    def step(self, stream: Stream, layer: int, resid: Resid, narrow: bool) -> Step:
        """Begin a layer; with `narrow` at the read positions alone."""

    @abstractmethod
    def logits(self, stream: Stream, resid: Resid, narrow: bool) -> Float[Tensor, "rows labels"]:
        """The classifier's output; after a `narrow` last layer each row has one position."""

    @abstractmethod
    def row_bytes(self, pos: int, levels: int) -> int:
        """Bytes of activations for one row of `pos` tokens, when sets touch `levels` layers."""
