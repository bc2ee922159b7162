"""A hooked model beside Hugging Face's own: how far are their logits apart?

1. Texts go through ours in one padded batch, through Hugging Face's one by one without padding.
2. Rows of random tokens are long enough for windows and buckets of distances, and padded on the
   right or on the left. These and the user's batches go through Hugging Face's encoders as they
   are, and through its decoders one by one without padding, because there Hugging Face would count
   a row's positions from its first pad.
3. A language model's logits count at every token that is not a pad.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from hc_lens.models.families import ENCODERS
from hc_lens.models.inputs import Side, encode, is_encoder, mask_name, mask_of, pad, tokenizer_of
from hc_lens.models.loading import read_checkpoint
from hc_lens.models.quiet import quiet
from hc_lens.protocols import Model

LENGTHS = (300, 70, 5)
"""Tokens of the random rows, as far as they fit the context."""


class Reference:
    """Hugging Face's own model, read once more from the checkpoint."""

    def __init__(self, model: Model, checkpoint: str):
        """Read it."""
        with quiet():
            self._theirs = read_checkpoint(checkpoint).eval()
        self._model: Any = model
        self._takes = inspect.signature(self._theirs.forward).parameters
        self.family: str = self._theirs.config.model_type
        """Hugging Face's name of the family."""
        self.exact = ENCODERS[self.family].exact if self.family in ENCODERS else ""
        """What of an encoder family is computed as Hugging Face does."""

    @torch.no_grad()
    def on_texts(self, pairs: Sequence[tuple[str, str]]) -> float:
        """Largest difference of a logit on pairs of texts."""
        inputs, tokenizer = encode(self._model, list(pairs)), tokenizer_of(self._model)
        alone = [self._logits(tokenizer(*pair, return_tensors="pt")) for pair in pairs]
        return self._largest(inputs, [logits[0] for logits in alone])

    def on_random_rows(self, side: Side) -> float:
        """Largest difference on rows of random tokens, padded on one side."""
        generator, config = torch.Generator().manual_seed(0), self._theirs.config
        blank = config.pad_token_id or 0
        rows = []
        for length in LENGTHS:
            size = (min(length, self._model.cfg.n_ctx),)
            ids = torch.randint(config.vocab_size - 1, size, generator=generator)
            rows.append((ids + (ids >= blank)).tolist())  # a pad is no token
        mask = pad([[1] * len(row) for row in rows], 0, side)
        return self.on_batches([{"input": pad(rows, blank, side), mask_name(self._model): mask}])

    @torch.no_grad()
    def on_batches(self, batches: Iterable[Mapping[str, Tensor]]) -> float:
        """Largest difference on keyword arguments of our model."""
        largest = 0.0
        for inputs in batches:
            given = {name: inputs[name] for name in ("token_type_ids",) if name in inputs}
            given |= {"input_ids": inputs["input"], "attention_mask": mask_of(inputs)}
            given = {name: value.cpu() for name, value in given.items()}
            real = given["attention_mask"].bool()
            if is_encoder(self._model):
                logits = self._logits(given)
                theirs = list(logits) if logits.ndim == 2 else list(map(_at, logits, real))
            else:
                alone = [
                    {k: v[row, real[row]][None] for k, v in given.items()}
                    for row in range(len(real))
                ]
                theirs = [self._logits(row)[0] for row in alone]
            largest = max(largest, self._largest(inputs, theirs))
        return largest

    def _logits(self, given: Mapping[str, Tensor]) -> Tensor:
        return self._theirs(**{k: v for k, v in given.items() if k in self._takes}).logits

    def _largest(self, inputs: Mapping[str, Tensor], theirs: Sequence[Tensor]) -> float:
        """Between our logits of padded rows and theirs of each row without its pads."""
        device = self._model.cfg.device
        ours = self._model(**{name: value.to(device) for name, value in inputs.items()}).cpu()
        real = mask_of(inputs).bool().cpu()
        own = list(ours) if ours.ndim == 2 else list(map(_at, ours, real))
        pairs = zip(own, theirs, strict=True)
        return max(float((one.double() - other.double()).abs().max()) for one, other in pairs)


def padded_left(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Keyword arguments of rows that are padded on the right, with their pads on the left."""
    pads = (mask_of(inputs) == 0).sum(1).tolist()
    return {
        name: torch.stack([row.roll(shift) for row, shift in zip(value, pads, strict=True)])
        for name, value in inputs.items()
    }


def _at(logits: Tensor, real: Int[Tensor, "pos"] | Tensor) -> Tensor:
    """A language model's logits at the tokens that are not pads."""
    return logits[real]
