"""Tokenised rows into batches of about equal length.

1. Sort the rows by their number of tokens; rows of one length are in an order drawn
   from the seed.
2. Walk from short to long and close a batch before ``rows x longest row`` exceeds the token
   budget, or before more than a tenth of it is padding.
3. Shuffle the batches with the same seed.
4. Pad a batch to its own longest row, no further.
5. `Batches.restore` undoes the order: each batch knows the positions of its rows in the split.
6. `Batches.limited` and `Batches.of_cases` choose rows from batches that are already made: the
   batches keep their order and their width, and the rows that were not chosen drop out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from datasets import Dataset
from jaxtyping import Float, Int
from torch import Tensor

from hc_lens.errors import HcLensError
from hc_lens.models.inputs import Padding, mask_of
from hc_lens.protocols import BatchesLike
from hc_lens.records import digest

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

    def take(self, indices: Sequence[int]) -> Batch:
        """Some rows of the batch, by their indices, padded as they are here."""
        at = torch.tensor(indices, device=self.rows.device)
        return Batch(
            {name: tensor[at] for name, tensor in self.inputs.items()},
            self.labels[at],
            tuple(self.cases[index] for index in indices),
            self.rows[at],
        )

    def __len__(self) -> int:
        return len(self.cases)


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
    """Indices in `rows` of each batch's rows."""
    _widths: tuple[int, ...]
    """Number of tokens to which each batch is padded."""
    _padding: Padding
    """How the rows of a batch become the model's inputs."""

    @property
    def n_rows(self) -> int:
        """Number of rows in one pass."""
        return len(self.rows)

    @property
    def padding(self) -> float:
        """Share of padding among all tokens of one pass."""
        padded = sum(len(b) * width for b, width in zip(self._order, self._widths, strict=True))
        return 1 - sum(self._tokens["length"][:]) / padded

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
        order = [index for batch in self._order for index in batch]
        restored[torch.tensor(order, device=flat.device)] = flat
        return restored

    def limited(self, n: int | None, seed: int = 0) -> Batches:
        """At most `n` of the rows: a sample that depends on the seed alone, not on the batches."""
        if n is not None and (isinstance(n, bool) or not isinstance(n, int) or n < 1):
            raise HcLensError(f"expected limit as a positive number of rows, got {n!r}; raise it")
        if n is None or n >= self.n_rows:
            return self
        return self._chosen(sample(self.n_rows, n, seed))

    def of_cases(self, *cases: str) -> Batches:
        """The rows of some cases."""
        unknown = [case for case in cases if case not in self._cases]
        if unknown or not cases:
            raise HcLensError(
                f"expected a case among {sorted(set(self._cases))}, got "
                f"{unknown[0] if unknown else 'none'!r}; choose one"
            )
        chosen = [index for index, case in enumerate(self._cases) if case in cases]
        return replace(self._chosen(chosen), name=f"{self.name}/{'+'.join(cases)}")

    def _chosen(self, indices: list[int]) -> Batches:
        """The rows at some indices of `rows`, in the batches in which they are now."""
        index_of = {old: new for new, old in enumerate(indices)}
        kept = [tuple(index_of[i] for i in batch if i in index_of) for batch in self._order]
        rows = self.rows[indices]
        return replace(
            self,
            fingerprint=digest(self.fingerprint, rows.tolist()),
            rows=rows,
            _tokens=self._tokens.select(indices),
            _gold=self._gold[indices],
            _cases=tuple(self._cases[index] for index in indices),
            _order=tuple(batch for batch in kept if batch),
            _widths=tuple(w for w, batch in zip(self._widths, kept, strict=True) if batch),
        )

    def __iter__(self) -> Iterator[Batch]:
        for index in range(len(self)):
            yield self[index]

    def __getitem__(self, index: int) -> Batch:
        return self.gather(self._order[index], self._widths[index])

    def __len__(self) -> int:
        return len(self._order)

    def __repr__(self) -> str:
        return (
            f"Batches({self.name}: {self.n_rows} rows in {len(self)} batches, "
            f"{self.padding:.1%} padding, {self.n_truncated} truncated, {self.n_dropped} dropped)"
        )

    def gather(self, indices: Sequence[int], width: int | None = None) -> Batch:
        """One batch of any rows, by their indices in `rows`; as wide as its longest row."""
        at = list(indices)
        inputs = self._padding(self._tokens[at], width)
        device = inputs["input"].device
        cases = tuple(self._cases[index] for index in at)
        return Batch(inputs, self._gold[at].to(device), cases, self.rows[at].to(device))

    def _to_task(self, logits: Tensor) -> Tensor:
        if not self.labels or logits.shape[-1] != len(self.to_task):
            raise HcLensError(
                f"expected logits of {len(self.to_task)} labels for {self.name}, got "
                f"{logits.shape[-1]}; score the model that the batches were made for, on a task "
                "with labels"
            )
        return self.to_task.to(logits.device)


def named_batches(datasets: BatchesLike | Mapping[str, BatchesLike]) -> dict[str, BatchesLike]:
    """Batches by name, from a mapping or from batches alone; each must have rows."""
    if isinstance(datasets, Mapping):
        named = dict(datasets)
    else:
        named = {getattr(datasets, "name", "rows"): datasets}
    for batches in named.values():
        if not all(hasattr(batches, name) for name in ("predictions", "log_probs")):
            raise HcLensError(
                "expected batches by name such as {'mnli': task.batches(model)}, got a "
                f"{type(batches).__name__}; make batches with task.batches(model, ...)"
            )
    empty = [name for name, batches in named.items() if len(batches) == 0]
    if empty or not named:
        what = f"none in {empty[0]!r}" if empty else "no dataset"
        raise HcLensError(f"expected rows in every dataset, got {what}; check the split")
    return named


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
    return [batches[index] for index in order]
