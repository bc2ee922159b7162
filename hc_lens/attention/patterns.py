"""Attention patterns with everything needed to read them.

1. `word_batches` makes the batches of a task's split once more, each with the words and sentences
   of its tokens (`hc_lens.attention.words`); `word_batch` does so for texts in hand.
2. `visit` runs the model on one batch and hands each layer's pattern, read at
   ``blocks.{l}.attn.hook_pattern``, to a function. Nothing is kept: the pattern of a layer is freed
   before the next one is computed. A study over a dataset calls it batch after batch.
3. `patterns` keeps the patterns of some heads for one batch, to look at them.

A pattern is [batch, head, query, key]: what share of its attention each query gives to each key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, TypedDict, cast

import torch
from datasets import Dataset
from jaxtyping import Float, Int
from torch import Tensor
from typing_extensions import Unpack

from hc_lens.attention.words import Row, Words, align, stack
from hc_lens.data.batches import Batches, sample
from hc_lens.data.task import Task
from hc_lens.errors import HcLensError
from hc_lens.masks.hooks import Handle
from hc_lens.models.inputs import Side, Text, encode, mask_of, tokenizer_of
from hc_lens.protocols import BatchLike, Model
from hc_lens.units import Unit, UnitSpace

See = Callable[[int, Float[Tensor, "batch head query key"]], None]
"""What `visit` calls: the layer and its pattern."""


def pattern_name(layer: int) -> str:
    """Hook point of the attention pattern of a layer."""
    return f"blocks.{layer}.attn.hook_pattern"


class Batching(TypedDict, total=False):
    """Arguments of `hc.Task.batches`, which says what each does."""

    seed: int
    max_length: int | None
    token_budget: int
    padding_side: Side | None
    separator: str | None


@dataclass(frozen=True)
class WordBatch:
    """Rows ready for the model, with the words and sentences of their tokens."""

    inputs: dict[str, Tensor]
    """Keyword arguments of the model."""
    words: Words
    """Words and sentences of the tokens."""
    rows: Int[Tensor, " batch"]
    """Position of each row in ``task.dataset(split)``, or among the texts given."""
    own: tuple[Row, ...] | None = None
    """In swapped batches: each row as it is with its own second sentence."""

    def __len__(self) -> int:
        return len(self.words.rows)


@dataclass(frozen=True, eq=False, repr=False)
class WordBatches:
    """The rows of a task's split with their words: re-iterable, the same at every pass."""

    batches: Batches
    """The batches that the model reads."""
    texts: Dataset
    """The one or two texts of each row, in the order that the batches count in."""
    rows: Int[Tensor, " rows"]
    """Position of each of these rows in ``task.dataset(split)``."""
    _model: Model
    """The model that the batches were made for."""
    _settings: Batching
    """How the batches were made."""
    _own: Dataset | None = None
    """In swapped batches: the texts of each row as they were."""

    @property
    def name(self) -> str:
        """Task and split, such as ``"mnli/train"``."""
        return self.batches.name

    @property
    def n_rows(self) -> int:
        """Number of rows in one pass."""
        return self.batches.n_rows

    @property
    def n_texts(self) -> int:
        """1 for single sentences, 2 for pairs."""
        return len(self.texts.column_names)

    @property
    def swappable(self) -> bool:
        """Whether the rows are pairs with at least two different second sentences."""
        return self.n_texts == 2 and len(set(self.texts[self.texts.column_names[1]][:])) > 1

    def swapped(self, seed: int = 0) -> WordBatches:
        """The same first sentences, each with another row's second: as long, but another text."""
        if not self.swappable:
            raise HcLensError(
                f"expected pairs with at least two different second sentences to swap, got others "
                f"in {self.name}; use a task with two text columns, and more rows"
            )
        first, second = self.texts.column_names
        sentences = self.texts[second][:]
        foreign = [sentences[at] for at in _partners(sentences, seed)]
        texts = Dataset.from_dict({first: self.texts[first][:], second: foreign})
        # A pair that fits the context may not fit with a longer second sentence.
        context = min(self._model.cfg.n_ctx, tokenizer_of(self._model).model_max_length)
        max_length = self._settings.get("max_length") or context
        settings: Batching = {**self._settings, "max_length": max_length}
        batches = _batches(self._model, texts, self.name, settings)
        return WordBatches(batches, texts, self.rows, self._model, settings, self.texts)

    def __iter__(self) -> Iterator[WordBatch]:
        tokenizer = tokenizer_of(self._model)
        separator = self._settings.get("separator")
        for batch in self.batches:
            rows = batch.rows.tolist()
            words = _words(tokenizer, _pick(self.texts, rows), batch.inputs, separator)
            own = None
            if self._own is not None:
                own = tuple(align(tokenizer, _pick(self._own, rows), separator=separator))
            yield WordBatch(batch.inputs, words, self.rows[rows], own)

    def __len__(self) -> int:
        return len(self.batches)

    def __repr__(self) -> str:
        return f"WordBatches({self.name}: {self.n_rows} rows in {len(self)} batches)"


def word_batches(
    model: Model,
    task: Task,
    split: str | None = None,
    *,
    limit: int | None = None,
    **settings: Unpack[Batching],
) -> WordBatches:
    """The rows that ``task.batches`` gives with the same arguments, with their words.

    Labels play no part: the task may have none, and the model's need not match.
    """
    # The model's tokenizer is tried first, so that a slow one is refused before rows are read.
    align(tokenizer_of(model), [("a",)])
    if split is None:
        split = task.splits[0] if len(task.splits) == 1 else "train"
    if limit is not None and limit < 1:
        raise HcLensError(
            f"expected limit as a whole number above 0, got {limit}; leave it out for all rows"
        )
    table = task.dataset(split)
    positions = sample(len(table), limit, settings.get("seed", 0))
    texts = table.select_columns(list(task.columns)).select(positions)
    batches = _batches(model, texts, f"{task.name}/{split}", settings)
    return WordBatches(batches, texts, torch.tensor(positions), model, settings)


