"""A desk-scale study: a small model learns an invented world from scratch, then new facts.

1. A GPT-2-shaped model (4 layers, width 64, 4 heads, a token a word) is pretrained on an invented
   world. For the first hop the corpus says where 400 people live, which language is spoken in the
   city each is from, and the cities' languages. For the second hop it says who holds an office in a
   city and, by a landmark, in the city that contains it.
2. Token embeddings keep their random values, so that facts are stored in the blocks, during
   pretraining as well as later.
3. New people (or new mayors), never seen before, then go through the experiments and the scores.
A model of this size composes only when the people are many: with few it learns each answer by
heart. So the invented relation has 200 people to train on where the paper has 84.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
from scipy import stats
from tqdm.auto import tqdm

from analyses.extractive import experiments
from analyses.extractive.facts import (
    FactSet,
    World,
    first_hop,
    invented_relation,
    lives_in,
    mayor_by_landmark,
    mayor_of,
    second_hop,
    speaks,
)
from analyses.extractive.parts import State
from analyses.extractive.prompts import Question
from analyses.extractive.scoring import scores
from analyses.extractive.training import TrainConfig, fill, train
from analyses.extractive.words import word_tokenizer

OFFICES = ("bishop", "judge")
"""Offices that are known in every city; mayors are known only in those the tests leave out."""
PRETRAINING = TrainConfig(steps=500, lr=3e-3, batch_size=64)
FACTS = TrainConfig(steps=60, lr=1e-3, batch_size=20)
INVENTED = TrainConfig(steps=120, lr=1e-3, batch_size=64)


@dataclass(frozen=True)
class DeskConfig:
    """Sizes and training of the desk-scale study."""

    n_layers: int = 4
    """Layers of the model."""
    d_model: int = 64
    """Width of the model; an MLP is four times as wide."""
    n_heads: int = 4
    """Heads a layer."""
    n_cities: int = 20
    """Cities in the tests, and so the number of options."""
    n_known_cities: int = 40
    """Further cities whose mayors the second-hop corpus tells."""
    n_known_people: int = 400
    """People in the first-hop corpus."""
    n_invented_people: int = 200
    """People to train the invented relation on; as many as cities are left for its test."""
    pretraining: TrainConfig = PRETRAINING
    """Training on the corpus."""
    facts: TrainConfig = FACTS
    """Fine-tuning on new facts."""
    invented: TrainConfig = INVENTED
    """Each phase of the ordering and grafting experiments."""
    n_counterfactuals: int = 10
    """Counterfactual prompts a question, for the upstream score."""


@dataclass(frozen=True)
class Desk:
    """One seed's world, its corpora and the sets of new facts."""

    config: DeskConfig
    """Sizes and training."""
    seed: int
    """Seed of world, weights and order of training."""
    corpora: dict[str, list[Question]]
    """What is pretrained on, for the first and the second hop."""
    sets: dict[str, FactSet]
    """The new facts of the first and the second hop."""
    invented: tuple[FactSet, FactSet]
    """The invented relation, and its counterfactual twin."""

    @classmethod
    def of(cls, config: DeskConfig, seed: int) -> Desk:
        """Make the world of a seed."""
        n_cities = config.n_cities + config.n_known_cities
        n_officials = n_cities * (1 + len(OFFICES))
        groups = {
            "known": config.n_known_people,
            "officials": n_officials,
            "first": config.n_cities,
            "second": config.n_cities,
            "invented": config.n_cities + config.n_invented_people,
        }
        whole = World.invented(seed, n_cities, sum(groups.values()))
        names = iter(whole.people)
        # No person of a test occurs in a corpus.
        worlds = {
            group: replace(whole, people=tuple(itertools.islice(names, count)))
            for group, count in groups.items()
        }
        first = _first_hop_corpus(worlds["known"], config.n_cities)
        second = _second_hop_corpus(worlds["officials"], config.n_cities)
        invented = invented_relation(
            worlds["invented"], groups["invented"], config.n_cities, config.n_cities, seed
        )
        sets = {
            "first hop": first_hop(worlds["first"], config.n_cities, seed),
            "second hop": second_hop(worlds["second"], config.n_cities, seed),
        }
        return cls(config, seed, {"first hop": first, "second hop": second}, sets, invented)

    def model(self, hop: str) -> Any:
        """A model pretrained on the corpus of a hop."""
        model = self.untrained()
        settings = replace(self.config.pretraining, seed=self.seed)
        state = train(model, self.corpora[hop], settings, trainable=lambda n: n != "embed.W_E")
        return with_weights(model, state)

    def untrained(self) -> Any:
        """A model with random weights that knows every word of the world."""
        from transformer_lens import HookedTransformer, HookedTransformerConfig

        from hc_lens.models.quiet import quiet

        tokenizer = word_tokenizer(self._texts())
        config = self.config
        with quiet():
            cfg = HookedTransformerConfig(
                n_layers=config.n_layers,
                d_model=config.d_model,
                n_heads=config.n_heads,
                d_head=config.d_model // config.n_heads,
                d_mlp=4 * config.d_model,
                d_vocab=len(tokenizer),
                n_ctx=16,
                act_fn="gelu",
                normalization_type="LN",
                device="cpu",
                default_prepend_bos=False,
                seed=self.seed,
            )
            model = HookedTransformer(cfg, move_to_device=False)
        model.tokenizer = tokenizer
        model.cfg.tokenizer_prepends_bos = False
        return model.eval()

    def _texts(self) -> Iterable[str]:
        asked = [*self.sets.values(), *self.invented]
        groups = [*self.corpora.values(), *(s.facts + s.implications for s in asked)]
        return (f"{q.prompt} {q.answer}" for group in groups for q in group)


