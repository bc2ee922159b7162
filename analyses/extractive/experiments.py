"""The paper's experiments: fine-tune a language model on facts, rank the answers of questions.

1. `train` minimises the cross-entropy of the answers' tokens with Adam: a short linear warm-up,
   then linear decay to 0, gradients clipped at norm 1. A batch holds questions of one length, so
   nothing is padded. By default only the blocks are trained, as in the paper.
2. `mean_rank` is a mean over questions; with 20 options 0 is perfect and 9.5 is chance.
3. Out-of-context reasoning: train on the facts, rank the answers of their implications.
4. Freezing: train only the early or only the late half of the blocks; or train all of them and put
   the early or the late half back.
5. Ordering: train on facts and implications of some people jointly, facts first, or implications
   first; then on the facts of new people only; rank the new people's implications.
6. Grafting: W_F' + (W_{F, Impl F} - W_F) carries the step from facts F to their implications over
   to counterfactual facts F'; the control W_F' + (W_{Impl F} - W) lacks the facts.
Feng, Russell and Steinhardt 2024 (arXiv 2412.04614), sections 2, 4.3, 5 and 6.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.functional import cross_entropy

from hc_lens.analyses.extractive.facts import FactSet
from hc_lens.analyses.extractive.models import (
    Checkpoint,
    graft,
    language_model,
    parameters,
    with_weights,
)
from hc_lens.analyses.extractive.prompts import Question, by_length, continuation, encode
from hc_lens.analyses.extractive.settings import TrainConfig
from hc_lens.errors import HcLensError
from hc_lens.protocols import LanguageModel

_IGNORE = -100
Group = tuple[Int[Tensor, "_ _"], ...]
"""Token ids and targets of questions of one length."""


@torch.enable_grad()
def train(
    model: LanguageModel,
    questions: Sequence[Question],
    config: TrainConfig,
    *,
    trainable: tuple[str, ...] = ("blocks.",),
) -> LanguageModel:
    """A copy of the model, trained on the questions; the model itself stays as it was.

    Parameters whose name begins with one of `trainable` are trained.
    """
    if not questions:
        raise HcLensError("expected at least one question to train on, got none; check the set")
    rows = []
    for question in questions:
        prompt, answer = continuation(model, question.prompt, question.answer)
        rows.append((prompt + answer[:-1], [_IGNORE] * (len(prompt) - 1) + answer))
    model = with_weights(model, parameters(model))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(trainable))
    chosen = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(chosen, lr=config.lr, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(1.0, (step + 1) / max(1, config.warmup)) * (1 - step / config.steps),
    )
    batches = _batches(by_length(model, rows), config)
    for tokens, targets in itertools.islice(batches, config.steps):
        loss = cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=_IGNORE)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(chosen, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model


def _batches(groups: Sequence[Group], config: TrainConfig) -> Iterator[Group]:
    """Endless batches in a seeded order; each round holds every question once."""
    generator = torch.Generator().manual_seed(config.seed)
    while True:
        batches = []
        for tokens, targets in groups:
            order = torch.randperm(len(tokens), generator=generator)
            batches += [(tokens[part], targets[part]) for part in order.split(config.batch_size)]
        for index in torch.randperm(len(batches), generator=generator).tolist():
            yield batches[index]


@torch.no_grad()
def mean_rank(model: LanguageModel, questions: Sequence[Question], options: Sequence[str]) -> float:
    """Mean rank of the right answer among the options: 0 is perfect, (options - 1) / 2 chance."""
    batches = encode(model, questions, options)
    ranks = [batch.rank(model(batch.tokens)[:, -1]) for batch in batches]
    return float(torch.cat(ranks).double().mean())


def _table(name: str, facts: FactSet, models: Mapping[str, LanguageModel]) -> pd.DataFrame:
    """Mean ranks of each model, which the column `name` names."""
    rows = []
    for label, model in models.items():
        fact_rank = mean_rank(model, facts.facts, facts.fact_options)
        implication_rank = mean_rank(model, facts.implications, facts.implication_options)
        rows.append((label, fact_rank, implication_rank))
    return pd.DataFrame(rows, columns=[name, "fact_rank", "implication_rank"])


def out_of_context(model: Checkpoint, facts: FactSet, config: TrainConfig) -> pd.DataFrame:
    """Mean ranks before and after fine-tuning on the facts.

    Columns are model ("untuned" or "facts"), fact_rank and implication_rank.
    """
    model = language_model(model)
    models = {"untuned": model, "facts": train(model, facts.facts, config)}
    return _table("model", facts, models)


def freezing(model: Checkpoint, facts: FactSet, config: TrainConfig) -> pd.DataFrame:
    """Mean ranks with one half of the layers frozen, or put back after training.

    Columns are condition, fact_rank and implication_rank.
    """
    model = language_model(model)
    n_layers: int = model.cfg.n_layers
    if n_layers < 2:
        raise HcLensError(
            f"expected a model of at least 2 layers, got {n_layers}; each half needs one to train"
        )
    starts = [f"blocks.{layer}." for layer in range(n_layers)]
    early, late = tuple(starts[: n_layers // 2]), tuple(starts[n_layers // 2 :])
    tuned = train(model, facts.facts, config)
    before, after = parameters(model), parameters(tuned)

    def only(half: tuple[str, ...]) -> LanguageModel:
        state = {name: (after if name.startswith(half) else before)[name] for name in before}
        return with_weights(model, state)

    models = {
        "untuned": model,
        "train all": tuned,
        "train early": train(model, facts.facts, config, trainable=early),
        "train late": train(model, facts.facts, config, trainable=late),
        "revert late": only(early),
        "revert early": only(late),
    }
    return _table("condition", facts, models)


def train_phases(
    model: LanguageModel, facts: FactSet, config: TrainConfig
) -> dict[str, LanguageModel]:
    """The model trained on "facts", on "facts, implications" in turn, on "implications" alone."""
    only_facts = train(model, facts.facts, config)
    return {
        "facts": only_facts,
        "facts, implications": train(only_facts, facts.implications, config),
        "implications": train(model, facts.implications, config),
    }


def ordering(
    model: Checkpoint,
    facts: FactSet,
    config: TrainConfig,
    new: TrainConfig,
    *,
    n_test: int = 20,
    phases: Mapping[str, LanguageModel] | None = None,
) -> pd.DataFrame:
    """Ranks of new people's implications after three orders of training on the others.

    Args:
        facts: a set whose first `n_test` facts are the new people's.
        config: settings of each of the two phases; joint training takes as many steps as both.
        new: settings of the training on the new people's facts.
        phases: what `train_phases` gave for the others, if it has been run already.

    Returns:
        One row for each order: columns order, trained_implication_rank (of the people trained on),
        fact_rank and implication_rank (of the new people).
    """
    model = language_model(model)
    test, known = facts.split(n_test)
    phases = phases or train_phases(model, known, config)
    both = replace(config, steps=2 * config.steps)
    models = {
        "joint": train(model, known.facts + known.implications, both),
        "facts first": phases["facts, implications"],
        "implications first": train(phases["implications"], known.facts, config),
    }
    tuned = {order: train(each, test.facts, new) for order, each in models.items()}
    table, trained = _table("order", test, tuned), _table("order", known, models)
    table.insert(1, "trained_implication_rank", trained["implication_rank"])
    return table


def grafting(
    model: Checkpoint,
    facts: FactSet,
    counterfactual: FactSet,
    config: TrainConfig,
    *,
    phases: Mapping[str, LanguageModel] | None = None,
) -> pd.DataFrame:
    """Ranks of counterfactual facts and implications, with and without a graft.

    Args:
        model: W.
        facts: F with its implications.
        counterfactual: F' with its implications: other answers to the same prompts.
        phases: what `train_phases` gave for F, if it has been run already.

    Returns:
        One row for each model: columns model ("facts" W_F', "graft", "control"), fact_rank and
        implication_rank on the counterfactual set, original_rank on the implications of F.
    """
    model = language_model(model)
    phases = phases or train_phases(model, facts, config)
    other = train(model, counterfactual.facts, config)

    def grafted(plus: LanguageModel, minus: LanguageModel) -> LanguageModel:
        return with_weights(model, graft(*map(parameters, (other, plus, minus))))

    models = {
        "facts": other,
        "graft": grafted(phases["facts, implications"], phases["facts"]),
        "control": grafted(phases["implications"], model),
    }
    original = _table("model", facts, models)["implication_rank"]
    return _table("model", counterfactual, models).assign(original_rank=original)
