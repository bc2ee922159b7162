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

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from analyses.extractive import exact, linear
from analyses.extractive.checks import check_pair
from analyses.extractive.parts import Component, components, parameters
from analyses.extractive.prompts import (
    Encoded,
    Question,
    align,
    counterfactuals,
    encode,
    slots,
    token_ids,
)
from analyses.extractive.streams import Record, record
from hc_lens.errors import HcLensError

SCORES = ("informative", "downstream", "upstream")
METHODS = ("linear", "exact")
LEVELS = ("component", "position")


def load_model(model: Any) -> Any:
    """A HookedTransformer as it is, or one loaded from a checkpoint's path or Hub id."""
    if isinstance(model, (str, Path)):
        from hc_lens.models import load

        return load(model)
    return model


def scores(
    before: Any,
    after: Any,
    questions: Sequence[Question],
    options: Sequence[str],
    *,
    method: str = "linear",
    by: str = "component",
    which: Sequence[str] = SCORES,
    n_counterfactuals: int = 10,
    seed: int = 0,
    max_rows: int = 512,
    progress: bool = True,
) -> pd.DataFrame:
    """Scores of every component on every question, one row each.

    Args:
        before: the model W, a HookedTransformer or a checkpoint.
        after: the model W' of the same architecture, after fine-tuning on facts.
        questions: the implications on which the scores are computed.
        options: the answers they are judged against.
        method: "linear" (gradients) or "exact" (interventions).
        by: "component" for the whole component, "position" for each token position alone.
        which: the scores to compute.
        n_counterfactuals: counterfactual prompts per question, for the upstream score. They are
            drawn from the other questions; a small set may have fewer.
        seed: of that draw.
        max_rows: largest number of prompts to run at once.
        progress: show a progress bar.

    Returns:
        Columns score, method, question (its place in `questions`), component, kind, layer, value;
        by position also position, token, slot and label, the last two meaning the same place in
        every prompt of one template. The informative score covers all components, the downstream
        score heads and MLPs, the upstream score heads, MLPs and the embeddings.
    """
    _check_choices(method, by, which)
    before, after = load_model(before), load_model(after)
    check_pair(before, after)
    batches = [
        part for whole in encode(before, questions, options) for part in _parts(whole, max_rows)
    ]
    others = counterfactuals(questions, n_counterfactuals, seed) if "upstream" in which else None
    parts = components(before)
    found: list[pd.DataFrame] = []
    for batch in tqdm(batches, desc=f"{method} scores", disable=not progress, leave=False):
        passes = _counterfactual_passes(before, batch, others)
        with torch.no_grad():
            values = (
                _linear(before, after, parts, batch, which, passes)
                if method == "linear"
                else _exact(before, after, parts, batch, which, passes, by, max_rows)
            )
        found += _tables(values, batch, by)
    table = pd.concat(found, ignore_index=True)
    table.insert(1, "method", method)
    table = _with_components(table, parts)
    return _with_slots(table, before, questions) if by == "position" else table


def _check_choices(method: str, by: str, which: Sequence[str]) -> None:
    for what, given, known in (
        ("method", [method], METHODS),
        ("by", [by], LEVELS),
        ("which", list(which), SCORES),
    ):
        if not given or set(given) - set(known):
            raise HcLensError(f"expected {what} among {list(known)}, got {given}; use one of these")


def _parts(batch: Encoded, max_rows: int) -> list[Encoded]:
    """A batch in pieces of at most `max_rows` prompts."""
    names = [field.name for field in fields(batch)]
    pieces = zip(*(getattr(batch, name).split(max(1, max_rows)) for name in names), strict=True)
    return [Encoded(*piece) for piece in pieces]


def _linear(
    before: Any,
    after: Any,
    parts: list[Component],
    batch: Encoded,
    which: Sequence[str],
    passes: list[Record],
) -> dict[str, linear.PositionScores]:
    old, new = linear.slopes(before, batch), linear.slopes(after, batch)
    values = {}
    if "informative" in which:
        values["informative"] = linear.informative(before, parameters(after), parts, batch, old)
    if "downstream" in which:
        values["downstream"] = linear.downstream(before, old, new.kept)
    if "upstream" in which:
        values["upstream"] = linear.upstream(before, old, new, _average(passes))
    return values


def _exact(
    before: Any,
    after: Any,
    parts: list[Component],
    batch: Encoded,
    which: Sequence[str],
    passes: list[Record],
    by: str,
    max_rows: int,
) -> dict[str, exact.Scores]:
    kept = record(before, batch.tokens)
    runner = exact.Runner(before, batch, kept, by == "position", max_rows)
    values = {}
    if "informative" in which:
        values["informative"] = exact.informative(runner, parameters(after), parts)
    if "downstream" in which:
        values["downstream"] = exact.downstream(runner, record(after, batch.tokens))
    if "upstream" in which:
        values["upstream"] = exact.upstream(runner, after, passes)
    return values


