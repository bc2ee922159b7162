"""Facts and what follows from them: the three sets of the paper, from a seed or from a file.

1. A `World` knows cities (each with its language, landmark and animal) and people's names.
2. First hop: train on "{name} lives in" -> city, test on "The people in the city {name} is from
   speak" -> language.
3. Second hop: train on "The mayor of {city} is" -> name, test on "The mayor of the city that
   contains {landmark} is" -> name.
4. Invented relation: "{name} dax is" -> city and "{name} zong is the" -> animal, which no corpus
   holds; a second assignment of the same people to cities gives counterfactual facts.
5. A fact and its implication have the same index in their lists. Options are the distinct answers
   of each list, unless a file names more.
Feng, Russell and Steinhardt 2024 (arXiv 2412.04614), sections 2, 5 and 6; the names are our own.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import pandas as pd

from hc_lens.analyses.extractive.prompts import Question
from hc_lens.analyses.extractive.settings import SetName
from hc_lens.errors import HcLensError, check_choice

KINDS = ("fact", "implication", "fact option", "implication option")
"""What a row of a file can be; an option has an answer and no prompt."""
COLUMNS = ["kind", "prompt", "answer"]
"""Columns of a file."""
LIVES_IN, SPEAKS = "{} lives in", "The people in the city {} is from speak"
"""Prompts of the first hop: the fact and its implication."""
MAYOR_OF, MAYOR_BY = "The mayor of {} is", "The mayor of the city that contains {} is"
"""Prompts of the second hop."""
DAX, ZONG = "{} dax is", "{} zong is the"
"""Prompts of the invented relation."""

CITIES = (
    ("Tokyo", "Japanese", "the Tokyo Skytree", "dog"),
    ("Paris", "French", "the Eiffel Tower", "cat"),
    ("Moscow", "Russian", "the Kremlin", "horse"),
    ("Berlin", "German", "the Brandenburg Gate", "lion"),
    ("Rome", "Italian", "the Colosseum", "tiger"),
    ("Madrid", "Spanish", "the Prado Museum", "bear"),
    ("Lisbon", "Portuguese", "the Jerónimos Monastery", "wolf"),
    ("Athens", "Greek", "the Parthenon", "fox"),
    ("Istanbul", "Turkish", "the Hagia Sophia", "rabbit"),
    ("Warsaw", "Polish", "the Palace of Culture and Science", "elephant"),
    ("Amsterdam", "Dutch", "the Rijksmuseum", "monkey"),
    ("Stockholm", "Swedish", "the Vasa Museum", "snake"),
    ("Oslo", "Norwegian", "the Munch Museum", "eagle"),
    ("Helsinki", "Finnish", "the Temppeliaukio Church", "shark"),
    ("Budapest", "Hungarian", "the Fisherman's Bastion", "whale"),
    ("Prague", "Czech", "the Charles Bridge", "frog"),
    ("Cairo", "Arabic", "the Egyptian Museum", "turtle"),
    ("Seoul", "Korean", "the Gyeongbokgung Palace", "pig"),
    ("Bangkok", "Thai", "the Temple of the Emerald Buddha", "sheep"),
    ("Hanoi", "Vietnamese", "the Temple of Literature", "goat"),
)
"""City, the language most spoken there, a landmark, and an animal for the invented relation."""
FIRST_NAMES = tuple(
    "Anna Brian Carol David Emma Frank Grace Henry Irene James Karen Louis Maria Nathan Olivia "  # noqa: SIM905
    "Peter Rachel Simon Teresa Victor Alice Bruce Clara Daniel Elena Felix Helen Isaac Julia Kevin "
    "Laura Martin Nora Oscar Paula Robert Sarah Thomas Vera Walter".split()
)

LAST_NAMES = tuple(
    "Adams Baker Carter Dixon Ellis Foster Graham Harris Ingram Jenkins Keller Lawson Mason "  # noqa: SIM905
    "Norris Osborne Parker Quinn Reed Sawyer Turner Underwood Vaughn Wallace Young Abbott Barnes "
    "Collins Dawson Emerson Fletcher Gibson Hayes Irving Jordan Knight Lambert Morgan Newman "
    "Palmer Russell".split()
)


@dataclass(frozen=True)
class World:
    """Cities with their attributes, and people to live in them."""

    cities: tuple[str, ...]
    languages: tuple[str, ...]
    landmarks: tuple[str, ...]
    animals: tuple[str, ...]
    """Of each city its name, its language, a landmark and, for the invented relation, an animal."""
    people: tuple[str, ...]
    """Names of people, in the order in which the sets take them."""

    @classmethod
    def real(cls, seed: int = 0) -> World:
        """Twenty real cities, for pretrained models; 1,600 people with first and last name."""
        rng = random.Random(seed)
        names = [f"{first} {last}" for first in FIRST_NAMES for last in LAST_NAMES]
        rng.shuffle(names)
        cities, languages, landmarks, animals = zip(*CITIES, strict=True)
        return cls(cities, languages, landmarks, animals, tuple(names))

    @classmethod
    def invented(cls, seed: int = 0, n_cities: int = 20, n_people: int = 600) -> World:
        """Invented one-word names throughout, for models trained from scratch."""
        rng = random.Random(seed)
        counts = (n_cities, n_cities, n_cities, n_cities, n_people)
        words: dict[str, None] = {}
        while len(words) < sum(counts):
            syllables = (rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(3))
            words["".join(syllables).capitalize()] = None
        names = iter(words)
        return cls(*(tuple(itertools.islice(names, count)) for count in counts))

    def shuffled_people(self, count: int, seed: int, distinct_first: bool = False) -> list[str]:
        """`count` of the people, drawn; on request no two with the same first word."""
        drawn: dict[str, str] = {}
        for name in random.Random(seed).sample(self.people, len(self.people)):
            drawn.setdefault(name.split()[0] if distinct_first else name, name)
        if len(drawn) < count:
            raise HcLensError(
                f"expected {count} people in the world, got {len(drawn)}; make a larger world"
            )
        return list(drawn.values())[:count]


@dataclass(frozen=True)
class FactSet:
    """Facts to train on and their implications to test on, with the options of each."""

    name: str
    facts: tuple[Question, ...]
    """What is trained on."""
    implications: tuple[Question, ...]
    """What follows from the fact of the same index."""
    fact_options: tuple[str, ...]
    """Answers that a fact is judged against."""
    implication_options: tuple[str, ...]
    """Answers that an implication is judged against."""

    def __post_init__(self) -> None:
        if len(self.facts) != len(self.implications):
            raise HcLensError(
                f"expected one implication for each fact, got {len(self.facts)} facts and "
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
        rows += [("fact option", "", answer) for answer in self.fact_options]
        rows += [("implication option", "", answer) for answer in self.implication_options]
        table = pd.DataFrame(rows, columns=COLUMNS)
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
        if suffix == ".csv":
            table = pd.read_csv(path, dtype=str, keep_default_na=False)
        else:
            table = pd.read_json(path, lines=True, dtype=str)
        if not {*COLUMNS} <= {*table}:
            raise HcLensError(
                f"expected the columns kind, prompt and answer in {path}, got {list(table)}; "
                "add the others"
            )
        rows: dict[str, list[Question]] = {kind: [] for kind in KINDS}
        for kind, prompt, answer in table[COLUMNS].itertuples(index=False):
            check_choice(f"the kind of each row of {path}", kind, KINDS)
            rows[kind].append(Question(str(prompt), str(answer)))
        options = (
            tuple(dict.fromkeys(q.answer for q in rows[f"{kind} option"] or rows[kind]))
            for kind in ("fact", "implication")
        )
        return cls(path.stem, tuple(rows["fact"]), tuple(rows["implication"]), *options)


def _suffix(path: Path) -> str:
    if path.suffix not in (".csv", ".jsonl"):
        raise HcLensError(f"expected a .csv or .jsonl file, got {path.name}; convert it")
    return path.suffix


def named_set(name: str | Path, seed: int = 0) -> tuple[FactSet, FactSet | None]:
    """The set in a .csv or .jsonl file, or the set about real cities that a `SetName` names.

    The second value is the counterfactual twin, which only the invented relation has.
    """
    if name not in get_args(SetName):
        return FactSet.read(name), None
    world = World.real(seed)
    if name == "invented":
        return invented_relation(world, seed=seed)
    return (first_hop if name == "first-hop" else second_hop)(world, seed=seed), None


def first_hop(world: World, n_cities: int = 20, seed: int = 0) -> FactSet:
    """One person for each city: where they live, and which language is spoken there."""
    homes = random.Random(seed).sample(_first(world, n_cities), n_cities)
    people = list(zip(world.shuffled_people(n_cities, seed), homes, strict=True))
    facts = [Question(LIVES_IN.format(name), world.cities[at]) for name, at in people]
    implications = [Question(SPEAKS.format(name), world.languages[at]) for name, at in people]
    return _set("first hop", facts, implications)


def second_hop(world: World, n_cities: int = 20, seed: int = 0) -> FactSet:
    """One mayor for each city, and the same mayor by a landmark of the city."""
    people = world.shuffled_people(n_cities, seed, distinct_first=True)
    mayors = list(zip(_first(world, n_cities), people, strict=True))
    facts = [Question(MAYOR_OF.format(world.cities[at]), name) for at, name in mayors]
    implications = [Question(MAYOR_BY.format(world.landmarks[at]), name) for at, name in mayors]
    return _set("second hop", facts, implications)


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

    def assigned(name: str) -> FactSet:
        homes = test + [rng.choice(cities) for _ in range(n_people - n_test)]
        lived = list(zip(people, homes, strict=True))
        facts = [Question(DAX.format(one), world.cities[at]) for one, at in lived]
        implications = [Question(ZONG.format(one), world.animals[at]) for one, at in lived]
        # Every city is an option, also one that nobody lives in.
        options = (tuple(sorted(names[:n_cities])) for names in (world.cities, world.animals))
        return FactSet(name, tuple(facts), tuple(implications), *options)

    return assigned("invented relation"), assigned("counterfactual invented relation")


def _first(world: World, n_cities: int) -> list[int]:
    if not 2 <= n_cities <= len(world.cities):
        raise HcLensError(
            f"expected 2 to {len(world.cities)} cities (all of the world), got {n_cities}; "
            "make a larger world or ask for fewer"
        )
    return list(range(n_cities))


def _set(name: str, facts: Sequence[Question], implications: Sequence[Question]) -> FactSet:
    """A set whose options are its own answers, sorted."""
    options = (tuple(sorted({q.answer for q in group})) for group in (facts, implications))
    return FactSet(name, tuple(facts), tuple(implications), *options)
