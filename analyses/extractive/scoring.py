"""Which components store a fact, which query it and which use it, before and after fine-tuning.

1. W is the model before fine-tuning on facts, W' after. The questions are *implications* of the
   facts; the reward R is the answer's logit minus the mean over the options.
2. Informative score: how much R rises when one component gets its new weights (it stores the fact).
3. Downstream score: how much R rises when one component with its old weights gets the inputs it has
   in W' (it uses the fact).
4. Upstream score: how much more the component's output matters, against a counterfactual prompt's,
   once the components after it are fine-tuned (it queries the fact).
5. Each comes exact (the change is made) and linear (gradients); whole or by token position.
Feng, Russell and Steinhardt 2024 (arXiv 2412.04614), sections 3 and 4.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pandas as pd
import torch
from torch.nn.functional import pad
from tqdm.auto import tqdm

from analyses.extractive.component import Component, Site, components, sites
from analyses.extractive.effects import Effect, Exact, Linear, downstream, informative, upstream
from analyses.extractive.models import check_pair, language_model
from analyses.extractive.passes import Parts, record
from analyses.extractive.prompts import (
    Encoded,
    Question,
    align,
    by_length,
    counterfactuals,
    encode,
    slots,
    token_ids,
)
from analyses.extractive.settings import SCORES, Level, Score, ScoreConfig
from hc_lens.protocols import LanguageModel


@torch.no_grad()
def scores(
    before: LanguageModel | str | Path,
    after: LanguageModel | str | Path,
    questions: Sequence[Question],
    options: Sequence[str],
    config: ScoreConfig | None = None,
    *,
    progress: bool = True,
) -> pd.DataFrame:
    """Scores of every component on every question, one row each.

    Args:
        before: the model W, a HookedTransformer or a checkpoint.
        after: the model W' of the same architecture, after fine-tuning on facts.
        questions: the implications on which the scores are computed.
        options: the answers they are judged against.

    Returns:
        Columns score, method, question (its index in `questions`), component, kind, layer, value;
        by position also position, token, slot and label, the last two meaning the same position in
        every prompt of one template. The informative score covers all components, the downstream
        score heads and MLPs, the upstream score heads, MLPs and the embeddings.
    """
    config = config or ScoreConfig()
    before, after = language_model(before), language_model(after)
    check_pair(before, after)
    encoded = encode(before, questions, options)
    batches = [batch for whole in encoded for batch in whole.split(config.max_rows)]
    others: list[tuple[Question, ...]] = []
    if "upstream" in config.which:
        others = counterfactuals(questions, config.n_counterfactuals, config.seed)
    chosen = components(before)
    rows: list[tuple[Score, int, str, int, float]] = []
    for batch in tqdm(batches, desc=f"{config.method} scores", disable=not progress, leave=False):
        way = (Linear if config.method == "linear" else Exact)(before, after, batch, config)
        for score in config.which:
            if score == "informative":
                found = informative(way, chosen)
            elif score == "downstream":
                found = downstream(way)
            else:
                found = upstream(way, _counterfactual_parts(before, batch, others))
            rows += _rows(score, found, batch, config.by)
    table = pd.DataFrame(rows, columns=["score", "question", "component", "position", "value"])
    table = _described(table, chosen, config)
    return _with_slots(table, before, questions) if config.by == "position" else table


def _counterfactual_parts(
    model: LanguageModel, batch: Encoded, others: Sequence[Sequence[Question]]
) -> list[dict[Site, Parts]]:
    """What the model writes on counterfactuals, aligned with the batch: one entry per draw."""
    rows, tokens = batch.rows.tolist(), batch.tokens.tolist()
    found = []
    for draw in range(len(others[0])):
        ids = [token_ids(model, others[row][draw].prompt) for row in rows]
        aligned: dict[int, dict[Site, Parts]] = {}
        for wanted, members in by_length(model, zip(ids, range(len(ids)), strict=True)):
            kept = record(model, wanted)
            for copy, i in enumerate(members.tolist()):
                at = align(tokens[i], ids[i])
                aligned[i] = {site: kept[site].parts[copy, at] for site in sites(model)[:-1]}
        order = [aligned[i] for i in range(len(ids))]
        found.append({site: torch.stack([each[site] for each in order]) for site in order[0]})
    return found


def _rows(
    score: Score, found: Mapping[str, Effect], batch: Encoded, by: Level
) -> Iterator[tuple[Score, int, str, int, float]]:
    """Score, question, component, position and value; position 0 stands for all of them."""
    n_positions = batch.tokens.shape[1]
    for name, effect in found.items():
        # The read-out writes at the last position only.
        by_position = pad(effect, (n_positions - effect.shape[1], 0))
        values = by_position if by == "position" else effect.sum(1, keepdim=True)
        for question, row in zip(batch.rows.tolist(), values.tolist(), strict=True):
            for position, value in enumerate(row):
                yield score, question, name, position, value


def _described(
    table: pd.DataFrame, chosen: Sequence[Component], config: ScoreConfig
) -> pd.DataFrame:
    """The table with what each component is, in order of score, question and component."""
    known = {component.name: component for component in chosen}
    table["method"] = config.method
    table["kind"] = [known[name].kind for name in table["component"]]
    table["layer"] = pd.array([known[name].layer for name in table["component"]], dtype="Int64")
    ranks = {name: rank for rank, name in enumerate((*SCORES, *known))}
    table = table.sort_values(
        ["score", "question", "component"],
        key=lambda column: column if column.name == "question" else column.map(ranks),
        ignore_index=True,
    )
    positions = ["position"] if config.by == "position" else []
    columns = ["score", "method", "question", "component", "kind", "layer", *positions, "value"]
    return table.reindex(columns=columns)


def _with_slots(
    table: pd.DataFrame, model: LanguageModel, questions: Sequence[Question]
) -> pd.DataFrame:
    """The table with each position's token, and its slot and label common to all prompts."""
    rows = [token_ids(model, question.prompt) for question in questions]
    words = [[model.tokenizer.decode([token]).strip() for token in row] for row in rows]
    places = [
        (question, position, word, *slot)
        for question, (row, aligned) in enumerate(zip(words, slots(rows, words), strict=True))
        for position, (word, slot) in enumerate(zip(row, aligned, strict=True))
    ]
    keys = ["question", "position"]
    known = pd.DataFrame(places, columns=[*keys, "token", "slot", "label"])
    value = table.pop("value")
    return table.merge(known, on=keys, how="left").assign(value=value)
