"""Batches made by hand, for tests of the instruments."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hc_lens.models.inputs import mask_name, mask_of
from tests import tiny


@dataclass(frozen=True)
class Rows:
    """One batch: the fields of hc.Batch that the instruments read."""

    inputs: dict[str, Tensor]
    rows: Tensor
    labels: Tensor
    cases: tuple[str, ...]

    def take(self, indices) -> Rows:
        at = list(indices)
        inputs = {name: tensor[at] for name, tensor in self.inputs.items()}
        return Rows(inputs, self.rows[at], self.labels[at], tuple(self.cases[i] for i in at))


class Batches(list):
    """A list of `Rows` with the label functions of hc.Batches, one task label per model label."""

    fingerprint = "made by hand"

    def predictions(self, logits: Tensor, batch) -> Tensor:
        return logits.argmax(-1)

    def log_probs(self, logits: Tensor, batch) -> Tensor:
        return logits.log_softmax(-1)


def random_batches(model, lengths=((9, 5, 2), (7, 7)), side: str = "right", seed: int = 0):
    """Batches of random ids, one per tuple of row lengths."""
    batches, start = Batches(), 0
    for index, rows in enumerate(lengths):
        made = tiny.tiny_inputs(model.pad_token_id or 0, side, rows, seed=seed + index)
        inputs = {"input": made["input_ids"], mask_name(model): made["attention_mask"]}
        inputs = {name: tensor.to(model.cfg.device) for name, tensor in inputs.items()}
        ids = torch.arange(start, start + len(rows))
        batches.append(Rows(inputs, ids, ids % 3, ("all",) * len(rows)))
        start += len(rows)
    return batches


def single_rows(batches) -> list[dict[str, Tensor]]:
    """Every row of the batches alone, without its pads."""
    singles = []
    for batch in batches:
        mask = mask_of(batch.inputs).bool()
        for row in range(len(mask)):
            singles.append(
                {name: value[row : row + 1][:, mask[row]] for name, value in batch.inputs.items()}
            )
    return singles
