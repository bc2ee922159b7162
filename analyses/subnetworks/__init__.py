"""What the subnetworks of a sweep share, and how differently they generalise.

Section 4 of Bhaskar, Friedman and Chen (2024).

1. The frequency of a head at a sparsity is the share of that sparsity's subnetworks that keep it.
   `frequency_table` counts heads by their two frequencies (Figures 5 and 11), `spearman`
   correlates them.
2. The core is the heads that every subnetwork keeps, all seeds and all sparsities together.
3. Chance: run r keeps k_r of n heads. If each run chose its heads independently and at random, the
   core would hold ``n * prod(k_r / n)`` heads on average. Its size has an exact distribution: of i
   heads still shared, run r leaves a hypergeometric number. A mask also removes MLPs; k_r counts
   the heads that the run really kept. ``within="layer"`` draws within each layer, so that a
   preference for some layers is no longer evidence of a core.
4. `jaccard` compares subnetworks two by two. `early_core` asks whether the core of a checkpoint
   from before the model generalised is still in the final one.
5. `spread` is the layout of Tables 5 and 7 (Figures 2, 3 and 12), `by_sparsity` that of Figure 4.

Subnetworks come as ``{(checkpoint, sparsity, seed): Subnetwork}``, as in the ``subnetworks`` of
`hc.sweep`; `select` chooses among them. All other functions take those of one checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Int
from scipy.stats import hypergeom

from analyses.statistics import Correlation, rank_correlation
from analyses.tables import CELL, FullModels, in_order, run_table, with_full
from hc_lens.errors import HcLensError, check_choice
from hc_lens.pruning.subnetwork import Subnetwork

Key = tuple[str, float, int]
"""Checkpoint, sparsity and seed of a run."""
Kind = Literal["heads", "mlps", "all"]
"""Which units of a subnetwork are looked at."""
Within = Literal["model", "layer"]
"""Which units may stand for each other under chance: those of the model, or of one layer."""


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
        """Whether the early core has units, all of which are in the final one."""
        return bool(self.early) and len(self.shared) == len(self.early)


def select(
    subnetworks: Mapping[Key, Subnetwork],
    *,
    checkpoint: str | None = None,
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
    runs: Any = pd.DataFrame(kept, columns=labels).groupby([key[1] for key in subnetworks])
    counts = runs.sum().rename_axis("sparsity").reset_index()
    table = counts.melt("sparsity", var_name="unit", value_name="count")
    table = table.sort_values("sparsity", kind="stable", ignore_index=True)
    table["runs"] = table["sparsity"].map(runs.size())
    table["frequency"] = table["count"] / table["runs"]
    return table.loc[:, ["unit", "sparsity", "count", "runs", "frequency"]]


def at_sparsity(table: pd.DataFrame, sparsity: float) -> pd.DataFrame:
    """The rows of one sparsity, in their order."""
    found = table.loc[np.isclose(table["sparsity"], sparsity)]
    if found.empty:
        raise HcLensError(
            f"expected a sparsity of the table, got {sparsity}; it has "
            f"{sorted(table['sparsity'].unique().tolist())}"
        )
    return found


def frequency_table(table: pd.DataFrame, rows: float, columns: float) -> pd.DataFrame:
    """Number of units by how many subnetworks keep them at two sparsities of `frequencies`.

    The counts at the sparsity `rows` are the rows, those at `columns` the columns.
    """
    first, second = at_sparsity(table, rows), at_sparsity(table, columns)
    counted = pd.crosstab(first["count"].to_numpy(), second["count"].to_numpy())
    counted = counted.reindex(
        index=range(first["runs"].iloc[0] + 1),
        columns=range(second["runs"].iloc[0] + 1),
        fill_value=0,
    )
    return counted.rename_axis(index=f"count at {rows:g}", columns=f"count at {columns:g}")


def spearman(table: pd.DataFrame, first: float, second: float) -> Correlation:
    """Rank correlation of the units' frequencies at two sparsities of `frequencies`."""
    ours, theirs = (at_sparsity(table, sparsity)["frequency"] for sparsity in (first, second))
    return rank_correlation(ours.to_numpy(), theirs.to_numpy())


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
    within: Within = "model",
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
    check_choice("within", within, get_args(Within))
    labels, kept = _kept(subnetworks, units)
    needed = _needed(fraction, len(kept))
    layers = [label.partition(".")[0] if within == "layer" else "" for label in labels]
    by_layer = pd.DataFrame(kept.T).groupby(layers, sort=False)
    groups = [(len(part), part.sum().tolist()) for _, part in by_layer]
    size = int((kept.sum(0) >= needed).sum())
    expected = sum(n * at_least([k / n for k in ks], needed) for n, ks in groups)
    exact = needed == len(kept)
    if exact:
        total = np.ones(1)
        for n, ks in groups:
            total = np.convolve(total, intersection(n, ks))
        tail = float(total[size:].sum())
    else:
        rng = np.random.default_rng(seed)
        drawn = np.zeros(n_draws, dtype=np.int64)
        for n, ks in groups:
            drawn += simulated(n, ks, needed, n_draws, rng)
        tail = (int((drawn >= size).sum()) + 1) / (n_draws + 1)
    return Chance(size, expected, min(tail, 1.0), exact, len(labels), tuple(kept.sum(1).tolist()))