def with_weights(model: Any, state: State) -> Any:
    """A copy of the model with other weights."""
    tokenizer, model.tokenizer = model.tokenizer, None
    try:
        twin = copy.deepcopy(model)
    finally:
        model.tokenizer = tokenizer
    twin.tokenizer = tokenizer
    fill(twin, state)
    return twin


def _first_hop_corpus(world: World, n_cities: int) -> list[Question]:
    """Homes and languages of people, and the languages of cities three times over."""
    corpus = []
    for place, name in enumerate(world.people):
        home = place % n_cities
        corpus.append(lives_in(name, world.cities[home]))
        corpus.append(speaks(name, world.languages[home]))
    for city, language in zip(world.cities, world.languages, strict=True):
        corpus += [Question(f"The people in {city} speak", language)] * 3
    return corpus


def _second_hop_corpus(world: World, n_cities: int) -> list[Question]:
    """Officials by city and by landmark, and the cities of landmarks three times over.

    The mayors of the first `n_cities` cities are left out: these are the new facts.
    """
    corpus, names = [], iter(world.people)
    for place, (city, landmark) in enumerate(zip(world.cities, world.landmarks, strict=True)):
        corpus += [Question(f"{landmark} is in", city)] * 3
        if place >= n_cities:
            mayor = next(names)
            corpus += [mayor_of(city, mayor), mayor_by_landmark(landmark, mayor)]
        for office in OFFICES:
            name = next(names)
            corpus.append(Question(f"The {office} of {city} is", name))
            corpus.append(Question(f"The {office} of the city that contains {landmark} is", name))
    return corpus


def study(
    seeds: Sequence[int] = (0, 1, 2), config: DeskConfig | None = None, *, progress: bool = True
) -> dict[str, pd.DataFrame]:
    """Every experiment and score for each seed.

    Returns:
        Tables freezing, ordering, grafting, agreement (of linear with exact scores), components
        (scores by component, both methods) and positions (linear scores by position), each with
        columns seed and, where there are two, set.
    """
    config = config or DeskConfig()
    tables: dict[str, list[pd.DataFrame]] = {}
    for seed in tqdm(seeds, desc="seeds", disable=not progress):
        for name, table in _one_seed(Desk.of(config, seed)).items():
            table.insert(0, "seed", seed)
            tables.setdefault(name, []).append(table)
    return {name: pd.concat(parts, ignore_index=True) for name, parts in tables.items()}


def _one_seed(desk: Desk) -> dict[str, pd.DataFrame]:
    config, found = desk.config, {}
    facts = replace(config.facts, seed=desk.seed)
    invented = replace(config.invented, seed=desk.seed)
    for hop, new in desk.sets.items():
        model = desk.model(hop)
        parts = {"freezing": experiments.freezing(model, new, facts)}
        after = with_weights(model, train(model, new.facts, facts))
        parts |= _scored(model, after, new, config.n_counterfactuals, desk.seed)
        for name, table in parts.items():
            table.insert(0, "set", hop)
            found.setdefault(name, []).append(table)
        if hop == "first hop":
            known = [each.split(config.n_cities)[1] for each in desk.invented]
            phases = experiments.train_phases(model, known[0], invented)
            found["ordering"] = [
                experiments.ordering(
                    model,
                    desk.invented[0],
                    invented,
                    facts,
                    n_test=config.n_cities,
                    phases=phases,
                )
            ]
            found["grafting"] = [
                experiments.grafting(model, known[0], known[1], invented, phases=phases)
            ]
    return {name: pd.concat(tables, ignore_index=True) for name, tables in found.items()}


def _scored(
    before: Any, after: Any, new: FactSet, n_counterfactuals: int, seed: int
) -> dict[str, pd.DataFrame]:
    """Scores on a set's implications, and how well linear and exact agree."""

    def score(method: str, by: str) -> pd.DataFrame:
        return scores(
            before,
            after,
            new.implications,
            new.implication_options,
            method=method,
            by=by,
            n_counterfactuals=n_counterfactuals,
            seed=seed,
            progress=False,
        )

    linear, exact = score("linear", "component"), score("exact", "component")
    return {
        "components": pd.concat([linear, exact], ignore_index=True),
        "agreement": agreement(linear, exact),
        "positions": score("linear", "position"),
    }


def agreement(linear: pd.DataFrame, exact: pd.DataFrame) -> pd.DataFrame:
    """Correlation of linear with exact scores: columns score, n, pearson, spearman, pearson_mean.

    `pearson` and `spearman` are over all questions and components, `pearson_mean` over components
    after the mean over questions. Components whose exact score is always 0 are left out.
    """
    keys = ["score", "question", "component"]
    both: Any = linear.merge(exact, on=keys, suffixes=("_linear", "_exact"))
    used = both.groupby(["score", "component"])["value_exact"].transform(lambda v: v.abs().max())
    rows = []
    for name, part in both[used > 1e-9].groupby("score", sort=False):
        x, y = part["value_linear"], part["value_exact"]
        means = part.groupby("component")[["value_linear", "value_exact"]].mean()
        rows.append(
            {
                "score": name,
                "n": len(part),
                "pearson": stats.pearsonr(x, y)[0],
                "spearman": stats.spearmanr(x, y)[0],
                "pearson_mean": stats.pearsonr(*means.to_numpy().T)[0],
            }
        )
    return pd.DataFrame(rows)
