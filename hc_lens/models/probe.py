"""Does a hooked model say what the Hugging Face model says that it was made of?

1. Run both on a few tokens, without pads.
2. Compare the logits. A difference beyond rounding is an error: TransformerLens has passed over a
   setting of the configuration, such as the biases of a Llama with version 3.
Attention within a window is longer than these tokens; a converter that passes over it is refused
where it is called (`hc_lens.models.decoders`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hc_lens.errors import HcLensError
from hc_lens.models.installed import BRIDGES, INSTALLED

TOKENS = 12
"""Tokens that are run, or as many as the context has."""
EXACT, ROUNDED = (1e-3, 0.1), (0.25, 1.0)
"""Largest difference as a share of the largest logit, and the smallest logit that counts as one: in
float32 and float64, and in types of 16 bits."""


def check_logits(hf_model: Any, model: Any) -> None:
    """Refuse a hooked model with other logits than the Hugging Face model it was made of."""
    tokens = _tokens(hf_model.config.vocab_size, min(TOKENS, model.cfg.n_ctx))
    with torch.no_grad(), _evaluating(hf_model):
        theirs = _read(hf_model(input_ids=tokens.to(hf_model.device)).logits)
        ours = _read(model(tokens.to(model.cfg.device)))
    if not theirs.isfinite().all():
        return  # told where the model is used, with the weights that are not finite
    narrow = min(hf_model.dtype.itemsize, model.cfg.dtype.itemsize) < 4
    share, least = ROUNDED if narrow else EXACT
    apart, largest = float((ours - theirs).abs().max()), float(theirs.abs().max())
    if not apart <= share * max(largest, least):
        raise HcLensError(
            f"expected the logits of Hugging Face's {type(hf_model).__name__}, got others (apart "
            f"by {apart:.3g}, the largest is {largest:.3g}): TransformerLens {INSTALLED} passes "
            "over a setting of this checkpoint's configuration; try it with TransformerLens "
            f"{3 if BRIDGES else 4}, and open an issue"
        )


def _tokens(vocabulary: int, length: int) -> Int[Tensor, "1 pos"]:
    """Token ids from everywhere in a vocabulary."""
    return torch.linspace(0.1, 0.9, length).mul(vocabulary).long()[None]


def _read(logits: Tensor) -> Float[Tensor, "*pos out"]:
    """The logits of the one row, where they can be compared."""
    return logits[0].double().cpu()


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """A model without dropout; each part goes back to its own mode."""
    training = [part for part in model.modules() if part.training]
    model.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True
