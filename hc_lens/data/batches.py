"""Tokenised rows into batches of about equal length.

1. Sort the rows by their number of tokens; rows of one length stand in an order drawn from the
   seed.
2. Walk from short to long and close a batch before ``rows x longest row`` exceeds the token
   budget, or before more than a tenth of it is padding.
3. Shuffle the batches with the same seed.
4. Pad a batch to its own longest row, no further.
5. `Batches.restore` undoes the order: each batch knows the positions of its rows in the split.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from jaxtyping import Float, Int
from torch import Tensor

from hc_lens.errors import HcLensError
from hc_lens.models.inputs import mask_of, name_inputs, pad, pad_id

MOST_PADDING = 0.1
"""Largest share of padding in a batch."""


@dataclass(frozen=True)
class Batch:
    """Rows of about equal length, ready for ``model(**batch.inputs)``."""

    inputs: dict[str, Tensor]
    """Keyword arguments of the model: token ids, attention mask, token types if it has them."""
    labels: Int[Tensor, " batch"]
    """Index of each row's label in `Batches.labels`; -1 for a row without one."""
    cases: tuple[str, ...]
    """Name of each row's case."""
    rows: Int[Tensor, " batch"]
    """Position of each row in ``task.dataset(split)``."""

    @property
    def tokens(self) -> Int[Tensor, "batch pos"]:
        """The token ids."""
        return self.inputs["input"]

    @property
    def mask(self) -> Int[Tensor, "batch pos"]:
        """The 0/1 attention mask, whatever the model calls it."""
        return mask_of(self.inputs)

    def __len__(self) -> int:
        return len(self.cases)


@dataclass(frozen=True)
class Padding:
    """How the rows of a batch are made equally long for one model."""

    value: int
    """Token id to fill with."""
    side: str
    """Side to fill on, ``"left"`` or ``"right"``."""
    mask_name: str
    """What the model's ``forward`` calls the attention mask."""
    token_types: bool
    """Whether the model takes token types."""

    @classmethod
    def of(cls, model: Any, side: str) -> Padding:
        """The padding that a model takes."""
        # One token tells how this model names its inputs, without holding on to its weights.
        one = torch.ones(1, 1, dtype=torch.long)
        named = name_inputs(model, one, one, one)
        (mask_name,) = set(named) - {"input", "token_type_ids"}
        return cls(pad_id(model), side, mask_name, "token_type_ids" in named)

    def __call__(self, columns: Mapping[str, list[list[int]]]) -> dict[str, Tensor]:
        """The model's keyword arguments for some tokenised rows."""
        ids = columns["input_ids"]
        inputs = {
            "input": pad(ids, self.value, self.side),
            self.mask_name: pad([[1] * len(row) for row in ids], 0, self.side),
        }
        if self.token_types and "token_type_ids" in columns:
            inputs["token_type_ids"] = pad(columns["token_type_ids"], 0, self.side)
        return inputs


