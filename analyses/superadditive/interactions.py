"""Which pairs of units interact? An estimate of all pairs from one gradient pass per unit.

Exact pair effects cost one run per pair. This screen costs one run per unit.

1. Let f(m) be a mean over rows under the mask m: of the gold label's probability, its log-odds, or
   another measure with a derivative; of one in which less is better, minus the mean. The
   interaction of a pair is
   ``-(f(i and j removed) - f(i removed) - f(j removed) + f(nothing removed))``: the drop of both
   minus the sum of their drops, gains included. It is the excess where neither gains.
2. ``method="gradient"``: remove i for good and take the gradient of f with respect to all other
   entries of the mask. The effect of then removing j is about minus that gradient, so
   the interaction is about ``df/dm_j (i removed) - df/dm_j (nothing removed)``. Exact in i, linear
   in j; both orders are averaged.
3. ``method="hessian"``: second order in both. The interaction is about minus the Hessian of f at
   the full model, one Hessian-vector product per unit.
4. The estimate is only as good as it turns out to be: the pairs with the largest estimates and a
   random sample of the others are measured exactly, and the rank correlation between estimate and
   measurement is part of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.functional import hessian, jacobian
from tqdm.auto import tqdm

from hc_lens.analyses.statistics import rank_correlation
from hc_lens.analyses.superadditive.drops import ExcessConfig, excess, to_scan
from hc_lens.analyses.superadditive.verdicts import DECIMALS
from hc_lens.data.batches import Batches
from hc_lens.errors import HcLensError, check_choice
from hc_lens.masks.ablate import mask_edits
from hc_lens.masks.hooks import Handle
from hc_lens.masks.replacements import Source, as_source
from hc_lens.metrics import (
    COSTS,
    LOGIT,
    NAMED,
    PROBABILITY,
    SMOOTH,
    Metric,
    Metrics,
    log_odds,
    row_values,
    smooth_metric,
)
from hc_lens.models.reading import Readout
from hc_lens.protocols import BatchLike, Model
from hc_lens.scans.scan import ScanOptions, scan_rows
from hc_lens.units import Unit, UnitSpace, set_label

FROM_LOG_PROBS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    PROBABILITY: lambda log_probs, labels: log_probs.gather(1, labels[:, None])[:, 0].exp(),
    LOGIT: log_odds,
}
"""The usual measures from log-probabilities and labels, in the model's own precision: other metrics
take twice the memory for their derivatives, in double precision."""
Method = Literal["gradient", "hessian"]
"""How an interaction is estimated."""


@dataclass(frozen=True)
class ScreenConfig(ExcessConfig):
    """How the interactions of pairs are estimated, and which pairs are measured."""

    measure: str = PROBABILITY
    """What the interaction is in: probability or logit (log-odds) of the right answer, or another
    metric with a derivative."""
    method: Method = "gradient"
    """How an interaction is estimated: exact in one unit of the pair, or second order in both."""
    top: int = 20
    """Number of pairs with the largest estimates to measure."""
    check: int | None = 40
    """Number of random pairs to measure, drawn from all; None measures every pair."""
    memory: int | str = "1GB"
    """Most bytes to hold beside the model and the results, such as 500_000_000 or 2GB."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("a method", self.method, get_args(Method))
        if self.measure in NAMED:
            check_choice("a measure", self.measure, SMOOTH)
        if self.top < 0 or (self.check is not None and self.check < 3):
            raise HcLensError(
                f"expected top of at least 0 and check of at least 3 pairs, got {self.top} and "
                f"{self.check}; an estimate is not given without its rank correlation with the "
                "truth"
            )


DEFAULTS = ScreenConfig()


@dataclass(frozen=True)
class Screen:
    """Estimated interactions of all pairs, and how far they can be trusted."""

    estimates: pd.DataFrame
    """Every pair: set, estimate; the largest first."""
    measured: pd.DataFrame
    """The pairs that were measured: set, estimate, top, random (why it was measured), interaction
    (what is estimated), excess, low, high (see `excess`), accuracy_interaction."""
    correlations: pd.DataFrame
    """Spearman's rank correlation of the estimate with the measurement: pairs (random or top),
    against (the measure or accuracy), n, spearman, p. Only the random pairs stand for the pool."""


