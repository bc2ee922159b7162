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
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import numpy as np
import pandas as pd

from analyses.tables import FullModels, full_table, run_table, with_full
from hc_lens.errors import HcLensError

TARGETS = ("id", "ood", "mix")
"""What a size is measured on."""
AVERAGES = ("seeds-first", "seeds-last")
"""Accuracies averaged over seeds and compared once, or each seed compared and sizes averaged."""
ROUNDING = 1e-9
"""A drop of exactly the margin passes, whatever the last bit of the difference."""


def effective_size(
    table: pd.DataFrame,
    full: FullModels,
    *,
    margin: float = 0.03,
    average: Literal["seeds-first", "seeds-last"] = "seeds-first",
    monotone: bool = False,
    one_sided: bool = False,
    id: str = "id",
    ood: str | None = "ood",
    cases: Iterable[str] | None = None,
    n_labels: Mapping[str, int] | None = None,
    chance: Mapping[str, float] | None = None,
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
        With seeds-last a flag is True if it is for any seed.

    Args:
        table: runs: checkpoint, sparsity, seed, dataset, case, accuracy, as fractions. The grid is
            every sparsity and every seed that stands in it.
        full: accuracies of the full models: a table with checkpoint, dataset, case, accuracy, or a
            mapping from these three to the accuracy.
        margin: how far from the full model a subnetwork may be.
        average: what is averaged over seeds, accuracies (the paper) or sizes.
        monotone: stop at the first sparsity that fails, or that no run measured.
        one_sided: a subnetwork that is better than the full model always passes. By default one
            that is better by more than the margin fails: it does not do what the model does.
        id: name of the in-domain dataset.
        ood: name of the other; None for in-domain alone.
        cases: the cases of `ood` to use, such as the adversarial ones; default all.
        n_labels: number of labels of each dataset; chance is one over it.
        chance: chance level of each dataset, instead of `n_labels`. That of mix is their mean.
    """
    _check(margin, average)
    settings = {"id": id, "ood": ood, "cases": cases}
    compared = compare(table, full, margin=margin, one_sided=one_sided, **settings)
    levels = _levels(n_labels, chance, id, ood)
    rows = []
    groups: Any = compared.groupby(["checkpoint", "target"], sort=False)
    for (checkpoint, target), part in groups:
        if average == "seeds-first":
            found = _seeds_first(part, margin, monotone, one_sided)
        else:
            found = _seeds_last(part, monotone)
        level = levels.get(str(target))
        at_floor = (
            pd.NA if level is None else bool(part["full"].iloc[0] <= level + margin + ROUNDING)
        )
        missing = int(part["accuracy"].isna().sum())
        rows.append(
            {"checkpoint": checkpoint, "target": target}
            | found
            | {"full": part["full"].iloc[0], "floor": at_floor, "missing": missing}
        )
    names = ("checkpoint", "target", "effective_size", "std", "sparsity", "full", "accuracy")
    flags = ("seeds", "ceiling", "none_passes", "floor", "missing", "non_monotone")
    return pd.DataFrame(rows)[[*names, *flags]].astype({"floor": "boolean"})


def compare(
    table: pd.DataFrame,
    full: FullModels,
    *,
    margin: float = 0.03,
    one_sided: bool = False,
    id: str = "id",
    ood: str | None = "ood",
    cases: Iterable[str] | None = None,
) -> pd.DataFrame:
    """Every run of the grid against its full model: the numbers behind `effective_size`.

    Columns: checkpoint, target, sparsity, seed, full, accuracy (NaN if the run or one of its cases
    is missing), drop (full - accuracy), passes. The arguments are those of `effective_size`.
    """
    runs, whole = run_table(table), full_table(full)
    parts = {"id": _cells(runs, id, None, "id")}
    if ood is not None:
        parts["ood"] = _cells(runs, ood, cases, "ood")
    with_full(pd.concat(parts.values()), whole)
    order = dict.fromkeys(name for name in whole["checkpoint"] if name in set(runs["checkpoint"]))
    grid = pd.MultiIndex.from_product(
        [list(order), sorted(runs["sparsity"].unique()), sorted(runs["seed"].unique())],
        names=["checkpoint", "sparsity", "seed"],
    )
    found = {target: _means(part, whole, grid) for target, part in parts.items()}
    if ood is not None:
        found["mix"] = (found["id"] + found["ood"]) / 2
    tables = [part.reset_index().assign(target=target) for target, part in found.items()]
    compared = pd.concat(tables, ignore_index=True)
    compared["drop"] = compared["full"] - compared["accuracy"]
    compared["passes"] = _passes(compared["drop"], margin, one_sided)
    place = compared["checkpoint"].map({name: at for at, name in enumerate(order)})
    compared = compared.iloc[np.argsort(place.to_numpy(), kind="stable")]
    names = ("checkpoint", "target", "sparsity", "seed", "full", "accuracy", "drop", "passes")
    return compared[list(names)].reset_index(drop=True)


def _cells(
    runs: pd.DataFrame, dataset: str, cases: Iterable[str] | None, argument: str
) -> pd.DataFrame:
    """The runs' rows on one dataset, all cases or the given ones."""
    part = runs.loc[runs["dataset"] == dataset]
    if part.empty:
        raise HcLensError(
            f"expected a dataset of the runs, got {argument}={dataset!r}; they have "
            f"{runs['dataset'].unique().tolist()}"
        )
    if cases is None:
        return part
    wanted = [cases] if isinstance(cases, str) else list(cases)
    known = part["case"].unique().tolist()
    unknown = [case for case in wanted if case not in known]
    if unknown or not wanted:
        raise HcLensError(
            f"expected cases of {dataset!r}, got {unknown[0] if unknown else 'none'!r}; it has "
            f"{known[:20]}"
        )
    return part.loc[part["case"].isin(wanted)]


def _means(part: pd.DataFrame, whole: pd.DataFrame, grid: pd.MultiIndex) -> pd.DataFrame:
    """Mean over cases of each run of the grid and of its full model; NaN unless all are there."""
    wanted = part["case"].unique()
    grouped: Any = part.groupby(["checkpoint", "sparsity", "seed"])["accuracy"]
    accuracy = grouped.mean().where(grouped.size() == len(wanted)).reindex(grid)
    inside = whole.loc[(whole["dataset"] == part["dataset"].iloc[0]) & whole["case"].isin(wanted)]
    by_model: Any = inside.groupby("checkpoint")["accuracy"]
    known = by_model.mean().reindex(grid.get_level_values("checkpoint"))
    return pd.DataFrame({"full": known.to_numpy(), "accuracy": accuracy.to_numpy()}, index=grid)


def _passes(drop: pd.Series, margin: float, one_sided: bool) -> pd.Series:
    # NaN compares as False: what was not measured does not pass.
    return (drop if one_sided else drop.abs()) <= margin + ROUNDING


def _seeds_first(
    part: pd.DataFrame, margin: float, monotone: bool, one_sided: bool
) -> dict[str, Any]:
    grouped: Any = part.groupby("sparsity")
    accuracy = grouped["accuracy"].mean()
    full = part["full"].iloc[0]
    found = _largest(_passes(full - accuracy, margin, one_sided), accuracy.notna(), monotone)
    reached = accuracy.get(found["sparsity"], full if found["none_passes"] else math.nan)
    seeds = int(grouped["accuracy"].count().min())
    size = 100 * (1 - found["sparsity"])
    return {**found, "effective_size": size, "std": math.nan, "accuracy": reached, "seeds": seeds}


def _seeds_last(part: pd.DataFrame, monotone: bool) -> dict[str, Any]:
    by_seed = [
        _largest(rows["passes"], rows["accuracy"].notna(), monotone)
        for _, rows in part.set_index("sparsity").groupby("seed")
        if rows["accuracy"].notna().any()
    ]
    sparsities = pd.Series([found["sparsity"] for found in by_seed], dtype=float)
    flags = {
        name: any(found[name] for found in by_seed)
        for name in ("ceiling", "none_passes", "non_monotone")
    }
    numbers = {"sparsity": sparsities.mean(), "effective_size": 100 * (1 - sparsities.mean())}
    spread = {"std": 100 * sparsities.std(), "accuracy": math.nan, "seeds": len(by_seed)}
    return {**flags, **numbers, **spread}


def _largest(passes: pd.Series, measured: pd.Series, monotone: bool) -> dict[str, Any]:
    """The largest sparsity that passes, of series by rising sparsity, with what to know.

    NaN if nothing was measured.
    """
    values = passes.to_numpy(dtype=bool)
    n_first = len(values) if values.all() else int(np.argmin(values))
    n_last = int(np.flatnonzero(values)[-1]) + 1 if values.any() else 0
    n = n_first if monotone else n_last
    known = values[measured.to_numpy(dtype=bool)]
    return {
        "sparsity": float(passes.index[n - 1]) if n else (0.0 if len(known) else math.nan),
        "ceiling": n == len(values),
        "none_passes": n == 0 and len(known) > 0,
        "non_monotone": bool((np.diff(known.astype(int)) > 0).any()),
    }


def _levels(
    n_labels: Mapping[str, int] | None,
    chance: Mapping[str, float] | None,
    id: str,
    ood: str | None,
) -> dict[str, float]:
    """Chance level of each target that has one."""
    if n_labels is not None and chance is not None:
        raise HcLensError("expected n_labels= or chance=, got both; give one of them")
    given = {name: 1 / n for name, n in n_labels.items()} if n_labels else dict(chance or {})
    datasets = {"id": id, "ood": ood}
    unknown = [name for name in given if name not in datasets.values()]
    if unknown:
        raise HcLensError(
            f"expected chance levels of the datasets {[id, ood]}, got one of {unknown[0]!r}; name "
            "the datasets as in the table"
        )
    levels = {target: given[name] for target, name in datasets.items() if name in given}
    if len(levels) == 2:
        levels["mix"] = (levels["id"] + levels["ood"]) / 2
    return levels


def _check(margin: float, average: str) -> None:
    if not 0 <= margin < 1:
        raise HcLensError(
            f"expected the margin as a fraction of 0 or more and below 1, got {margin}; 3 points "
            "are 0.03"
        )
    if average not in AVERAGES:
        raise HcLensError(f"expected average among {list(AVERAGES)}, got {average!r}; choose one")
