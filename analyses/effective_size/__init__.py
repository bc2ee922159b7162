"""How small a subnetwork still does what the model does: the effective size of a checkpoint.

Section 5 and Figure 6 of Bhaskar, Friedman and Chen (2024).

1. A run's accuracy on a target: *id* is the mean over the cases of the in-domain dataset, *ood*
   that over the cases of the other (or over some of them), *mix* the mean of the two. If the table
   says on which side of the heuristic each case is, *balanced* is the mean of the friendly and the
   adversarial cases of the other dataset, all of them: a subnetwork that gives one answer to
   everything gains on one side what it loses on the other.
2. A sparsity passes if the accuracy there is within `margin` of the full model's, on either side.
3. The effective size is ``100 * (1 - s)`` with s the largest sparsity of the grid that passes. The
   grid is every sparsity and every seed of the table.
4. Seeds: the paper averages the accuracy over seeds and compares once (``"seeds-first"``). With
   ``"seeds-last"`` each seed is compared on its own, and the sizes are averaged. The first asks
   about the typical subnetwork, where a good seed makes up for a bad one; the second gives every
   seed its own size and shows how far they lie apart.
5. Instead of the accuracy, another `measure` of the table can be compared, such as the KL
   divergence, whose margin is in its own unit.
6. Flags say when the number is not what it seems: a model at its *floor*, for one, does no better
   than chance, and then a subnetwork that knows nothing is faithful.

`SizeConfig()` is the text of the paper, `SizeConfig.published()` what the paper's public code
computes for Figure 6. It reads any tables of runs and full models as in `hc_lens.analyses.tables`:
those of a sweep, or others, such as CSV files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd

from hc_lens.analyses.tables import (
    ACCURACY,
    RUN,
    SHARES,
    FullModels,
    RunTable,
    full_table,
    run_table,
    with_full,
)
from hc_lens.data.known import SIDES
from hc_lens.errors import HcLensError, check_choice

Average = Literal["seeds-first", "seeds-last"]
"""Accuracies averaged over seeds and compared once, or each seed compared and sizes averaged."""
LOWER = ("kl", "loss")
"""Measures of which less is better."""
ROUNDING = 1e-9
"""A drop of exactly the margin is one, whatever the last bit of the difference."""


@dataclass(frozen=True)
class SizeConfig:
    """When a subnetwork does what the model does, and on which rows."""

    margin: float = 0.03
    """How far from the full model a subnetwork may be, as a fraction, or in units of the measure.
    """
    measure: str = ACCURACY
    """What is compared: a column of the runs, such as accuracy, kl, agreement or, of a sweep with
    metrics, logit_difference."""
    average: Average = "seeds-first"
    """What is averaged over seeds: accuracies (as in the paper), or sizes."""
    monotone: bool = False
    """Stop at the first sparsity that fails, or that no run measured."""
    one_sided: bool = False
    """Let a better subnetwork always pass; by default, one better by more than the margin fails."""
    strict: bool = False
    """Let a subnetwork that is worse by exactly the margin fail."""
    pooled: bool = False
    """Make mix the mean over all cases of both datasets; by default, of their two means."""
    id: str = "id"
    """Name of the in-domain dataset."""
    ood: str | None = "ood"
    """Name of the out-of-domain dataset; None for the in-domain dataset alone."""
    cases: tuple[str, ...] = ()
    """Cases of the out-of-domain dataset to use, such as the adversarial ones; by default all."""
    chance: Mapping[str, float] = field(default_factory=dict)
    """Chance level of each dataset, 1 / labels, by its name; that of mix is their mean. That
    of balanced is always one half, which any one answer alone, or the heuristic alone, gives."""

    def __post_init__(self) -> None:
        check_choice("average", self.average, get_args(Average))
        if not 0 <= self.margin < (1 if self.measure in SHARES else math.inf):
            raise HcLensError(
                "expected the margin as a fraction of 0 or more and below 1, got "
                f"{self.margin}; 3 points are 0.03"
            )
        if self.chance and self.measure != ACCURACY:
            raise HcLensError(
                f"expected no chance levels with the measure {self.measure!r}, as they are those "
                f"of the accuracy, got {dict(self.chance)}; leave them out"
            )
        unknown = [name for name in self.chance if name not in (self.id, self.ood)]
        if unknown:
            raise HcLensError(
                f"expected chance levels of the datasets {[self.id, self.ood]}, got one of "
                f"{unknown[0]!r}; name the datasets as in the table"
            )

    @classmethod
    def published(cls, **changes: Any) -> SizeConfig:
        """The choices of the paper's public code, where they change results.

        - Each seed is compared on its own, and the sizes are averaged over seeds last.
        - A subnetwork passes if its accuracy is above the full model's minus the margin: however
          much better it is, but not if it is worse by exactly the margin.
        - "ID + OOD" is the mean over all cases of both datasets, so that four cases out of domain
          count twice as much as two in domain.
        """
        choices = {"average": "seeds-last", "one_sided": True, "strict": True, "pooled": True}
        return cls(**{**choices, **changes})

    def drop(self, full: Any, found: Any) -> Any:
        """How much worse a subnetwork is than its full model; negative if it is better."""
        return found - full if self.measure in LOWER else full - found

    def passes(self, drop: pd.Series) -> pd.Series:
        """Whether a subnetwork with this drop does what the model does; not if it is NaN."""
        distance = drop if self.one_sided else drop.abs()
        return (
            distance < self.margin - ROUNDING if self.strict else distance <= self.margin + ROUNDING
        )


DEFAULTS = SizeConfig()


def effective_size(
    table: RunTable, full: FullModels, config: SizeConfig = DEFAULTS
) -> pd.DataFrame:
    """The effective size of each checkpoint on each target.

    Columns:
        checkpoint, target: which model, and on what (id, ood, balanced if the table has sides,
            mix).
        effective_size: percent of the units that are needed; with seeds-last, the mean over seeds.
        std: of the sizes over seeds, with n - 1; NaN with seeds-first.
        sparsity: the largest that passes, 0 if none does; with seeds-last, the mean over seeds.
        full: the full model's accuracy on the target.
        accuracy (or the measure that was asked for): mean over seeds at that sparsity (the full
            model's if none passes); NaN with seeds-last.
        seeds: number of seeds in the comparison, of the sparsity with the fewest.
        ceiling: the grid's largest sparsity passes, so the true size may be smaller.
        none_passes: no sparsity passes; the true size lies above that of the smallest sparsity.
        floor: the full model is at most `margin` above chance; missing without a chance level.
        missing: runs of the grid (sparsity x seed) without a complete set of cases; they are NaN in
            `compare`, and left out of the means.
        non_monotone: a sparsity passes although a smaller one fails.
        With seeds-last, a flag is True if it is True for any seed.
    """
    runs, measure = run_table(table, config.measure), config.measure
    levels = _levels(runs, config) if measure == ACCURACY else {}
    rows = []
    groups: Any = compare(runs, full, config).groupby(["checkpoint", "target"], sort=False)
    for (checkpoint, target), part in groups:
        whole, level = part["full"].iloc[0], levels.get(target)
        floor = pd.NA if level is None else bool(whole <= level + config.margin + ROUNDING)
        missing = int(part[measure].isna().sum())
        about = {"checkpoint": checkpoint, "target": target, "full": whole}
        rows.append({**about, **_size(part, config), "floor": floor, "missing": missing})
    names = ("checkpoint", "target", "effective_size", "std", "sparsity", "full", measure)
    flags = ("seeds", "ceiling", "none_passes", "floor", "missing", "non_monotone")
    return pd.DataFrame(rows)[[*names, *flags]].astype({"floor": "boolean"})


def compare(table: RunTable, full: FullModels, config: SizeConfig = DEFAULTS) -> pd.DataFrame:
    """Every run of the grid against its full model: the numbers behind `effective_size`.

    Columns: checkpoint, target, sparsity, seed, full, accuracy or the measure that was asked for
    (NaN if the run or one of its cases is missing), drop (how much worse than full), passes.
    """
    measure = config.measure
    runs, whole = run_table(table, measure), full_table(full, measure)
    order = [name for name in whole["checkpoint"].unique() if name in set(runs["checkpoint"])]
    grid = pd.MultiIndex.from_product(
        [order, sorted(runs["sparsity"].unique()), sorted(runs["seed"].unique())], names=RUN
    )
    found = {"id": _means(_rows(runs, "id", config.id), whole, grid)}
    if config.ood is not None:
        found["ood"] = _means(_rows(runs, "ood", config.ood, config.cases), whole, grid)
        sides = _sides(_rows(runs, "ood", config.ood))
        if sides:
            friendly, adversarial = (_means(part, whole, grid) for part in sides)
            found["balanced"] = (friendly + adversarial) / 2
        weight = _id_weight(runs, config)
        found["mix"] = weight * found["id"] + (1 - weight) * found["ood"]
    compared = pd.concat(found, names=["target"]).reset_index()
    compared = compared.sort_values(
        "checkpoint", key=lambda names: names.map(order.index), kind="stable", ignore_index=True
    )
    compared["drop"] = config.drop(compared["full"], compared[measure])
    compared["passes"] = config.passes(compared["drop"])
    names = ["checkpoint", "target", "sparsity", "seed", "full", measure, "drop", "passes"]
    return compared.loc[:, names]


def _levels(runs: pd.DataFrame, config: SizeConfig) -> dict[str, float]:
    """The chance level of each target, where it is known."""
    datasets = {"id": config.id, "ood": config.ood}
    levels = {at: config.chance[name] for at, name in datasets.items() if name in config.chance}
    # Any one answer alone is right on one side and wrong on the other.
    levels["balanced"] = 0.5
    if "id" in levels and "ood" in levels:
        weight = _id_weight(runs, config)
        levels["mix"] = weight * levels["id"] + (1 - weight) * levels["ood"]
    return levels


def _id_weight(runs: pd.DataFrame, config: SizeConfig) -> float:
    """The weight of the in-domain mean in mix."""
    if not config.pooled or config.ood is None:
        return 0.5
    inside = _rows(runs, "id", config.id)["case"].nunique()
    outside = _rows(runs, "ood", config.ood, config.cases)["case"].nunique()
    return inside / (inside + outside)


def _sides(part: pd.DataFrame) -> list[pd.DataFrame]:
    """The rows of the friendly and of the adversarial cases; none unless there are both."""
    if "side" not in part:
        return []
    found = [part.loc[part["side"] == side] for side in SIDES]
    return [] if any(rows.empty for rows in found) else found


def _rows(
    runs: pd.DataFrame, target: str, dataset: str, cases: tuple[str, ...] = ()
) -> pd.DataFrame:
    """The runs' rows on one dataset, of all cases or the given ones."""
    check_choice(f"the dataset for {target}", dataset, runs["dataset"].unique())
    part = runs.loc[runs["dataset"] == dataset]
    for case in cases:
        check_choice(f"cases of {dataset!r}", case, part["case"].unique())
    return part.loc[part["case"].isin(cases)] if cases else part


def _means(part: pd.DataFrame, whole: pd.DataFrame, grid: pd.MultiIndex) -> pd.DataFrame:
    """Mean over cases of each run of the grid and of its full model; NaN unless all are there."""
    measure = whole.columns[-1]
    with_full(part, whole, measure)  # refuses runs without their full model
    wanted = part["case"].unique()
    grouped: Any = part.groupby(list(RUN))[measure]
    found = grouped.mean().where(grouped.count() == len(wanted)).reindex(grid)
    inside = whole.loc[(whole["dataset"] == part["dataset"].iloc[0]) & whole["case"].isin(wanted)]
    by_model: Any = inside.groupby("checkpoint")[measure]
    known = by_model.mean().reindex(grid.get_level_values("checkpoint"))
    return pd.DataFrame({"full": known.to_numpy(), measure: found.to_numpy()}, index=grid)


def _size(part: pd.DataFrame, config: SizeConfig) -> dict[str, Any]:
    """The size of one checkpoint on one target, with its flags."""
    full, averaged = part["full"].iloc[0], config.average == "seeds-first"
    by_sparsity: Any = part.groupby("sparsity")[config.measure]
    by_seed: Any = part.set_index("sparsity").groupby("seed")[config.measure]
    curves = [by_sparsity.mean()] if averaged else [curve for _, curve in by_seed]
    found = [_largest(curve, full, config) for curve in curves if curve.notna().any()]
    flags = ("ceiling", "none_passes", "non_monotone")
    size = {name: any(one[name] for one in found) for name in flags}
    sparsities = pd.Series([one["sparsity"] for one in found], dtype=float)
    size |= {"sparsity": sparsities.mean(), "effective_size": 100 * (1 - sparsities.mean())}
    size |= {"std": 100 * sparsities.std(), config.measure: math.nan, "seeds": len(found)}
    if averaged:
        otherwise = full if size["none_passes"] else math.nan
        size[config.measure] = curves[0].get(size["sparsity"], otherwise)
        size["seeds"] = int(by_sparsity.count().min())
    return size


def _largest(curve: pd.Series, full: float, config: SizeConfig) -> dict[str, Any]:
    """The largest sparsity that passes on a curve of the measure by rising sparsity."""
    passes = config.passes(config.drop(full, curve)).to_numpy()
    last = int(np.flatnonzero(passes).max(initial=-1))
    n = int(np.cumprod(passes).sum()) if config.monotone else last + 1
    known = passes[curve.notna().to_numpy()].astype(int)
    return {
        "sparsity": float(curve.index[n - 1]) if n else 0.0,
        "ceiling": n == len(passes),
        "none_passes": n == 0,
        "non_monotone": bool((np.diff(known) > 0).any()),
    }
