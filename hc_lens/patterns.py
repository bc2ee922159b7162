"""Attention patterns with everything needed to read them.

1. `word_batches` makes the batches of a task's split once more, each with the words and sentences
   of its tokens (`hc_lens.words`); `word_batch` does so for texts in hand.
2. `visit` runs the model on one batch and hands each layer's pattern, read at
   ``blocks.{l}.attn.hook_pattern``, to a function. Nothing is kept: the pattern of a layer is gone
   before the next one is computed. A study over a dataset calls it batch after batch.
3. `patterns` keeps the patterns of some heads for one batch, to look at them.

A pattern is [batch, head, query, key]: what share of its attention each query gives to each key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from datasets import Dataset
from jaxtyping import Float, Int
from torch import Tensor

from hc_lens.data import Batches, Task
from hc_lens.data.batches import sample
from hc_lens.errors import HcLensError
from hc_lens.hooks import Handle
from hc_lens.models.inputs import encode, mask_of, tokenizer_of
from hc_lens.units import Unit, UnitSpace
from hc_lens.words import Row, Words, align, stack

Text = str | tuple[str, str]
See = Callable[[int, Float[Tensor, "batch head query key"]], None]
"""What `visit` calls: the layer and its pattern."""


def pattern_name(layer: int) -> str:
    """Hook point of the attention pattern of a layer."""
    return f"blocks.{layer}.attn.hook_pattern"


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
    _model: Any
    _settings: dict[str, Any]
    _own: Dataset | None = None

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
        """The same first sentences, each with the second sentence of another row.

        A row gets a sentence of about the same number of words as its own, never the same text.
        """
        if not self.swappable:
            raise HcLensError(
                f"expected pairs with at least two different second sentences to swap, got others "
                f"in {self.name}; use a task with two text columns, and more rows"
            )
        first, second = self.texts.column_names
        sentences = self.texts[second][:]
        partners = _partners(sentences, seed)
        texts = Dataset.from_dict(
            {first: self.texts[first][:], second: [sentences[at] for at in partners]}
        )
        # A pair that fits the context may not fit with a longer second sentence.
        context = min(self._model.cfg.n_ctx, tokenizer_of(self._model).model_max_length)
        settings = {**self._settings, "max_length": self._settings["max_length"] or context}
        batches = _batches(self._model, texts, self.name, settings)
        return WordBatches(batches, texts, self.rows, self._model, settings, self.texts)

    def __iter__(self) -> Iterator[WordBatch]:
        tokenizer = tokenizer_of(self._model)
        separator = self._settings["separator"]
        for batch in self.batches:
            places = batch.rows.tolist()
            aligned = align(tokenizer, _pick(self.texts, places), _lengths(batch.mask), separator)
            _check_ids(aligned, batch.tokens, batch.mask, self.name)
            words = stack(aligned, batch.mask)
            own = None
            if self._own is not None:
                own = tuple(align(tokenizer, _pick(self._own, places), None, separator))
            yield WordBatch(batch.inputs, words, self.rows[places], own)

    def __len__(self) -> int:
        return len(self.batches)

    def __repr__(self) -> str:
        return f"WordBatches({self.name}: {self.n_rows} rows in {len(self)} batches)"


def word_batches(
    model: Any,
    task: Task,
    split: str | None = None,
    *,
    limit: int | None = None,
    seed: int = 0,
    max_length: int | None = None,
    token_budget: int = 4096,
    padding_side: str | None = None,
    separator: str | None = None,
) -> WordBatches:
    """The rows that ``task.batches`` gives with the same arguments, with their words.

    Labels play no part: the task may have none, and the model's need not match.
    """
    # The model's tokenizer is tried first, so that a slow one is told before rows are read.
    align(tokenizer_of(model), [("a",)])
    if split is None:
        split = task.splits[0] if len(task.splits) == 1 else "train"
    if limit is not None and limit < 1:
        raise HcLensError(
            f"expected limit as a whole number above 0, got {limit}; leave it out for all rows"
        )
    table = task.dataset(split)
    positions = sample(len(table), limit, seed)
    texts = table.select_columns(list(task.columns)).select(positions)
    settings = {
        "seed": seed,
        "max_length": max_length,
        "token_budget": token_budget,
        "padding_side": padding_side,
        "separator": separator,
    }
    batches = _batches(model, texts, f"{task.name}/{split}", settings)
    return WordBatches(batches, texts, torch.tensor(positions), model, settings)


def word_batch(model: Any, texts: Text | Sequence[Text], separator: str | None = None) -> WordBatch:
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
    mask = mask_of(inputs)
    aligned = align(tokenizer_of(model), rows, _lengths(mask), separator)
    _check_ids(aligned, inputs["input"], mask, "the texts")
    return WordBatch(inputs, stack(aligned, mask), torch.arange(len(rows)))


def visit(model: Any, batch: Any, see: See, layers: Iterable[int] | None = None) -> None:
    """Run the model on one batch and call ``see(layer, pattern)`` as each layer attends.

    Args:
        model: a hooked model; hooks that are on it stay, so masks and ablations count.
        batch: anything with `inputs`.
        see: takes the layer and its pattern; what it returns is not used.
        layers: layers to see; all by default.
    """
    wanted = list(range(UnitSpace.of(model).n_layers) if layers is None else layers)
    known = getattr(model, "hook_dict", {})
    missing = [pattern_name(layer) for layer in wanted if pattern_name(layer) not in known]
    if missing:
        raise HcLensError(
            f"expected the hook points {missing[:3]} on the model, got a {type(model).__name__} "
            "without them; load the model with hc.load, or pass a HookedEncoder, "
            "HookedTransformer or TransformerBridge"
        )
    seen: set[int] = set()

    def edit(layer: int) -> Callable[[Tensor], None]:
        def read(pattern: Tensor) -> None:
            seen.add(layer)
            see(layer, pattern)

        return read

    with torch.no_grad(), Handle(model, {pattern_name(layer): edit(layer) for layer in wanted}):
        model(**batch.inputs)
    silent = [pattern_name(layer) for layer in wanted if layer not in seen]
    if silent:
        raise HcLensError(
            f"expected the hook points {silent[:3]} to fire, they did not; the model computes its "
            "attention without a pattern (fused attention): load it with hc.load, or with "
            "attn_implementation='eager'"
        )


def check_heads(model: Any, heads: Iterable[Unit | str] | str | None) -> list[Unit]:
    """The heads named, in the order given; all by default. An unknown one is an HcLensError."""
    space = UnitSpace.of(model)
    if heads is None:
        return space.heads
    units = [space[place] for place in space.indices(heads)]
    layers = [unit for unit in units if not unit.is_head]
    if layers or not units:
        raise HcLensError(
            f"expected attention heads such as 'L0.H0', got {layers[0] if layers else 'none'}; "
            "an MLP has no attention pattern: name heads of hc.UnitSpace.of(model).heads"
        )
    return units


def patterns(
    model: Any, batch: Any, heads: Iterable[Unit | str] | str | None = None
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


def _batches(model: Any, texts: Dataset, name: str, settings: dict[str, Any]) -> Batches:
    task_name, _, split = name.rpartition("/")
    task = Task.from_rows({split: texts}, columns=texts.column_names, label=None, name=task_name)
    return task.batches(model, split, **settings)


def _pick(texts: Dataset, places: list[int]) -> list[tuple[str, ...]]:
    chosen = texts[places]
    return list(zip(*(chosen[name] for name in texts.column_names), strict=True))


def _lengths(mask: Int[Tensor, "batch pos"]) -> list[int]:
    return mask.sum(1).tolist()


def _check_ids(
    rows: Sequence[Row], tokens: Int[Tensor, "batch pos"], mask: Int[Tensor, "batch pos"], name: str
) -> None:
    for row, ids, real in zip(rows, tokens, mask.bool(), strict=True):
        if ids[real].tolist() != list(row.ids):
            raise HcLensError(
                f"expected the tokenizer to give the same ids twice, got others for a row of "
                f"{name}; has the model's tokenizer been changed since?"
            )


def _partners(sentences: list[str], seed: int) -> list[int]:
    """For each row another row whose sentence is about as long and not the same text."""
    generator = torch.Generator().manual_seed(seed)
    shuffled = torch.randperm(len(sentences), generator=generator).tolist()
    order = sorted(shuffled, key=lambda row: len(sentences[row].split()))
    partners = [0] * len(sentences)
    for place, row in enumerate(order):
        step = 1
        while sentences[order[(place + step) % len(order)]] == sentences[row]:
            step += 1
        partners[row] = order[(place + step) % len(order)]
    return partners
