"""The desk-scale study: a small model learns an invented world from scratch, then new facts.

1. A GPT-2-shaped model (4 layers, width 64, 4 heads, one token for each word) is pretrained on an
   invented world. For the first hop the corpus says where 400 people live, which language is spoken
   in the city each is from, and the cities' languages. For the second hop it says who holds an
   office in a city and, by a landmark, in the city that contains it.
2. Token embeddings keep their random values, so that facts are stored in the blocks, during
   pretraining as well as later.
3. New people (or new mayors), never seen before, then go through the experiments and the scores.
4. `study` repeats this for several seeds; `report` and `save` give the means as text and figures.
A model of this size composes only when the people are many: with few it learns each answer by
heart. So the invented relation has 200 people to train on where the paper has 84.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pandas as pd
from scipy import stats
from tokenizers import Tokenizer, models, pre_tokenizers
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerFast

from hc_lens.analyses.extractive.experiments import (
    freezing,
    grafting,
    ordering,
    train,
    train_phases,
)
from hc_lens.analyses.extractive.facts import (
    LIVES_IN,
    MAYOR_BY,
    MAYOR_OF,
    SPEAKS,
    World,
    first_hop,
    invented_relation,
    second_hop,
)
from hc_lens.analyses.extractive.figures import heat_maps, rank_bars
from hc_lens.analyses.extractive.hooked import HookedTransformer, HookedTransformerConfig
from hc_lens.analyses.extractive.prompts import Question
from hc_lens.analyses.extractive.scoring import scores
from hc_lens.analyses.extractive.settings import DeskConfig, Method, ScoreConfig
from hc_lens.models.quiet import quiet
from hc_lens.protocols import LanguageModel
from hc_lens.records import table_bytes

OFFICES = ("bishop", "judge")
"""Offices that are known in every city; mayors are known only in those the tests leave out."""


class Desk:
    """One seed's world: what models are pretrained on, and the new facts."""

    def __init__(self, config: DeskConfig, seed: int):
        self.config, self.seed = config, seed
        n_tested = config.n_cities
        n_cities = n_tested + config.n_known_cities
        n_officials = n_cities * (1 + len(OFFICES))
        n_invented = n_tested + config.n_invented_people
        counts = (config.n_known_people, n_officials, n_tested, n_tested, n_invented)
        whole = World.invented(seed, n_cities, sum(counts))
        names = iter(whole.people)
        # No person of a test occurs in a corpus.
        known, officials, first, second, invented = (
            replace(whole, people=tuple(itertools.islice(names, count))) for count in counts
        )
        self.corpora = {
            "first hop": _first_hop_corpus(known, n_tested),
            "second hop": _second_hop_corpus(officials, n_tested),
        }
        self.sets = {
            "first hop": first_hop(first, n_tested, seed),
            "second hop": second_hop(second, n_tested, seed),
        }
        self.invented = invented_relation(invented, n_invented, n_tested, n_tested, seed)
        """The invented relation, and its counterfactual twin."""

    def model(self, hop: str) -> LanguageModel:
        """A model pretrained on the corpus of a hop; its token embeddings stay random."""
        settings = replace(self.config.pretraining, seed=self.seed)
        trainable = ("pos_embed.", "blocks.", "ln_final.", "unembed.")
        return train(self.untrained(), self.corpora[hop], settings, trainable=trainable)

    def untrained(self) -> LanguageModel:
        """A model with random weights that knows every word of the world."""
        asked = [each.facts + each.implications for each in (*self.sets.values(), *self.invented)]
        questions = itertools.chain(*self.corpora.values(), *asked)
        tokenizer = word_tokenizer(f"{each.prompt} {each.answer}" for each in questions)
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


