"""Where a model is read in each row, and its logits there.

1. A classifier knows where it is read: its logits are [batch, labels].
2. A language model has logits at every token. A row is read at ``batch.reads``; where a batch does
   not say, a causal model is read at the last token of each row that is not a pad.
3. `Readout` runs a model in two parts: `held` is the residual stream behind the last block at the
   read position, d_model numbers for each row; `logits` is the final norm and the unembedding of
   it. So the vocabulary's logits are made at one position alone, and of many runs only what is held
   needs to be kept.
4. `read_units` runs a model for the activations of its units alone: without final norm and
   unembedding, which would make the vocabulary's logits at every position.
5. What cannot be taken apart is held as its logits: a classifier, a model of a kind that hc_lens
   does not know, or one with hooks of the user's own behind its last block, which expect every
   position.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hc_lens.errors import HcLensError
from hc_lens.masks.finite import is_finite
from hc_lens.masks.hooks import has_user_hooks, hook_points, hooked_units, is_hooked, observe
from hc_lens.models.inputs import is_encoder, mask_of
from hc_lens.models.lens import known_parts, parts_of
from hc_lens.models.parts import Parts, last_real
from hc_lens.protocols import BatchLike, Model


def is_classifier(model: Model) -> bool:
    """Whether the model is a classifier of `hc.load`."""
    parts = parts_of(model)
    return parts is not None and parts.is_classifier


def read_positions(model: Model, batch: BatchLike) -> Int[Tensor, "batch"]:
    """The position at which each row is read, which decides its logits."""
    parts = parts_of(model)
    known = None if parts is None else parts.reads(batch)
    reads = getattr(batch, "reads", None) if known is None else known
    if reads is not None:
        return reads
    if is_encoder(model):
        raise HcLensError(
            "expected batches that say where a masked language model is read, got a "
            f"{type(batch).__name__} without reads; make them with hc.Prompts, with the mask token "
            "in each prompt"
        )
    mask = mask_of(batch.inputs)
    return last_real(None, mask, None, mask)


def at_positions(
    x: Float[Tensor, "batch pos *rest"], reads: Int[Tensor, "batch"]
) -> Float[Tensor, "batch *rest"]:
    """Each row at one position."""
    return x[torch.arange(len(x), device=x.device), reads.to(x.device)]


class Readout:
    """A model that is run up to where it is read, and read there."""

    def __init__(self, model: Model):
        self.model: Any = model
        parts = parts_of(model)
        behind = [getattr(model, name) for name in Parts.behind if hasattr(model, name)]
        hooked = is_hooked(model) or any(map(has_user_hooks, behind))
        self.split = parts is not None and not parts.is_classifier and not hooked
        """Whether the residual stream is held; else the logits themselves are."""

    def __call__(self, batch: BatchLike) -> Float[Tensor, "batch out"]:
        """The logits of each row where it is read."""
        return self.logits(self.held(batch))

    def held(self, batch: BatchLike) -> Float[Tensor, "batch width"]:
        """What a run leaves at the read position of each row: the stream, or the logits."""
        left = self.run(batch.inputs)
        if left.ndim == 3 and left.shape[:2] == batch.inputs["input"].shape:
            return at_positions(left, read_positions(self.model, batch))
        if left.ndim != 2 or len(left) != len(batch.rows):
            raise HcLensError(
                f"expected logits [batch, labels] or [batch, pos, vocabulary] of {len(batch.rows)} "
                f"rows, got {list(left.shape)} from a {type(self.model).__name__}; load the "
                "model with hc.load, or pass a HookedTransformer or HookedEncoder"
            )
        return left

    def logits(self, held: Float[Tensor, "*runs batch width"]) -> Float[Tensor, "*runs batch out"]:
        """The logits of what is held, with the model's own final norm and unembedding."""
        if not self.split:
            return held
        logits = known_parts(self.model).head(held.flatten(0, -2)[:, None])
        if not is_finite(logits):
            raise HcLensError(
                "expected finite logits, got NaN or infinity, which begin behind the last block; "
                "look at the weights of the final norm and of the unembedding"
            )
        return logits[:, 0].unflatten(0, held.shape[:-1])

    def run(self, inputs: Mapping[str, Tensor]) -> Any:
        """What the blocks leave, the stream at every position, or else the model's own logits."""
        return known_parts(self.model).stream(inputs) if self.split else self.model(**inputs)


def read_units(
    model: Model, inputs: Mapping[str, Tensor], read: Callable[[str, Tensor], None]
) -> Float[Tensor, "batch ..."]:
    """What `Readout.run` leaves; `read` gets each hook point of the units and its activation."""
    names = hook_points(hooked_units(model))
    left, silent = observe(model, inputs, names, read, Readout(model).run)
    if silent:
        raise HcLensError(
            f"expected the hook points {silent[:3]} to fire, they did not; does the model run its "
            "blocks through TransformerLens hooks?"
        )
    return left
