"""Which components store a fact, which query it and which use it, before and after fine-tuning.

1. W is the model before fine-tuning on facts, W' after. The questions are *implications* of the
   facts; the reward R is the answer's logit minus the mean over the options.
2. Informative: R[W_C <- W'_C] - R. A component gets its new weights and keeps its input: it stores
   the fact. Linear scores sum to <dW, grad R> over all components and positions.
3. Downstream: R[y_C <- f_C(z'_C, W_C)] - R. A component with its old weights, those of the norm in
   front of it as well, reads the residual stream of W': it uses the fact.
4. Upstream: (R_late - R_late[y_C <- y*_C]) - (R - R[y_C <- y*_C]), y* the output on a
   counterfactual prompt, mean over the counterfactuals. Late are the heads, MLPs and norms of the
   blocks after C, then those of W'; the read-out stays that of W. The component queries the fact.
   The linear score of a head may take its gradients at z, so that W' writes with its own W_O.
5. Each comes exact (the change is made) and linear (gradients), whole or by token position; these
   two ways are in `hc_lens.analyses.extractive.passes`.
Feng, Russell and Steinhardt 2024 (arXiv 2412.04614), sections 3 and 4, with R for minus the loss.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import pandas as pd
import torch
from torch.nn.functional import pad
from tqdm.auto import tqdm

from hc_lens.analyses.extractive.models import (
    Checkpoint,
    Component,
    Site,
    check_pair,
    components,
    language_model,
    sites,
    writers,
)
from hc_lens.analyses.extractive.passes import (
    Effect,
    Exact,
    Linear,
    Parts,
    Stream,
    Way,
    Written,
    block_of,
    record,
    write,
)
from hc_lens.analyses.extractive.prompts import (
    Encoded,
    Question,
    align,
    by_length,
    common_ends,
    counterfactuals,
    encode,
    token_ids,
)
from hc_lens.analyses.extractive.settings import SCORES, Level, Score, ScoreConfig
from hc_lens.protocols import LanguageModel

Changes = Mapping[Site, Parts]
"""How much else each writer of each site writes."""


@torch.no_grad()
def scores(
    before: Checkpoint,
    after: Checkpoint,
    questions: Sequence[Question],
    options: Sequence[str],
    config: ScoreConfig | None = None,
    *,
    progress: bool = True,
) -> pd.DataFrame:
    """Scores of every component on every question, one row each.

    Args:
        before: the model W.
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
    values: dict[tuple[Score, int, str], list[float]] = {}
    for batch in tqdm(batches, desc=f"{config.method} scores", disable=not progress, leave=False):
        linear = config.method == "linear"
        way = Linear(before, after, batch) if linear else Exact(before, after, batch, config)
        for score in config.which:
            if score == "informative":
                effects = informative(way, chosen)
            elif score == "downstream":
                effects = downstream(way)
            else:
                effects = upstream(way, *_changes(way, batch, others, config.gradient_at_z))
            for name, effect in effects.items():
                found = _values(effect, batch, config.by)
                for question, row in zip(batch.rows.tolist(), found, strict=True):
                    values[score, question, name] = row
    rows = []
    for score, question, each in itertools.product(SCORES, range(len(questions)), chosen):
        named = (score, config.method, question, each.name, each.kind, each.layer)
        row = values.get((score, question, each.name), ())
        rows += [(*named, position, value) for position, value in enumerate(row)]
    columns = ["score", "method", "question", "component", "kind", "layer", "position", "value"]
    table = pd.DataFrame(rows, columns=columns).astype({"layer": "Int64"})
    if config.by == "component":
        return table.drop(columns="position")
    tokens, value = _tokens(before, questions), table.pop("value")
    return table.merge(tokens, on=["question", "position"], how="left").assign(value=value)


def _values(effect: Effect, batch: Encoded, by: Level) -> list[list[float]]:
    """For each prompt one value for the whole component, or one for each position."""
    if by == "component":
        return effect.sum(1, keepdim=True).tolist()
    # The read-out writes at the last position only.
    return pad(effect, (batch.tokens.shape[1] - effect.shape[1], 0)).tolist()


