"""The words of the organism's language, and which of them never meet in training.

1. Every person, verb, adjective and place is one token; past tense and participle look alike,
   so that a passive has the words of its active sentence.
2. Person number i and verb number j belong to the groups ``i % 4`` and ``j % 4``.
3. In training a person is never an argument of a verb of the same group. Each row of the OOD set
   uses people and verbs of one group only, so that none of its clauses can occur in training.
"""

from __future__ import annotations

N_GROUPS = 4

PEOPLE = (
    *("pilot", "baker", "nurse", "farmer", "singer", "painter", "sailor", "teacher"),
    *("waiter", "miner", "poet", "clerk", "guard", "tailor", "dancer", "driver"),
    *("hunter", "carpenter", "gardener", "plumber", "cook", "librarian", "potter", "weaver"),
    *("fisher", "barber", "mason", "juggler", "drummer", "goalkeeper", "mayor", "umpire"),
)
TRANSITIVE = (
    *("greeted", "phoned", "praised", "followed", "blamed", "teased", "warned", "visited"),
    *("hugged", "pushed", "chased", "hired", "scolded", "paid", "tricked", "noted"),
)
INTRANSITIVE = (
    *("sneezed", "smiled", "whistled", "yawned", "coughed", "jogged"),
    *("hummed", "giggled", "blinked", "frowned", "stumbled", "prayed"),
)
ADJECTIVES = ("tall", "young", "quiet", "brave", "tired", "polite", "clumsy", "proud")
PLACES = ("garden", "station", "kitchen", "market", "harbour", "tunnel", "stable", "tower")
PREPOSITIONS = ("near", "behind", "beside", "with")
FACTIVE = ("knew", "saw", "proved", "recalled")
NON_FACTIVE = ("hoped", "guessed", "dreamed", "feared")
FACTUAL = ("because", "since", "although", "while")
CONDITIONAL = ("if", "unless", "supposing", "provided")
CLOSED = ("the", "in", "that", "was", "by", "and", "or", "never", "nobody", ",", ".")

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
CONTENT = (*PEOPLE, *TRANSITIVE, *INTRANSITIVE, *ADJECTIVES, *PLACES)
WORDS = (
    *SPECIAL,
    *CLOSED,
    *CONTENT,
    *(*PREPOSITIONS, *FACTIVE, *NON_FACTIVE, *FACTUAL, *CONDITIONAL),
)
"""Every token; a token's id is its index here, as BERT's ``[PAD]`` is 0."""

GROUP = {
    word: index % N_GROUPS
    for words in (PEOPLE, TRANSITIVE, INTRANSITIVE)
    for index, word in enumerate(words)
}
"""The group of each person and verb."""
