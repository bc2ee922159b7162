"""A model with rows and the units that are known to matter on them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hc_lens.data.batches import Batch
from hc_lens.protocols import BatchesLike, BatchLike
from hc_lens.records import digest
from hc_lens.units import Unit, UnitSpace


@dataclass(frozen=True)
class Known:
    """A model whose circuit is known."""

    name: str
    """What was planted or compiled."""
    model: Any
    """The hooked model."""
    batches: BatchesLike
    """Rows on which the circuit is at work, with the labels that it answers."""
    units: tuple[Unit, ...]
    """The true units, in mask order: those that matter. Every other unit is noise, or nothing."""

    @property
    def space(self) -> UnitSpace:
        """All units of the model."""
        return UnitSpace.of(self.model)

    @property
    def truth(self) -> Bool[Tensor, "units"]:
        """Whether each unit is a true one, in mask order."""
        return torch.tensor([unit in self.units for unit in self.space])

    def __repr__(self) -> str:
        return f"Known({self.name}: {len(self.units)} of {len(self.space)} units are true)"


@dataclass(frozen=True, repr=False)
class ClassBatches:
    """Batches of token ids whose label is one of the model's own outputs."""

    name: str
    """What the rows are."""
    labels: tuple[str, ...]
    """The name of each output."""
    _batches: Sequence[Batch]

    @property
    def n_rows(self) -> int:
        """Number of rows in one pass."""
        return sum(map(len, self._batches))

    @property
    def fingerprint(self) -> str:
        """Hash of the token ids, the labels and where each row is read."""
        parts: list[object] = [self.name, self.labels]
        for batch in self._batches:
            reads = None if batch.reads is None else batch.reads.tolist()
            parts += [batch.tokens.tolist(), batch.labels.tolist(), reads]
        return digest(*parts)

    def predictions(
        self, logits: Float[Tensor, "*runs batch out"], batch: BatchLike | None = None
    ) -> Int[Tensor, "*runs batch"]:
        """The output with the largest logit."""
        return logits.argmax(-1)

    def log_probs(
        self, logits: Float[Tensor, "*runs batch out"], batch: BatchLike | None = None
    ) -> Float[Tensor, "*runs batch labels"]:
        """Log-probabilities of the outputs."""
        return logits.log_softmax(-1)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._batches)

    def __getitem__(self, index: int, /) -> Batch:
        return self._batches[index]

    def __len__(self) -> int:
        return len(self._batches)

    def __repr__(self) -> str:
        return f"ClassBatches({self.name}: {self.n_rows} rows in {len(self)} batches)"
