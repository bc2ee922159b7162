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
5. What cannot be taken apart is held as its logits: a classifier, a TransformerBridge, or a model
   with hooks of the user's own behind its last block, which expect every position.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens import HookedEncoder, HookedTransformer

from hc_lens.errors import HcLensError
from hc_lens.masks.finite import is_finite
from hc_lens.masks.hooks import has_user_hooks, hook_points, hooked_units, is_hooked, observe
from hc_lens.models.classifiers import DecoderClassifier, EncoderClassifier
from hc_lens.models.inputs import is_encoder, mask_of
from hc_lens.protocols import BatchLike, Model

_BEHIND = ("ln_final", "mlm_head", "unembed")
"""The parts of a language model behind its last block."""


def is_classifier(model: Model) -> bool:
    """Whether the model is a classifier of `hc.load`."""
    return isinstance(model, EncoderClassifier | DecoderClassifier)


def read_positions(model: Model, batch: BatchLike) -> Int[Tensor, "batch"]:
    """The position at which each row is read, which decides its logits."""
    mask = mask_of(batch.inputs)
    if isinstance(model, EncoderClassifier):
        return torch.zeros_like(mask[:, 0])
    if isinstance(model, DecoderClassifier):
        given = batch.inputs.get("attention_mask")
        return model.read_positions(batch.inputs["input"], given, mask[..., None].float())
    reads = getattr(batch, "reads", None)
    if reads is not None:
        return reads
    if is_encoder(model):
        raise HcLensError(
            "expected batches that say where a masked language model is read, got a "
            f"{type(batch).__name__} without reads; make them with hc.Prompts, with the mask token "
            "in each prompt"
        )
    positions = torch.arange(mask.shape[1], device=mask.device)
    return (positions * mask).argmax(-1)


def at_positions(
    x: Float[Tensor, "batch pos *rest"], reads: Int[Tensor, "batch"]
) -> Float[Tensor, "batch *rest"]:
    """Each row at one position."""
    return x[torch.arange(len(x), device=x.device), reads.to(x.device)]


class Readout:
    """A model that is run up to where it is read, and read there."""

    def __init__(self, model: Model):
        self.model: Any = model
        language_model = isinstance(model, HookedEncoder | HookedTransformer)
        behind = [getattr(model, name) for name in _BEHIND if hasattr(model, name)]
        hooked = is_hooked(model) or any(map(has_user_hooks, behind))
        self.split = language_model and not is_classifier(model) and not hooked
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
        model, stream = self.model, held.flatten(0, -2)[:, None]
        if isinstance(model, HookedEncoder):
            logits = model.unembed(model.mlm_head(stream))
        else:
            logits = model(stream, start_at_layer=model.cfg.n_layers, return_type="logits")
        if not is_finite(logits):
            raise HcLensError(
                "expected finite logits, got NaN or infinity, which begin behind the last block; "
                "look at the weights of the final norm and of the unembedding"
            )
        return logits[:, 0].unflatten(0, held.shape[:-1])

    def run(self, inputs: Mapping[str, Tensor]) -> Any:
        """What the blocks leave, the stream at every position, or else the model's own logits."""
        model = self.model
        if not self.split:
            return model(**inputs)
        if isinstance(model, HookedEncoder):
            types, mask = inputs.get("token_type_ids"), inputs.get("one_zero_attention_mask")
            return model.encoder_output(inputs["input"], types, mask)
        return model(**inputs, stop_at_layer=model.cfg.n_layers)


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