def intersection(n: int, kept: Sequence[int]) -> Float[np.ndarray, "sizes"]:
    """Probability of each size 0..n of the intersection of random sets of k_r out of n units.

    After each set the number j that is left of i shared units is hypergeometric:
    ``P(j) = sum over i of P(i) C(i, j) C(n - i, k - j) / C(n, k)``.
    """
    sizes = np.arange(n + 1)
    chances = np.zeros(n + 1)
    chances[n] = 1.0
    for k in kept:
        chances = chances @ hypergeom.pmf(sizes[None, :], n, sizes[:, None], k)
    return chances


def at_least(chances: Sequence[float], needed: int) -> float:
    """Probability of at least `needed` successes in independent trials with these chances."""
    counts = np.ones(1)
    for chance in chances:
        counts = np.convolve(counts, [1 - chance, chance])
    return float(counts[needed:].sum())


def simulated(
    n: int, kept: Sequence[int], needed: int, n_draws: int, rng: np.random.Generator
) -> Int[np.ndarray, "draws"]:
    """Simulated numbers of units that at least `needed` random sets share."""
    counts = np.zeros((n_draws, n), dtype=np.int64)
    for k in kept:
        ranks = rng.random((n_draws, n)).argsort(1)
        counts += ranks < k
    return (counts >= needed).sum(1)


def jaccard(subnetworks: Mapping[Key, Subnetwork], units: Kind = "heads") -> pd.DataFrame:
    """The overlap of every two subnetworks.

    Columns: sparsity_a, seed_a, sparsity_b, seed_b, both (units in both), either, jaccard (their
    ratio; 1 for two empty sets), expected (its mean for random sets of the same two sizes).
    """
    labels, kept = _kept(subnetworks, units)
    rows = []
    for (key_a, a), (key_b, b) in combinations(zip(subnetworks, kept, strict=True), 2):
        sizes = int(a.sum()), int(b.sum())
        shared = np.arange(min(sizes) + 1)
        ratio = shared / (sum(sizes) - shared) if sum(sizes) else np.ones(1)
        expected = float((hypergeom.pmf(shared, len(labels), *sizes) * ratio).sum())
        both = int((a & b).sum())
        rows.append((*key_a[1:], *key_b[1:], both, sum(sizes) - both, ratio[both], expected))
    names = ("sparsity_a", "seed_a", "sparsity_b", "seed_b", "both", "either", "jaccard")
    return pd.DataFrame(rows, columns=[*names, "expected"])


