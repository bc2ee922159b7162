"""Indirect object identification (Wang et al. 2022), in the words of a children's story.

1. Two people go somewhere, and one of them gives something to the other: "One day, Tom and Lily
   went to the park. Lily gave a ball to" continues with Tom, not with Lily.
2. The case is the place of the right name: ``first`` or ``second`` of the two as they are mentioned
   together. Both cases are equally frequent.
3. Only names are used that are one token in the model's own vocabulary, so that all sentences of a
   template with the same place and thing have as many tokens.
4. The counterfactual is the same sentence with three other names, so that nobody is named twice.
"""

from __future__ import annotations

import random

from hc_lens.data.generated.drawing import Made, distinct, ended, token_counts
from hc_lens.errors import HcLensError
from hc_lens.protocols import Model

CASES = ("first", "second")
"""Which of the two names is the answer, in the order of mention."""
LEAST_NAMES = 5
"""Names that a row and its counterfactual need."""
NAMES = (  # noqa: SIM905
    "Tom Lily Ben Sam Anna Max Sue Tim Lucy Jack Mia Bob Amy Sara Jane John Mary Kate Emma Jim "
    "Bill Mark Paul Peter Alice Rose David Mike Daisy Molly Billy Jenny Emily Sarah Leo Dan Joe "
    "Nick Ella Adam Eva Maria Laura George Henry James Charlie Lisa Julia Robert Tony Martin Simon "
    "Daniel Thomas Alex"
).split()
TEMPLATES = (
    "One day, {a} and {b} went to the {place}. {c} gave a {thing} to",
    "Then, {a} and {b} went to the {place}. {c} wanted to give a {thing} to",
    "When {a} and {b} were at the {place}, {c} gave a {thing} to",
    "After {a} and {b} came to the {place}, {c} showed a {thing} to",
    "Once upon a time, {a} and {b} played at the {place}. {c} handed a {thing} to",
    "In the morning, {a} and {b} walked to the {place}. {c} passed a {thing} to",
    "While {a} and {b} were playing at the {place}, {c} threw a {thing} to",
    "Yesterday, {a} and {b} met at the {place}. {c} decided to give a {thing} to",
)
PLACES = (  # noqa: SIM905
    "park school house garden beach farm zoo store lake forest river pond"
).split()
THINGS = (  # noqa: SIM905
    "ball book toy flower cookie box hat cake doll kite rock stick present cup"
).split()


def rows(model: Model, split: str, n: int, seed: int) -> list[Made]:
    """`n` rows of a split, half of them with the first name as the answer."""
    counts = token_counts(model, NAMES)
    names = [name for name in NAMES if counts.get(name) == 1]
    if len(names) < LEAST_NAMES:
        raise HcLensError(
            f"expected at least {LEAST_NAMES} names that are one token of the model's vocabulary, "
            f"got {names}; write prompts of your own with hc.Prompts.from_rows"
        )

    def make(drawn: random.Random, case: str) -> Made:
        a, b, *others = drawn.sample(names, 5)
        right, wrong = (a, b) if case == CASES[0] else (b, a)
        template, words = (
            drawn.choice(TEMPLATES),
            {"place": drawn.choice(PLACES), "thing": drawn.choice(THINGS)},
        )
        prompt = template.format(a=a, b=b, c=wrong, **words)
        other = template.format(a=others[0], b=others[1], c=others[2], **words)
        return {
            "prompt": ended(model, prompt, "."),
            "right": right,
            "wrong": wrong,
            "counterfactual": ended(model, other, "."),
            "case": case,
            "side": "",
        }

    return distinct(make, CASES, "ioi", split, n, seed)
