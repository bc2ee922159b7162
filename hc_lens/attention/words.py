"""Which word, and which sentence, each token of a row stands for.

1. Tokenise a row's one or two texts with a fast tokenizer. Its word ids say which tokens are pieces
   of one word, its sequence ids the sentence, its offsets the text of a piece.
2. A piece after a space begins a new word as well: some tokenizers (Llama's) give one word id to a
   whole text.
3. A token outside both texts is special. It is a separator if it is the tokenizer's separator, or
   if it stands between the two texts.
4. Two texts joined by a `separator` string go in as one text. The offsets say whether a piece is in
   the first text, in the separator or in the second.
5. A row that was cut to fewer tokens is cut here in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from jaxtyping import Bool, Int
from tokenizers import Encoding
from torch import Tensor

from hc_lens.errors import HcLensError
from hc_lens.models.inputs import mask_of

NONE = -1
"""Sentence and word of a token that has none."""
Piece = tuple[int, int, int]
"""Which text a token is of, and where it begins and ends there."""


@dataclass(frozen=True)
class Row:
    """The tokens of one row and the words that they stand for."""

    ids: tuple[int, ...]
    """Token ids, special tokens included."""
    tokens: tuple[str, ...]
    """What each token stands for in the text; special tokens by their own name."""
    sentences: tuple[int, ...]
    """Sentence of each token, 0 or 1; -1 for special tokens and separators."""
    word_ids: tuple[int, ...]
    """Index of each token's word in `words`; -1 for special tokens and separators."""
    separators: tuple[bool, ...]
    """Whether each token is a separator."""
    words: tuple[str, ...]
    """Text of each word, first sentence first."""

    def words_of(self, sentence: int) -> tuple[str, ...]:
        """The words of one sentence, 0 or 1."""
        own = dict(zip(self.word_ids, self.sentences, strict=True))
        return tuple(word for index, word in enumerate(self.words) if own[index] == sentence)


@dataclass(frozen=True)
class Words:
    """The rows of a batch, as tensors beside its token ids."""

    rows: tuple[Row, ...]
    """Each row by itself, without pads."""
    mask: Bool[Tensor, "batch pos"]
    """False at pads."""
    sentence: Int[Tensor, "batch pos"]
    """Sentence of each token, 0 or 1; -1 for special tokens, separators and pads."""
    word: Int[Tensor, "batch pos"]
    """Index of each token's word in its row; -1 for special tokens, separators and pads."""
    separator: Bool[Tensor, "batch pos"]
    """Whether each token is a separator."""


def align(
    tokenizer: Any,
    texts: Sequence[tuple[str, ...]],
    lengths: Sequence[int] | None = None,
    separator: str | None = None,
) -> list[Row]:
    """Tokenise rows of one or two texts and find the words of each token.

    `lengths` are the numbers of tokens to which rows were cut, `separator` is the text between two
    texts that go in as one.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise HcLensError(
            "expected a fast tokenizer, which knows the word of each token, got "
            f"{type(tokenizer).__name__} without word ids; load the checkpoint's fast tokenizer "
            "(AutoTokenizer.from_pretrained with a tokenizer.json) and pass tokenizer= to hc.load"
        )
    inputs = list(texts) if separator is None else [(separator.join(row),) for row in texts]
    rows = []
    for index, encoding in enumerate(_encode(tokenizer, inputs, None)):
        if lengths is not None and len(encoding.ids) > lengths[index]:
            (encoding,) = _encode(tokenizer, [inputs[index]], lengths[index])
        n_first = len(texts[index][0])
        parts = None if separator is None else (n_first, n_first + len(separator))
        rows.append(_row(tokenizer, encoding, inputs[index], parts))
    return rows


def align_batch(
    tokenizer: Any,
    texts: Sequence[tuple[str, ...]],
    inputs: Mapping[str, Tensor],
    separator: str | None,
) -> Words:
    """The words of a batch's tokens; the tokenizer must give the ids that the batch has."""
    mask = mask_of(inputs).bool()
    rows = align(tokenizer, texts, mask.sum(1).tolist(), separator)
    for row, ids, real in zip(rows, inputs["input"], mask, strict=True):
        if ids[real].tolist() != list(row.ids):
            raise HcLensError(
                "expected the tokenizer to give the same ids twice, got other ids for the row "
                f"{row.words[:4]}...; has the model's tokenizer been changed since?"
            )

    def laid_out(values: Iterable[Sequence[int]], fill: int) -> Int[Tensor, "batch pos"]:
        real = torch.tensor([value for row in values for value in row], device=mask.device)
        return torch.full(mask.shape, fill, device=mask.device).masked_scatter(mask, real.long())

    return Words(
        rows=tuple(rows),
        mask=mask,
        sentence=laid_out((row.sentences for row in rows), NONE),
        word=laid_out((row.word_ids for row in rows), NONE),
        separator=laid_out((row.separators for row in rows), 0).bool(),
    )


