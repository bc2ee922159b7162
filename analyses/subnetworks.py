"""What the subnetworks of a sweep share, and how differently they generalise.

Section 4 of Bhaskar, Friedman and Chen (2024).

1. The frequency of a head at a sparsity is the share of that sparsity's subnetworks that keep it.
   `frequency_table` counts heads by their two frequencies (Figures 5 and 11), `spearman`
   correlates them.
2. The core is the heads that every subnetwork keeps, all seeds and all sparsities together.
3. Chance: run r keeps k_r of n heads. If each chose its heads at random and on its own, the core
   would hold ``n * prod(k_r / n)`` heads on average. Its size has an exact distribution: of i
   heads still shared, run r leaves a hypergeometric number. A mask also removes MLPs; k_r counts
   the heads that the run really kept. ``within="layer"`` draws within each layer, so that a taste
   for some layers is no longer evidence of a core.
4. `jaccard` compares subnetworks two by two. `early_core` asks whether the core of a checkpoint
   from before the model generalised is still in the final one.
5. `spread` is the layout of Tables 5 and 7 (Figures 2, 3 and 12), `by_sparsity` that of Figure 4.

Subnetworks come as ``{(checkpoint, sparsity, seed): Subnetwork}``, as in the ``subnetworks`` of
`hc.sweep`; `select` chooses among them. Every function but `select` wants those of one checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
from jaxtyping import Bool
from scipy.stats import hypergeom, spearmanr

from analyses.chance import at_least, intersection, simulated
from analyses.tables import CELL, FullModels, full_table, run_table, with_full
from hc_lens.errors import HcLensError
from hc_lens.store import Subnetwork

Key = tuple[Any, float, int]
"""Checkpoint, sparsity and seed of a run."""
Kind = Literal["heads", "mlps", "all"]
"""Which units of a subnetwork are looked at."""


class Correlation(NamedTuple):
    """A rank correlation of frequencies."""

    rho: float
    """Spearman's rho; NaN if one of the sides is constant."""
    p: float
    """Two-sided p-value, from the t distribution."""
    n: int
    """Number of units."""


@dataclass(frozen=True)
class Chance:
    """The size of a core against independent random subnetworks of the same sizes."""

    size: int
    """Units in the core."""
    expected: float
    """Mean number of units in the core of random subnetworks."""
    tail: float
    """Probability that random subnetworks share at least `size` units."""
    exact: bool
    """Whether `tail` was computed; otherwise it was simulated."""
    units: int
    """Units that a subnetwork chooses from."""
    kept: tuple[int, ...]
    """How many of them each run keeps."""


@dataclass(frozen=True)
class EarlyCore:
    """Whether the core of an early checkpoint is in the core of the final one."""

    early: tuple[str, ...]
    """The early core."""
    final: tuple[str, ...]
    """The final core."""
    shared: tuple[str, ...]
    """Units of both."""
    share: float
    """Share of the early core that is in the final one; NaN if the early core is empty."""
    expected: float
    """That share if the final core were a random set of its size."""
    tail: float
    """Probability that such a random set shares at least as many units."""

    @property
    def survives(self) -> bool:
        """Whether the early core is there and is wholly inside the final one."""
        return bool(self.early) and len(self.shared) == len(self.early)


def select(
    subnetworks: Mapping[Key, Subnetwork],
    *,
    checkpoint: Any = None,
    sparsities: Iterable[float] | None = None,
    seeds: Iterable[int] | None = None,
) -> dict[Key, Subnetwork]:
    """The subnetworks of one checkpoint, of some sparsities, of some seeds."""
    wanted = None if sparsities is None else list(sparsities)
    numbers = None if seeds is None else set(seeds)
    found = {
        key: network
        for key, network in subnetworks.items()
        if (checkpoint is None or key[0] == checkpoint)
        and (wanted is None or any(math.isclose(key[1], given) for given in wanted))
        and (numbers is None or key[2] in numbers)
    }
    if not found:
        raise HcLensError(
            f"expected subnetworks of checkpoint {checkpoint!r}, sparsities {wanted} and seeds "
            f"{numbers} (None is any), got none among {list(subnetworks)[:3]} (of "
            f"{len(subnetworks)}); choose others"
        )
    return found


