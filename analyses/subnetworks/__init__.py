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
5. `spread` and `by_sparsity` are about the accuracies of the runs, or another measure of them, case
   by case. `by_side` puts the
   cases that the heuristic gets right beside those that it gets wrong: a subnetwork that gives one
   answer to everything gains on one side what it loses on the other.

Subnetworks come as ``{(checkpoint, sparsity, seed): Subnetwork}``, as in the ``subnetworks`` of
`hc.sweep`; `select` chooses among them. All other functions take those of one checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import combinations
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
from jaxtyping import Float, Int
from scipy.stats import hypergeom

from hc_lens.analyses.statistics import Correlation, rank_correlation
from hc_lens.analyses.tables import (
    ABOUT,
    ACCURACY,
    CELL,
    RUN,
    FullModels,
    RunTable,
    full_table,
    run_table,
    with_full,
)
from hc_lens.errors import HcLensError, check_choice
from hc_lens.metrics import by_side as compared
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
    """Share of the early core that is in the final one, 1 if it survives; NaN if it is empty."""
    expected: float
    """That share if the final core were a random set of its size."""
    tail: float
    """Probability that such a random set shares at least as many units."""


def select(
    subnetworks: Mapping[Key, Subnetwork],
    *,
    checkpoint: str | None = None,
    sparsities: Collection[float] | None = None,
    seeds: Collection[int] | None = None,
) -> dict[Key, Subnetwork]:
    """The subnetworks of one checkpoint, of some sparsities, of some seeds."""
    found = {
        key: network
        for key, network in subnetworks.items()
        if checkpoint in (None, key[0])
        and (sparsities is None or np.isclose(key[1], [*sparsities]).any())
        and (seeds is None or key[2] in seeds)
    }
    if not found:
        raise HcLensError(
            f"expected subnetworks of checkpoint {checkpoint!r}, sparsities {sparsities} and seeds "
            f"{seeds} (None is any), got none among {list(subnetworks)[:3]} (of "
            f"{len(subnetworks)}); choose others"
        )
    return found


