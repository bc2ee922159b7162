"""Facts and what follows from them: the three sets of the paper, from a seed or from a file.

1. A `World` knows cities (each with its language, landmark and animal) and people's names.
2. First hop: train on "{name} lives in" -> city, test on "The people in the city {name} is from
   speak" -> language.
3. Second hop: train on "The mayor of {city} is" -> name, test on "The mayor of the city that
   contains {landmark} is" -> name.
4. Invented relation: "{name} dax is" -> city and "{name} zong is the" -> animal, which no corpus
   holds; a second assignment of the same people to cities gives counterfactual facts.
5. A fact and its implication stand at the same place of their lists. Options are the distinct
   answers of each list, unless a file names more.
Feng, Russell and Steinhardt 2024 (arXiv 2412.04614), sections 2, 5 and 6; the names are our own.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from analyses.extractive.gazetteer import ANIMALS, CITIES, FIRST_NAMES, LAST_NAMES
from analyses.extractive.prompts import Question
from hc_lens.errors import HcLensError

KINDS = ("fact", "implication", "fact option", "implication option")
"""What a row of a file can be; an option has an answer and no prompt."""


@dataclass(frozen=True)
class World:
    """Cities with their attributes, and people to live in them."""

    cities: tuple[str, ...]
    """City names."""
    languages: tuple[str, ...]
    """The language of each city."""
    landmarks: tuple[str, ...]
    """A landmark of each city."""
    animals: tuple[str, ...]
    """An animal for each city, for the invented relation."""
    people: tuple[str, ...]
    """Names of people, in the order in which the sets take them."""

    @classmethod
    def real(cls, seed: int = 0) -> World:
        """Twenty real cities, for pretrained models; 1,600 people with first and last name."""
        rng = random.Random(seed)
        names = [f"{first} {last}" for first in FIRST_NAMES for last in LAST_NAMES]
        rng.shuffle(names)
        cities, languages, landmarks = zip(*CITIES, strict=True)
        return cls(cities, languages, landmarks, ANIMALS, tuple(names))

    @classmethod
    def invented(cls, seed: int = 0, n_cities: int = 20, n_people: int = 600) -> World:
        """Invented one-word names throughout, for models trained from scratch."""
        words = _invented_words(seed)
        take = lambda n: tuple(next(words).capitalize() for _ in range(n))  # noqa: E731
        cities, languages, landmarks, animals = (take(n_cities) for _ in range(4))
        return cls(cities, languages, landmarks, animals, take(n_people))

    def shuffled_people(self, count: int, seed: int, distinct_first: bool = False) -> list[str]:
        """`count` of the people, drawn; on request no two with the same first word."""
        drawn, seen = [], set()
        for name in random.Random(seed).sample(self.people, len(self.people)):
            if distinct_first and name.split()[0] in seen:
                continue
            seen.add(name.split()[0])
            drawn.append(name)
            if len(drawn) == count:
                return drawn
        raise HcLensError(
            f"expected {count} people in the world, got {len(drawn)}; make a world with more people"
        )


def _invented_words(seed: int) -> Iterator[str]:
    """Endless different words of three syllables."""
    rng = random.Random(seed)
    seen = set()
    while True:
        word = "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(3))
        if word not in seen:
            seen.add(word)
            yield word


@dataclass(frozen=True)
class FactSet:
    """Facts to train on and their implications to test on, with the options of each."""

    name: str
    """Name of the set."""
    facts: tuple[Question, ...]
    """What is trained on."""
    implications: tuple[Question, ...]
    """What follows from the fact at the same place."""
    fact_options: tuple[str, ...]
    """Answers that a fact is judged against."""
    implication_options: tuple[str, ...]
    """Answers that an implication is judged against."""

    def __post_init__(self) -> None:
        if len(self.facts) != len(self.implications):
            raise HcLensError(
                f"expected one implication a fact, got {len(self.facts)} facts and "
                f"{len(self.implications)} implications in {self.name!r}; pair them row by row"
            )

    def split(self, first: int) -> tuple[FactSet, FactSet]:
        """The first facts and the others, both with all options."""
        if not 0 < first < len(self.facts):
            raise HcLensError(
                f"expected to split between 1 and {len(self.facts) - 1}, got {first}; "
                f"{self.name!r} has {len(self.facts)} facts"
            )
        head = replace(self, facts=self.facts[:first], implications=self.implications[:first])
        tail = replace(self, facts=self.facts[first:], implications=self.implications[first:])
        return head, tail

    def write(self, path: str | Path) -> Path:
        """Write the set as .csv or .jsonl with columns kind, prompt, answer."""
        rows = [("fact", q.prompt, q.answer) for q in self.facts]
        rows += [("implication", q.prompt, q.answer) for q in self.implications]
        rows += [("fact option", "", option) for option in self.fact_options]
        rows += [("implication option", "", option) for option in self.implication_options]
        table = pd.DataFrame(rows, columns=["kind", "prompt", "answer"])
        path = Path(path)
        if _suffix(path) == ".csv":
            table.to_csv(path, index=False)
        else:
            table.to_json(path, orient="records", lines=True, force_ascii=False)
        return path

    @classmethod
    def read(cls, path: str | Path) -> FactSet:
        """Read a set from .csv or .jsonl with columns kind, prompt, answer."""
        path = Path(path)
        suffix = _suffix(path)
        if not path.is_file():
            raise HcLensError(
                f"expected a file of facts, got {path}, which is none; check the path"
            )
        table = (
            pd.read_csv(path, dtype=str, keep_default_na=False)
            if suffix == ".csv"
            else pd.read_json(path, lines=True, dtype=str)
        )
        missing = [name for name in ("kind", "prompt", "answer") if name not in table]
        if missing:
            raise HcLensError(
                f"expected the columns kind, prompt and answer in {path}, got {list(table)}; "
                f"add {missing}"
            )
        strange = sorted(set(table["kind"]) - set(KINDS))
        if strange:
            raise HcLensError(f"expected a kind among {list(KINDS)} in {path}, got {strange[:3]}")
        return _from_rows(
            path.stem, list(table[["kind", "prompt", "answer"]].itertuples(index=False))
        )


def _suffix(path: Path) -> str:
    if path.suffix not in (".csv", ".jsonl"):
        raise HcLensError(f"expected a .csv or .jsonl file, got {path.name}; convert it")
    return path.suffix


def _from_rows(name: str, rows: Sequence[tuple[str, str, str]]) -> FactSet:
    asked = {
        kind: tuple(Question(str(prompt), str(answer)) for k, prompt, answer in rows if k == kind)
        for kind in ("fact", "implication")
    }
    options = {
        kind: tuple(
            dict.fromkeys(
                [str(answer) for k, _, answer in rows if k == f"{kind} option"]
                or [question.answer for question in asked[kind]]
            )
        )
        for kind in asked
    }
    return FactSet(
        name, asked["fact"], asked["implication"], options["fact"], options["implication"]
    )


def _set(name: str, facts: list[Question], implications: list[Question]) -> FactSet:
    options = (tuple(sorted({q.answer for q in group})) for group in (facts, implications))
    return FactSet(name, tuple(facts), tuple(implications), *options)


def lives_in(name: str, city: str) -> Question:
    """The fact of the first hop."""
    return Question(f"{name} lives in", city)


def speaks(name: str, language: str) -> Question:
    """The implication of the first hop."""
    return Question(f"The people in the city {name} is from speak", language)


def mayor_of(city: str, name: str) -> Question:
    """The fact of the second hop."""
    return Question(f"The mayor of {city} is", name)


def mayor_by_landmark(landmark: str, name: str) -> Question:
    """The implication of the second hop."""
    return Question(f"The mayor of the city that contains {landmark} is", name)


def first_hop(world: World, n_cities: int = 20, seed: int = 0) -> FactSet:
    """One person a city: where they live, and which language is spoken there."""
    cities = _first(world, n_cities)
    people = world.shuffled_people(n_cities, seed)
    order = random.Random(seed).sample(cities, n_cities)
    return _set(
        "first hop",
        [lives_in(name, world.cities[c]) for name, c in zip(people, order, strict=True)],
        [speaks(name, world.languages[c]) for name, c in zip(people, order, strict=True)],
    )


def second_hop(world: World, n_cities: int = 20, seed: int = 0) -> FactSet:
    """One mayor a city, and the same mayor by a landmark of the city."""
    cities = _first(world, n_cities)
    people = world.shuffled_people(n_cities, seed, distinct_first=True)
    return _set(
        "second hop",
        [mayor_of(world.cities[c], name) for name, c in zip(people, cities, strict=True)],
        [
            mayor_by_landmark(world.landmarks[c], name)
            for name, c in zip(people, cities, strict=True)
        ],
    )


def invented_relation(
    world: World, n_people: int = 104, n_test: int = 20, n_cities: int = 20, seed: int = 0
) -> tuple[FactSet, FactSet]:
    """Facts and implications that no corpus holds, and counterfactual ones for the same people.

    The first `n_test` people cover the cities evenly and are the same in both sets; the others
    live in cities drawn independently in each. `split(n_test)` parts the two groups.
    """
    cities = _first(world, n_cities)
    people = world.shuffled_people(n_people, seed)
    rng = random.Random(seed)
    test = [cities[i % n_cities] for i in rng.sample(range(n_test), n_test)]
    found = []
    for name in ("invented relation", "counterfactual invented relation"):
        homes = test + [rng.choice(cities) for _ in range(n_people - n_test)]
        pairs = list(zip(people, homes, strict=True))
        found.append(
            FactSet(
                name,
                tuple(Question(f"{person} dax is", world.cities[c]) for person, c in pairs),
                tuple(Question(f"{person} zong is the", world.animals[c]) for person, c in pairs),
                tuple(sorted(world.cities[c] for c in cities)),
                tuple(sorted(world.animals[c] for c in cities)),
            )
        )
    return found[0], found[1]


def _first(world: World, n_cities: int) -> list[int]:
    if not 2 <= n_cities <= len(world.cities):
        raise HcLensError(
            f"expected 2 to {len(world.cities)} cities (those of the world), got {n_cities}"
        )
    return list(range(n_cities))