def frequencies(subnetworks: Mapping[Key, Subnetwork], units: Kind = "heads") -> pd.DataFrame:
    """How often each unit is kept, per sparsity.

    Columns: unit, sparsity, count (runs that keep it), runs, frequency (their ratio).
    """
    labels, kept = _kept(subnetworks, units)
    at = np.array([key[1] for key in subnetworks])
    parts = []
    for sparsity in sorted(set(at.tolist())):
        count = kept[at == sparsity].sum(0)
        runs = int((at == sparsity).sum())
        columns = {"unit": labels, "sparsity": sparsity, "count": count, "runs": runs}
        parts.append(pd.DataFrame({**columns, "frequency": count / runs}))
    return pd.concat(parts, ignore_index=True)


def frequency_table(table: pd.DataFrame, rows: float, columns: float) -> pd.DataFrame:
    """How many units are in so many subnetworks of one sparsity and in so many of another.

    Args:
        table: what `frequencies` returned.
        rows: sparsity whose counts are the rows, from 0 to its number of runs.
        columns: sparsity whose counts are the columns.
    """
    first, second = _at(table, rows), _at(table, columns)
    counted = pd.crosstab(first["count"].to_numpy(), second["count"].to_numpy())
    counted = counted.reindex(
        index=range(first["runs"].iloc[0] + 1),
        columns=range(second["runs"].iloc[0] + 1),
        fill_value=0,
    )
    return counted.rename_axis(index=f"count at {rows:g}", columns=f"count at {columns:g}")


def spearman(table: pd.DataFrame, first: float, second: float) -> Correlation:
    """Rank correlation of the units' frequencies at two sparsities.

    Args:
        table: what `frequencies` returned.
        first: one sparsity.
        second: the other.
    """
    ours = _at(table, first)["frequency"].to_numpy()
    theirs = _at(table, second)["frequency"].to_numpy()
    if len(set(ours)) < 2 or len(set(theirs)) < 2:
        return Correlation(math.nan, math.nan, len(ours))
    found: Any = spearmanr(ours, theirs)
    return Correlation(float(found.statistic), float(found.pvalue), len(ours))


def core(
    subnetworks: Mapping[Key, Subnetwork], fraction: float = 1.0, units: Kind = "heads"
) -> list[str]:
    """Labels of the units in all subnetworks, or in at least a fraction of them."""
    labels, kept = _kept(subnetworks, units)
    inside = kept.sum(0) >= _needed(fraction, len(kept))
    return [label for label, shared in zip(labels, inside, strict=True) if shared]


def chance(
    subnetworks: Mapping[Key, Subnetwork],
    fraction: float = 1.0,
    units: Kind = "heads",
    *,
    within: Literal["model", "layer"] = "model",
    n_draws: int = 10_000,
    seed: int = 0,
) -> Chance:
    """The size of the core against that of independent random subnetworks of the same sizes.

    Args:
        subnetworks: of one checkpoint.
        fraction: as in `core`. The tail is exact for 1; below it is simulated, the expectation
            stays exact.
        units: heads, MLPs or all units.
        within: what is random: which units of the model, or which of each layer, with each run's
            number of units in that layer given.
        n_draws: draws of the simulation.
        seed: of the simulation.
    """
    labels, kept = _kept(subnetworks, units)
    needed = _needed(fraction, len(kept))
    groups = _groups(labels, within)
    counts = [kept[:, group].sum(1).tolist() for group in groups]
    sizes = [len(group) for group in groups]
    size = int((kept.sum(0) >= needed).sum())
    expected = sum(
        n * at_least([k / n for k in ks], needed) for n, ks in zip(sizes, counts, strict=True)
    )
    if needed == len(kept):
        total = np.ones(1)
        for n, ks in zip(sizes, counts, strict=True):
            total = np.convolve(total, intersection(n, ks))
        tail = float(total[size:].sum())
    else:
        rng = np.random.default_rng(seed)
        drawn = np.zeros(n_draws, dtype=np.int64)
        for n, ks in zip(sizes, counts, strict=True):
            drawn += simulated(n, ks, needed, n_draws, rng)
        tail = (int((drawn >= size).sum()) + 1) / (n_draws + 1)
    exact = needed == len(kept)
    return Chance(size, expected, min(tail, 1.0), exact, len(labels), tuple(kept.sum(1).tolist()))


