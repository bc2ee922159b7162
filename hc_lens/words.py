"""Which word, and which sentence, each token of a row stands for.

1. Tokenise a row's one or two texts with a fast tokenizer. Its word ids tell which tokens are
   pieces of one word, its sequence ids tell the sentence, its offsets tell the text of a piece.
2. A piece after a space begins a new word as well: some tokenizers (Llama's) give one word id to a
   whole text.
3. A token outside both texts is special. It is a separator if it is the tokenizer's separator, or
   if it stands between the two texts.
4. Two texts joined by a `separator` string go in as one text: the offsets tell the pieces of the
   first text, of the separator and of the second apart.
5. A row that was cut to fewer tokens is cut here in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxtyping import Bool, Int
from torch import Tensor

from hc_lens.errors import HcLensError
from hc_lens.models.inputs import pad

NONE = -1
"""Sentence and word of a token that has none."""


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

    @property
    def word_sentences(self) -> list[int]:
        """The sentence of each word, 0 or 1."""
        own = dict(zip(self.word_ids, self.sentences, strict=True))
        return [own[place] for place in range(len(self.words))]


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

    @property
    def special(self) -> Bool[Tensor, "batch pos"]:
        """Whether each token is special or a separator; pads are not."""
        return self.mask & (self.word == NONE)


def align(
    tokenizer: Any,
    texts: Sequence[tuple[str, ...]],
    lengths: Sequence[int] | None = None,
    separator: str | None = None,
) -> list[Row]:
    """Tokenise rows of one or two texts and find the words of each token.

    Args:
        tokenizer: a fast tokenizer of transformers.
        texts: the one or two texts of each row.
        lengths: number of tokens of each row where rows may have been cut.
        separator: text between the two texts, if they go in as one.
    """
    _check(tokenizer)
    columns = list(zip(*texts, strict=True))
    if separator is not None:
        columns = [tuple(separator.join(row) for row in texts)]
    whole = _encode(tokenizer, columns, None)
    rows = []
    for place, row in enumerate(texts):
        encoding, at = whole, place
        if lengths is not None and len(whole["input_ids"][place]) > lengths[place]:
            one = [(column[place],) for column in columns]
            encoding, at = _encode(tokenizer, one, lengths[place]), 0
        inner = tuple(column[place] for column in columns)
        parts = None if separator is None else (len(row[0]), len(row[0]) + len(separator))
        rows.append(_row(tokenizer, encoding, at, inner, parts))
    return rows


def stack(rows: Sequence[Row], mask: Int[Tensor, "batch pos"]) -> Words:
    """The rows laid out as in a batch, whose pads (on either side) are 0 in `mask`."""
    # A row whose last token is real has its pads, if any, on the left.
    side = "left" if bool((mask[:, -1] == 1).all()) else "right"
    width = mask.shape[1]

    def layout(values: list[tuple[int, ...]], fill: int) -> Tensor:
        return pad(values, fill, side, width).to(mask.device)

    return Words(
        rows=tuple(rows),
        mask=mask.bool(),
        sentence=layout([row.sentences for row in rows], NONE),
        word=layout([row.word_ids for row in rows], NONE),
        separator=layout([tuple(map(int, row.separators)) for row in rows], 0).bool(),
    )


def _check(tokenizer: Any) -> None:
    if not getattr(tokenizer, "is_fast", False):
        raise HcLensError(
            f"expected a fast tokenizer, which tells the word of each token, got "
            f"{type(tokenizer).__name__} without word ids; load the checkpoint's fast tokenizer "
            "(AutoTokenizer.from_pretrained with a tokenizer.json) and pass tokenizer= to hc.load"
        )


def _encode(tokenizer: Any, columns: Sequence[Sequence[str]], length: int | None) -> Any:
    texts = [list(column) for column in columns]
    return tokenizer(
        *texts,
        truncation=length is not None,
        max_length=length,
        return_offsets_mapping=True,
        verbose=False,
    )


def _row(
    tokenizer: Any,
    encoding: Any,
    at: int,
    texts: tuple[str, ...],
    parts: tuple[int, int] | None,
) -> Row:
    """One row of an encoding; `parts` are the ends of the first text and of the separator."""
    ids = encoding["input_ids"][at]
    names = tokenizer.convert_ids_to_tokens(ids)
    spans = encoding["offset_mapping"][at]
    sentences = [NONE if s is None else s for s in encoding.sequence_ids(at)]
    given = encoding.word_ids(at)
    if any(s != NONE and w is None for s, w in zip(sentences, given, strict=True)):
        raise HcLensError(
            f"expected word ids for every token of {texts[0]!r}, got None at some; the tokenizer "
            f"{type(tokenizer).__name__} does not tell its words: use one with a pre-tokenizer"
        )
    pieces = [
        None if s == NONE else _trim(texts[s], *span)
        for s, span in zip(sentences, spans, strict=True)
    ]
    separators = _separators(tokenizer, ids, sentences)
    if parts is not None:
        sentences = [
            NONE if piece is None else _side(span, piece, parts)
            for span, piece in zip(spans, pieces, strict=True)
        ]
        separators = [
            mark or (s == NONE and piece is not None)
            for mark, s, piece in zip(separators, sentences, pieces, strict=True)
        ]
    sources = texts * 2 if parts is not None else texts
    word_ids, words = _words(sources, sentences, given, pieces)
    tokens = _readable(names, texts, encoding.sequence_ids(at), pieces)
    return Row(
        tuple(ids), tuple(tokens), tuple(sentences), tuple(word_ids), tuple(separators), words
    )


def _trim(text: str, start: int, end: int) -> tuple[int, int]:
    """The span without the spaces at its ends; a span of spaces only is empty, at its end."""
    while start < end and text[start].isspace():
        start += 1
    while start < end and text[end - 1].isspace():
        end -= 1
    return start, end


def _side(span: tuple[int, int], piece: tuple[int, int], parts: tuple[int, int]) -> int:
    """Sentence of a piece of two joined texts, by its last character; -1 in the separator."""
    start, end = piece if piece[0] < piece[1] else span
    last = max(start, end - 1)
    return 0 if last < parts[0] else NONE if last < parts[1] else 1


def _separators(tokenizer: Any, ids: Sequence[int], sentences: Sequence[int]) -> list[bool]:
    own = tokenizer.sep_token_id
    first = [place for place, sentence in enumerate(sentences) if sentence == 0]
    second = [place for place, sentence in enumerate(sentences) if sentence == 1]
    between = range(first[-1] + 1, second[0]) if first and second else range(0)
    return [
        sentence == NONE and ((own is not None and token == own) or place in between)
        for place, (token, sentence) in enumerate(zip(ids, sentences, strict=True))
    ]


def _words(
    texts: Sequence[str],
    sentences: Sequence[int],
    given: Sequence[int | None],
    pieces: Sequence[tuple[int, int] | None],
) -> tuple[list[int], tuple[str, ...]]:
    """Word index of each token, and the text of each word."""
    word_ids: list[int] = []
    spans: list[tuple[int, int, int]] = []  # sentence, start and end of each word
    before: tuple[int, int | None] | None = None  # sentence and given id of the token before
    for sentence, own, piece in zip(sentences, given, pieces, strict=True):
        if sentence == NONE or piece is None:
            word_ids.append(NONE)
            before = None
            continue
        start, end = piece
        text = texts[sentence]
        inside = before == (sentence, own) and not any(map(str.isspace, text[spans[-1][2] : start]))
        if inside:
            spans[-1] = (sentence, spans[-1][1], max(end, spans[-1][2]))
        else:
            spans.append((sentence, start, end))
        word_ids.append(len(spans) - 1)
        before = (sentence, own)
    return word_ids, tuple(texts[sentence][start:end] for sentence, start, end in spans)


def _readable(
    names: Sequence[str],
    texts: Sequence[str],
    sequences: Sequence[int | None],
    pieces: Sequence[tuple[int, int] | None],
) -> list[str]:
    """The text of each token; the k-th piece of one character says so, as no text is its own."""
    tokens: list[str] = []
    before, count = None, 1
    for name, sequence, piece in zip(names, sequences, pieces, strict=True):
        if sequence is None or piece is None:
            tokens.append(name)
            continue
        text = texts[sequence][slice(*piece)] or "␣"
        count = count + 1 if (sequence, piece) == before and text != "␣" else 1
        before = (sequence, piece)
        tokens.append(text if count == 1 else f"{text}·{count}")
    return tokens
