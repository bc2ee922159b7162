"""Rows of text into batches of about equal length.

1. Tokenise with the model's own tokenizer: a pair goes in as ``tokenizer(text_a, text_b)``, or as
   one text with `separator` in between. A row longer than the model's context is an error, unless
   `max_length` was given: then it is cut, the longer text first.
2. Keep the ids in an arrow file under the datasets cache, a record (`hc_lens.records`) whose key is
   made of texts, tokenizer and settings, and memory-map it: the same rows are not tokenised twice.
3. Sort the rows by their number of tokens; rows of one length are in an order drawn from the seed.
4. Walk from short to long and close a batch before ``rows x longest row`` exceeds the token
   budget, or before more than a tenth of it is padding. Shuffle the batches with the same seed.
5. Pad a batch to its own longest row, no further.
6. `Batches.restore` undoes the order. `Batches.limited` and `Batches.of_cases` choose rows from
   batches that are already made: these keep their order and their width.
"""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from datasets import Dataset, config
from datasets import __version__ as datasets_version
from jaxtyping import Float, Int
from torch import Tensor

from hc_lens.errors import HcLensError, check_choice, check_count
from hc_lens.models.inputs import Padding, is_encoder, mask_of, tokenizer_of
from hc_lens.protocols import BatchesLike, BatchLike, Model
from hc_lens.records import Fill, Records, RecordsError, digest, seed_of

