"""Prompts: what a language model reads, with right and wrong answers, and their batches.

1. Read the tables of the source, one for each split (`hc_lens.data.readers`), or make the rows of a
   named generator for the model at hand (`hc_lens.data.generated`).
2. Turn the prompts, their answers and their counterfactuals into token ids
   (`hc_lens.data.encoding`), which refuses every row that could not be scored.
3. Bucket the rows by length as those of a task are (`hc_lens.data.batches`). A batch also says
   where each row is read, the tokens of its answers, and the inputs of its counterfactuals.
4. Two labels stand for the vocabulary: ``right``, the summed probability of the right answers, and
   ``wrong``, that of the wrong ones, or of all other tokens where a row names none. A row is
   answered right if its largest answer logit is that of a right answer.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, TypedDict

import pandas as pd
import torch
from datasets import Dataset, Features, Value
from jaxtyping import Bool, Float, Int
from torch import Tensor
from typing_extensions import Unpack

from hc_lens.data import readers
from hc_lens.data.batches import Batch, Batches, bucket, draw
from hc_lens.data.encoding import Answer, Encoded, Encoder, Prompt, Row, refuse
from hc_lens.data.generated import agreement, drawing, induction, ioi
from hc_lens.data.known import SIDES
from hc_lens.data.splits import Splits
from hc_lens.errors import HcLensError, HcLensWarning, check_choice, check_count, warn
from hc_lens.models.inputs import Padding, Side, pad
from hc_lens.protocols import BatchLike, Model
from hc_lens.records import digest

RIGHT, WRONG = LABELS = ("right", "wrong")
"""The labels of every row: what its answers are."""
NEEDED = ("prompt", "right")
"""Columns that a table must have."""
COLUMNS = (*NEEDED, "wrong", "counterfactual", "case", "side", "read")
"""Columns that a table may have, by the names that they have by default."""
GENERATED: dict[str, Callable[[Model, str, int, int], list[drawing.Made]]] = {
    "ioi": ioi.rows,
    "agreement": agreement.rows,
    "agreement-ood": agreement.all_rows,
    "induction": induction.rows,
}
"""Named prompts -> what makes the rows of a split, of which there are so many, from a seed."""
LIKE = 0.8
"""How like another the name of a column is that may be misspelt (`difflib`), 1 for the same."""
NO_ANSWER = -1
"""What fills up the answers of a row that has fewer than others."""


class UnreadColumnWarning(HcLensWarning):
    """A column that is not read has very nearly the name of one that would be."""


class Columns(TypedDict, total=False):
    """What the columns of a table are called, where not by their own names."""

    prompt: str
    right: str
    wrong: str | None
    counterfactual: str | None
    case: str | None
    side: str | None
    read: str | None


class ForLanguageModel(TypedDict, total=False):
    """Arguments of `Prompts.batches` that only a language model has."""

    padding_side: Side | None
    prepend_bos: bool | None


@dataclass(frozen=True, eq=False, repr=False)
class PromptBatches(Batches):
    """The batches of prompts: of each row also where it is read, its answers, its counterfactual.

    Label 0 is right and every row's own; the logits are those at `Batch.reads`.
    """

    sides: Mapping[str, str]
    """``friendly`` or ``adversarial`` for each case; empty if neither or both."""

    def gather(self, indices: Sequence[int], width: int | None = None) -> Batch:
        """One batch of any rows, by their indices in `rows`; as wide as its longest row."""
        batch = super().gather(indices, width)
        given, width = self._table[list(indices)], batch.tokens.shape[1]
        reads = torch.tensor(given["read"])
        if self._padding.side == "left":
            reads += width - torch.tensor(given["length"])
        most = max(len(ids) for label in LABELS for ids in given[label])
        answers = [pad(given[label], NO_ANSWER, "right", most) for label in LABELS]
        other = None
        if "counterfactual" in given:
            other = self._padding({"input_ids": given["counterfactual"]}, width)
        device = batch.tokens.device
        stacked = torch.stack(answers, dim=1).to(device)
        return replace(batch, reads=reads.to(device), answers=stacked, counterfactual=other)

    def predictions(
        self, logits: Float[Tensor, "*runs batch out"], batch: BatchLike | None = None
    ) -> Int[Tensor, "*runs batch"]:
        """0 where the largest logit among a row's answers is a right one, else 1, also for a tie.

        Where a row names no wrong answers, every other token of the vocabulary is one.
        """
        answers = self._answers(logits, batch)
        right, wrong = _gathered(logits, answers).amax(dim=-1).unbind(dim=-1)
        any_other = (answers[:, 1] == NO_ANSWER).all(dim=-1)
        if any_other.any():
            wrong = torch.where(any_other, _best_other(logits, answers[:, 0]), wrong)
        return (~(right > wrong)).long()

    def log_probs(
        self, logits: Float[Tensor, "*runs batch out"], batch: BatchLike | None = None
    ) -> Float[Tensor, "*runs batch labels"]:
        """Log of the summed probability of a row's right answers, and of its wrong ones.

        Where a row names no wrong answers, the second is that of all other tokens together.
        """
        answers = self._answers(logits, batch)
        given = _gathered(logits, answers).logsumexp(dim=-1)
        right, wrong = (given - logits.logsumexp(dim=-1)[..., None]).unbind(dim=-1)
        any_other = (answers[:, 1] == NO_ANSWER).all(dim=-1)
        wrong = torch.where(any_other, _log_rest(right, any_other), wrong)
        return torch.stack([right, wrong], dim=-1)

    def _answers(self, logits: Tensor, batch: BatchLike | None) -> Int[Tensor, "batch labels most"]:
        answers = getattr(batch, "answers", None)
        if answers is None:
            raise HcLensError(
                f"expected the batch of {self.name} whose logits these are, got "
                f"{type(batch).__name__}; call it with (logits, batch)"
            )
        if logits.shape[-2] != len(answers):
            raise HcLensError(
                f"expected logits [..., {len(answers)}, vocabulary] at the read position of each "
                f"row, got {list(logits.shape)}; take logits[range(len(batch)), batch.reads]"
            )
        return answers.to(logits.device)


@dataclass(frozen=True, eq=False, repr=False)
class Prompts(Splits):
    """Rows of a prompt and its answers, in named splits; used wherever a task is."""

    labels: ClassVar[tuple[str, ...]] = LABELS
    """What a row's answers are."""
    heuristic: ClassVar[None] = None
    """Prompts have a side for each case instead."""

    name: str
    """Name of the prompts."""
    _splits: tuple[str, ...]
    """Names of the splits."""
    _read: Callable[[str, Model], Dataset]
    """The table of a split; a model may decide the rows that are made for it."""
    _columns: Mapping[str, str | None]
    """What the table calls each column; None for one that it does not have."""
    _separator: str = " "
    """What stands between a prompt and its answer."""
    _lists: bool = False
    """Whether a table of text alone may hold lists as JSON."""

    @classmethod
    def named(cls, name: str, *, seed: int = 0, n: int = 2_000) -> Prompts:
        """Prompts that hc_lens makes itself: ioi, agreement, agreement-ood or induction.

        The splits train and validation have `n` rows each, made from the seed when a model is
        given: the words, or the tokens, are chosen to suit its tokenizer. No prompt is in both, not
        even of two seeds.
        """
        if name not in GENERATED:
            raise HcLensError(
                f"expected one of the named prompts {', '.join(GENERATED)}, got {name!r}; read "
                "other rows with Prompts.from_files or Prompts.from_rows"
            )
        check_count("n", n)
        check_count("seed", seed, least=0)

        def read(split: str, model: Model) -> Dataset:
            return readers.read_rows([*GENERATED[name](model, split, n, seed)])[readers.ONLY]

        return cls(name, drawing.SPLITS, read, _named_columns({}))

    @classmethod
    def from_rows(
        cls,
        rows: readers.Table | Mapping[str, readers.Table],
        *,
        separator: str = " ",
        name: str = "prompts",
        **columns: Unpack[Columns],
    ) -> Prompts:
        """Rows in memory: a list of dicts, a DataFrame, a Dataset, or a mapping of splits to such.

        Args:
            rows: One row a prompt. A prompt and its counterfactual are texts or lists of token ids;
                right and wrong answers are a text, a list of texts, a token id or a list of them.
            separator: What stands between a prompt and its answer, unless one of them has white
                space there.
            name: Name of the prompts.
            columns: What the columns are called where not prompt, right, wrong, counterfactual,
                case, side (friendly or adversarial) and read (a position among the row's tokens).
                Only prompt and right must be there; None leaves a column unread.
        """
        tables = readers.read_rows(rows)
        named = _named_columns(columns)
        empty = [split for split, table in tables.items() if not len(table)]
        if empty or not tables:
            raise HcLensError(
                f"expected rows in every split of {name}, got none in {empty or 'any'}; "
                "leave empty splits out"
            )
        for split, table in tables.items():
            _check_columns(table, named, columns, f"{name}/{split}")
        return cls(name, tuple(tables), lambda split, _: tables[split], named, separator)

    @classmethod
    def from_files(
        cls,
        path: readers.Files,
        *,
        separator: str = " ",
        name: str | None = None,
        **columns: Unpack[Columns],
    ) -> Prompts:
        """A jsonl, csv or parquet file, a folder of them, or a mapping of split names to files.

        In a table of text alone, as every csv file is, a list is written as JSON:
        ``["Tom", "Tim"]`` are two answers, ``[42]`` is a token id. The other arguments are those of
        `from_rows`.
        """
        tables = readers.read_files(path)
        name = name or ("files" if isinstance(path, Mapping) else Path(path).stem)
        read = cls.from_rows(tables, separator=separator, name=name, **columns)
        return replace(read, _lists=True)

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits."""
        return self._splits

    def rows(
        self, model: Model, split: str | None = None, *, prepend_bos: bool | None = None
    ) -> pd.DataFrame:
        """The rows of a split as a model reads them, with the tokens that are scored."""
        where, given = self._given(model, split)
        encoded = Encoder(model, where, self._separator, prepend_bos)(given)
        table = pd.DataFrame(
            {
                "prompt": [row.prompt for row in given],
                "right": [list(row.right) for row in given],
                "wrong": [list(row.wrong) for row in given],
                "counterfactual": [row.counterfactual for row in given],
                "case": [row.case for row in given],
                "side": [row.side for row in given],
                "tokens": [len(row.prompt) for row in encoded],
                "read": [row.read for row in encoded],
            }
        )
        for label in LABELS:
            table[f"{label}_tokens"] = [_strings(model, getattr(row, label)) for row in encoded]
        return table

    def batches(
        self,
        model: Model,
        split: str | None = None,
        *,
        limit: int | None = None,
        limit_per_case: int | None = None,
        seed: int = 0,
        max_length: int | None = None,
        token_budget: int = 4096,
        **language: Unpack[ForLanguageModel],
    ) -> PromptBatches:
        """The rows of a split in batches for a model.

        Args:
            model: A language model that ``hc.load`` returns or that TransformerLens made.
            split: By default the only one, or ``"train"`` of several.
            limit: Use at most this many rows, drawn at random with the seed.
            limit_per_case: Use at most this many rows of each case instead, drawn likewise.
            seed: Decides the rows under a limit and the order of the batches.
            max_length: Prompts are never cut, as their end is read: anything but None is an error.
            token_budget: Most tokens in a batch, padding included.
            language: `padding_side`, by default the side of the tokenizer, and `prepend_bos`, by
                default as ``model.to_tokens`` does.
        """
        _check_settings(model, max_length, token_budget)
        padding_side, prepend_bos = _for_language_model(**language)
        padding = Padding.of(model, padding_side)
        where, given = self._given(model, split)
        positions = draw([row.case for row in given], seed, limit, limit_per_case)
        chosen = [given[position] for position in positions]
        encoded = Encoder(model, where, self._separator, prepend_bos)(chosen)
        table = _as_table(encoded, [row.case for row in chosen])
        lengths, sides = table["length"][:], _sides(given)
        content = [table.to_dict(), positions, sides, seed, token_budget, padding.side]
        order = bucket(lengths, token_budget, seed, prompts=True)
        return PromptBatches(
            name=where,
            labels=LABELS,
            heuristic=None,
            to_task=torch.zeros(0, dtype=torch.long),
            n_dropped=0,
            fingerprint=digest(*content),
            rows=torch.tensor(positions),
            _table=table,
            _plan=tuple((tuple(batch), max(lengths[row] for row in batch)) for batch in order),
            _padding=padding,
            sides=sides,
        )

    def _given(self, model: Model, split: str | None) -> tuple[str, list[Row]]:
        """The name and the rows of a split."""
        _check_model(model)
        split = self.split_named(split)
        where = f"{self.name}/{split}"
        return where, _rows(self._read(split, model), self._columns, self._lists, where)

    def __repr__(self) -> str:
        return f"Prompts({self.name}: {', '.join(self.splits)})"


def _gathered(
    logits: Float[Tensor, "*runs batch out"], answers: Int[Tensor, "batch labels most"]
) -> Float[Tensor, "*runs batch labels most"]:
    """The logits of the answers; minus infinity where a row has fewer of them."""
    shape = (*logits.shape[:-1], answers[0].numel())
    at = answers.clamp(min=0).flatten(1).expand(shape)
    found = logits.gather(-1, at).unflatten(-1, answers.shape[1:])
    return found.masked_fill(answers == NO_ANSWER, -math.inf)


def _best_other(
    logits: Float[Tensor, "*runs batch out"], right: Int[Tensor, "batch most"]
) -> Float[Tensor, "*runs batch"]:
    """The largest logit of a token that is not among the right answers."""
    # Of one token more than there are right answers, at least one is another.
    largest = logits.topk(min(right.shape[1] + 1, logits.shape[-1]), dim=-1)
    taken = (largest.indices[..., None] == right[:, None]).any(dim=-1)
    return largest.values.masked_fill(taken, -math.inf).amax(dim=-1)


def _log_rest(
    log_prob: Float[Tensor, "*runs batch"], needed: Bool[Tensor, " batch"]
) -> Float[Tensor, "*runs batch"]:
    """log(1 - p) from log(p), finite where p rounds to 1; only the needed entries count."""
    # Other entries get a harmless value, as the gradient there could be infinite times zero.
    half = -math.log(2)
    below = log_prob.clamp(max=-torch.finfo(log_prob.dtype).eps)
    below = torch.where(needed, below, half)
    small, large = below.clamp(max=half), below.clamp(min=half)
    return torch.where(below < half, torch.log1p(-small.exp()), torch.log(-torch.expm1(large)))


def _for_language_model(
    padding_side: Side | None = None, prepend_bos: bool | None = None
) -> tuple[Side | None, bool | None]:
    """The arguments by their names; Python refuses others."""
    return padding_side, prepend_bos


def _check_model(model: Model) -> None:
    if not hasattr(model, "cfg"):
        raise HcLensError(f"expected a TransformerLens model, got {model!r}; use hc.load(...)")
    if labels := getattr(model, "labels", None):
        raise HcLensError(
            f"expected a language model for prompts, got a classifier of {[*labels.values()]}; "
            "load a causal or masked language model, or use hc.Task"
        )


def _check_settings(model: Model, max_length: int | None, token_budget: int) -> None:
    _check_model(model)
    check_count("token_budget", token_budget)
    if max_length is not None:
        raise HcLensError(
            f"expected no max_length for prompts, whose end is read, got {max_length}; leave it "
            "out, and shorten the prompts themselves"
        )


def _named_columns(given: Mapping[str, Any]) -> dict[str, str | None]:
    """What a table calls each column: by default by its own name."""
    for column in given:
        check_choice("a column of prompts", column, COLUMNS)
    return {**{column: column for column in COLUMNS}, **given}


def _check_columns(
    table: Dataset, named: Mapping[str, str | None], given: Mapping[str, Any], where: str
) -> None:
    """Refuse a table without the columns that it must have, or that the caller named.

    An optional column that is not there, while another has nearly its name, is a warning.
    """
    wanted = {named[column] for column in (*NEEDED, *given) if named[column] or column in NEEDED}
    if missing := sorted(str(column) for column in wanted - {*table.column_names}):
        raise HcLensError(
            f"expected the columns {missing} in {where}, got {table.column_names}; name the "
            "columns of your rows with prompt=..., right=..., wrong=... of Prompts.from_rows"
        )
    read = {name for name in named.values() if name}
    absent = [column for column, name in named.items() if name and name not in table.column_names]
    for column in sorted({*table.column_names} - read):
        for like in difflib.get_close_matches(column.lower(), absent, 1, LIKE):
            warn(
                f"column {column!r} of {where} is not read, though its name is very like {like!r}; "
                "rename it if that is what it holds",
                UnreadColumnWarning,
            )


def _rows(table: Dataset, named: Mapping[str, str | None], lists: bool, where: str) -> list[Row]:
    """The rows of a table; without cases each side is one, or all rows together."""
    parse = _listed if lists and _is_text(table) else lambda cell: cell
    columns: dict[str, list[Any]] = {
        column: [parse(cell) for cell in table[source][:]]
        if source in table.column_names
        else [None] * len(table)
        for column, source in named.items()
    }
    _check_whole(columns, where)
    made = []
    for number, cells in enumerate(zip(*columns.values(), strict=True)):
        cell = dict(zip(columns, cells, strict=True))
        side = "" if _is_missing(cell["side"]) else str(cell["side"])
        if side not in ("", *SIDES):
            raise HcLensError(
                f"expected a side among {list(SIDES)} in {where}, got {side!r} in row {number}; "
                "correct it, or leave it empty"
            )
        case = side or "all" if _is_missing(cell["case"]) else str(cell["case"]).replace("/", "-")
        row = Row(
            number,
            _prompt(cell["prompt"]) or "",
            _several(cell["right"]),
            _several(cell["wrong"]),
            _prompt(cell["counterfactual"]),
            case,
            side,
            _position(cell["read"], number, where),
        )
        made.append(row)
    return made


def _check_whole(columns: Mapping[str, list[Any]], where: str) -> None:
    """Refuse token ids that are not whole numbers, and what is neither they nor a text."""
    strange = [
        (number, repr(each))
        for number in range(len(columns["prompt"]))
        for column in ("prompt", "right", "wrong", "counterfactual")
        for each in _strange(columns[column][number], answers=column in LABELS)
    ]
    refuse(strange, "whole numbers as token ids", where, "correct them, or give texts")


def _strange(cell: Any, answers: bool) -> list[Any]:
    """What cannot be a token id, nor an answer where the cell holds answers."""
    if _is_missing(cell) or isinstance(cell, str):
        return []
    given = [_whole(each) for each in _each(cell) if not (answers and _is_missing(each))]
    # To Python True is a whole number too.
    return [each for each in given if type(each) is not int and not (answers and type(each) is str)]


def _is_text(table: Dataset) -> bool:
    """Whether every column is text, as in every csv file."""
    return all(getattr(each, "dtype", None) == "string" for each in table.features.values())


def _listed(cell: Any) -> Any:
    """The list of texts or of whole numbers that a cell holds as JSON; else the cell itself."""
    try:
        found = json.loads(cell) if str(cell).lstrip().startswith("[") else None
    except ValueError:
        return cell
    kinds = {type(each) for each in found or ()}
    return found if isinstance(found, list) and kinds in ({str}, {int}, set()) else cell


def _is_missing(cell: Any) -> bool:
    return cell is None or cell == "" or cell != cell  # NaN is how pandas writes a missing value


def _prompt(cell: Any) -> Prompt | None:
    if _is_missing(cell):
        return None
    return cell if isinstance(cell, str) else [_whole(each) for each in _each(cell)]


def _several(cell: Any) -> tuple[Answer, ...]:
    """The answers of a cell, which is one of them or a list."""
    return tuple(_whole(each) for each in _each(cell) if not _is_missing(each))


def _each(cell: Any) -> list[Any]:
    return cell if isinstance(cell, list) else [cell]


def _whole(each: Any) -> Any:
    """A token id as it was: beside a missing value pandas turns whole numbers into floats."""
    return int(each) if isinstance(each, float) and each.is_integer() else each


def _position(cell: Any, number: int, where: str) -> int | None:
    """The position to read, also as a csv file or pandas writes it."""
    if _is_missing(cell):
        return None
    try:
        found = float(cell)
    except (TypeError, ValueError):
        found = math.nan
    if not found.is_integer():
        raise HcLensError(
            f"expected a whole number as the read position in {where}, got {cell!r} in row "
            f"{number}; count from 0, or from -1 at the end"
        )
    return int(found)


def _sides(rows: Sequence[Row]) -> dict[str, str]:
    """The side of each case; none where its rows have several."""
    sides: dict[str, str] = {}
    for row in rows:
        sides[row.case] = row.side if sides.get(row.case, row.side) == row.side else ""
    return sides


def _as_table(encoded: Sequence[Encoded], cases: Sequence[str]) -> Dataset:
    """The columns that batches are made from."""
    columns: dict[str, list[Any]] = {
        "input_ids": [row.prompt for row in encoded],
        "length": [len(row.prompt) for row in encoded],
        "long": [False] * len(encoded),
        "label": [0] * len(encoded),
        "case": list(cases),
        "right": [row.right for row in encoded],
        "wrong": [row.wrong for row in encoded],
        "read": [row.read for row in encoded],
    }
    if encoded[0].counterfactual is not None:
        columns["counterfactual"] = [row.counterfactual for row in encoded]
    ids = [Value("int64")]
    kinds = {"long": Value("bool"), "case": Value("string")}
    whole = {column: Value("int64") for column in ("length", "label", "read")}
    # Of empty lists alone, arrow could not tell what they hold.
    types = {column: kinds.get(column) or whole.get(column, ids) for column in columns}
    return Dataset.from_dict(columns, Features(types))


def _strings(model: Model, ids: list[int]) -> list[str]:
    """Tokens as their vocabulary writes them; as numbers for a model without a tokenizer."""
    tokenizer = getattr(model, "tokenizer", None)
    return (
        [str(each) for each in ids] if tokenizer is None else tokenizer.convert_ids_to_tokens(ids)
    )
