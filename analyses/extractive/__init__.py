"""Extractive structures: which components store a fact, which query it and which use it.

1. `scores` finds informative, downstream and upstream components of two checkpoints.
2. `out_of_context`, `freezing`, `ordering` and `grafting` are the experiments.
3. `World`, `first_hop`, `second_hop`, `invented_relation` and `FactSet.read` give the facts.
4. `demo` runs all of it on a small model trained from scratch.
Feng, Russell and Steinhardt 2024 (arXiv 2412.04614). Names are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from analyses.extractive.desk import Desk, DeskConfig, agreement, study, with_weights
    from analyses.extractive.experiments import (
        Phases,
        freezing,
        grafting,
        ordering,
        out_of_context,
        train_phases,
    )
    from analyses.extractive.facts import FactSet, World, first_hop, invented_relation, second_hop
    from analyses.extractive.figures import heat_maps, rank_bars
    from analyses.extractive.parts import Component, components, graft, parameters, swap
    from analyses.extractive.prompts import Question, align
    from analyses.extractive.reporting import demo
    from analyses.extractive.scoring import scores
    from analyses.extractive.training import TrainConfig, mean_rank, train

_HOME = {
    "scores": "scoring",
    "Component": "parts",
    "components": "parts",
    "parameters": "parts",
    "swap": "parts",
    "graft": "parts",
    "Question": "prompts",
    "align": "prompts",
    "World": "facts",
    "FactSet": "facts",
    "first_hop": "facts",
    "second_hop": "facts",
    "invented_relation": "facts",
    "TrainConfig": "training",
    "train": "training",
    "mean_rank": "training",
    "out_of_context": "experiments",
    "freezing": "experiments",
    "ordering": "experiments",
    "grafting": "experiments",
    "Phases": "experiments",
    "train_phases": "experiments",
    "heat_maps": "figures",
    "rank_bars": "figures",
    "Desk": "desk",
    "DeskConfig": "desk",
    "study": "desk",
    "agreement": "desk",
    "with_weights": "desk",
    "demo": "reporting",
}

__all__ = [
    "Component",
    "Desk",
    "DeskConfig",
    "FactSet",
    "Phases",
    "Question",
    "TrainConfig",
    "World",
    "agreement",
    "align",
    "components",
    "demo",
    "first_hop",
    "freezing",
    "graft",
    "grafting",
    "heat_maps",
    "invented_relation",
    "mean_rank",
    "ordering",
    "out_of_context",
    "parameters",
    "rank_bars",
    "scores",
    "second_hop",
    "study",
    "swap",
    "train",
    "train_phases",
    "with_weights",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {__all__}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