def frequencies(subnetworks: Mapping[Key, Subnetwork], units: Kind = "heads") -> pd.DataFrame:
    """How often each unit is kept, per sparsity.

    Columns: unit, sparsity, count (runs that keep it), runs, frequency (their ratio).
    """
    runs: Any = _kept(subnetworks, units).groupby("sparsity")
    table = runs.sum().T.rename_axis("unit").unstack().rename("count").reset_index()
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
    kept = _kept(subnetworks, units)
    return kept.columns[kept.sum() >= _needed(fraction, len(kept))].tolist()


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

    With a `fraction` below 1 the expectation stays exact, and the tail is simulated with `n_draws`
    draws. `within` says what is random: which units of the model, or which of each layer, with each
    run's number of units in that layer given.
    """
    check_choice("within", within, get_args(Within))
    kept = _kept(subnetworks, units)
    needed = _needed(fraction, len(kept))
    layers = [label.partition(".")[0] if within == "layer" else "" for label in kept.columns]
    groups = [(len(part), part.sum().tolist()) for _, part in kept.T.groupby(layers, sort=False)]
    size = int((kept.sum() >= needed).sum())
    expected = sum(n * at_least([k / n for k in ks], needed) for n, ks in groups)
    exact = needed == len(kept)
    if exact:
        total = reduce(np.convolve, [intersection(n, ks) for n, ks in groups])
        tail = float(total[size:].sum())
    else:
        rng = np.random.default_rng(seed)
        drawn = np.sum([simulated(n, ks, needed, n_draws, rng) for n, ks in groups], axis=0)
        tail = (int((drawn >= size).sum()) + 1) / (n_draws + 1)
    sizes = tuple(kept.sum(axis=1).tolist())
    return Chance(size, expected, min(tail, 1.0), exact, len(kept.columns), sizes)


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
    counts = reduce(np.convolve, [[1 - chance, chance] for chance in chances], np.ones(1))
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
    kept = _kept(subnetworks, units)
    rows = []
    for (key_a, a), (key_b, b) in combinations(zip(subnetworks, kept.to_numpy(), strict=True), 2):
        sizes = int(a.sum()), int(b.sum())
        shared = np.arange(min(sizes) + 1)
        ratio = shared / (sum(sizes) - shared) if sum(sizes) else np.ones(1)
        expected = float((hypergeom.pmf(shared, len(kept.columns), *sizes) * ratio).sum())
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
    known, theirs = (_kept(networks, units).columns for networks in (early, final))
    if not known.equals(theirs):
        raise HcLensError(
            f"expected checkpoints of one architecture, got one with {len(known)} {units} and one "
            f"with {len(theirs)}; compare checkpoints of the same training run"
        )
    first, last = core(early, fraction, units), core(final, fraction, units)
    shared = [label for label in first if label in last]
    share = len(shared) / len(first) if first else math.nan
    tail = float(hypergeom.sf(len(shared) - 1, len(known), len(last), len(first)))
    expected = len(last) / len(known)
    return EarlyCore(tuple(first), tuple(last), tuple(shared), share, expected, tail)


def spread(table: RunTable, full: FullModels, measure: str = ACCURACY) -> pd.DataFrame:
    """How far seeds of one sparsity lie apart (Tables 5 and 7), accuracies as fractions.

    Columns: checkpoint, sparsity (as it was asked for), dataset, case, side and n if the table has
    them, full (the full model's accuracy), min, max, mean, std (over seeds, with n - 1; NaN for one
    seed), seeds (their number; runs that are missing do not count). Another `measure` is a column
    of the runs, such as ``"kl"``.
    `hc_lens.analyses.tables` says what the tables of the runs and of the full models have.
    """
    runs = with_full(table, full, measure)
    return _summary(runs, ["checkpoint"], ["sparsity", *CELL, "full"], measure)


def by_sparsity(table: RunTable, full: FullModels, measure: str = ACCURACY) -> pd.DataFrame:
    """Accuracy against sparsity, a curve for each checkpoint, dataset and case (Figure 4).

    Columns: checkpoint, dataset, case, sparsity, side and n if the table has them, min, max, mean,
    std, seeds. Every curve begins with the full model at sparsity 0. Another `measure` is a column
    of the runs, such as ``"kl"``.
    """
    runs, curve = with_full(table, full, measure), ["checkpoint", *CELL]
    start = runs.drop_duplicates(curve)
    start = start.assign(**{measure: start["full"], "sparsity": 0.0})
    return _summary(pd.concat([start, runs]), curve, ["sparsity"], measure)


def by_side(table: pd.DataFrame, full: FullModels) -> pd.DataFrame:
    """Friendly beside adversarial cases, for every run and for its full model.

    Args:
        table: runs as in `spread`, with the column side.
        full: accuracies of the full models.

    Returns:
        One row for each run and each dataset that has both sides. Columns: checkpoint, sparsity,
        seed, dataset, friendly and adversarial (means of the accuracy over the cases of that side),
        balanced (the mean of both), full_friendly, full_adversarial and full_balanced (the same of
        the full model), said (the label that is said most) and said_share (how often it is), both
        missing for prompts.
    """
    runs = run_table(table)
    if "side" not in runs:
        raise HcLensError(
            "expected the column side in the table of runs (friendly or adversarial for every "
            f"case), got {', '.join(map(str, table.columns))}; evaluate with a task that names the "
            "label of its heuristic, or with prompts that have sides, or add the column"
        )
    # The shares of the labels are read here and nowhere else.
    shares = table.filter(regex="^share_").reset_index(drop=True)
    found = compared(pd.concat([runs, shares], axis=1), [*RUN, "dataset"])
    cells = runs[[*CELL, "side"]].drop_duplicates()
    whole = compared(full_table(full).merge(cells, on=list(CELL)), ["checkpoint", "dataset"])
    names = {name: f"full_{name}" for name in ("friendly", "adversarial", "balanced")}
    whole = whole.rename(columns=names)[["checkpoint", "dataset", *names.values()]]
    joined = found.merge(whole, on=["checkpoint", "dataset"], how="left")
    order = [*RUN, "dataset", *names, *names.values(), "said", "said_share"]
    return joined.loc[joined["balanced"].notna(), order].reset_index(drop=True)


def _summary(table: pd.DataFrame, curve: list[str], along: list[str], measure: str) -> pd.DataFrame:
    """A measure over seeds, with the sparsities of each curve in order."""
    about = {name: (name, "first") for name in ABOUT if name in table}
    measures = {name: (measure, name) for name in ("min", "max", "mean", "std")}
    cells: Any = table.groupby([*curve, *along], sort=False)
    found: Any = cells.agg(**about, **measures, seeds=(measure, "count")).reset_index()
    curves = [
        part.sort_values("sparsity", kind="stable") for _, part in found.groupby(curve, sort=False)
    ]
    return pd.concat(curves, ignore_index=True)


def _kept(subnetworks: Mapping[Any, Subnetwork], units: Kind) -> pd.DataFrame:
    """Which of the units looked at each run keeps: a row for each run, a column for each unit."""
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
    keep = np.stack([network.keep.cpu().numpy() for network in subnetworks.values()])
    runs = pd.MultiIndex.from_tuples(subnetworks, names=RUN)
    chosen = [units == "all" or unit.is_head == (units == "heads") for unit in spaces[0]]
    return pd.DataFrame(keep, index=runs, columns=spaces[0].labels).loc[:, chosen]


def _needed(fraction: float, runs: int) -> int:
    if not 0 < fraction <= 1:
        raise HcLensError(
            f"expected a fraction above 0 and at most 1, got {fraction}; 1 asks for all subnetworks"
        )
    # 0.7 * 10 is a little above 7 in floating point.
    return max(1, math.ceil(fraction * runs - 1e-9))
