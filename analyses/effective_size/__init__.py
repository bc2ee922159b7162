"""How small a subnetwork still does what the model does: the effective size of a checkpoint.

Section 5 and Figure 6 of Bhaskar, Friedman and Chen (2024).

1. A run's accuracy on a target: *id* is the mean over the cases of the in-domain dataset, *ood*
   that over the cases of the other (or over some of them), *mix* the mean of the two.
2. A sparsity passes if the accuracy there is within `margin` of the full model's, on either side.
3. The effective size is ``100 * (1 - s)`` with s the largest sparsity of the grid that passes.
4. Seeds: the paper averages the accuracy over seeds and compares once (``"seeds-first"``). With
   ``"seeds-last"`` each seed is compared on its own, and the sizes are averaged. The first asks
   about the typical subnetwork, where a good seed makes up for a bad one; the second gives every
   seed its own size and shows how far they lie apart.
5. Flags say when the number is not what it seems: the grid's largest sparsity passes (*ceiling*),
   no sparsity passes, the full model does no better than chance (*floor*: then a subnetwork that
   knows nothing is faithful), runs are missing, a larger sparsity passes though a smaller fails.

It reads any DataFrame of checkpoint, sparsity, seed, dataset, case and accuracy: that of a sweep,
or one made elsewhere.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd

from analyses.effective_size.config import SizeConfig
from analyses.tables import FullModels, full_table, in_order, run_table, with_full
from hc_lens.errors import check_choice

__all__ = ["SizeConfig", "compare", "effective_size"]

ROUNDING = 1e-9
"""A drop of exactly the margin passes, whatever the last bit of the difference."""
DEFAULTS = SizeConfig()


def effective_size(
    table: pd.DataFrame, full: FullModels, config: SizeConfig = DEFAULTS
) -> pd.DataFrame:
    """The effective size of each checkpoint on each target.

    Columns:
        checkpoint, target: which model, and on what (id, ood, mix).
        effective_size: percent of the units that are needed; with seeds-last, the mean over seeds.
        std: of the sizes over seeds, with n - 1; NaN with seeds-first.
        sparsity: the largest that passes, 0 if none does; with seeds-last, the mean over seeds.
        full: the full model's accuracy on the target.
        accuracy: mean over seeds at that sparsity (the full model's if none passes); NaN with
            seeds-last.
        seeds: number of seeds in the comparison, of the sparsity with the fewest.
        ceiling: the grid's largest sparsity passes, so the true size may be smaller.
        none_passes: no sparsity passes; the true size lies above that of the smallest sparsity.
        floor: the full model is at most `margin` above chance; missing without a chance level.
        missing: runs of the grid (sparsity x seed) without a complete set of cases; they are left
            out of the means.
        non_monotone: a sparsity passes although a smaller one fails.
        With seeds-last, a flag is True if it is True for any seed.

    Args:
        table: runs: checkpoint, sparsity, seed, dataset, case, accuracy, as fractions. The grid is
            every sparsity and every seed in it.
        full: accuracies of the full models: a table with checkpoint, dataset, case, accuracy, or a
            mapping from these three to the accuracy.
        config: what passes, and on which rows.
    """
    datasets = {"id": config.id, "ood": config.ood}
    levels = {at: config.chance[name] for at, name in datasets.items() if name in config.chance}
    if len(levels) == 2:
        levels["mix"] = sum(levels.values()) / 2
    rows = []
    groups: Any = compare(table, full, config).groupby(["checkpoint", "target"], sort=False)
    for (checkpoint, target), part in groups:
        whole, level = part["full"].iloc[0], levels.get(target)
        floor = pd.NA if level is None else bool(whole <= level + config.margin + ROUNDING)
        missing = int(part["accuracy"].isna().sum())
        about = {"checkpoint": checkpoint, "target": target, "full": whole}
        rows.append({**about, **_size(part, config), "floor": floor, "missing": missing})
    names = ("checkpoint", "target", "effective_size", "std", "sparsity", "full", "accuracy")
    flags = ("seeds", "ceiling", "none_passes", "floor", "missing", "non_monotone")
    return pd.DataFrame(rows)[[*names, *flags]].astype({"floor": "boolean"})


def compare(table: pd.DataFrame, full: FullModels, config: SizeConfig = DEFAULTS) -> pd.DataFrame:
    """Every run of the grid against its full model: the numbers behind `effective_size`.

    Columns: checkpoint, target, sparsity, seed, full, accuracy (NaN if the run or one of its cases
    is missing), drop (full - accuracy), passes. The arguments are those of `effective_size`.
    """
    runs, whole = run_table(table), full_table(full)
    parts = {"id": _cells(runs, "id", config.id)}
    if config.ood is not None:
        parts["ood"] = _cells(runs, "ood", config.ood, config.cases)
    with_full(pd.concat(parts.values()), full)
    order = dict.fromkeys(name for name in whole["checkpoint"] if name in set(runs["checkpoint"]))
    grid = pd.MultiIndex.from_product(
        [list(order), sorted(runs["sparsity"].unique()), sorted(runs["seed"].unique())],
        names=["checkpoint", "sparsity", "seed"],
    )
    found = {target: _means(part, whole, grid) for target, part in parts.items()}
    if config.ood is not None:
        found["mix"] = (found["id"] + found["ood"]) / 2
    tables = [part.reset_index().assign(target=target) for target, part in found.items()]
    compared = pd.concat(tables, ignore_index=True)
    compared["drop"] = compared["full"] - compared["accuracy"]
    compared["passes"] = _passes(compared["drop"], config)
    names = ("checkpoint", "target", "sparsity", "seed", "full", "accuracy", "drop", "passes")
    return in_order(compared, order).loc[:, list(names)]


def _cells(
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
    wanted = part["case"].unique()
    grouped: Any = part.groupby(["checkpoint", "sparsity", "seed"])["accuracy"]
    accuracy = grouped.mean().where(grouped.size() == len(wanted)).reindex(grid)
    inside = whole.loc[(whole["dataset"] == part["dataset"].iloc[0]) & whole["case"].isin(wanted)]
    by_model: Any = inside.groupby("checkpoint")["accuracy"]
    known = by_model.mean().reindex(grid.get_level_values("checkpoint"))
    return pd.DataFrame({"full": known.to_numpy(), "accuracy": accuracy.to_numpy()}, index=grid)


def _passes(drop: pd.Series, config: SizeConfig) -> pd.Series:
    # NaN compares as False: what was not measured does not pass.
    return (drop if config.one_sided else drop.abs()) <= config.margin + ROUNDING


def _size(part: pd.DataFrame, config: SizeConfig) -> dict[str, Any]:
    """The size of one checkpoint on one target, with its flags."""
    full, averaged = part["full"].iloc[0], config.average == "seeds-first"
    by_sparsity: Any = part.groupby("sparsity")["accuracy"]
    by_seed: Any = part.set_index("sparsity").groupby("seed")["accuracy"]
    curves = [by_sparsity.mean()] if averaged else [curve for _, curve in by_seed]
    found = [_largest(curve, full, config) for curve in curves if curve.notna().any()]
    flags = ("ceiling", "none_passes", "non_monotone")
    size = {name: any(one[name] for one in found) for name in flags}
    sparsities = pd.Series([one["sparsity"] for one in found], dtype=float)
    size |= {"sparsity": sparsities.mean(), "effective_size": 100 * (1 - sparsities.mean())}
    size |= {"std": 100 * sparsities.std(), "accuracy": math.nan, "seeds": len(found)}
    if averaged:
        otherwise = full if size["none_passes"] else math.nan
        size["accuracy"] = curves[0].get(size["sparsity"], otherwise)
        size["seeds"] = int(by_sparsity.count().min())
    return size


def _largest(accuracy: pd.Series, full: float, config: SizeConfig) -> dict[str, Any]:
    """The largest sparsity that passes on a curve of accuracies by rising sparsity."""
    passes = _passes(full - accuracy, config).to_numpy()
    last = int(np.flatnonzero(passes).max(initial=-1))
    n = int(np.cumprod(passes).sum()) if config.monotone else last + 1
    known = passes[accuracy.notna().to_numpy()].astype(int)
    return {
        "sparsity": float(accuracy.index[n - 1]) if n else 0.0,
        "ceiling": n == len(passes),
        "none_passes": n == 0,
        "non_monotone": bool((np.diff(known) > 0).any()),
    }
