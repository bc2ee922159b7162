"""Extractive structures: which components store a fact, which query it and which use it.

1. `scores` finds informative, downstream and upstream components of two checkpoints.
2. `out_of_context`, `freezing`, `ordering` and `grafting` are the experiments.
3. `first_hop`, `second_hop` and `invented_relation` make facts about a `World`, `FactSet.read`
   reads them from a file, `named_set` takes the name of either.
4. `study` runs all of it on small models trained from scratch.
Feng, Russell and Steinhardt 2024 (arXiv 2412.04614). Names are imported on first use.
"""

# ruff: noqa: I001 (a list of names, those that give tables first)

from __future__ import annotations

from typing import TYPE_CHECKING

from hc_lens.lazy import exports

if TYPE_CHECKING:
    from hc_lens.analyses.extractive.scoring import scores as scores
    from hc_lens.analyses.extractive.experiments import (
        out_of_context as out_of_context,
        freezing as freezing,
        ordering as ordering,
        grafting as grafting,
        train as train,
        mean_rank as mean_rank,
    )
    from hc_lens.analyses.extractive.desk import study as study
    from hc_lens.analyses.extractive.figures import heat_maps as heat_maps, rank_bars as rank_bars
    from hc_lens.analyses.extractive.facts import (
        FactSet as FactSet,
        World as World,
        first_hop as first_hop,
        second_hop as second_hop,
        invented_relation as invented_relation,
        named_set as named_set,
    )
    from hc_lens.analyses.extractive.settings import (
        ScoreConfig as ScoreConfig,
        TrainConfig as TrainConfig,
        DeskConfig as DeskConfig,
    )
    from hc_lens.analyses.extractive.prompts import Question as Question, align as align
    from hc_lens.analyses.extractive.models import (
        graft as graft,
        parameters as parameters,
        with_weights as with_weights,
    )

__getattr__, __dir__ = exports(__name__, __file__)