def word_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A Hugging Face tokenizer whose tokens are the words of the texts, in alphabetical order."""
    pad, unknown = "<pad>", "<unk>"
    words = sorted({word for text in texts for word in text.split()})
    vocabulary = {word: index for index, word in enumerate([pad, unknown, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, unk_token=unknown, eos_token=pad
    )


def _first_hop_corpus(world: World, n_cities: int) -> list[Question]:
    """Homes and languages of people, and the languages of cities three times over."""
    corpus = []
    for index, name in enumerate(world.people):
        home = index % n_cities
        corpus.append(Question(LIVES_IN.format(name), world.cities[home]))
        corpus.append(Question(SPEAKS.format(name), world.languages[home]))
    for city, language in zip(world.cities, world.languages, strict=True):
        corpus += [Question(f"The people in {city} speak", language)] * 3
    return corpus


def _second_hop_corpus(world: World, n_cities: int) -> list[Question]:
    """Officials by city and by landmark, and the cities of landmarks three times over.

    The mayors of the first `n_cities` cities are left out: these are the new facts.
    """
    corpus, names = [], iter(world.people)
    for index, (city, landmark) in enumerate(zip(world.cities, world.landmarks, strict=True)):
        corpus += [Question(f"{landmark} is in", city)] * 3
        for office in OFFICES if index < n_cities else ("mayor", *OFFICES):
            name = next(names)
            by_city, by_landmark = (p.replace("mayor", office) for p in (MAYOR_OF, MAYOR_BY))
            corpus.append(Question(by_city.format(city), name))
            corpus.append(Question(by_landmark.format(landmark), name))
    return corpus


def study(
    seeds: Sequence[int] = (0, 1, 2),
    config: DeskConfig | None = None,
    *,
    progress: bool = True,
) -> dict[str, pd.DataFrame]:
    """Every experiment and score for each seed.

    Returns:
        Tables freezing, ordering, grafting, agreement (of linear with exact scores), components
        (scores by component, both methods) and positions (linear scores by position), each with
        columns seed and, where there are two, set.
    """
    tables: dict[str, list[pd.DataFrame]] = {}
    for seed in tqdm(seeds, desc="seeds", disable=not progress):
        for name, table in _one_seed(Desk(config or DeskConfig(), seed)):
            table.insert(0, "seed", seed)
            tables.setdefault(name, []).append(table)
    return {name: pd.concat(parts, ignore_index=True) for name, parts in tables.items()}


def _one_seed(desk: Desk) -> Iterator[tuple[str, pd.DataFrame]]:
    """The tables of one seed by name, a table for each hop where there are two."""
    config, seed = desk.config, desk.seed
    facts = replace(config.facts, seed=seed)
    scoring = ScoreConfig(seed=seed, n_counterfactuals=config.n_counterfactuals)
    models = {hop: desk.model(hop) for hop in desk.sets}
    for hop, new in desk.sets.items():
        model = models[hop]
        asked = new.implications, new.implication_options
        score = partial(scores, model, train(model, new.facts, facts), *asked, progress=False)
        linear, exact = score(scoring), score(replace(scoring, method="exact"))
        tables = {
            "freezing": freezing(model, new, facts),
            "components": pd.concat([linear, exact], ignore_index=True),
            "agreement": agreement(linear, exact),
            "positions": score(replace(scoring, by="position")),
        }
        for name, table in tables.items():
            table.insert(0, "set", hop)
            yield name, table
    model, settings = models["first hop"], replace(config.invented, seed=seed)
    first, other = (each.split(config.n_cities)[1] for each in desk.invented)
    phases = train_phases(model, first, settings)
    known = {"n_test": config.n_cities, "phases": phases}
    yield "ordering", ordering(model, desk.invented[0], settings, facts, **known)
    yield "grafting", grafting(model, first, other, settings, phases=phases)


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
        found = stats.pearsonr(x, y), stats.spearmanr(x, y), stats.pearsonr(*means.to_numpy().T)
        rows.append((name, len(part), *(correlation for correlation, _ in found)))
    return pd.DataFrame(rows, columns=["score", "n", "pearson", "spearman", "pearson_mean"])


def report(tables: dict[str, pd.DataFrame]) -> str:
    """The study's tables as text, means over seeds."""
    n_seeds = tables["freezing"]["seed"].nunique()
    parts = [f"Extractive structures, desk-scale: mean over {n_seeds} seeds (rank 0 is perfect)."]
    for title, name, keys in (
        ("Out of context and freezing: train on facts, rank implications", "freezing", 2),
        ("Ordering: new people's ranks (invented relation)", "ordering", 1),
        ("Grafting: ranks on counterfactual facts (invented relation)", "grafting", 1),
        ("Agreement of linear with exact scores", "agreement", 2),
    ):
        # The first columns after the seed name the row.
        table = tables[name].drop(columns="seed")
        means: Any = table.groupby(list(table)[:keys], sort=False).mean()
        parts.append(f"\n{title}\n{means.reset_index().round(2).to_string(index=False)}")
    for method in ("exact", "linear"):
        parts.append(
            f"\nMean {method} score by layer (embed, heads summed, MLPs)\n"
            f"{_by_layer(tables['components'], method).round(2).to_string()}"
        )
    return "\n".join(parts)


def _by_layer(components: pd.DataFrame, method: Method) -> pd.DataFrame:
    """Mean score of the embeddings and of each layer's heads and MLP, by set and score."""
    kinds = {"embed": "embed", "head": "heads", "mlp": "MLP"}
    chosen: Any = components[components["method"] == method]
    chosen = chosen[chosen["kind"].isin(kinds)]
    layer = chosen["layer"].map(lambda value: "" if pd.isna(value) else f"L{value} ")
    chosen = chosen.assign(part=layer + chosen["kind"].map(kinds))
    parts = list(dict.fromkeys(chosen["part"]))
    by_question = ["set", "score", "seed", "question", "part"]
    summed = chosen.groupby(by_question, sort=False)["value"].sum()
    return summed.groupby(["set", "score", "part"], sort=False).mean().unstack("part")[parts]


def save(tables: dict[str, pd.DataFrame], out: Path, config: DeskConfig) -> None:
    """Write the heat maps of each set, the bars (PNG) and the tables (CSV) into a folder."""
    positions = tables["positions"]
    # Questions of different seeds are different questions.
    question = positions["seed"].astype(str) + ":" + positions["question"].astype(str)
    for name, part in positions.assign(question=question).groupby("set", sort=False):
        title = f"{name}: linear scores, mean over implications and seeds"
        figure = heat_maps(cast("pd.DataFrame", part), title=title)
        figure.savefig(out / f"{str(name).replace(' ', '-')}-heat-maps.png", dpi=150)
    panels = [
        (f"freezing, {name}", part, "condition", "implication_rank")
        for name, part in tables["freezing"].groupby("set", sort=False)
    ]
    panels += [
        ("ordering", tables["ordering"], "order", "implication_rank"),
        ("grafting", tables["grafting"], "model", "implication_rank"),
    ]
    chance = (config.n_cities - 1) / 2
    rank_bars(panels, chance).savefig(out / "ranks.png", dpi=150)
    for name, table in tables.items():
        (out / f"{name}.csv").write_bytes(table_bytes(table))