@torch.no_grad()
def _counterfactual_passes(
    model: Any, batch: Encoded, others: list[tuple[Question, ...]] | None
) -> list[Record]:
    """Passes of the model on counterfactuals, aligned with the batch: one record each draw."""
    if others is None:
        return []
    rows, tokens = batch.rows.tolist(), batch.tokens.tolist()
    passes = []
    for draw in range(len(others[0])):
        ids = [token_ids(model, others[row][draw].prompt) for row in rows]
        places = [align(ours, theirs) for ours, theirs in zip(tokens, ids, strict=True)]
        aligned: dict[int, Record] = {}
        for length in {len(each) for each in ids}:
            members = [i for i, each in enumerate(ids) if len(each) == length]
            wanted = torch.tensor([ids[i] for i in members], device=batch.tokens.device)
            kept = record(model, wanted)
            for copy, i in enumerate(members):
                aligned[i] = _at(kept, copy, places[i])
        passes.append(_joined([aligned[i] for i in range(len(ids))]))
    return passes


def _at(kept: Record, row: int, places: list[int]) -> Record:
    """One row of a record, read at the given places; its logits stay."""
    picked = {
        field.name: tuple(value[row : row + 1, places] for value in getattr(kept, field.name))
        for field in fields(kept)
        if field.name != "logits"
    }
    return replace(kept, **picked, logits=kept.logits[row : row + 1])


def _joined(rows: list[Record]) -> Record:
    """Records of single prompts as one record of a batch."""
    columns = {}
    for field in fields(Record):
        values = [getattr(row, field.name) for row in rows]
        columns[field.name] = (
            torch.cat(values)
            if isinstance(values[0], Tensor)
            else tuple(torch.cat(group) for group in zip(*values, strict=True))
        )
    return Record(**columns)


def _average(passes: list[Record]) -> Record:
    """The mean of several records, value by value."""
    columns = {}
    for field in fields(Record):
        values = [getattr(each, field.name) for each in passes]
        columns[field.name] = (
            torch.stack(values).mean(0)
            if isinstance(values[0], Tensor)
            else tuple(torch.stack(group).mean(0) for group in zip(*values, strict=True))
        )
    return Record(**columns)


def _tables(
    values: Mapping[str, Mapping[str, Float[Tensor, "batch copies"]]], batch: Encoded, by: str
) -> list[pd.DataFrame]:
    """One table a score and component: a row a question, or a row a question and position."""
    tables = []
    rows = batch.rows.tolist()
    for score, named in values.items():
        for name, value in named.items():
            columns: dict[str, Any] = {"score": score, "component": name}
            if by == "component":
                columns |= {"question": rows, "value": value.sum(1).tolist()}
            else:
                n_positions = value.shape[1]
                columns |= {
                    "question": [row for row in rows for _ in range(n_positions)],
                    "position": list(range(n_positions)) * len(rows),
                    "value": value.flatten().tolist(),
                }
            tables.append(pd.DataFrame(columns))
    return tables


def _with_components(table: pd.DataFrame, parts: list[Component]) -> pd.DataFrame:
    """The table with kind and layer of each component, in order of score, question, component."""
    order = {part.name: place for place, part in enumerate(parts)}
    table["kind"] = table["component"].map({part.name: part.kind for part in parts})
    layers = {part.name: part.layer for part in parts}
    table["layer"] = table["component"].map(layers).astype("Int64")
    ranks = pd.DataFrame(
        {
            "score": table["score"].map({name: place for place, name in enumerate(SCORES)}),
            "question": table["question"],
            "component": table["component"].map(order),
        }
    )
    order_of_rows = ranks.sort_values(list(ranks), kind="stable").index
    sorted_table: Any = table.loc[order_of_rows].reset_index(drop=True)
    last = ["value"]
    first = ["score", "method", "question", "component", "kind", "layer"]
    return sorted_table[first + [name for name in table if name not in first + last] + last]


def _with_slots(table: pd.DataFrame, model: Any, questions: Sequence[Question]) -> pd.DataFrame:
    """The table with each position's token, and its slot and label common to all prompts."""
    rows = [token_ids(model, question.prompt) for question in questions]
    words = [[model.tokenizer.decode([token]).strip() for token in row] for row in rows]
    aligned = slots(rows, words)
    places = list(zip(table["question"], table["position"], strict=True))
    table = table.drop(columns="value").assign(
        token=[words[row][position] for row, position in places],
        slot=[aligned[row][position][0] for row, position in places],
        label=[aligned[row][position][1] for row, position in places],
        value=table["value"],
    )
    return table