def early_core(
    early: Mapping[Key, Subnetwork],
    final: Mapping[Key, Subnetwork],
    fraction: float = 1.0,
    units: Kind = "heads",
) -> EarlyCore:
    """Whether the core of an early checkpoint survives in that of the same model's final one."""
    first, last = core(early, fraction, units), core(final, fraction, units)
    (labels, _), (theirs, _) = _kept(early, units), _kept(final, units)
    if labels != theirs:
        raise HcLensError(
            f"expected checkpoints of one architecture, got one with {len(labels)} {units} and one "
            f"with {len(theirs)}; compare checkpoints of the same training run"
        )
    shared = [label for label in first if label in last]
    share = len(shared) / len(first) if first else math.nan
    tail = float(hypergeom.sf(len(shared) - 1, len(labels), len(last), len(first)))
    expected = len(last) / len(labels)
    return EarlyCore(tuple(first), tuple(last), tuple(shared), share, expected, tail)


def spread(table: pd.DataFrame, full: FullModels) -> pd.DataFrame:
    """How far seeds of one sparsity lie apart (Tables 5 and 7), as fractions.

    Columns: checkpoint, sparsity, dataset, case, full (the full model's accuracy), min, max, mean,
    std (over seeds, with n - 1; NaN for one seed), seeds (their number).

    Args:
        table: runs: checkpoint, sparsity, seed, dataset, case, accuracy.
        full: accuracies of the full models: a table with checkpoint, dataset, case, accuracy, or a
            mapping from these three to the accuracy.
    """
    joined = with_full(table, full)
    found = _summary(joined, ["checkpoint", "sparsity", *CELL, "full"])
    return in_order(found, joined["checkpoint"], "sparsity")


def by_sparsity(table: pd.DataFrame, full: FullModels | None = None) -> pd.DataFrame:
    """Accuracy against sparsity, a curve for each checkpoint, dataset and case (Figure 4).

    Columns: checkpoint, dataset, case, sparsity, min, max, mean, std, seeds. With `full`, every
    curve begins with the full model at sparsity 0.
    """
    runs, curve = run_table(table), ["checkpoint", *CELL]
    if full is not None:
        start = with_full(runs, full).drop_duplicates(curve)
        start = start.assign(accuracy=start["full"], sparsity=0.0)
        runs = pd.concat([start, runs], ignore_index=True)
    curves: Any = _summary(runs, [*curve, "sparsity"]).groupby(curve, sort=False)
    return pd.concat([rows.sort_values("sparsity") for _, rows in curves], ignore_index=True)


def _summary(table: pd.DataFrame, names: list[str]) -> pd.DataFrame:
    measures = {name: ("accuracy", name) for name in ("min", "max", "mean", "std")}
    grouped: Any = table.groupby(names, sort=False)
    return grouped.agg(**measures, seeds=("accuracy", "size")).reset_index()


def _kept(
    subnetworks: Mapping[Any, Subnetwork], units: Kind
) -> tuple[list[str], Bool[np.ndarray, "runs units"]]:
    """Labels of the units looked at, and which of them each run keeps."""
    if not subnetworks:
        raise HcLensError("expected at least one subnetwork, got none; is the sweep done?")
    check_choice("units", units, get_args(Kind))
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
    chosen = [units == "all" or unit.is_head == (units == "heads") for unit in spaces[0]]
    labels = [str(unit) for unit, wanted in zip(spaces[0], chosen, strict=True) if wanted]
    kept = np.stack([network.keep.cpu().numpy() for network in subnetworks.values()])
    return labels, kept[:, np.array(chosen)]


def _needed(fraction: float, runs: int) -> int:
    if not 0 < fraction <= 1:
        raise HcLensError(
            f"expected a fraction above 0 and at most 1, got {fraction}; 1 asks for all subnetworks"
        )
    # 0.7 * 10 is a little above 7 in floating point.
    return max(1, math.ceil(fraction * runs - 1e-9))