def jaccard(subnetworks: Mapping[Key, Subnetwork], units: Kind = "heads") -> pd.DataFrame:
    """The overlap of every two subnetworks.

    Columns: sparsity_a, seed_a, sparsity_b, seed_b, both (units in both), either, jaccard (their
    ratio; 1 for two empty sets), expected (its mean for random sets of the same two sizes).
    """
    labels, kept = _kept(subnetworks, units)
    keys, sizes, n = list(subnetworks), kept.sum(1), len(labels)
    expected: dict[tuple[int, int], float] = {}
    rows = []
    for a, b in combinations(range(len(keys)), 2):
        both = int((kept[a] & kept[b]).sum())
        pair = (int(sizes[a]), int(sizes[b]))
        if pair not in expected:
            shared = np.arange(min(pair) + 1)
            ratio = np.ones(1) if sum(pair) == 0 else shared / (sum(pair) - shared)
            expected[pair] = float((hypergeom.pmf(shared, n, *pair) * ratio).sum())
        either = sum(pair) - both
        overlap = both / either if either else 1.0
        rows.append((*keys[a][1:], *keys[b][1:], both, either, overlap, expected[pair]))
    names = ("sparsity_a", "seed_a", "sparsity_b", "seed_b", "both", "either", "jaccard")
    return pd.DataFrame(rows, columns=[*names, "expected"])


def early_core(
    early: Mapping[Key, Subnetwork],
    final: Mapping[Key, Subnetwork],
    fraction: float = 1.0,
    units: Kind = "heads",
) -> EarlyCore:
    """Whether the core before generalisation survives in the final core.

    Args:
        early: subnetworks of an early checkpoint.
        final: subnetworks of the final checkpoint of the same model.
        fraction: as in `core`.
        units: heads, MLPs or all units.
    """
    first, last = core(early, fraction, units), core(final, fraction, units)
    (labels, _), (theirs, _) = _kept(early, units), _kept(final, units)
    if labels != theirs:
        raise HcLensError(
            f"expected checkpoints of one architecture, got one with {len(labels)} {units} and one "
            f"with {len(theirs)}; compare checkpoints of one training"
        )
    shared = [label for label in first if label in set(last)]
    n = len(labels)
    share = len(shared) / len(first) if first else math.nan
    tail = float(hypergeom.sf(len(shared) - 1, n, len(last), len(first)))
    return EarlyCore(tuple(first), tuple(last), tuple(shared), share, len(last) / n, tail)


def spread(table: pd.DataFrame, full: FullModels) -> pd.DataFrame:
    """How far seeds of one sparsity lie apart (Tables 5 and 7), as fractions.

    Columns: checkpoint, sparsity, dataset, case, full (the full model's accuracy), min, max, mean,
    std (over seeds, with n - 1; NaN for one seed), seeds (their number).

    Args:
        table: runs: checkpoint, sparsity, seed, dataset, case, accuracy.
        full: accuracies of the full models: a table with checkpoint, dataset, case, accuracy, or a
            mapping from these three to the accuracy.
    """
    joined = with_full(run_table(table), full_table(full))
    names = ["checkpoint", "sparsity", *CELL, "full"]
    found = _summary(joined, names)
    order = {name: place for place, name in enumerate(dict.fromkeys(joined["checkpoint"]))}
    found = found.assign(_at=found["checkpoint"].map(order))
    return found.sort_values(["_at", "sparsity"], kind="stable", ignore_index=True).drop(
        columns="_at"
    )


