"""Which way of ranking units finds the circuit? All of them on the same rows, side by side.

1. `rank` scores every unit in each way of `RANKERS`; more is more important.
2. `aurocs` compares the scores with the units that are known to matter (`hc_lens.circuits`): the
   chance that a true unit is above another one, ties half (the area under the ROC curve).
3. `hc_lens.analyses.scorecard.curves` takes the scores as rankings: CPR and CMD of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch

from hc_lens.analyses.rankers.integrated import integrated
from hc_lens.analyses.statistics import auroc
from hc_lens.errors import HcLensError, check_choice, check_count
from hc_lens.masks.replacements import Source, as_source
from hc_lens.metric_names import SmoothName
from hc_lens.metrics import FULL
from hc_lens.protocols import BatchesLike, Model
from hc_lens.pruning.config import Method, PruneConfig, n_removed
from hc_lens.pruning.importance import importance
from hc_lens.pruning.train import prune
from hc_lens.scans.scan import scan
from hc_lens.units import Unit, UnitSpace

__all__ = ["RANKERS", "RankConfig", "aurocs", "integrated", "rank", "rankings"]


@dataclass(frozen=True)
class RankConfig:
    """How units are ranked."""

    metric: SmoothName = "logit"
    """What gradients are of; pruning and ablation look at the KL divergence."""
    sparsity: float = 0.5
    """Sparsity to which gates and top-k are trained; their scores rank all units."""
    steps: int = 400
    """Steps of their training."""
    path_steps: int = 5
    """Points of integrated gradients."""
    seed: int = 0
    """Seed of everything that is drawn."""

    def __post_init__(self) -> None:
        n_removed(self.sparsity, 10**9)
        for name in ("steps", "path_steps"):
            check_count(name, getattr(self, name))


DEFAULTS = RankConfig()


@dataclass(frozen=True)
class _Rows:
    """What every ranker gets."""

    model: Model
    batches: BatchesLike
    source: Source
    config: RankConfig
    progress: bool

    @property
    def space(self) -> UnitSpace:
        """The units of the model."""
        return UnitSpace.of(self.model)

    def pruned(self, method: Method, sparsity: float) -> np.ndarray:
        """The scores of a pruning method; what is kept at the end counts as a little more."""
        config = PruneConfig(sparsity, self.config.seed, method=method, steps=self.config.steps)
        found = prune(self.model, self.batches, self.source, config, progress=self.progress)
        assert found.scores is not None
        scores = found.scores.double().numpy()
        largest = scores[np.isfinite(scores)].max()
        return np.nan_to_num(scores, posinf=largest + 1)


def _gates(rows: _Rows) -> np.ndarray:
    return rows.pruned("gates", rows.config.sparsity)


def _top_k(rows: _Rows) -> np.ndarray:
    return rows.pruned("top-k", rows.config.sparsity)


def _greedy(rows: _Rows) -> np.ndarray:
    """The round in which a unit goes, if all but one do."""
    n = len(rows.space)
    return rows.pruned("greedy", (n - 1) / n)


def _importance(rows: _Rows) -> np.ndarray:
    table = importance(
        rows.model, rows.batches, rows.source, loss=rows.config.metric, progress=rows.progress
    )
    return table["importance"].to_numpy()


def _integrated(along: Any) -> Callable[[_Rows], np.ndarray]:
    def scores(rows: _Rows) -> np.ndarray:
        table = integrated(
            rows.model,
            rows.batches,
            rows.source,
            along,
            loss=rows.config.metric,
            steps=rows.config.path_steps,
            progress=rows.progress,
        )
        return table["importance"].to_numpy()

    return scores


def _ablation(rows: _Rows) -> np.ndarray:
    """KL divergence on removing each unit alone."""
    table = scan(rows.model, {"rows": rows.batches}, rows.source, progress=rows.progress)
    total = (table["kl"] * table["n"]).groupby(table["set"], sort=False).sum().drop(FULL)
    return total[rows.space.labels].to_numpy() / table.loc[table["set"] == FULL, "n"].sum()


def _random(rows: _Rows) -> np.ndarray:
    generator = torch.Generator().manual_seed(rows.config.seed)
    return torch.rand(len(rows.space), generator=generator).double().numpy()


RANKERS: dict[str, Callable[[_Rows], np.ndarray]] = {
    "gates": _gates,
    "top-k": _top_k,
    "importance": _importance,
    "integrated-activations": _integrated("activations"),
    "integrated-inputs": _integrated("inputs"),
    "ablation": _ablation,
    "greedy": _greedy,
    "random": _random,
}
"""The ways to rank units by name."""


def rank(
    model: Model,
    batches: BatchesLike,
    means: Source | str,
    rankers: Iterable[str] | None = None,
    config: RankConfig = DEFAULTS,
    *,
    progress: bool = True,
) -> pd.DataFrame:
    """The scores of every unit: ranker, unit, score; more is more important.

    The rankers are by default all of `RANKERS`. Greedy runs the model once for every pair of a
    round and a unit that is left, on every row: leave it out for large models.
    """
    names = list(RANKERS) if rankers is None else list(rankers)
    for name in names or [None]:
        check_choice("a ranker", name, RANKERS)
    source = as_source(means)
    rows = _Rows(model, batches, source, config, progress)
    source.check(model, rows.space)
    parts = []
    for name in dict.fromkeys(names):
        scores = RANKERS[name](rows)
        parts.append(pd.DataFrame({"ranker": name, "unit": rows.space.labels, "score": scores}))
    return pd.concat(parts, ignore_index=True)


def rankings(table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The scores of each ranker, as `hc_lens.analyses.scorecard.curves` takes them."""
    return {str(name): part for name, part in table.groupby("ranker", sort=False)}


def aurocs(table: pd.DataFrame, units: Sequence[Unit | str]) -> pd.DataFrame:
    """How well each ranker of `rank` tells the true units from the others: ranker, auroc.

    It is NaN where every unit is a true one.
    """
    true = {str(unit) for unit in units}
    unknown = sorted(true - set(table["unit"]))
    if unknown or not true:
        raise HcLensError(
            f"expected the true units among those that were ranked, got {unknown or 'none'}; give "
            "those of the same model"
        )
    records = [
        (name, auroc(part["score"].to_numpy(), part["unit"].isin(true).to_numpy()))
        for name, part in table.groupby("ranker", sort=False)
    ]
    return pd.DataFrame(records, columns=pd.Index(["ranker", "auroc"]))
