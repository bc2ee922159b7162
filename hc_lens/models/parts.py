"""A hooked model in the parts that engines run, whichever TransformerLens it is made of.

1. `Parts` is everything that an engine asks of a model besides running it as a whole: what stands
   in front of its blocks, each block alone, what stands behind them, and the weights of a block.
2. TransformerLens 3 has HookedEncoder and HookedTransformer (`hc_lens.models.hooked`),
   TransformerLens 4 has TransformerBridge (`hc_lens.models.bridged`). Each has one subclass, and
   `hc_lens.models.lens.parts_of` finds it for a model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hc_lens.blocks import Block, Norm
from hc_lens.models.inputs import mask_of
from hc_lens.protocols import BatchLike, Model

Weights = Mapping[str, Tensor]
"""Parameters by their name in the model, such as ``"blocks.0.attn.W_Q"``."""


class Entered(NamedTuple):
    """What a model hands to its first block."""

    resid: Float[Tensor, "batch pos d_model"]
    """The residual stream."""
    mask: Int[Tensor, "batch pos"] | None
    """The 0/1 attention mask; None where no row has pads."""
    positions: Float[Tensor, "batch pos d_model"] | None = None
    """What a model whose heads add the positions themselves (shortformer) gives to every block."""
    beside: Sequence[tuple[tuple[Any, ...], dict[str, Any]]] = ()
    """What a bridge gives to each of its blocks beside the stream."""
    convolved: Float[Tensor, "batch pos d_model"] | None = None
    """What a convolution (DeBERTa-v2) makes of the embeddings, for a block's `entrance`."""


class Parts(ABC):
    """One model."""

    behind: tuple[str, ...] = ("ln_final", "mlm_head", "unembed")
    """The parts of a language model behind its last block."""
    reads_mean = False
    """Whether a classifier reads the mean of all tokens (ModernBERT), not one position."""

    def __init__(self, model: Model):
        self.model: Any = model

    @property
    @abstractmethod
    def is_classifier(self) -> bool:
        """Whether the logits are [batch, labels]."""

    @abstractmethod
    def reads(self, batch: BatchLike) -> Int[Tensor, "batch"] | None:
        """The position at which a classifier reads each row; None for a language model."""

    @abstractmethod
    def can_view(self) -> bool:
        """Whether the kernels of `hc_lens.blocks` compute what the model's own blocks compute."""

    @abstractmethod
    def view(self, layer: int, weights: Weights) -> Block:
        """The weights of one layer; those in `weights` replace the model's own."""

    @abstractmethod
    def final_norm(self) -> Norm:
        """The norm in front of a decoder's head."""

    @abstractmethod
    def enter(self, inputs: Mapping[str, Tensor], blocks: bool = False) -> Entered:
        """A batch in front of the first block, with the model's own hooks.

        `blocks` says that the model's own blocks will be run on it.
        """

    @abstractmethod
    def block(self, layer: int, entered: Entered) -> Callable[[Tensor], Tensor]:
        """One of the model's own blocks, from the stream in front of it to that behind it."""

    @abstractmethod
    def stream(self, inputs: Mapping[str, Tensor]) -> Float[Tensor, "batch pos d_model"]:
        """The residual stream behind the last block."""

    @abstractmethod
    def head(
        self,
        resid: Float[Tensor, "batch pos d_model"],
        mask: Int[Tensor, "batch pos"] | None = None,
    ) -> Float[Tensor, "batch *out"]:
        """The logits of the stream behind the last block; a mean over the tokens needs the mask.

        They are [batch, labels] from an encoder's classifier, else they stand at every position.
        """

    @abstractmethod
    def unembed(self, normed: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch *out"]:
        """The same from what is read of the stream behind the final norm, if there is one."""

    @abstractmethod
    def last_matrix(self) -> Float[Tensor, "d_model _"]:
        """The first matrix that reads the stream behind the final norm."""


def last_real(
    tokens: Int[Tensor, "batch pos"] | None,
    mask: Int[Tensor, "batch pos"] | None,
    pad: int | None,
    like: Float[Tensor, "batch pos width"] | Int[Tensor, "batch pos"],
) -> Int[Tensor, "batch"]:
    """The rightmost token of each row that is not a pad (0 if all are): where a decoder is read."""
    real = torch.ones(like.shape[:2], dtype=torch.bool, device=like.device)
    if tokens is not None and pad is not None:
        real &= tokens.to(like.device) != pad
    if mask is not None:
        real &= mask.to(like.device).bool()
    positions = torch.arange(like.shape[1], device=like.device)
    return (positions * real).argmax(-1)


def first_positions(batch: BatchLike) -> Int[Tensor, "batch"]:
    """Position 0 of every row: where an encoder's classifier reads."""
    return torch.zeros_like(mask_of(batch.inputs)[:, 0])
