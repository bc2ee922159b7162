"""Number agreement of subject and verb (Linzen et al. 2016), in the words of a children's story.

1. The subject decides the verb: "One day, the dog near the cats" continues with *was*, not *were*.
2. Between the two stands nothing, a prepositional phrase ("near the cats"), a subject relative
   ("that saw the cats") or an object relative ("that the cats saw"). The noun in it, the attractor,
   has the same number as the subject or the other one.
3. The heuristic "agree with the nearest noun" is right where there is no attractor or one of the
   same number: these cases are friendly. Where the attractor has the other number, it is wrong:
   these are adversarial. A case is construction, attractor and number of the subject, such as
   ``prepositional_other_singular``; without an attractor ``none_singular``.
4. Only nouns are used whose singular and plural have as many tokens in the model's own vocabulary.
   The counterfactual is the same sentence with the subject in the other number.
5. ``agreement`` has the friendly cases alone, ``agreement-ood`` all of them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

from hc_lens.data.generated.drawing import Made, distinct, ended, token_counts
from hc_lens.data.known import ADVERSARIAL, FRIENDLY
from hc_lens.errors import HcLensError
from hc_lens.protocols import Model

SINGULAR, PLURAL = NUMBERS = ("singular", "plural")
SAME, OTHER = ATTRACTORS = ("same", "other")
NONE = "none"
CONSTRUCTIONS = {
    "prepositional": "{preposition} the {attractor}",
    "subject_relative": "that {verb} the {attractor}",
    "object_relative": "that the {attractor} {verb}",
}
"""What stands between subject and verb."""
LEAST_NOUNS = 2
"""Nouns that a row needs."""
_REGULAR = (  # noqa: SIM905
    "dog cat bird boy girl bear duck frog cow pig horse rabbit lion tiger monkey bee ant goat "
    "chicken snake turtle owl friend teacher doctor farmer king queen kid brother sister clown "
    "pirate robot elephant squirrel dinosaur kitten whale shark crab snail spider student nurse "
    "sailor soldier singer driver painter prince neighbor artist player baker visitor"
).split()
_IRREGULAR = {
    "child": "children",
    "man": "men",
    "woman": "women",
    "wolf": "wolves",
    "bunny": "bunnies",
}
NOUNS = {noun: f"{noun}s" for noun in _REGULAR} | _IRREGULAR
"""The plural of each noun."""
PAST = (
    "One day, the",
    "Once upon a time, the",
    "Yesterday, the",
    "Last night, the",
    "In the morning, the",
    "After lunch, the",
    "That day, the",
    "A long time ago, the",
)
PRESENT = (
    "Today, the",
    "Now, the",
    "Look, the",
    "Every day, the",
    "I think that the",
    "You see, the",
    "They say that the",
    "Right now, the",
)
VERBS = (
    (("was", "were"), PAST, "there ."),
    (("is", "are"), PRESENT, "there ."),
    (("has", "have"), PRESENT, "a ball ."),
)
"""Singular and plural, how sentences with them begin, and how they go on for a masked model."""
ADJECTIVES = (  # noqa: SIM905
    "big little small happy sad old young nice funny brave kind hungry tired"
).split()
PREPOSITIONS = ("near", "behind", "beside", "next to", "in front of", "above", "below", "far from")
PAST_VERBS = (  # noqa: SIM905
    "saw liked loved helped followed chased found heard called watched met missed"
).split()
"""What one can do to another, the same in both numbers."""

NONE_CASES = tuple(f"{NONE}_{number}" for number in NUMBERS)
FRIENDLY_CASES = NONE_CASES + tuple(
    f"{construction}_{SAME}_{number}" for construction in CONSTRUCTIONS for number in NUMBERS
)
ADVERSARIAL_CASES = tuple(
    f"{construction}_{OTHER}_{number}" for construction in CONSTRUCTIONS for number in NUMBERS
)


def rows(
    model: Model, split: str, n: int, seed: int, *, cases: Sequence[str] = FRIENDLY_CASES
) -> list[Made]:
    """`n` rows of a split, of each case as many as of the others."""
    counts = token_counts(model, [*NOUNS, *NOUNS.values()])
    nouns = [
        (one, many)
        for one, many in NOUNS.items()
        if one in counts and counts[one] == counts.get(many)
    ]
    if len(nouns) < LEAST_NOUNS:
        raise HcLensError(
            f"expected at least {LEAST_NOUNS} nouns whose plural has as many tokens as the "
            f"singular, got {nouns} in the model's vocabulary; write prompts of your own with "
            "hc.Prompts.from_rows"
        )
    return distinct(partial(_make, model, nouns), cases, "agreement", split, n, seed)


all_rows = partial(rows, cases=FRIENDLY_CASES + ADVERSARIAL_CASES)
"""`rows` of the friendly and of the adversarial cases."""


def _make(model: Model, nouns: Sequence[tuple[str, str]], drawn: random.Random, case: str) -> Made:
    """One row of a case."""
    construction, _, about = case.rpartition("_")[0].rpartition("_")
    number = NUMBERS.index(case.rpartition("_")[2])
    subject, attractor = drawn.sample(nouns, 2)
    verbs, openings, rest = drawn.choice(VERBS)
    words = {
        "preposition": drawn.choice(PREPOSITIONS),
        "verb": drawn.choice(PAST_VERBS),
        "attractor": attractor[number if about == SAME else 1 - number],
    }
    middle = CONSTRUCTIONS.get(construction, "").format(**words)
    adjective = drawn.choice(["", *ADJECTIVES])
    opening = drawn.choice(openings)

    def sentence(noun: str) -> str:
        parts = (opening, adjective, noun, middle)
        return ended(model, " ".join(part for part in parts if part), rest)

    return {
        "prompt": sentence(subject[number]),
        "right": verbs[number],
        "wrong": verbs[1 - number],
        "counterfactual": sentence(subject[1 - number]),
        "case": case,
        "side": ADVERSARIAL if about == OTHER else FRIENDLY,
    }
