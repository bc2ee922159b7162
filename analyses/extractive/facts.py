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
6. `named_set` gives one of these sets for real cities by its name, or the set in a file.
Feng, Russell and Steinhardt 2024 (arXiv 2412.04614), sections 2, 5 and 6; the names are our own.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from analyses.extractive.prompts import Question
from analyses.extractive.settings import SETS
from hc_lens.errors import HcLensError

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
    ("Tokyo", "Japanese", "the Tokyo Skytree"),
    ("Paris", "French", "the Eiffel Tower"),
    ("Moscow", "Russian", "the Kremlin"),
    ("Berlin", "German", "the Brandenburg Gate"),
    ("Rome", "Italian", "the Colosseum"),
    ("Madrid", "Spanish", "the Prado Museum"),
    ("Lisbon", "Portuguese", "the Jerónimos Monastery"),
    ("Athens", "Greek", "the Parthenon"),
    ("Istanbul", "Turkish", "the Hagia Sophia"),
    ("Warsaw", "Polish", "the Palace of Culture and Science"),
    ("Amsterdam", "Dutch", "the Rijksmuseum"),
    ("Stockholm", "Swedish", "the Vasa Museum"),
    ("Oslo", "Norwegian", "the Munch Museum"),
    ("Helsinki", "Finnish", "the Temppeliaukio Church"),
    ("Budapest", "Hungarian", "the Fisherman's Bastion"),
    ("Prague", "Czech", "the Charles Bridge"),
    ("Cairo", "Arabic", "the Egyptian Museum"),
    ("Seoul", "Korean", "the Gyeongbokgung Palace"),
    ("Bangkok", "Thai", "the Temple of the Emerald Buddha"),
    ("Hanoi", "Vietnamese", "the Temple of Literature"),
)
"""City, the language most spoken there, a landmark."""

ANIMALS = tuple(
    "dog cat horse lion tiger bear wolf fox rabbit elephant monkey snake eagle shark whale frog "  # noqa: SIM905
    "turtle pig sheep goat".split()
)

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
        counts = (n_cities, n_cities, n_cities, n_cities, n_people)
        return cls(*(tuple(next(words).capitalize() for _ in range(count)) for count in counts))

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
        options = (self.fact_options, self.implication_options)
        offered = ([Question("", option) for option in group] for group in options)
        groups = zip(KINDS, (self.facts, self.implications, *offered), strict=True)
        rows = [(kind, q.prompt, q.answer) for kind, group in groups for q in group]
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
        if missing := [name for name in COLUMNS if name not in table]:
            raise HcLensError(
                f"expected the columns kind, prompt and answer in {path}, got {list(table)}; "
                f"add {missing}"
            )
        if strange := sorted(set(table["kind"]) - set(KINDS)):
            raise HcLensError(
                f"expected a kind among {list(KINDS)} in {path}, got {strange[:3]}; correct them"
            )
        rows: dict[str, list[Question]] = {kind: [] for kind in KINDS}
        for kind, prompt, answer in table[COLUMNS].itertuples(index=False):
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
    """The set in a .csv or .jsonl file, or the set about real cities with one of the names `SETS`.

    The second value is the counterfactual twin, which only the invented relation has.
    """
    if name not in SETS:
        return FactSet.read(name), None
    world = World.real(seed)
    if name == "invented":
        return invented_relation(world, seed=seed)
    return (first_hop if name == "first-hop" else second_hop)(world, seed=seed), None


def _set(
    name: str, prompts: tuple[str, str], pairs: Sequence[Sequence[tuple[str, str]]]
) -> FactSet:
    """A fact and an implication for each pair of (subject, answer), the options sorted."""
    facts, implications = (
        tuple(Question(prompt.format(subject), answer) for subject, answer in column)
        for prompt, column in zip(prompts, zip(*pairs, strict=True), strict=True)
    )
    options = (tuple(sorted({q.answer for q in group})) for group in (facts, implications))
    return FactSet(name, facts, implications, *options)


def first_hop(world: World, n_cities: int = 20, seed: int = 0) -> FactSet:
    """One person for each city: where they live, and which language is spoken there."""
    homes = random.Random(seed).sample(_first(world, n_cities), n_cities)
    people = zip(world.shuffled_people(n_cities, seed), homes, strict=True)
    pairs = [((name, world.cities[at]), (name, world.languages[at])) for name, at in people]
    return _set("first hop", (LIVES_IN, SPEAKS), pairs)


def second_hop(world: World, n_cities: int = 20, seed: int = 0) -> FactSet:
    """One mayor for each city, and the same mayor by a landmark of the city."""
    cities = _first(world, n_cities)
    people = zip(world.shuffled_people(n_cities, seed, distinct_first=True), cities, strict=True)
    pairs = [((world.cities[at], name), (world.landmarks[at], name)) for name, at in people]
    return _set("second hop", (MAYOR_OF, MAYOR_BY), pairs)


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
        lived = zip(people, homes, strict=True)
        pairs = [((one, world.cities[at]), (one, world.animals[at])) for one, at in lived]
        # Every city is an option, also one that nobody lives in.
        return replace(
            _set(name, (DAX, ZONG), pairs),
            fact_options=tuple(sorted(world.cities[:n_cities])),
            implication_options=tuple(sorted(world.animals[:n_cities])),
        )

    return assigned("invented relation"), assigned("counterfactual invented relation")


def _first(world: World, n_cities: int) -> list[int]:
    if not 2 <= n_cities <= len(world.cities):
        raise HcLensError(
            f"expected 2 to {len(world.cities)} cities (all of the world), got {n_cities}; "
            "make a larger world or ask for fewer"
        )
    return list(range(n_cities))
