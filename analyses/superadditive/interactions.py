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

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from analyses.statistics import rank_correlation
from analyses.superadditive.config import ExcessConfig, ScreenConfig
from analyses.superadditive.drops import excess
from hc_lens.data.batches import Batches
from hc_lens.errors import HcLensError
from hc_lens.masks.ablate import masked
from hc_lens.masks.replacements import Source, as_source
from hc_lens.metrics import log_odds
from hc_lens.protocols import BatchLike, Model
from hc_lens.scans.scan import scan_rows
from hc_lens.units import Unit, UnitSpace, set_label

DEFAULTS = ScreenConfig()
Total = Callable[[Float[Tensor, "units"]], Float[Tensor, ""]]
"""What `_total` is for one batch: a function of the mask."""


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
    model: Model,
    batches: Batches,
    means: Source | str,
    units: Iterable[Unit | str] | None = None,
    config: ScreenConfig = DEFAULTS,
    *,
    progress: bool = True,
) -> Screen:
    """Estimate the interaction of every pair of units; measure the largest and a random sample.

    Args:
        model: a classifier of `hc.load`.
        batches: `hc.Batches` with labels.
        means: what replaces a removed unit.
        units: the pool; by default every unit of the model.
        config: the method, the measure, and which pairs are measured.
        progress: show progress bars.
    """
    space, source = UnitSpace.of(model), as_source(means)
    source.check(model, space)
    pool = range(len(space)) if units is None else space.indices(units)
    if len(pool) < 2:
        raise HcLensError(f"expected at least two units in the pool, got {len(pool)}; name more")
    if config.case is not None and not source.row_wise:
        raise HcLensError(
            f"expected no case with {type(source).__name__}, which needs the rows of a batch "
            "together; make batches of this case alone"
        )
    chosen = batches if config.case is None else batches.of_cases(config.case)
    matrix = _estimate(model, chosen, source, list(pool), config, progress)
    pairs = list(combinations(range(len(pool)), 2))
    estimates = pd.DataFrame(
        {
            "set": [set_label([space[pool[i]], space[pool[j]]]) for i, j in pairs],
            "estimate": [float(matrix[i, j]) for i, j in pairs],
        }
    ).sort_values("estimate", ascending=False, ignore_index=True, kind="stable")
    # Measured are the largest estimates and a random sample of all.
    numbers = np.arange(len(pairs))
    drawn = np.random.default_rng(config.seed).permutation(len(pairs))[: config.check]
    picked = estimates.assign(top=numbers < config.top, random=np.isin(numbers, drawn))
    picked = picked.loc[picked["top"] | picked["random"]].reset_index(drop=True)
    wanted = [label.split("+") for label in picked["set"]]
    members = dict.fromkeys(unit for pair in wanted for unit in pair)
    data, sets = {batches.name: chosen}, [*members, *wanted]
    scanned = scan_rows(model, data, means, sets, memory=config.memory, progress=progress)
    # One case for all rows: the screen is of their mean, whatever cases they are of.
    scanned = replace(scanned, rows=scanned.rows.assign(case=config.case or "all"))
    asked = ExcessConfig(config.measure, config.n_resamples, seed=config.seed)
    exact = excess(scanned, wanted, asked)
    right = excess(scanned, wanted, replace(asked, measure="accuracy"))
    measured = picked.assign(
        **{name: exact[name] for name in ("excess", "low", "high")},
        accuracy_excess=right["excess"],
    )
    return Screen(estimates, measured, _correlations(measured, config.measure))


def _estimate(
    model: Model,
    batches: Batches,
    source: Source,
    pool: list[int],
    config: ScreenConfig,
    progress: bool,
) -> Float[Tensor, "pool pool"]:
    """The estimated excess of every pair, symmetric; the diagonal means nothing."""
    dtype = torch.promote_types(model.cfg.dtype, torch.float32)
    full = torch.ones(len(UnitSpace.of(model)), device=model.cfg.device, dtype=dtype)
    estimate = _by_gradient if config.method == "gradient" else _by_hessian
    sums = torch.zeros(len(pool), len(pool), dtype=torch.float64)
    n_rows = 0
    for batch in tqdm(batches, desc="screen", disable=not progress, leave=False):
        if bool((batch.labels < 0).any()):
            raise HcLensError(
                "expected rows with labels, got rows without; scan a task with labels"
            )
        total = partial(_total, model, batches, batch, source.on(batch), config.measure)
        sums += estimate(total, full, pool).double().cpu()
        n_rows += len(batch.rows)
    return (sums + sums.T) / (2 * n_rows)


def _by_gradient(
    total: Total, full: Float[Tensor, "units"], pool: list[int]
) -> Float[Tensor, "pool pool"]:
    """The change of the gradient when each unit is removed, summed over the rows."""

    def gradient(removed: list[int]) -> Tensor:
        mask = full.clone()
        mask[removed] = 0.0
        mask.requires_grad_()
        return torch.autograd.grad(total(mask), mask)[0][pool]

    whole = gradient([])
    return torch.stack([gradient([unit]) - whole for unit in pool])


def _by_hessian(
    total: Total, full: Float[Tensor, "units"], pool: list[int]
) -> Float[Tensor, "pool pool"]:
    """Minus the Hessian at the full model, summed over the rows, a row of it at a time."""
    mask = full.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(total(mask), mask, create_graph=True)
    rows = [torch.autograd.grad(gradient[i], mask, retain_graph=True)[0][pool] for i in pool]
    return -torch.stack(rows)


def _total(
    model: Model,
    batches: Batches,
    batch: BatchLike,
    source: Source,
    measure: str,
    mask: Float[Tensor, "units"],
) -> Float[Tensor, ""]:
    """The measure under a mask, summed over the rows of a batch."""
    with torch.enable_grad(), masked(model, mask, source):
        log_probs = batches.log_probs(model(**batch.inputs))
    if measure == "logit":
        return log_odds(log_probs, batch.labels).sum()
    return log_probs.gather(1, batch.labels[:, None]).exp().sum()


def _correlations(measured: pd.DataFrame, measure: str) -> pd.DataFrame:
    records = []
    for pairs in ("random", "top"):
        group = measured.loc[measured[pairs]]
        for against, column in ((measure, "excess"), ("accuracy", "accuracy_excess")):
            # Fewer than three pairs have no rank correlation to speak of.
            ours, theirs = (group[name].to_numpy() for name in ("estimate", column))
            rho, p = rank_correlation(ours, theirs)[:2] if len(group) > 2 else (np.nan, np.nan)
            records.append((pairs, against, len(group), rho, p))
    return pd.DataFrame(records, columns=pd.Index(["pairs", "against", "n", "spearman", "p"]))