def _encode(tokenizer: Any, rows: Sequence[tuple[str, ...]], length: int | None) -> list[Encoding]:
    columns = [list(column) for column in zip(*rows, strict=True)]
    cut = length is not None
    return tokenizer(*columns, truncation=cut, max_length=length, verbose=False).encodings


def _row(
    tokenizer: Any, encoding: Encoding, texts: tuple[str, ...], parts: tuple[int, int] | None
) -> Row:
    """The row of an encoding; `parts` are the ends of the first text and of the separator."""
    ids, spans, sides = encoding.ids, encoding.offsets, encoding.sequence_ids
    given = encoding.word_ids
    if any(side is not None and word is None for side, word in zip(sides, given, strict=True)):
        raise HcLensError(
            f"expected word ids for every token of {texts[0]!r}, got None at some; the tokenizer "
            f"{type(tokenizer).__name__} does not know its words: use one with a pre-tokenizer"
        )
    pieces = [_piece(texts, side, *span) for side, span in zip(sides, spans, strict=True)]
    sentences = [NONE if side is None else side for side in sides]
    if parts is not None:
        sentences = [
            NONE if piece is None else _sentence(span, piece, parts)
            for span, piece in zip(spans, pieces, strict=True)
        ]
    between = range(0)
    if {0, 1} <= set(sides):
        between = range(len(sides) - sides[::-1].index(0), sides.index(1))
    separators = tuple(
        sentence == NONE
        and (side is not None or token == tokenizer.sep_token_id or position in between)
        for position, (token, side, sentence) in enumerate(zip(ids, sides, sentences, strict=True))
    )
    tokens = _readable(encoding.tokens, texts, pieces)
    word_ids, words = _words(texts, sentences, given, pieces)
    return Row(tuple(ids), tuple(tokens), tuple(sentences), word_ids, separators, words)


def _piece(texts: Sequence[str], side: int | None, start: int, end: int) -> Piece | None:
    """A token's span without the spaces at its ends; one of spaces only is empty, at its end."""
    if side is None:
        return None
    inner = texts[side][start:end].lstrip()
    start = end - len(inner)
    return side, start, start + len(inner.rstrip())


def _sentence(span: tuple[int, int], piece: Piece, parts: tuple[int, int]) -> int:
    """Sentence of a piece of two joined texts, by its last character; -1 in the separator."""
    _, start, end = piece
    start, end = (start, end) if start < end else span
    last = max(start, end - 1)
    return 0 if last < parts[0] else NONE if last < parts[1] else 1


def _words(
    texts: Sequence[str],
    sentences: Sequence[int],
    given: Sequence[int | None],
    pieces: Sequence[Piece | None],
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Word index of each token, and the text of each word."""
    word_ids: list[int] = []
    words: list[Piece] = []
    before: tuple[int, int | None] | None = None  # sentence and given id of the token before
    for sentence, own, piece in zip(sentences, given, pieces, strict=True):
        if sentence == NONE or piece is None:
            word_ids.append(NONE)
            before = None
            continue
        side, start, end = piece
        gap = texts[side][words[-1][2] : start] if before == (sentence, own) else " "
        if any(map(str.isspace, gap)):
            words.append(piece)
        else:
            words[-1] = (side, words[-1][1], max(end, words[-1][2]))
        word_ids.append(len(words) - 1)
        before = (sentence, own)
    return tuple(word_ids), tuple(texts[side][start:end] for side, start, end in words)


def _readable(
    names: Sequence[str], texts: Sequence[str], pieces: Sequence[Piece | None]
) -> Iterator[str]:
    """The text of each token; the k-th piece of one character has its number behind it."""
    for piece, same in groupby(zip(pieces, names, strict=True), key=lambda token: token[0]):
        for count, (_, name) in enumerate(same, start=1):
            if piece is None:
                yield name
                continue
            side, start, end = piece
            text = texts[side][start:end] or "␣"
            yield text if text == "␣" or count == 1 else f"{text}·{count}"