def _changes(
    way: Way, batch: Encoded, others: Sequence[Sequence[Question]], at_z: bool
) -> tuple[Sequence[Changes], Sequence[Changes]]:
    """What W would write differently on counterfactual prompts, and what W' would.

    The second are the same changes, or with `at_z` the changes of z under the W_O of W'.
    """
    found = _counterfactual_parts(way.before, batch, others)
    own = {site: way.kept[site].parts for site in found[0]}
    before = [{site: each[site] - own[site] for site in own} for each in found]
    if not at_z:
        return before, before
    found = _counterfactual_parts(way.before, batch, others, way.after)
    own = {site: _parts(way.kept[site], site, way.after) for site in own}
    return before, [{site: each[site] - own[site] for site in own} for each in found]


def _parts(written: Written, site: Site, writer: LanguageModel | None) -> Parts:
    """What each of a site's writers wrote; if a `writer` is given, heads write with its W_O."""
    if writer is None or written.z is None:
        return written.parts
    return block_of(writer, site.layer).written_by_heads(written.z)


def _counterfactual_parts(
    model: LanguageModel,
    batch: Encoded,
    others: Sequence[Sequence[Question]],
    writer: LanguageModel | None = None,
) -> list[dict[Site, Parts]]:
    """What the model writes on counterfactuals, aligned with the batch: one entry per draw."""
    rows, tokens = batch.rows.tolist(), batch.tokens.tolist()
    found = []
    for draw in range(len(others[0])):
        ids = [token_ids(model, others[row][draw].prompt) for row in rows]
        aligned: dict[int, dict[Site, Parts]] = {}
        for wanted, members in by_length(model, zip(ids, range(len(ids)), strict=True)):
            kept = record(model, wanted)
            parts = {site: _parts(kept[site], site, writer) for site in sites(model)[:-1]}
            for copy, i in enumerate(members.tolist()):
                at = align(tokens[i], ids[i])
                aligned[i] = {site: each[copy, at] for site, each in parts.items()}
        order = [aligned[i] for i in range(len(ids))]
        found.append({site: torch.stack([each[site] for each in order]) for site in order[0]})
    return found


def _tokens(model: LanguageModel, questions: Sequence[Question]) -> pd.DataFrame:
    """Every token of every prompt, with a slot and a label that mean the same in all prompts.

    The common beginning is aligned on the left, all else on the right. Tokens of the common
    beginning and end keep their text; those of the stretch that differs count from its right end:
    ``<-2>``, ``<-1>``.
    """
    prompts = [token_ids(model, question.prompt) for question in questions]
    prefix, suffix = common_ends(prompts)
    longest = max(map(len, prompts))
    rows = []
    for question, ids in enumerate(prompts):
        for position, token in enumerate(ids):
            text = model.tokenizer.decode([token]).strip()
            slot = position if position < prefix else position + longest - len(ids)
            from_end = position - (len(ids) - suffix)
            label = f"<{from_end}>" if position >= prefix and from_end < 0 else text
            rows.append((question, position, text, slot, label))
    return pd.DataFrame(rows, columns=["question", "position", "token", "slot", "label"])


def informative(way: Way, chosen: Sequence[Component]) -> dict[str, Effect]:
    """The effect of each component's new weights, by the component's name."""
    changes: dict[Site, dict[str, Stream]] = {}
    for component in chosen:
        changes.setdefault(component.site, {})[component.name] = way.moved(component)
    values: dict[str, Effect] = {}
    for site, named in changes.items():
        values.update(zip(named, way.rises(site, list(named.values()), "added"), strict=True))
    return values


def downstream(way: Way) -> dict[str, Effect]:
    """The effect of the new inputs on every head and MLP with its old weights, by name."""
    values: dict[str, Effect] = {}
    for site in sites(way.before)[1:-1]:
        moved = write(way.before, site, way.tuned[site].reads).parts - way.kept[site].parts
        effects = way.rises(site, moved.unbind(2), "output")
        values.update(zip(writers(way.before, site), effects, strict=True))
    return values


def upstream(
    way: Way, changes: Sequence[Changes], late: Sequence[Changes] | None = None
) -> dict[str, Effect]:
    """How much more counterfactual outputs matter to the fine-tuned model, by component name.

    The score is the mean over the counterfactual prompts.

    Args:
        changes: for each counterfactual, how much else the embeddings, heads and MLPs of W write.
        late: the same where the components after them are those of W'; the same by default.
    """
    values: dict[str, Effect] = {}
    for site in sites(way.before)[:-1]:
        for index, name in enumerate(writers(way.before, site)):
            old = way.rises(site, [each[site][:, :, index] for each in changes], "output")
            new = way.rises(site, [each[site][:, :, index] for each in late or changes], "late")
            values[name] = (torch.stack(old) - torch.stack(new)).mean(0)
    return values