@dataclass(frozen=True, eq=False, repr=False)
class Batches:
    """The batches of one split for one model: the same rows in the same order at every pass."""

    name: str
    """Task and split, such as ``"mnli/train"``."""
    labels: tuple[str, ...]
    """The task's label names, which `Batch.labels` counts into."""
    to_task: Int[Tensor, " model_labels"]
    """Task label id of each model label id, matched by name; empty for a task without labels."""
    n_dropped: int
    """Number of rows of the split that were left out as they have no gold label."""
    n_truncated: int
    """Number of rows that were cut to `max_length`."""
    fingerprint: str
    """Hash of the rows, the tokenizer and every setting that decides a batch."""
    rows: Int[Tensor, " rows"]
    """Position of each row in ``task.dataset(split)``, in the order that `restore` gives."""
    _tokens: Dataset
    """Token ids of each row, in the order of `rows`."""
    _gold: Int[Tensor, " rows"]
    """Label of each row, in the order of `rows`."""
    _cases: tuple[str, ...]
    """Case of each row, in the order of `rows`."""
    _order: tuple[tuple[int, ...], ...]
    """Places in `rows` of each batch's rows."""
    _padding: Padding
    """How to make a batch's rows equally long."""
    _cfg: Any
    """The model's config, which knows the device that the model is on."""

    @property
    def n_rows(self) -> int:
        """Number of rows in one pass."""
        return len(self.rows)

    @property
    def padding(self) -> float:
        """Share of padding among all tokens of one pass."""
        lengths = self._tokens["length"][:]
        padded = sum(len(batch) * max(lengths[row] for row in batch) for batch in self._order)
        return 1 - sum(lengths) / padded

    def predictions(self, logits: Float[Tensor, "batch model_labels"]) -> Int[Tensor, " batch"]:
        """Task label of the largest logit: for HANS neutral and contradiction are both 1."""
        return self._to_task(logits)[logits.argmax(dim=-1)]

    def log_probs(
        self, logits: Float[Tensor, "batch model_labels"]
    ) -> Float[Tensor, "batch task_labels"]:
        """Log of the summed probability of the model labels that map to each task label."""
        to_task = self._to_task(logits)
        log_probs = logits.log_softmax(dim=-1)
        summed = [log_probs[:, to_task == k].logsumexp(dim=-1) for k in range(len(self.labels))]
        return torch.stack(summed, dim=-1)

    def restore(self, values: Sequence[Tensor]) -> Tensor:
        """Results of every batch in turn, as one tensor in the order of `rows`."""
        flat = torch.cat(list(values)) if len(values) else torch.empty(0)
        if len(flat) != self.n_rows:
            raise HcLensError(
                f"expected one result for each of the {self.n_rows} rows of {self.name}, got "
                f"{len(flat)} in {len(values)} batches; collect the results of a whole pass"
            )
        restored = torch.empty_like(flat)
        places = [row for batch in self._order for row in batch]
        restored[torch.tensor(places, device=flat.device)] = flat
        return restored

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._order:
            yield self.gather(list(batch))

    def __getitem__(self, place: int) -> Batch:
        return self.gather(list(self._order[place]))

    def __len__(self) -> int:
        return len(self._order)

    def __repr__(self) -> str:
        return (
            f"Batches({self.name}: {self.n_rows} rows in {len(self)} batches, "
            f"{self.padding:.1%} padding, {self.n_truncated} truncated, {self.n_dropped} dropped)"
        )

    def gather(self, places: list[int]) -> Batch:
        """One batch of any rows, by their places in `rows`."""
        inputs = self._padding(self._tokens[places])
        device = self._cfg.device
        return Batch(
            {name: tensor.to(device) for name, tensor in inputs.items()},
            self._gold[places].to(device),
            tuple(self._cases[place] for place in places),
            self.rows[places].to(device),
        )

    def _to_task(self, logits: Tensor) -> Tensor:
        if not self.labels or logits.shape[-1] != len(self.to_task):
            raise HcLensError(
                f"expected logits of {len(self.to_task)} labels for {self.name}, got "
                f"{logits.shape[-1]}; score the model that the batches were made for, on a task "
                "with labels"
            )
        return self.to_task.to(logits.device)


def sample(n_rows: int, limit: int | None, seed: int) -> list[int]:
    """At most `limit` of the rows, drawn without replacement, in their own order.

    With one seed a smaller sample is part of every larger one.
    """
    generator = torch.Generator().manual_seed(seed)
    return sorted(torch.randperm(n_rows, generator=generator)[:limit].tolist())


def bucket(lengths: Sequence[int], token_budget: int, seed: int) -> list[list[int]]:
    """Indices of the rows of each batch, in the order of iteration."""
    if max(lengths) > token_budget:
        raise HcLensError(
            f"expected a token_budget for at least the longest row ({max(lengths)} tokens), got "
            f"{token_budget}; raise it, or cut the rows with max_length="
        )
    generator = torch.Generator().manual_seed(seed)
    shuffled = torch.randperm(len(lengths), generator=generator).tolist()
    batches: list[list[int]] = [[]]
    real = 0  # tokens of the open batch, without padding
    for row in sorted(shuffled, key=lambda row: lengths[row]):
        padded = (len(batches[-1]) + 1) * lengths[row]
        real += lengths[row]
        if padded > token_budget or real < (1 - MOST_PADDING) * padded:
            batches.append([])
            real = lengths[row]
        batches[-1].append(row)
    order = torch.randperm(len(batches), generator=generator).tolist()
    return [batches[place] for place in order]
