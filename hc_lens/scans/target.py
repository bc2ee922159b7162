"""The metric whose change is to be precise, and what a derivative foresees of it.

1. The first-order effect of a set on a smooth metric is minus the sum of the gradients of the
   metric by the masks of its units (`hc_lens.pruning.importance.row_gradients`).
2. KL is smallest at the full model and has no first order. With p the probability of what the full
   model predicts and f the first-order effect on its log-odds, it is foreseen to be
   ``p (1 - p) f^2 / 2``, the second order for two labels.
3. Being right, and agreeing with the full model, are steps of log-odds. They are foreseen from the
   sign of the log-odds of the gold label, or of the full model's prediction, after their
   first-order change.
4. A metric of the user's own is differentiated if it has a derivative; otherwise nothing but what
   the full model says of a row is foreseen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from scipy.special import expit

from hc_lens.data.batches import cut
from hc_lens.errors import HcLensError, HcLensWarning, check_choice, warn
from hc_lens.metrics import (
    ACCURACY,
    AGREEMENT,
    KL,
    LOGIT,
    MARGIN,
    NAMED,
    OF_LABELLED,
    TRIED,
    Loss,
    Metric,
)
from hc_lens.models.reading import Readout
from hc_lens.protocols import BatchesLike
from hc_lens.pruning.losses import first_order_loss

Foreseen = Callable[
    [Float[np.ndarray, "rows"], Float[np.ndarray, "rows sets"]], Float[np.ndarray, "rows sets"]
]
"""The effects that are foreseen, from the full model's value on each row and first-order effects of
the smooth metric."""


class NoGradientWarning(HcLensWarning):
    """A metric without a derivative is measured on samples without control variates."""


@dataclass(frozen=True)
class Target:
    """One metric of a scan."""

    name: str
    """Its name among the metrics of a scan."""
    column: str
    """The column of the table that holds what is estimated."""
    smooth: Metric | str | None
    """What is differentiated in its place; None if nothing can be."""
    foreseen: Foreseen
    """What the first-order effects on `smooth` say of it."""
    largest: float = 0.0
    """Most by which a row can change, where that is known."""
    unchanged: float = 0.0
    """The column's value for a set that changes nothing."""

    @property
    def of_labelled(self) -> bool:
        """Whether only rows with a label have it, or what is differentiated in its place."""
        return self.name in OF_LABELLED or self.smooth in OF_LABELLED

    @property
    def is_change(self) -> bool:
        """Whether the column is a difference from the full model."""
        return self.column != self.name

    def loss(self, batches: BatchesLike) -> Loss | None:
        """What is differentiated, on the rows of some batches."""
        return None if self.smooth is None else first_order_loss(self.smooth, batches)


def target(
    of: str, more: Mapping[str, Metric | str], batches: BatchesLike, readout: Readout
) -> Target:
    """The metric of a scan of this name; `more` are those that the user asked for."""
    named = {ACCURACY: ACCURACY, KL: KL, AGREEMENT: AGREEMENT, LOGIT: LOGIT, **more}
    if of in NAMED and NAMED[of] in named:
        of = NAMED[of]
    check_choice("the metric that is to be precise", of, named)
    metric = named[of]
    if metric in _STEPS:
        return _STEPS[metric]
    smooth: Metric | str | None = metric
    if not isinstance(metric, str) and not _has_gradient(metric, batches, readout):
        warn(
            f"expected a metric with a derivative, to foresee effects with, got {of!r} without "
            "one: it is measured without first-order control variates, on more rows; compute it "
            "with functions of PyTorch from the logits if you can",
            NoGradientWarning,
        )
        smooth = None
    return Target(of, f"{of}_change", smooth, lambda full, first: first)


def _has_gradient(metric: Metric, batches: BatchesLike, readout: Readout) -> bool:
    piece = cut(batches[0], TRIED)[0]
    with torch.no_grad():
        logits = readout(piece)
    with torch.enable_grad():
        values = metric(logits.clone().requires_grad_(), piece)
    return values.requires_grad


def _kl(
    full: Float[np.ndarray, "rows"], first: Float[np.ndarray, "rows sets"]
) -> Float[np.ndarray, "rows sets"]:
    p = expit(full)[:, None]
    return p * (1 - p) * first**2 / 2


def _step(
    full: Float[np.ndarray, "rows"], first: Float[np.ndarray, "rows sets"]
) -> Float[np.ndarray, "rows sets"]:
    return (full[:, None] + first > 0).astype(float) - (full > 0)[:, None]


_STEPS = {
    KL: Target(KL, KL, MARGIN, _kl),
    ACCURACY: Target(ACCURACY, f"{ACCURACY}_change", LOGIT, _step, largest=1.0),
    AGREEMENT: Target(AGREEMENT, AGREEMENT, MARGIN, _step, largest=1.0, unchanged=1.0),
}
"""Metrics that are foreseen from the derivative of another one."""


def check_labelled(name: str, n: int) -> None:
    """Refuse a metric of labelled rows where there are none."""
    if n == 0:
        raise HcLensError(
            f"expected rows with labels to estimate {name!r} on, got none; give "
            "precision_of='kl' or 'agreement', or rows with labels"
        )