MOST_PADDING = 0.1
"""Largest share of padding in a batch."""
TOKENS = "tokens.arrow"
"""The file of a cached table."""
_FORMAT = 1
"""Format of a cached table; raised when its columns change, so that older files are not read."""


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
    reads: Int[Tensor, " batch"] | None = None
    """Position at which a language model is read in each row; None where the model knows it."""
    answers: Int[Tensor, "batch labels most"] | None = None
    """Token ids of each row's right answers and of its wrong ones, filled up with -1."""
    counterfactual: dict[str, Tensor] | None = None
    """Keyword arguments of the model for the rows' counterfactuals, padded as the rows are."""

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

        def chosen(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            return {name: tensor[at] for name, tensor in tensors.items()}

        return Batch(
            chosen(self.inputs),
            self.labels[at],
            tuple(self.cases[index] for index in indices),
            self.rows[at],
            None if self.reads is None else self.reads[at],
            None if self.answers is None else self.answers[at],
            None if self.counterfactual is None else chosen(self.counterfactual),
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
    heuristic: str | None
    """The label that the heuristic answers, which makes a case friendly or adversarial."""
    to_task: Int[Tensor, " model_labels"]
    """Task label id of each model label id, matched by name; empty for a task without labels."""
    n_dropped: int
    """Number of rows of the split that were left out: without a gold label, or without text."""
    fingerprint: str
    """Hash of the rows, the tokenizer and every setting that decides a batch."""
    rows: Int[Tensor, " rows"]
    """Position of each row in ``task.dataset(split)``, in the order that `restore` gives."""
    _table: Dataset
    """Token ids, label and case of each row, in the order of `rows`."""
    _plan: tuple[tuple[tuple[int, ...], int], ...]
    """For each batch the indices in `rows` of its rows, and the tokens to which it is padded."""
    _padding: Padding
    """How the rows of a batch become the model's inputs."""

    @property
    def n_rows(self) -> int:
        """Number of rows in one pass."""
        return len(self.rows)

    @property
    def n_truncated(self) -> int:
        """Number of rows that were cut to `max_length`."""
        return sum(self._table["long"][:])

    @property
    def padding(self) -> float:
        """Share of padding among all tokens of one pass."""
        padded = sum(len(indices) * width for indices, width in self._plan)
        return 1 - sum(self._table["length"][:]) / padded

    def predictions(
        self, logits: Float[Tensor, "*runs batch out"], batch: BatchLike | None = None
    ) -> Int[Tensor, "*runs batch"]:
        """Task label of the largest logit: for HANS neutral and contradiction are both 1."""
        return self._to_task(logits)[logits.argmax(dim=-1)]

    def log_probs(
        self, logits: Float[Tensor, "*runs batch out"], batch: BatchLike | None = None
    ) -> Float[Tensor, "*runs batch labels"]:
        """Log of the summed probability of the model labels that map to each task label."""
        to_task = self._to_task(logits)
        log_probs = logits.log_softmax(dim=-1)
        summed = [log_probs[..., to_task == k].logsumexp(dim=-1) for k in range(len(self.labels))]
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
        order = [index for indices, _ in self._plan for index in indices]
        restored[torch.tensor(order, device=flat.device)] = flat
        return restored

    def limited(
        self, limit: int | None = None, seed: int = 0, *, per_case: int | None = None
    ) -> Batches:
        """At most `limit` of the rows, or `per_case` rows of each case.

        The sample depends on the seed alone, not on the batches.
        """
        chosen = draw(self._table["case"][:], seed, limit, per_case)
        return self if len(chosen) == self.n_rows else self._chosen(chosen)

    def of_cases(self, *cases: str) -> Batches:
        """The rows of some cases."""
        known = self._table["case"][:]
        for case in cases or [None]:
            check_choice("a case", case, sorted(set(known)))
        chosen = [index for index, case in enumerate(known) if case in cases]
        return replace(self._chosen(chosen), name=f"{self.name}/{'+'.join(cases)}")

    def _chosen(self, indices: list[int]) -> Batches:
        """The rows at some indices of `rows`, in the batches in which they are now."""
        new = {old: index for index, old in enumerate(indices)}
        plan = [(tuple(new[i] for i in batch if i in new), width) for batch, width in self._plan]
        rows = self.rows[indices]
        return replace(
            self,
            fingerprint=digest(self.fingerprint, rows.tolist()),
            rows=rows,
            _table=self._table.select(indices),
            _plan=tuple((batch, width) for batch, width in plan if batch),
        )

    def column(self, name: Literal["case", "label", "length"]) -> list[Any]:
        """The case, the label (-1 without one) or the number of tokens of each of `rows`."""
        return self._table[name][:]

    def __iter__(self) -> Iterator[Batch]:
        for index in range(len(self)):
            yield self[index]

    def __getitem__(self, index: int) -> Batch:
        return self.gather(*self._plan[index])

    def __len__(self) -> int:
        return len(self._plan)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.name}: {self.n_rows} rows in {len(self)} batches, "
            f"{self.padding:.1%} padding, {self.n_truncated} truncated, {self.n_dropped} dropped)"
        )

    def gather(self, indices: Sequence[int], width: int | None = None) -> Batch:
        """One batch of any rows, by their indices in `rows`; as wide as its longest row."""
        at = list(indices)
        given = self._table[at]
        inputs = self._padding(given, width)
        device = inputs["input"].device
        labels = torch.tensor(given["label"], device=device)
        return Batch(inputs, labels, tuple(given["case"]), self.rows[at].to(device))

    def _to_task(self, logits: Tensor) -> Tensor:
        if not self.labels or logits.shape[-1] != len(self.to_task):
            raise HcLensError(
                f"expected logits of {len(self.to_task)} labels for {self.name}, got "
                f"{logits.shape[-1]}; score the model of these batches, on a task with labels"
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


def cut(batch: BatchLike, size: int) -> list[BatchLike]:
    """A batch in pieces of at most `size` rows."""
    rows = range(len(batch.rows))
    if len(rows) <= size:
        return [batch]
    return [batch.take(rows[first : first + size]) for first in rows[::size]]


def sample(n_rows: int, limit: int | None, seed: int) -> list[int]:
    """At most `limit` of the rows, drawn without replacement, in their own order.

    With one seed a smaller sample is part of every larger one.
    """
    generator = torch.Generator().manual_seed(seed)
    return sorted(torch.randperm(n_rows, generator=generator)[:limit].tolist())


def draw(
    cases: Sequence[str], seed: int, limit: int | None = None, limit_per_case: int | None = None
) -> list[int]:
    """The rows that a limit leaves, given the case of each row; all of them without a limit.

    The rows of a case are drawn on their own, so that other cases do not change them.
    """
    if limit is not None and limit_per_case is not None:
        raise HcLensError(
            f"expected a limit for all rows or one for each case, got both ({limit} and "
            f"{limit_per_case}); leave limit or limit_per_case out"
        )
    for what, given in {"limit": limit, "limit_per_case": limit_per_case}.items():
        if given is not None:
            check_count(what, given)
    if limit_per_case is None:
        return sample(len(cases), limit, seed)
    rows: dict[str, list[int]] = defaultdict(list)
    for row, case in enumerate(cases):
        rows[case].append(row)
    drawn = {
        case: sample(len(rows[case]), limit_per_case, seed_of(f"{seed} {case}")) for case in rows
    }
    return sorted(rows[case][index] for case in rows for index in drawn[case])


def shorter(prompts: bool) -> str:
    """What to do about rows that are too long: prompts are never cut."""
    return "shorten the prompts" if prompts else "cut the rows with max_length="


def bucket(
    lengths: Sequence[int], token_budget: int, seed: int, prompts: bool = False
) -> list[list[int]]:
    """Indices of the rows of each batch, in the order of iteration."""
    if max(lengths) > token_budget:
        raise HcLensError(
            f"expected a token_budget for at least the longest row ({max(lengths)} tokens), got "
            f"{token_budget}; raise it, or {shorter(prompts)}"
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


def tokenise(
    model: Model, texts: Dataset, where: str, max_length: int | None, separator: str | None
) -> tuple[Dataset, str]:
    """The token ids of rows of one or two texts, memory-mapped, and their name in the cache."""
    tokenizer, columns = tokenizer_of(model), texts.column_names
    _check_settings(model, len(columns), max_length, separator)
    limit = max_length or min(model.cfg.n_ctx, tokenizer.model_max_length)
    settings = [_FORMAT, limit, max_length is not None, separator]
    key = digest(_identity(tokenizer), settings, *(texts[column][:] for column in columns))

    def fill(folder: Path) -> None:
        texts.map(
            partial(_encode, tokenizer, separator, limit, max_length is not None),
            batched=True,
            input_columns=columns,
            remove_columns=columns,
            cache_file_name=str(folder / TOKENS),
            new_fingerprint=key,
            desc=f"tokenising {where}",
        )

    table = _kept(key, fill)
    lengths = table["length"][:]
    n_long = sum(length > limit for length in lengths)
    if n_long:
        raise HcLensError(
            f"expected rows of at most {limit} tokens (the model's context), got {n_long} longer "
            f"ones in {where}, up to {max(lengths)}; cut them with max_length={limit} or less"
        )
    if min(lengths) == 0:
        raise HcLensError(
            f"expected at least one token in each row, got {lengths.count(0)} rows without "
            f"text in {where}; remove the empty rows"
        )
    return table, key


def _kept(key: str, fill: Fill) -> Dataset:
    """The table of a key in the cache, made if it is not there or is damaged."""
    folder, found = Path(config.HF_DATASETS_CACHE) / "hc_lens", None
    # A version of datasets may not read what a newer one wrote, and both may use this cache.
    name = digest(key, datasets_version)
    # Read without writing first: the cache may be one that others filled.
    with contextlib.suppress(HcLensError):
        there = Records.existing(folder, "tokens")
        there.tidy()
        found = there.find(name, key)
    if found is None:
        try:
            records = Records(folder, "tokens")
            records.write(name, fill, key)
        except (OSError, RecordsError) as error:
            raise RecordsError(
                f"expected to write token ids to {str(folder)!r}, got {error.__cause__ or error}; "
                "make room there, or name another folder with the variable HF_DATASETS_CACHE"
            ) from error
        found = records.folder(name)
    return Dataset.from_file(str(found / TOKENS))


def _encode(
    tokenizer: Any, separator: str | None, limit: int, cut: bool, *texts: list[str]
) -> dict[str, list[Any]]:
    """Token ids, their number, and whether the row is too long, for each row of texts."""
    if separator is not None:
        texts = ([separator.join(pair) for pair in zip(*texts, strict=True)],)
    encoded = tokenizer(*texts, truncation=False, verbose=False)
    too_long = [len(ids) > limit for ids in encoded["input_ids"]]
    # Not `truncation=True` at once, as the tokenizer does not say which rows it cut.
    if cut and any(too_long):
        encoded = tokenizer(*texts, truncation=True, max_length=limit)
    columns = {name: encoded[name] for name in ("input_ids", "token_type_ids") if name in encoded}
    return {**columns, "long": too_long, "length": [len(ids) for ids in encoded["input_ids"]]}


def _check_settings(
    model: Model, n_texts: int, max_length: int | None, separator: str | None
) -> None:
    if separator is not None and (n_texts == 1 or is_encoder(model)):
        raise HcLensError(
            f"expected separator= only for pairs on a decoder, got {separator!r} for "
            f"{'single texts' if n_texts == 1 else 'an encoder, which has its own'}; leave it out"
        )
    pair = n_texts == 2 and separator is None
    least = tokenizer_of(model).num_special_tokens_to_add(pair=pair) + n_texts
    if max_length is not None and not least <= max_length <= model.cfg.n_ctx:
        raise HcLensError(
            f"expected max_length from {least} (special tokens and one token of each text) to "
            f"{model.cfg.n_ctx} (the model's context), got {max_length}; choose one in between"
        )


def _identity(tokenizer: Any) -> list[Any]:
    """Everything in a tokenizer that decides the token ids, as plain values."""
    kind, backend = type(tokenizer).__name__, getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
        return [kind, tokenizer.get_vocab(), special]
    state = json.loads(backend.to_str())
    # Every call rewrites these two; the ids depend on our own settings only.
    for key in ("truncation", "padding"):
        state.pop(key, None)
    return [kind, tokenizer.truncation_side, state]
