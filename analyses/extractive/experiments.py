"""The paper's experiments on a language model and a set of facts, each a function to a table.

1. Out-of-context reasoning: fine-tune on the facts, rank the answers of their implications.
2. Freezing: train only the early or only the late half of the blocks; or train all of them and put
   the early or the late half back.
3. Ordering: train on facts and implications of some people jointly, facts first, or implications
   first; then on the facts of new people only; rank the new people's implications.
4. Grafting: W_F' + (W_{F, Impl F} - W_F) carries the step from facts F to their implications over
   to counterfactual facts F'; the control W_F' + (W_{Impl F} - W) lacks the facts.
Ranks are means over questions; with 20 options 0 is perfect and 9.5 is chance.
Feng, Russell and Steinhardt 2024 (arXiv 2412.04614), sections 2, 4.3, 5 and 6.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd
from torch import Tensor

from analyses.extractive.facts import FactSet
from analyses.extractive.models import State, graft, language_model, parameters
from analyses.extractive.settings import TrainConfig
from analyses.extractive.training import Trainable, in_layers, mean_rank, train
from hc_lens.errors import HcLensError
from hc_lens.protocols import LanguageModel


def _table(
    name: str, model: LanguageModel, facts: FactSet, states: Mapping[str, State]
) -> pd.DataFrame:
    """Mean ranks with each of the weights, which the column `name` names."""
    asked = {
        "fact_rank": (facts.facts, facts.fact_options),
        "implication_rank": (facts.implications, facts.implication_options),
    }
    ranks = {
        column: [mean_rank(model, *questions, state) for state in states.values()]
        for column, questions in asked.items()
    }
    return pd.DataFrame({name: list(states), **ranks})


def out_of_context(
    model: LanguageModel | str | Path, facts: FactSet, config: TrainConfig
) -> pd.DataFrame:
    """Mean ranks before and after fine-tuning on the facts.

    Columns are model ("untuned" or "facts"), fact_rank and implication_rank.
    """
    model = language_model(model)
    tuned = train(model, facts.facts, config)
    return _table("model", model, facts, {"untuned": parameters(model), "facts": tuned})


def freezing(
    model: LanguageModel | str | Path,
    facts: FactSet,
    config: TrainConfig,
    *,
    early: int | None = None,
) -> pd.DataFrame:
    """Mean ranks with parts of the model frozen, or put back after training.

    There are `early` early layers, by default half of them. Columns are condition, fact_rank and
    implication_rank.
    """
    model = language_model(model)
    n_layers: int = model.cfg.n_layers
    n_early = n_layers // 2 if early is None else early
    if not 0 < n_early < n_layers:
        raise HcLensError(
            f"expected 1 to {n_layers - 1} early layers, got {n_early}; "
            "both halves need a layer to train"
        )
    first, last = in_layers(range(n_early)), in_layers(range(n_early, n_layers))
    before, tuned = parameters(model), train(model, facts.facts, config)
    states = {
        "untuned": before,
        "train all": tuned,
        "train early": train(model, facts.facts, config, trainable=first),
        "train late": train(model, facts.facts, config, trainable=last),
        "revert late": _where(first, tuned, before),
        "revert early": _where(last, tuned, before),
    }
    return _table("condition", model, facts, states)


def _where(chosen: Trainable, tuned: State, before: State) -> dict[str, Tensor]:
    """`before` with the parameters that `chosen` accepts taken from `tuned`."""
    return {name: tuned[name] if chosen(name) else before[name] for name in before}


@dataclass(frozen=True)
class Phases:
    """Weights after training on the same people's facts and implications, one after the other."""

    facts: State
    """After the facts."""
    facts_then_implications: State
    """After the facts and then the implications."""
    implications: State
    """After the implications alone."""


def train_phases(model: LanguageModel, facts: FactSet, config: TrainConfig) -> Phases:
    """Train on facts, then on implications; and on implications alone."""
    only_facts = train(model, facts.facts, config)
    return Phases(
        only_facts,
        train(model, facts.implications, config, start=only_facts),
        train(model, facts.implications, config),
    )


def ordering(
    model: LanguageModel | str | Path,
    facts: FactSet,
    config: TrainConfig,
    new: TrainConfig,
    *,
    n_test: int = 20,
    phases: Phases | None = None,
) -> pd.DataFrame:
    """Ranks of new people's implications after three orders of training on the others.

    Args:
        model: a HookedTransformer or a checkpoint.
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
    states: dict[str, State] = {
        "joint": train(model, known.facts + known.implications, both),
        "facts first": phases.facts_then_implications,
        "implications first": train(model, known.facts, config, start=phases.implications),
    }
    tuned = {order: train(model, test.facts, new, start=state) for order, state in states.items()}
    table, trained = _table("order", model, test, tuned), _table("order", model, known, states)
    table.insert(1, "trained_implication_rank", trained["implication_rank"])
    return table


def grafting(
    model: LanguageModel | str | Path,
    facts: FactSet,
    counterfactual: FactSet,
    config: TrainConfig,
    *,
    phases: Phases | None = None,
) -> pd.DataFrame:
    """Ranks of counterfactual facts and implications, with and without a graft.

    Args:
        model: a HookedTransformer or a checkpoint, W.
        facts: F with its implications.
        counterfactual: F' with its implications: other answers to the same prompts.
        config: settings of each training.
        phases: what `train_phases` gave for F, if it has been run already.

    Returns:
        One row for each model: columns model ("facts" W_F', "graft", "control"), fact_rank and
        implication_rank on the counterfactual set, original_rank on the implications of F.
    """
    model = language_model(model)
    phases = phases or train_phases(model, facts, config)
    other = train(model, counterfactual.facts, config)
    states: dict[str, State] = {
        "facts": other,
        "graft": graft(other, phases.facts_then_implications, phases.facts),
        "control": graft(other, phases.implications, parameters(model)),
    }
    original = _table("model", model, facts, states)["implication_rank"]
    return _table("model", model, counterfactual, states).assign(original_rank=original)
