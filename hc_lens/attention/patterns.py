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

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import cast

import torch
from datasets import Dataset
from jaxtyping import Float
from torch import Tensor
from typing_extensions import Unpack

from hc_lens.attention.words import Row, Words, align, align_batch
from hc_lens.data.batches import Batch, Batches, draw
from hc_lens.data.labels import NO_LABEL
from hc_lens.data.task import ForDecoder, Task
from hc_lens.errors import HcLensError
from hc_lens.masks.finite import check_weights
from hc_lens.masks.hooks import observe
from hc_lens.models.inputs import Text, encode, tokenizer_of
from hc_lens.protocols import BatchLike, Model
from hc_lens.units import Unit, UnitSpace

See = Callable[[int, Float[Tensor, "batch head query key"]], None]
"""What `visit` calls: the layer and its pattern."""


class Batching(ForDecoder, total=False):
    """Arguments of `hc.Task.batches`, which says what each does."""

    seed: int
    max_length: int | None
    token_budget: int


@dataclass(frozen=True, kw_only=True)
class WordBatch(Batch):
    """Rows ready for the model, with the words and sentences of their tokens."""

    words: Words
    """Words and sentences of the tokens."""
    own: tuple[Row, ...] | None = None
    """In swapped batches: each row as it is with its own second sentence."""


@dataclass(frozen=True, eq=False, repr=False)
class WordBatches(Batches):
    """Batches without labels whose rows have their words."""

    texts: Dataset
    """The one or two texts of each row of the split."""
    _model: Model
    """The model that the batches were made for."""
    _settings: Batching
    """How the batches were made."""
    _own: Dataset | None = None
    """In swapped batches: the texts of each row of the split as they were."""

    @property
    def n_texts(self) -> int:
        """1 for single sentences, 2 for pairs."""
        return len(self.texts.column_names)

    @property
    def swappable(self) -> bool:
        """Whether the rows are pairs with at least two different second sentences."""
        return self.n_texts == 2 and len(set(self._seconds())) > 1

    def swapped(self, seed: int = 0) -> WordBatches:
        """The same first sentences, each with another row's second: as long, but another text."""
        if not self.swappable:
            raise HcLensError(
                f"expected pairs with at least two different second sentences to swap, got others "
                f"in {self.name}; use a task with two text columns, and more rows"
            )
        first, second = self.texts.column_names
        foreign, sentences = self.texts[second][:], self._seconds()
        for row, partner in zip(self.rows.tolist(), _partners(sentences, seed), strict=True):
            foreign[row] = sentences[partner]
        texts = Dataset.from_dict({first: self.texts[first][:], second: foreign})
        # A pair that fits the context may not fit with a longer second sentence.
        context = min(self._model.cfg.n_ctx, tokenizer_of(self._model).model_max_length)
        max_length = self._settings.get("max_length") or context
        settings: Batching = {**self._settings, "max_length": max_length}
        swapped = _with_words(self._model, texts, self.rows.tolist(), self.name, settings)
        return replace(swapped, _own=self.texts)

    def gather(self, indices: Sequence[int], width: int | None = None) -> WordBatch:
        """One batch of any rows, by their indices in `rows`, with their words."""
        batch, tokenizer = super().gather(indices, width), tokenizer_of(self._model)
        separator, rows = self._settings.get("separator"), batch.rows.tolist()
        words = align_batch(tokenizer, _pick(self.texts, rows), batch.inputs, separator)
        if self._own is None:
            return WordBatch(**vars(batch), words=words)
        own = align(tokenizer, _pick(self._own, rows), separator=separator)
        return WordBatch(**vars(batch), words=words, own=tuple(own))

    def __iter__(self) -> Iterator[WordBatch]:
        return (self.gather(*planned) for planned in self._plan)

    def _seconds(self) -> list[str]:
        return [texts[-1] for texts in _pick(self.texts, self.rows.tolist())]


def word_batches(
    model: Model,
    task: Task,
    split: str | None = None,
    *,
    limit: int | None = None,
    limit_per_case: int | None = None,
    **settings: Unpack[Batching],
) -> WordBatches:
    """The rows that ``task.batches`` gives with the same arguments, with their words.

    Labels play no part: the task may have none, and the model's need not match.
    """
    # The model's tokenizer is tried first, so that a slow one is refused before rows are read.
    align(tokenizer_of(model), [("a",)])
    whole = task.dataset(split)
    rows = draw(whole["case"][:], settings.get("seed", 0), limit, limit_per_case)
    texts = whole.select_columns(list(task.columns))
    return _with_words(model, texts, rows, f"{task.name}/{task.split_named(split)}", settings)


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
    inputs = encode(model, given if separator is None else [separator.join(row) for row in rows])
    words = align_batch(tokenizer_of(model), rows, inputs, separator)
    labels, cases = torch.full((len(rows),), NO_LABEL), ("all",) * len(rows)
    return WordBatch(inputs, labels, cases, torch.arange(len(rows)), words=words)


def visit(model: Model, batch: BatchLike, see: See, layers: Iterable[int] | None = None) -> None:
    """Run the model on one batch and call ``see(layer, pattern)`` as each layer attends.

    Hooks that are on the model stay, so masks and ablations count. `layers` are all by default.
    """
    wanted = range(UnitSpace.of(model).n_layers) if layers is None else layers
    layer_of = {f"blocks.{layer}.attn.hook_pattern": layer for layer in wanted}
    _, silent = observe(
        model, batch.inputs, layer_of, lambda name, pattern: see(layer_of[name], pattern)
    )
    if silent:
        raise HcLensError(
            f"expected the hook points {silent[:3]} to fire, they did not; the model computes "
            "its attention without a pattern (fused attention) or has no such hook points: load it "
            "with hc.load, or with attn_implementation='eager'"
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
    model: Model, batch: BatchLike, heads: Iterable[Unit | str] | str | None = None
) -> Float[Tensor, "batch head query key"]:
    """The patterns of some heads (all by default) on one batch, in the order of `heads`."""
    units = check_heads(model, heads)
    check_weights(model)
    kept: dict[Unit, Tensor] = {}

    def keep(layer: int, pattern: Tensor) -> None:
        # A copy of the wanted heads lets go of the rest of the layer.
        own = [unit for unit in units if unit.layer == layer]
        kept.update((unit, pattern[:, unit.head].clone()) for unit in own)

    visit(model, batch, keep, sorted({unit.layer for unit in units}))
    return torch.stack([kept[unit] for unit in units], dim=1)


def _with_words(
    model: Model, texts: Dataset, rows: list[int], name: str, settings: Batching
) -> WordBatches:
    """Some rows of a split, whose texts are given, in batches with their words."""
    task_name, _, split = name.rpartition("/")
    chosen = {split: texts.select(rows)}
    task = Task.from_rows(chosen, columns=texts.column_names, label=None, name=task_name)
    made = replace(task.batches(model, split, **settings), rows=torch.tensor(rows))
    return WordBatches(**vars(made), texts=texts, _model=model, _settings=settings)


def _pick(texts: Dataset, rows: list[int]) -> list[tuple[str, ...]]:
    chosen = texts[rows]
    return list(zip(*(chosen[name] for name in texts.column_names), strict=True))


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
