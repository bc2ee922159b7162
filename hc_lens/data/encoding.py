"""A prompt, its answers and its counterfactual as token ids.

1. Tokenise the prompts with the model's own tokenizer and with a BOS where TransformerLens puts one
   (``model.to_tokens``); a prompt of token ids is taken as it is.
2. A causal model is read at the last token, a masked one at its mask token, or where the row says.
3. An answer counts by the first token that it adds: tokenise prompt and answer together and take
   the token behind the prompt's own. A masked model's answer is the one token that stands in the
   place that is read. An answer of token ids is taken as it is.
4. Refuse, with the numbers of the rows, what could not be scored: a prompt without tokens or with
   too many, a counterfactual of another length, an answer that the tokenizer does not know, that
   changes the tokens before it or whose first token is only the space before it, a right answer
   that begins as a wrong one does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hc_lens.errors import HcLensError
from hc_lens.models.inputs import is_encoder, tokenizer_of
from hc_lens.protocols import Model

Prompt = str | list[int]
"""A text, or its token ids."""
Answer = str | int
"""A text, or its first token."""
Faults = Sequence[tuple[int, str]]
"""Numbers of rows, each with what a message shows of it."""
MASKS = ("[MASK]", "<mask>")
"""How a prompt may write the mask token, whatever the tokenizer calls it."""
MOST_SHOWN = 3
"""Most rows that a message lists."""
MOST_LETTERS = 40
"""Most letters of a prompt that a message shows."""


@dataclass(frozen=True)
class Row:
    """One prompt with its answers."""

    number: int
    """Position in its split, by which messages name the row."""
    prompt: Prompt
    """What the model reads."""
    right: tuple[Answer, ...]
    """The right answers."""
    wrong: tuple[Answer, ...] = ()
    """The wrong answers; none where every other token is wrong."""
    counterfactual: Prompt | None = None
    """Another prompt with as many tokens."""
    case: str = "all"
    """Name by which results are grouped."""
    side: str = ""
    """``friendly``, ``adversarial``, or neither."""
    read: int | None = None
    """Position at which the model is read, negative from the end; None for the model's own."""


@dataclass(frozen=True)
class Encoded:
    """The token ids of a row."""

    prompt: list[int]
    """The prompt."""
    right: list[int]
    """First tokens of the right answers, each once."""
    wrong: list[int]
    """First tokens of the wrong answers, each once."""
    read: int
    """Position at which the model is read."""
    counterfactual: list[int] | None
    """The counterfactual, as long as the prompt."""


def token_ids(
    model: Model, texts: Sequence[str], prepend_bos: bool | None = None
) -> list[list[int]]:
    """The token ids of each text; of a decoder as its ``to_tokens`` gives them.

    `prepend_bos` overrides the model's own ``cfg.default_prepend_bos``.
    """
    if not texts:
        return []
    tokenizer = tokenizer_of(model)
    if is_encoder(model):
        if prepend_bos is not None:
            raise HcLensError(
                f"expected prepend_bos= for a causal model, got {prepend_bos} for a masked one, "
                "whose tokenizer puts its own special tokens; leave it out"
            )
        return tokenizer(list(texts), verbose=False)["input_ids"]
    wanted = bool(model.cfg.default_prepend_bos if prepend_bos is None else prepend_bos)
    own = getattr(model.cfg, "tokenizer_prepends_bos", None)
    own = len(tokenizer.encode("")) > 0 if own is None else own
    bos = tokenizer.bos_token if wanted and not own else None
    ids = tokenizer([(bos or "") + text for text in texts], verbose=False)["input_ids"]
    removed = 1 if own and not wanted and tokenizer.bos_token_id is not None else 0
    return [each[removed:] for each in ids]


