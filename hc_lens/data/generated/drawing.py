"""What every generator of prompts does alike.

1. Draw rows one after the other, the cases in turn, with a generator made from name, split and
   seed.
2. A prompt belongs to one split for every seed, by a hash of its content: a quarter of all prompts
   is held out. So rows that are made with one seed are never held out with another, and
   ``agreement`` never trains on a prompt that ``agreement-ood`` holds out.
3. Keep a row unless it has been drawn before. More rows than a generator has are an error.
4. Words are chosen by the number of tokens that they add to a text.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TypedDict

from hc_lens.data.encoding import MASKS, Prompt, token_ids
from hc_lens.errors import HcLensError
from hc_lens.models.inputs import is_encoder, tokenizer_of
from hc_lens.protocols import Model
from hc_lens.records import seed_of

TRAIN, HELD_OUT = SPLITS = ("train", "validation")
"""The splits of every generator."""
ONE_IN = 4
"""One prompt of so many is held out."""
MOST_TRIES = 1_000
"""Draws in a row without a new prompt after which there seem to be no more."""
BEFORE = "They saw"
"""A text behind which the tokens of a word are counted."""


class Made(TypedDict):
    """A row that a generator makes."""

    prompt: Prompt
    right: str | int
    wrong: str | int
    counterfactual: Prompt
    case: str
    side: str


Make = Callable[[random.Random, str], Made]
"""What draws one row of a case."""


def split_of(prompt: Prompt) -> str:
    """The split that a prompt belongs to, whatever the seed."""
    return HELD_OUT if seed_of(str(prompt)) % ONE_IN == 0 else TRAIN


def distinct(
    make: Make, cases: Sequence[str], name: str, split: str, n: int, seed: int
) -> list[Made]:
    """`n` different rows of a split, of each case as many as of the others."""
    drawn = random.Random(seed_of(f"{name} {split} {seed}"))
    rows: dict[tuple[str, str | int], Made] = {}
    for place in range(n):
        for _ in range(MOST_TRIES):
            row = make(drawn, cases[place % len(cases)])
            key = str(row["prompt"]), row["right"]
            if split_of(row["prompt"]) == split and key not in rows:
                rows[key] = row
                break
        else:
            raise HcLensError(
                f"expected at most as many rows as {name}/{split} has for this model, got n={n} "
                f"and only about {len(rows)} different ones; lower n"
            )
    return list(rows.values())


def token_counts(model: Model, words: Sequence[str]) -> dict[str, int]:
    """How many tokens each word adds to a text, without words that the tokenizer does not know."""
    alone, *made = token_ids(model, [BEFORE, *(f"{BEFORE} {word}" for word in words)])
    unknown = tokenizer_of(model).unk_token_id
    return {
        word: len(ids) - len(alone)
        for word, ids in zip(words, made, strict=True)
        # Some tokenizers have one token for what is unknown and for the beginning of a text.
        if ids.count(unknown) == alone.count(unknown)
    }


def ended(model: Model, text: str, rest: str) -> str:
    """A prompt for either kind of model: a masked one reads what follows the answer, too."""
    return f"{text} {MASKS[0]} {rest}" if is_encoder(model) else text