def by_sparsity(table: pd.DataFrame, full: FullModels | None = None) -> pd.DataFrame:
    """Accuracy against sparsity, one curve a checkpoint, dataset and case (Figure 4).

    Columns: checkpoint, dataset, case, sparsity, min, max, mean, std, seeds. With `full`, every
    curve begins with the full model at sparsity 0.
    """
    runs = run_table(table)
    if full is not None:
        whole = full_table(full)
        with_full(runs, whole)
        start = runs[["checkpoint", *CELL]].drop_duplicates().merge(whole)
        runs = pd.concat([start.assign(sparsity=0.0, seed=0), runs], ignore_index=True)
    found = _summary(runs, ["checkpoint", *CELL, "sparsity"])
    curve: Any = found.groupby(["checkpoint", *CELL], sort=False).ngroup()
    return found.iloc[np.lexsort((found["sparsity"], curve))].reset_index(drop=True)


def _summary(table: pd.DataFrame, names: list[str]) -> pd.DataFrame:
    measures = {name: ("accuracy", name) for name in ("min", "max", "mean", "std")}
    grouped: Any = table.groupby(names, sort=False)
    return grouped.agg(**measures, seeds=("accuracy", "size")).reset_index()


def _kept(
    subnetworks: Mapping[Any, Subnetwork], units: str
) -> tuple[list[str], Bool[np.ndarray, "runs units"]]:
    """Labels of the units looked at, and which of them each run keeps."""
    if not subnetworks:
        raise HcLensError("expected at least one subnetwork, got none; is the sweep done?")
    if units not in ("heads", "mlps", "all"):
        raise HcLensError(f"expected units 'heads', 'mlps' or 'all', got {units!r}; choose one")
    wrong = [key for key in subnetworks if not (isinstance(key, tuple) and len(key) == 3)]
    if wrong:
        raise HcLensError(
            f"expected subnetworks by (checkpoint, sparsity, seed), got the key {wrong[0]!r}; "
            "pass the subnetworks of hc.sweep(...)"
        )
    checkpoints = list(dict.fromkeys(key[0] for key in subnetworks))
    if len(checkpoints) > 1:
        raise HcLensError(
            f"expected subnetworks of one checkpoint, got those of {checkpoints}; choose one with "
            "select(subnetworks, checkpoint=...)"
        )
    spaces = list(dict.fromkeys(network.space for network in subnetworks.values()))
    if len(spaces) > 1:
        raise HcLensError(
            f"expected subnetworks of one architecture, got {spaces[0]} and {spaces[1]}; compare "
            "subnetworks of the same model"
        )
    places = [
        place
        for place, unit in enumerate(spaces[0])
        if units == "all" or unit.is_head == (units == "heads")
    ]
    labels = spaces[0].labels
    kept = np.stack([network.keep.cpu().numpy() for network in subnetworks.values()])
    return [labels[place] for place in places], kept[:, places]


def _needed(fraction: float, runs: int) -> int:
    if not 0 < fraction <= 1:
        raise HcLensError(
            f"expected a fraction above 0 and at most 1, got {fraction}; 1 asks for all subnetworks"
        )
    # 0.7 * 10 is a little above 7 in floating point.
    return max(1, math.ceil(fraction * runs - 1e-9))


def _groups(labels: list[str], within: str) -> list[list[int]]:
    """Places of the units that may stand for each other under chance."""
    if within == "model":
        return [list(range(len(labels)))]
    if within != "layer":
        raise HcLensError(f"expected within 'model' or 'layer', got {within!r}; choose one")
    groups: dict[str, list[int]] = {}
    for place, label in enumerate(labels):
        groups.setdefault(label.partition(".")[0], []).append(place)
    return list(groups.values())


def _at(table: pd.DataFrame, sparsity: float) -> pd.DataFrame:
    """The rows of one sparsity, in the order of the units."""
    found = table.loc[np.isclose(table["sparsity"], sparsity)]
    if found.empty:
        raise HcLensError(
            f"expected a sparsity of the table, got {sparsity}; it has "
            f"{sorted(table['sparsity'].unique().tolist())}"
        )
    return found
