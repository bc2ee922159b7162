"""The full model's own logits, computed once per row and kept.

1. A batch that was seen before gives its kept logits; the full model does not run again.
2. Kept logits are a few numbers per row, on the CPU, keyed by the rows of the batch.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from hc_lens.protocols import BatchLike, Model


class Teacher:
    """Logits of the unmasked model on batches that come again."""

    def __init__(self, model: Model):
        self.model = model
        self._kept: dict[tuple[int, ...], Tensor] = {}

    def logits(self, batch: BatchLike) -> Float[Tensor, "batch labels"]:
        """The full model's logits on a batch."""
        key = tuple(batch.rows.tolist())
        if key not in self._kept:
            with torch.no_grad():
                self._kept[key] = self.model(**batch.inputs).cpu()
        return self._kept[key].to(batch.rows.device)