def screen(
    model: Model,
    batches: Batches,
    means: Source | str,
    units: Iterable[Unit | str] | None = None,
    config: ScreenConfig = DEFAULTS,
    *,
    metrics: Metrics = (),
    progress: bool = True,
) -> Screen:
    """Estimate the interaction of every pair of units; measure the largest and a random sample.

    The pairs are those of `units`, by default of every unit of the model. The rows need labels;
    ``batches.of_cases("swap")`` has those of one case. A measure of your own is a function among
    the `metrics` of the scan, in which more is better and which PyTorch can differentiate.
    """
    asked = to_scan(config.measure, metrics)
    space, source = UnitSpace.of(model), as_source(means)
    source.check(model, space)
    pool = space.indices(space if units is None else units)
    if len(pool) < 2:
        raise HcLensError(f"expected at least two units in the pool, got {len(pool)}; name more")
    metric = asked.get(config.measure, config.measure)
    matrix = _estimate(_Total(model, batches, source, pool, metric), config, progress).numpy()
    pairs = [set_label(pair) for pair in combinations([space[index] for index in pool], 2)]
    estimates = pd.DataFrame({"set": pairs, "estimate": matrix[np.triu_indices(len(pool), 1)]})
    estimates = estimates.sort_values("estimate", ascending=False, ignore_index=True, kind="stable")
    # Measured are the largest estimates and a random sample of all.
    numbers = np.arange(len(pairs))
    drawn = np.random.default_rng(config.seed).permutation(len(pairs))[: config.check]
    picked = estimates.assign(top=numbers < config.top, random=np.isin(numbers, drawn))
    picked = picked.loc[picked["top"] | picked["random"]].reset_index(drop=True)
    wanted = [label.split("+") for label in picked["set"]]
    sets = [*dict.fromkeys(unit for pair in wanted for unit in pair), *wanted]
    options: ScanOptions = {"metrics": asked, "memory": config.memory, "progress": progress}
    scanned = scan_rows(model, batches, means, sets, **options)
    # One case for all rows: the screen is of their mean, whatever cases they are of.
    scanned = replace(scanned, rows=scanned.rows.assign(case="all"))
    exact = excess(scanned, wanted, config)
    right = excess(scanned, wanted, ExcessConfig(n_resamples=config.n_resamples))
    # Rounding error, also of the two numbers, would put ranks between equal interactions.
    signed, of_right = (
        (table["drop"] - table["sum_of_drops"]).round(DECIMALS - 2) for table in (exact, right)
    )
    measured = picked.assign(interaction=signed).join(exact[["excess", "low", "high"]])
    measured["accuracy_interaction"] = of_right
    return Screen(estimates, measured, _correlations(measured, config.measure))


def _estimate(total: _Total, config: ScreenConfig, progress: bool) -> Float[Tensor, "pool pool"]:
    """The estimated interaction of every pair, symmetric; the diagonal means nothing."""
    cfg, size = total.model.cfg, len(total.pool)
    dtype = torch.promote_types(cfg.dtype, torch.float32)
    without_each = 1 - torch.eye(size, device=cfg.device, dtype=dtype)
    full = torch.ones_like(without_each[0])
    sums = torch.zeros(size, size, dtype=torch.float64)
    n_rows = 0
    for batch in tqdm(total.batches, desc="screen", disable=not progress, leave=False):
        if bool((batch.labels < 0).any()):
            raise HcLensError(
                "expected rows with labels, got rows without; scan a task with labels"
            )
        of_batch = total.on(batch)
        if config.method == "hessian":
            curvature: Any = hessian(of_batch, full)
            found = -curvature
        else:
            gradients = [jacobian(of_batch, entries) for entries in (full, *without_each)]
            found = torch.stack(gradients[1:]) - gradients[0]
        sums += found.double().cpu()
        n_rows += len(batch.rows)
    sign = -1 if config.measure in COSTS else 1
    return sign * (sums + sums.T) / (2 * n_rows)


class _Total:
    """The measure summed over the rows of a batch, as a function of the mask of a pool of units."""

    def __init__(
        self,
        model: Model,
        batches: Batches,
        source: Source,
        pool: list[int],
        metric: Metric | str,
    ):
        self.model, self.batches, self.pool = model, batches, pool
        self._source, self._metric, self._readout = source, metric, Readout(model)

    def on(self, batch: BatchLike) -> Callable[[Float[Tensor, "pool"]], Float[Tensor, ""]]:
        """The function for one batch."""
        space, source, metric = UnitSpace.of(self.model), self._source.on(batch), self._metric
        row_metric = metric if callable(metric) else self._named(metric, batch)

        def total(entries: Float[Tensor, "pool"]) -> Float[Tensor, ""]:
            mask = entries.new_ones(len(space))
            mask[self.pool] = entries
            with torch.enable_grad(), Handle(self.model, mask_edits(space, mask, source)):
                return row_values(row_metric, self._readout(batch), batch).sum()

        return total

    def _named(self, name: str, batch: BatchLike) -> Metric:
        """A metric by its name, for one batch."""
        made = FROM_LOG_PROBS.get(NAMED[name])
        if made is not None:
            return lambda logits, own: made(self.batches.log_probs(logits, own), own.labels)
        with torch.no_grad():
            full = self._readout(batch)
        loss = smooth_metric(name, self.batches)
        return lambda logits, own: loss(logits, own, lambda: full)


def _correlations(measured: pd.DataFrame, measure: str) -> pd.DataFrame:
    records = []
    for pairs in ("random", "top"):
        group = measured.loc[measured[pairs]]
        for against, column in ((measure, "interaction"), ("accuracy", "accuracy_interaction")):
            # Fewer than three pairs have no rank correlation to speak of.
            ours, theirs = (group[name].to_numpy() for name in ("estimate", column))
            rho, p = rank_correlation(ours, theirs)[:2] if len(group) > 2 else (np.nan, np.nan)
            records.append((pairs, against, len(group), rho, p))
    return pd.DataFrame(records, columns=pd.Index(["pairs", "against", "n", "spearman", "p"]))