def word_batch(
    model: Model, texts: Text | Sequence[Text], separator: str | None = None
) -> WordBatch:
    """Sentences, or (premise, hypothesis) pairs, as one batch with their words."""
    given = cast(list[Text], [texts] if isinstance(texts, (str, tuple)) else list(texts))
    rows = [(text,) if isinstance(text, str) else text for text in given]
    if len({len(row) for row in rows}) != 1:
        raise HcLensError(
            f"expected all sentences or all pairs, got {len(rows)} texts of both kinds or none; "
            "pass one kind at a time"
        )
    joined = given if separator is None else [separator.join(row) for row in rows]
    inputs = encode(model, joined)
    words = _words(tokenizer_of(model), rows, inputs, separator)
    return WordBatch(inputs, words, torch.arange(len(rows)))


def visit(
    model: Model, batch: WordBatch | BatchLike, see: See, layers: Iterable[int] | None = None
) -> None:
    """Run the model on one batch and call ``see(layer, pattern)`` as each layer attends.

    Hooks that are on the model stay, so masks and ablations count. `layers` are all by default.
    """
    wanted = range(UnitSpace.of(model).n_layers) if layers is None else layers
    names = {pattern_name(layer): layer for layer in wanted}
    missing = [name for name in names if name not in getattr(model, "hook_dict", {})]
    if missing:
        raise HcLensError(
            f"expected the hook points {missing[:3]} on the model, got a {type(model).__name__} "
            "without them; load the model with hc.load, or pass a HookedEncoder, "
            "HookedTransformer or TransformerBridge"
        )
    seen: set[int] = set()

    def read(layer: int, pattern: Tensor) -> None:
        seen.add(layer)
        see(layer, pattern)

    edits = {name: partial(read, layer) for name, layer in names.items()}
    with torch.no_grad(), Handle(model, edits):
        model(**batch.inputs)
    silent = [name for name, layer in names.items() if layer not in seen]
    if silent:
        raise HcLensError(
            f"expected the hook points {silent[:3]} to fire, they did not; the model computes its "
            "attention without a pattern (fused attention): load it with hc.load, or with "
            "attn_implementation='eager'"
        )


def check_heads(model: Model, heads: Iterable[Unit | str] | str | None) -> list[Unit]:
    """The heads named, in the order given; all by default. An unknown one is an HcLensError."""
    space = UnitSpace.of(model)
    if heads is None:
        return space.heads
    units = [space[index] for index in space.indices(heads)]
    mlps = [unit for unit in units if not unit.is_head]
    if mlps or not units:
        raise HcLensError(
            f"expected attention heads such as 'L0.H0', got {mlps[0] if mlps else 'none'}; "
            "an MLP has no attention pattern: name heads of hc.UnitSpace.of(model).heads"
        )
    return units


def patterns(
    model: Model, batch: WordBatch | BatchLike, heads: Iterable[Unit | str] | str | None = None
) -> Float[Tensor, "batch head query key"]:
    """The patterns of some heads (all by default) on one batch, in the order of `heads`."""
    units = check_heads(model, heads)
    kept: dict[Unit, Tensor] = {}

    def keep(layer: int, pattern: Tensor) -> None:
        # A copy of the wanted heads lets go of the rest of the layer.
        own = [unit for unit in units if unit.layer == layer]
        kept.update((unit, pattern[:, unit.head].clone()) for unit in own)

    visit(model, batch, keep, sorted({unit.layer for unit in units}))
    return torch.stack([kept[unit] for unit in units], dim=1)


def _batches(model: Model, texts: Dataset, name: str, settings: Batching) -> Batches:
    task_name, _, split = name.rpartition("/")
    task = Task.from_rows({split: texts}, columns=texts.column_names, label=None, name=task_name)
    return task.batches(model, split, **settings)


def _pick(texts: Dataset, rows: list[int]) -> list[tuple[str, ...]]:
    chosen = texts[rows]
    return list(zip(*(chosen[name] for name in texts.column_names), strict=True))


def _words(
    tokenizer: Any,
    texts: Sequence[tuple[str, ...]],
    inputs: Mapping[str, Tensor],
    separator: str | None,
) -> Words:
    """The words of a batch's tokens; the tokenizer must give the ids that the batch has."""
    mask = mask_of(inputs)
    rows = align(tokenizer, texts, mask.sum(1).tolist(), separator)
    for row, ids, real in zip(rows, inputs["input"], mask.bool(), strict=True):
        if ids[real].tolist() != list(row.ids):
            raise HcLensError(
                "expected the tokenizer to give the same ids twice, got other ids for the row "
                f"{row.words[:4]}...; has the model's tokenizer been changed since?"
            )
    return stack(rows, mask)


def _partners(sentences: list[str], seed: int) -> list[int]:
    """For each row another row whose sentence is about as long and not the same text."""
    generator = torch.Generator().manual_seed(seed)
    shuffled = torch.randperm(len(sentences), generator=generator).tolist()
    order = sorted(shuffled, key=lambda row: len(sentences[row].split()))
    partners = [0] * len(sentences)
    for rank, row in enumerate(order):
        following = (order[(rank + step) % len(order)] for step in count(1))
        partners[row] = next(other for other in following if sentences[other] != sentences[row])
    return partners
