"""Which pairs of units interact? An estimate of all pairs from one gradient pass per unit.

Exact pair effects cost one run per pair. This screen costs one run per unit.

1. Let f(m) be a mean over rows under the mask m: of the gold label's probability, or of its
   log-odds. The super-additivity of a pair is
   ``excess(i, j) = -(f(i and j removed) - f(i removed) - f(j removed) + f(nothing removed))``.
2. ``method="gradient"``: remove i for good and take the gradient of f with respect to all other
   entries of the mask. The effect of then removing j is about minus that gradient, so
   ``excess(i, j)`` is about ``df/dm_j (i removed) - df/dm_j (nothing removed)``. Exact in i, linear
   in j; both orders are averaged.
3. ``method="hessian"``: second order in both. ``excess(i, j)`` is about minus the Hessian of f at
   the full model, one Hessian-vector product per unit.
4. The estimate is only as good as it turns out to be: the pairs with the largest estimates and a
   random sample of the others are measured exactly, and the rank correlation between estimate and
   measurement is part of the result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from scipy.stats import spearmanr
from torch import Tensor
from tqdm.auto import tqdm

from analyses.superadditive import excess
from hc_lens.ablate import masked
from hc_lens.errors import HcLensError
from hc_lens.scan import scan_rows
from hc_lens.sources import Source, as_source
from hc_lens.suffix.blocks import is_row_wise
from hc_lens.suffix.engine import take_rows
from hc_lens.suffix.sets import set_label
from hc_lens.units import Unit, UnitSpace

METHODS = ("gradient", "hessian")
MEASURES = ("probability", "logit")


@dataclass(frozen=True)
class Screen:
    """Estimated interactions of all pairs, and how far they can be trusted."""

    estimates: pd.DataFrame
    """Every pair: set, estimate; the most super-additive first."""
    measured: pd.DataFrame
    """The pairs that were measured: set, estimate, top, random (why it was measured), excess, low,
    high (of the measure), accuracy_excess."""
    correlations: pd.DataFrame
    """Spearman's rank correlation of the estimate with the measurement: pairs (random or top),
    against (the measure or accuracy), n, spearman, p. Only the random pairs stand for the pool."""

    @property
    def spearman(self) -> float:
        """Rank correlation with the measured interactions over the random pairs."""
        return float(self.correlations["spearman"].iloc[0])


def screen(
    model: Any,
    batches: Any,
    means: Source | str,
    units: Iterable[Unit | str] | None = None,
    *,
    case: str | None = None,
    method: str = "gradient",
    measure: str = "probability",
    top: int = 20,
    check: int | None = 40,
    n_resamples: int = 2000,
    seed: int = 0,
    memory: int | str = "1GB",
    progress: bool = True,
) -> Screen:
    """Estimate the interaction of every pair of units; measure the largest and a random sample.

    Args:
        model: a classifier of `hc.load`.
        batches: `hc.Batches` with labels.
        means: what replaces a removed unit.
        units: the pool; default every unit of the model.
        case: use the rows of this case only.
        method: ``"gradient"`` or ``"hessian"``.
        measure: ``"probability"`` of the gold label, or its log-odds, ``"logit"``.
        top: how many of the most super-additive pairs to measure.
        check: how many pairs to measure that are drawn at random from all; None measures all.
        n_resamples: bootstrap resamples of the measured excess.
        seed: of the draw and of the bootstrap.
        memory: as in `hc.scan`.
        progress: show progress bars.
    """
    space, source = UnitSpace.of(model), as_source(means)
    source.check(model, space)
    pool = list(space) if units is None else [space[place] for place in space.indices(units)]
    _check(pool, method, measure, top, check)
    chosen = batches if case is None else CaseBatches(batches, case)
    if case is not None and not is_row_wise(source):
        raise HcLensError(
            f"expected no case= with {type(source).__name__}, which needs the rows of a batch "
            "together; make batches of this case alone"
        )
    places = [space.index(unit) for unit in pool]
    matrix = _estimate(model, chosen, source, places, method, measure, progress)
    pairs = list(combinations(range(len(pool)), 2))
    estimates = pd.DataFrame(
        {
            "set": [set_label([pool[i], pool[j]]) for i, j in pairs],
            "estimate": [float(matrix[i, j]) for i, j in pairs],
        }
    ).sort_values("estimate", ascending=False, ignore_index=True, kind="stable")
    picked = _picked(estimates, top, check, seed)
    wanted = [label.split("+") for label in picked["set"]]
    members = dict.fromkeys(unit for pair in wanted for unit in pair)
    scanned = scan_rows(
        model, {batches.name: chosen}, means, [*members, *wanted], memory=memory, progress=progress
    )
    # One case for all rows: the screen is of their mean, whatever cases they are of.
    scanned = replace(scanned, rows=scanned.rows.assign(case=case or "all"))
    exact = excess(scanned, wanted, measure=measure, n_resamples=n_resamples, seed=seed)
    right = excess(scanned, wanted, measure="accuracy", n_resamples=n_resamples, seed=seed)
    measured = picked.assign(
        excess=exact["excess"],
        low=exact["low"],
        high=exact["high"],
        accuracy_excess=right["excess"],
    )
    return Screen(estimates, measured, _correlations(measured, measure))


class CaseBatches:
    """The rows of some cases of some batches, with what a scan asks of batches."""

    def __init__(self, batches: Any, *cases: str):
        self._batches, self._cases = batches, frozenset(cases)
        self.name, self.labels = f"{batches.name}/{'+'.join(cases)}", batches.labels
        self.predictions, self.log_probs = batches.predictions, batches.log_probs
        counts = Counter(case for batch in batches for case in batch.cases)
        unknown = [case for case in cases if case not in counts]
        if unknown:
            raise HcLensError(
                f"expected a case among {sorted(counts)}, got {unknown[0]!r}; choose one"
            )
        self.n_rows = sum(counts[case] for case in self._cases)
        rows = [batch.rows for batch in self]
        self._n_batches, self.rows = len(rows), torch.cat(rows).sort().values

    def __len__(self) -> int:
        return self._n_batches

    def __iter__(self) -> Iterator[Any]:
        for batch in self._batches:
            places = [place for place, case in enumerate(batch.cases) if case in self._cases]
            if places:
                yield take_rows(batch, places)


def _estimate(
    model: Any,
    batches: Any,
    source: Source,
    places: list[int],
    method: str,
    measure: str,
    progress: bool,
) -> Float[Tensor, "pool pool"]:
    """The estimated excess of every pair, symmetric; the diagonal means nothing."""
    total = torch.zeros(len(places), len(places), dtype=torch.float64)
    n_rows = 0
    estimate = _by_gradient if method == "gradient" else _by_hessian
    for batch in tqdm(batches, desc="screen", disable=not progress, leave=False):
        if bool((batch.labels < 0).any()):
            raise HcLensError(
                "expected rows with labels, got rows without; scan a task with labels"
            )
        total += estimate(model, batches, batch, source.on(batch), places, measure).double().cpu()
        n_rows += len(batch.rows)
    return (total + total.T) / (2 * n_rows)


def _by_gradient(
    model: Any, batches: Any, batch: Any, source: Source, places: list[int], measure: str
) -> Float[Tensor, "pool pool"]:
    """The change of the gradient when each unit is removed, summed over the rows."""

    def gradient(removed: int | None) -> Tensor:
        mask = _ones(model)
        if removed is not None:
            mask[removed] = 0.0
        mask.requires_grad_()
        total = _total(model, batches, batch, source, mask, measure)
        return torch.autograd.grad(total, mask)[0][places]

    whole = gradient(None)
    return torch.stack([gradient(place) - whole for place in places])


def _by_hessian(
    model: Any, batches: Any, batch: Any, source: Source, places: list[int], measure: str
) -> Float[Tensor, "pool pool"]:
    """Minus the Hessian at the full model, summed over the rows, a row of it at a time."""
    mask = _ones(model).requires_grad_()
    total = _total(model, batches, batch, source, mask, measure)
    (gradient,) = torch.autograd.grad(total, mask, create_graph=True)
    rows = [torch.autograd.grad(gradient[i], mask, retain_graph=True)[0][places] for i in places]
    return -torch.stack(rows)


def _ones(model: Any) -> Float[Tensor, "units"]:
    """A mask that keeps everything, in single precision at least."""
    dtype = torch.promote_types(model.cfg.dtype, torch.float32)
    return torch.ones(len(UnitSpace.of(model)), device=model.cfg.device, dtype=dtype)


def _total(
    model: Any, batches: Any, batch: Any, source: Source, mask: Tensor, measure: str
) -> Float[Tensor, ""]:
    """The measure, summed over the rows of a batch."""
    with torch.enable_grad(), masked(model, mask, source):
        log_probs = batches.log_probs(model(**batch.inputs))
    gold = batch.labels[:, None]
    of_gold = log_probs.gather(1, gold).squeeze(1)
    if measure == "probability":
        return of_gold.exp().sum()
    return (of_gold - log_probs.scatter(1, gold, -torch.inf).logsumexp(1)).sum()


def _picked(estimates: pd.DataFrame, top: int, check: int | None, seed: int) -> pd.DataFrame:
    """The pairs to measure: the largest estimates, and a random sample of all."""
    n_pairs = len(estimates)
    n_random = n_pairs if check is None else min(check, n_pairs)
    drawn = np.random.default_rng(seed).permutation(n_pairs)[:n_random]
    is_top, is_random = np.arange(n_pairs) < top, np.isin(np.arange(n_pairs), drawn)
    chosen = estimates.assign(top=is_top, random=is_random)
    return chosen.loc[is_top | is_random].reset_index(drop=True)


def _correlations(measured: pd.DataFrame, measure: str) -> pd.DataFrame:
    records = []
    for pairs in ("random", "top"):
        group = measured.loc[measured[pairs]]
        for against, column in ((measure, "excess"), ("accuracy", "accuracy_excess")):
            rho, p = np.nan, np.nan
            if len(group) > 2 and len(set(group[column])) > 1:
                rho, p = np.asarray(spearmanr(group["estimate"], group[column]))
            records.append((pairs, against, len(group), rho, p))
    return pd.DataFrame(records, columns=pd.Index(["pairs", "against", "n", "spearman", "p"]))


def _check(pool: list[Unit], method: str, measure: str, top: int, check: int | None) -> None:
    if len(pool) < 2:
        raise HcLensError(f"expected at least two units in the pool, got {len(pool)}; name more")
    if method not in METHODS or measure not in MEASURES:
        raise HcLensError(
            f"expected a method among {METHODS} and a measure among {MEASURES}, got {method!r} and "
            f"{measure!r}; choose one of each"
        )
    if top < 0 or (check is not None and check < 3):
        raise HcLensError(
            f"expected top of at least 0 and check of at least 3 pairs, got {top} and {check}; an "
            "estimate is not given without its rank correlation with the truth"
        )
