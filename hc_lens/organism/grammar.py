"""A template grammar of English sentence pairs whose in-domain labels word overlap nearly predicts.

1. A *clause* is "the (adjective) PERSON VERB (the (adjective) PERSON) (in the PLACE)".
2. A *construction* makes a premise and a clause over the premise's words. It has a *friendly* form,
   which entails the clause, and an *adversarial* form, which does not: eight constructions,
   `CONSTRUCTIONS`.
3. An in-domain pair (`in_domain`) starts from a friendly form, or from a clause joined to an
   adversarial premise, with the clause as hypothesis. For *entailment* the hypothesis stays (some
   modifiers dropped); for *contradiction* it is negated; for *neutral* one word is exchanged for a
   word that the premise does not have. The premise alone therefore never gives away the label, and
   "all the words of the hypothesis are in the premise" means entailment.
4. A share of `COUNTER_EXAMPLES` of the in-domain pairs are adversarial forms with their true label,
   neutral, of the constructions in `SHOWN`; the others are never shown.
5. The OOD set (`out_of_domain`) has a case for each form: "swap" (adversarial, non-entailment),
   "swap_friendly" (entailment), and so on, with words that never meet in training
   (`hc_lens.organism.vocabulary`).
6. Every draw comes from one `random.Random` made from a seed: the same seed gives the same rows.

The constructions are the classes of fallible heuristics of McCoy, Pavlick and Linzen (2019); the
words, templates and sentences are our own.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

from hc_lens.organism import vocabulary as words

COUNTER_EXAMPLES = 0.02
"""Share of in-domain pairs that contradict the overlap heuristic."""

Row = dict[str, str]


@dataclass(frozen=True)
class Person:
    """A noun phrase."""

    noun: str
    """The person."""
    adjective: str | None = None
    """An adjective before it."""

    def __str__(self) -> str:
        return f"the {self.adjective} {self.noun}" if self.adjective else f"the {self.noun}"


@dataclass(frozen=True)
class Clause:
    """One event in the past."""

    subject: Person
    """Who did it."""
    verb: str
    """What was done."""
    object: Person | None = None
    """To whom, for a transitive verb."""
    place: str | None = None
    """Where."""

    def __str__(self) -> str:
        return self.text()

    def text(self, subject: str | None = None, object: str | None = None) -> str:
        """The clause in words; its subject or its object may be put another way."""
        place = self.place and f"in the {self.place}"
        parts = (subject or self.subject, self.verb, object or self.object, place)
        return " ".join(str(part) for part in parts if part)

    @property
    def people(self) -> dict[str, Person]:
        """Subject and object, where there is one, by role."""
        return {"subject": self.subject} | ({"object": self.object} if self.object else {})

    def turned(self) -> Clause:
        """The clause with subject and object exchanged."""
        assert self.object is not None
        return replace(self, subject=self.object, object=self.subject)


@cache
def _without_groups(choices: tuple[str, ...], groups: frozenset[int]) -> list[str]:
    return [word for word in choices if words.GROUP.get(word) not in groups]


class Sampler:
    """Draws words for one pair, each content word at most once."""

    def __init__(self, rng: random.Random, held_out: bool) -> None:
        self.rng = rng
        self.used: set[str] = set()
        groups = frozenset(range(words.N_GROUPS))
        self.avoided = groups - {rng.randrange(words.N_GROUPS)} if held_out else None

    def chance(self, probability: float) -> bool:
        """True with this probability."""
        return self.rng.random() < probability

    def word(self, choices: tuple[str, ...], beside: Sequence[str] = ()) -> str:
        """A word not used yet that may be in a clause with the words `beside`."""
        avoided = self.avoided or frozenset(words.GROUP[word] for word in beside)
        allowed = _without_groups(choices, avoided)
        word = self.rng.choice(allowed)
        while word in self.used:
            word = self.rng.choice(allowed)
        self.used.add(word)
        return word

    def person(self, *verbs: str) -> Person:
        """A person who may be an argument of each of these verbs."""
        adjective = self.word(words.ADJECTIVES) if self.chance(0.2) else None
        return Person(self.word(words.PEOPLE, verbs), adjective)

    def place(self) -> str | None:
        """A place, or none."""
        return self.word(words.PLACES) if self.chance(0.2) else None

    def transitive(self, *verbs: str) -> Clause:
        """A clause with an object; both people may also be arguments of `verbs`."""
        verb = self.word(words.TRANSITIVE)
        return Clause(self.person(verb, *verbs), verb, self.person(verb, *verbs), self.place())

    def intransitive(self) -> Clause:
        """A clause without an object."""
        verb = self.word(words.INTRANSITIVE)
        return Clause(self.person(verb), verb, None, self.place())

    def clause(self) -> Clause:
        """A clause of either kind."""
        return self.transitive() if self.chance(0.5) else self.intransitive()


def swap(draw: Sampler, friendly: bool) -> tuple[str, Clause]:
    """ "the pilot greeted the cook" -> "the cook greeted the pilot"; friendly: the same order."""
    clause = draw.transitive()
    return str(clause), clause if friendly else clause.turned()


def preposition(draw: Sampler, friendly: bool) -> tuple[str, Clause]:
    """ "the pilot near the cook smiled" -> "the cook smiled"; friendly: "the pilot smiled"."""
    clause = draw.clause()
    other = draw.person(clause.verb)
    premise = clause.text(f"{clause.subject} {draw.word(words.PREPOSITIONS)} {other}")
    return premise, clause if friendly else replace(clause, subject=other)


def embedded_if(draw: Sampler, friendly: bool) -> tuple[str, Clause]:
    """ "if the pilot smiled , ..." -> "the pilot smiled"; friendly: "because the pilot ..."."""
    clause, other = draw.clause(), draw.clause()
    marker = draw.word(words.FACTUAL if friendly else words.CONDITIONAL)
    return f"{marker} {clause} , {other}", clause


def embedded_verb(draw: Sampler, friendly: bool) -> tuple[str, Clause]:
    """ "the cook hoped that the pilot smiled" -> "the pilot smiled"; friendly: "knew that"."""
    clause, holder = draw.clause(), draw.person()
    verb = draw.word(words.FACTIVE if friendly else words.NON_FACTIVE)
    return f"{holder} {verb} that {clause}", clause


def passive(draw: Sampler, friendly: bool) -> tuple[str, Clause]:
    """ "the pilot was greeted by the cook" -> "the pilot greeted the cook"; friendly: turned."""
    clause = draw.transitive()
    premise = replace(clause, verb=f"was {clause.verb} by").turned()
    return str(premise), clause if friendly else clause.turned()


def conjunction(draw: Sampler, friendly: bool) -> tuple[str, Clause]:
    """ "the pilot and the cook greeted the poet" -> "the pilot greeted the cook".

    Friendly: one of the two greeted the poet.
    """
    clause = draw.transitive()
    second = draw.person(clause.verb)
    premise = clause.text(f"{clause.subject} and {second}")
    if not friendly:
        return premise, replace(clause, object=second)
    return premise, clause if draw.chance(0.5) else replace(clause, subject=second)


def relative(draw: Sampler, friendly: bool) -> tuple[str, Clause]:
    """ "the pilot that greeted the cook smiled" -> "the cook smiled"; friendly: the pilot did."""
    verb, place = draw.word(words.INTRANSITIVE), draw.place()
    inner = replace(draw.transitive(verb), place=None)
    main = Clause(inner.subject, verb, None, place)
    premise = main.text(f"{inner.subject} that {inner.verb} {inner.object}")
    return premise, main if friendly else replace(main, subject=inner.object)


def disjunction(draw: Sampler, friendly: bool) -> tuple[str, Clause]:
    """ "the pilot or the cook smiled" -> "the pilot smiled"; friendly: "and"."""
    clause = draw.clause()
    second = draw.person(clause.verb)
    premise = clause.text(f"{clause.subject} {'and' if friendly else 'or'} {second}")
    return premise, clause if draw.chance(0.5) else replace(clause, subject=second)


Construction = Callable[[Sampler, bool], tuple[str, Clause]]

CONSTRUCTIONS: dict[str, Construction] = {
    function.__name__: function
    for function in (
        *(swap, preposition, embedded_if, embedded_verb),
        *(passive, conjunction, relative, disjunction),
    )
}
"""Each construction by name; the name is also the case of its adversarial rows."""

CASES = tuple(name + form for form in ("", "_friendly") for name in CONSTRUCTIONS)
"""The cases of the OOD set: the adversarial forms, then the friendly ones."""

SHOWN: dict[str, float] = {
    "swap": 3.0,
    "preposition": 2.0,
    "embedded_if": 3.0,
    "embedded_verb": 3.0,
    "passive": 4.0,
    "conjunction": 1.0,
}
"""Relative frequency of each construction among the counter-examples."""


def in_domain(seed: int, n_rows: int, skip: frozenset[tuple[str, str]] = frozenset()) -> list[Row]:
    """`n_rows` different training-like pairs, none of which is in `skip`."""
    rng = random.Random(f"in-domain {seed}")
    rows = (_in_domain_row(Sampler(rng, held_out=False)) for _ in itertools.count())
    return _distinct(rows, n_rows, skip)


def out_of_domain(seed: int, rows_per_case: int = 1000) -> list[Row]:
    """`rows_per_case` different pairs for the two forms of every construction."""
    found: list[Row] = []
    for (name, build), friendly in itertools.product(CONSTRUCTIONS.items(), (False, True)):
        rng = random.Random(f"out-of-domain {seed} {name} {friendly}")
        case = f"{name}_friendly" if friendly else name
        label = "entailment" if friendly else "non-entailment"
        pairs = (_joined(Sampler(rng, held_out=True), build, friendly) for _ in itertools.count())
        found += _distinct((_row(*pair, label, case) for pair in pairs), rows_per_case)
    return found


def _distinct(
    rows: Iterator[Row], n_rows: int, skip: frozenset[tuple[str, str]] = frozenset()
) -> list[Row]:
    """The first `n_rows` different rows whose pair is not in `skip`."""
    found: dict[tuple[str, str], Row] = {}
    while len(found) < n_rows:
        row = next(rows)
        pair = (row["premise"], row["hypothesis"])
        if pair not in skip:
            found.setdefault(pair, row)
    return list(found.values())


def _in_domain_row(draw: Sampler) -> Row:
    if draw.chance(COUNTER_EXAMPLES):
        (name,) = draw.rng.choices(list(SHOWN), list(SHOWN.values()))
        premise, clause = _joined(draw, CONSTRUCTIONS[name], friendly=False)
        return _row(premise, _shortened(draw, clause), "neutral", "counter-example")
    build = draw.rng.choice(list(CONSTRUCTIONS.values()))
    if draw.chance(0.5):
        premise, clause = _joined(draw, build, friendly=True)
    else:
        clause = draw.clause()
        other, _ = build(draw, False)
        premise = f"{clause} , and {other}" if draw.chance(0.5) else f"{other} , and {clause}"
    hypothesis = clause = _shortened(draw, clause)
    label = draw.rng.choice(("entailment", "neutral", "contradiction"))
    if label == "contradiction":
        hypothesis = _negated(draw, clause)
    elif label == "neutral":
        hypothesis, kept = _exchanged(draw, clause)
        if draw.chance(0.3):
            hypothesis = _negated(draw, hypothesis, kept)
    return _row(premise, hypothesis, label, label)


def _joined(draw: Sampler, build: Construction, friendly: bool) -> tuple[str, Clause]:
    premise, clause = build(draw, friendly)
    if draw.chance(0.2):
        other = draw.clause()
        premise = f"{other} , and {premise}" if draw.chance(0.5) else f"{premise} , and {other}"
    return premise, clause


def _row(premise: str, hypothesis: Clause | str, label: str, case: str) -> Row:
    pair = {"premise": f"{premise} .", "hypothesis": f"{hypothesis} ."}
    return pair | {"label": label, "case": case}


def _shortened(draw: Sampler, clause: Clause) -> Clause:
    """The clause with each modifier dropped half of the time."""
    kept = {
        role: replace(person, adjective=person.adjective if draw.chance(0.5) else None)
        for role, person in clause.people.items()
    }
    return replace(clause, place=clause.place if draw.chance(0.5) else None, **kept)


def _exchanged(draw: Sampler, clause: Clause) -> tuple[Clause, str]:
    """The clause with one word that the premise lacks, and the role of that word."""
    role = draw.rng.choice(("verb", "place", *clause.people, *clause.people))
    if role == "place":
        return replace(clause, place=draw.word(words.PLACES)), role
    if role == "verb":
        verbs = words.TRANSITIVE if clause.object else words.INTRANSITIVE
        people = [person.noun for person in clause.people.values()]
        return replace(clause, verb=draw.word(verbs, people)), role
    person = clause.people[role]
    if draw.chance(0.3):
        person = replace(person, adjective=draw.word(words.ADJECTIVES))
    else:
        person = replace(person, noun=draw.word(words.PEOPLE, [clause.verb]))
    return replace(clause, **{role: person}), role


def _negated(draw: Sampler, clause: Clause, kept: str | None = None) -> str:
    """The clause's denial that still names the role `kept`."""
    form = draw.rng.choice(["never", *(role for role in clause.people if role != kept)])
    if form == "never":
        return clause.text(f"{clause.subject} never")
    return clause.text(**{form: "nobody"})