@dataclass(frozen=True)
class Encoder:
    """How the rows of one place become token ids of one model."""

    model: Model
    """The model that will read them."""
    where: str
    """The name of the rows, for messages."""
    separator: str = " "
    """What stands between a prompt and its answer, unless one of them has white space there."""
    prepend_bos: bool | None = None
    """Whether a BOS comes first; None for the model's own habit."""

    def __call__(self, rows: Sequence[Row]) -> list[Encoded]:
        """The token ids of rows, after every check that needs no run of the model."""
        self._check_rows(rows)
        prompts = self._ids([row.prompt for row in rows])
        self._check_ids(rows, prompts)
        reads = self._reads(rows, prompts)
        others = self._counterfactuals(rows, prompts)
        right = self._first_tokens(rows, prompts, reads, [row.right for row in rows])
        wrong = self._first_tokens(rows, prompts, reads, [row.wrong for row in rows])
        self._check_answers(rows, right, wrong)
        made = zip(prompts, right, wrong, reads, others, strict=True)
        return [Encoded(ids, [*yes], [*no], read, other) for ids, yes, no, read, other in made]

    def _refuse(self, found: Faults, expected: str, cure: str) -> None:
        refuse(found, expected, self.where, cure)

    def _check_rows(self, rows: Sequence[Row]) -> None:
        """Refuse rows that lack a part."""
        blank = [
            (row.number, repr(row.prompt))
            for row in rows
            if not (row.prompt.strip() if isinstance(row.prompt, str) else row.prompt)
        ]
        self._refuse(blank, "a prompt in every row", "fill or remove these rows")
        silent = [(row.number, shown(row.prompt)) for row in rows if not row.right]
        self._refuse(silent, "a right answer in every row", "give it, or remove these rows")
        some = any(row.counterfactual is not None for row in rows)
        lacking = [(row.number, shown(row.prompt)) for row in rows if row.counterfactual is None]
        if some:
            cure = "give one to each row, or leave the column out"
            self._refuse(lacking, "a counterfactual in every row or in none", cure)
        unlike = [
            (row.number, f"{shown(row.prompt)} with {answer!r}")
            for row in rows
            for answer in (*row.right, *row.wrong)
            if not isinstance(row.prompt, str) and isinstance(answer, str)
        ]
        cure = "give both as token ids, or both as text"
        self._refuse(unlike, "answers of token ids for prompts of token ids", cure)

    def _check_ids(self, rows: Sequence[Row], prompts: Sequence[list[int]]) -> None:
        """Refuse prompts that the model cannot read."""
        most, vocabulary = self.model.cfg.n_ctx, self.model.cfg.d_vocab
        pairs = list(zip(rows, prompts, strict=True))
        empty = [(row.number, shown(row.prompt)) for row, ids in pairs if not ids]
        self._refuse(empty, "at least one token in every prompt", "remove these rows")
        long = [(row.number, f"{len(ids)} tokens") for row, ids in pairs if len(ids) > most]
        context = f"prompts of at most {most} tokens (the model's context)"
        self._refuse(long, context, "shorten or remove these rows")
        strange = [
            (row.number, str(each))
            for row, ids in pairs
            for each in ids
            if not 0 <= each < vocabulary
        ]
        self._refuse(strange, f"token ids below {vocabulary} (the vocabulary)", "correct them")

    def _counterfactuals(
        self, rows: Sequence[Row], prompts: Sequence[list[int]]
    ) -> Sequence[list[int] | None]:
        """The token ids of the counterfactuals, each as many as its prompt has."""
        given = [row.counterfactual for row in rows if row.counterfactual is not None]
        if not given:
            return [None] * len(rows)
        others = self._ids(given)
        self._check_ids(rows, others)
        unlike = [
            (row.number, f"{len(other)} tokens for {len(ids)}: {shown(row.counterfactual)}")
            for row, ids, other in zip(rows, prompts, others, strict=True)
            if len(ids) != len(other)
        ]
        cure = "choose words with as many tokens, or remove these rows"
        self._refuse(unlike, "counterfactuals with as many tokens as their prompts", cure)
        return others

    def _ids(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """The token ids of prompts, of which some may be token ids already."""
        texts = [self._with_mask(each) for each in prompts if isinstance(each, str)]
        made = iter(token_ids(self.model, texts, self.prepend_bos))
        return [next(made) if isinstance(each, str) else list(each) for each in prompts]

    def _with_mask(self, text: str) -> str:
        """A text with the mask token as the model's own tokenizer writes it."""
        own = tokenizer_of(self.model).mask_token if is_encoder(self.model) else None
        for written in MASKS if own else ():
            text = text.replace(written, str(own))
        return text

    def _mask_id(self) -> int | None:
        """The mask token of a masked language model; None for a causal one."""
        if not is_encoder(self.model):
            return None
        found = tokenizer_of(self.model).mask_token_id
        if found is None:
            raise HcLensError(
                "expected a tokenizer with a mask token for a masked language model, got one "
                "without; pass tokenizer=... to hc.load"
            )
        return found

    def _reads(self, rows: Sequence[Row], prompts: Sequence[list[int]]) -> list[int]:
        """The position at which each row is read, counted from the left."""
        pairs = list(zip(rows, prompts, strict=True))
        unsaid = [(row, ids) for row, ids in pairs if row.read is None]
        mask = self._mask_id() if unsaid else None
        if mask is not None:
            unmasked = [
                (row.number, f"{ids.count(mask)} in {shown(row.prompt)}")
                for row, ids in unsaid
                if ids.count(mask) != 1
            ]
            cure = f"write {MASKS[0]} where the model is to answer, or give its position as read"
            self._refuse(unmasked, "one mask token in every prompt", cure)
        outside = [
            (row.number, f"{row.read} of {len(ids)} tokens")
            for row, ids in pairs
            if row.read is not None and not -len(ids) <= row.read < len(ids)
        ]
        cure = "count from 0, or from -1 at the end"
        self._refuse(outside, "a read position inside every prompt", cure)
        return [
            (len(ids) - 1 if mask is None else ids.index(mask))
            if row.read is None
            else row.read % len(ids)
            for row, ids in pairs
        ]

    def _first_tokens(
        self,
        rows: Sequence[Row],
        prompts: Sequence[list[int]],
        reads: Sequence[int],
        answers: Sequence[tuple[Answer, ...]],
    ) -> list[dict[int, Answer]]:
        """The first token of each answer of each row, with the first answer that begins so."""
        flat = [(index, each) for index, given in enumerate(answers) for each in given]
        texts = [(index, each) for index, each in flat if isinstance(each, str)]
        joined = self._ids(
            [
                self._joined(str(rows[index].prompt), prompts[index], reads[index], each)
                for index, each in texts
            ]
        )
        added = iter(
            _added(prompts[index], ids, reads[index] if is_encoder(self.model) else None)
            for (index, _), ids in zip(texts, joined, strict=True)
        )
        unknown = tokenizer_of(self.model).unk_token_id if texts else None
        found: list[dict[int, Answer]] = [{} for _ in rows]
        apart, strange, blank = [], [], []
        for index, answer in flat:
            token = next(added) if isinstance(answer, str) else answer
            told = (rows[index].number, f"{answer!r} for {shown(rows[index].prompt)}")
            if token is None:
                apart.append(told)
            elif token == unknown or not 0 <= token < self.model.cfg.d_vocab_out:
                strange.append((rows[index].number, repr(answer)))
            elif isinstance(answer, str) and self._is_space_before(answer, token):
                blank.append(told)
            else:
                found[index].setdefault(token, answer)
        self._refuse_answers(apart, strange, blank)
        return found

    def _is_space_before(self, answer: str, token: int) -> bool:
        """Whether the first token of an answer is nothing but the space that stands before it."""
        # A space before a word is how words are joined; other white space is what is asked for.
        text = answer.removeprefix(" ")
        meant = not text.strip() or text[0].isspace()
        return not meant and not tokenizer_of(self.model).decode([token]).strip()

    def _refuse_answers(self, apart: Faults, strange: Faults, blank: Faults) -> None:
        if is_encoder(self.model):
            expected = "answers that are one token in the place that is read"
            cure = "choose answers that the vocabulary has as one word"
        else:
            expected = "answers that leave the tokens of the prompt as they are"
            cure = "end the prompt before a space, or set separator=, or give token ids"
        self._refuse(apart, expected, cure)
        expected = "answers that the tokenizer knows"
        self._refuse(strange, expected, "choose other words, or remove these rows")
        expected = "answers whose first token is not a space alone"
        cure = "give token ids, or end the prompt with this space"
        self._refuse(blank, expected, cure)

    def _joined(self, prompt: str, ids: list[int], read: int, answer: str) -> str:
        """The text in which an answer is tokenised."""
        if is_encoder(self.model):
            text = self._with_mask(prompt)
            start, end = self._span(text, ids, read)
            return f"{text[:start]}{answer}{text[end:]}"
        apart = prompt[-1:].isspace() or answer[:1].isspace()
        return f"{prompt}{'' if apart else self.separator}{answer}"

    def _span(self, text: str, ids: list[int], read: int) -> tuple[int, int]:
        """Where in its text the token stands that a masked model is read at."""
        tokenizer = tokenizer_of(self.model)
        if ids[read] == tokenizer.mask_token_id:
            masks = re.finditer(re.escape(str(tokenizer.mask_token)), text)
            return [found.span() for found in masks][ids[:read].count(ids[read])]
        if not tokenizer.is_fast:
            raise HcLensError(
                f"expected a fast tokenizer to read {self.where} where no mask is, got a "
                f"{type(tokenizer).__name__}; write {MASKS[0]} in the place that is read"
            )
        spans = tokenizer(text, return_offsets_mapping=True, verbose=False)["offset_mapping"]
        start, end = spans[read]
        # Some tokenizers count the space before a word as a part of it.
        return end - len(text[start:end].lstrip()), end

    def _check_answers(
        self,
        rows: Sequence[Row],
        right: Sequence[Mapping[int, Answer]],
        wrong: Sequence[Mapping[int, Answer]],
    ) -> None:
        """Refuse rows in which a right answer begins as a wrong one does."""
        ambiguous = [
            (row.number, f"right {yes[token]!r} and wrong {no[token]!r}")
            for row, yes, no in zip(rows, right, wrong, strict=True)
            for token in yes
            if token in no
        ]
        cure = "choose answers that differ in their first token, or remove these rows"
        self._refuse(ambiguous, "right and wrong answers with different first tokens", cure)


def _added(prompt: list[int], joined: list[int], place: int | None) -> int | None:
    """The token that an answer adds behind a prompt, or puts in a place of it."""
    if place is None:
        size = len(prompt)
        return joined[size] if len(joined) > size and joined[:size] == prompt else None
    kept = prompt[:place] + joined[place : place + 1] + prompt[place + 1 :]
    return joined[place] if kept == joined else None


def refuse(found: Faults, expected: str, where: str, cure: str) -> None:
    """Raise an error that lists the first of the rows that are not as expected, if any."""
    # Of a row with several faults the first is told.
    first = list(dict(reversed(found)).items())[::-1]
    if first:
        listed = ", ".join(f"row {number} ({what})" for number, what in first[:MOST_SHOWN])
        rows = "1 row that is" if len(first) == 1 else f"{len(first)} rows that are"
        raise HcLensError(f"expected {expected} in {where}, got {rows} not so: {listed}; {cure}")


def shown(prompt: Prompt | None) -> str:
    """A prompt as a message shows it: its end, where the answer follows."""
    text = str(prompt)
    return repr(text if len(text) <= MOST_LETTERS else f"...{text[-MOST_LETTERS:]}")
