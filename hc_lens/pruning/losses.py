"""The losses of pruning and of importance, by their names.

1. `named_loss` is what each row's loss is: the cross-entropy, a metric of `hc_lens.metrics`, or a
   function of the user's own.
2. `faithful_loss` is what gates and greedy minimise. Of a metric it is the squared change from the
   full model's, so that they stay faithful to it, whether it is to be high or low.
3. `first_order_loss` is what importance takes the gradient of at the full model. KL and every
   squared change are smallest there, so that their gradient is nothing but rounding.

`hc_lens.metrics.held_losses` gives their values.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from jaxtyping import Float
from torch import Tensor

from hc_lens.errors import HcLensError, check_choice
from hc_lens.metrics import (
    KL,
    SMOOTH,
    Full,
    Loss,
    Metric,
    cross_entropy,
    kl_divergence,
    smooth_metric,
)
from hc_lens.protocols import BatchesLike, BatchLike

CROSS_ENTROPY = "cross-entropy"


def named_loss(loss: Metric | str, batches: BatchesLike) -> Loss:
    """The loss of each row, by its name or from a function of (logits, batch)."""
    if callable(loss):
        return _of_logits(loss)
    check_choice("a loss or a metric with a derivative", loss, (CROSS_ENTROPY, *SMOOTH))
    if loss == CROSS_ENTROPY:
        return _of_logits(cross_entropy(batches))
    return smooth_metric(loss, batches)


def faithful_loss(loss: Metric | str, batches: BatchesLike) -> Loss:
    """How far each row is from the full model, as the named loss sees it."""
    if loss == KL:
        return _kl
    named = named_loss(loss, batches)
    if callable(loss) or loss == CROSS_ENTROPY:
        return named

    @wraps(named)
    def change(
        logits: Float[Tensor, "batch out"], batch: BatchLike, full: Full
    ) -> Float[Tensor, "batch"]:
        theirs = full()
        before, after = (named(each, batch, lambda: theirs) for each in (theirs, logits))
        return (after - before).square()

    return change


def first_order_loss(loss: Metric | str, batches: BatchesLike) -> Loss:
    """The loss of each row, if it has a gradient at the full model."""
    if loss == KL:
        raise HcLensError(
            f"expected a loss with a gradient at the full model, got {loss!r}, which is smallest "
            "there, so that its gradient is rounding alone; leave loss= out for the cross-entropy, "
            "or give a metric such as loss='logit_difference', or a function of (logits, batch)"
        )
    return named_loss(loss, batches)


def _of_logits(metric: Metric) -> Loss:
    """A loss that does not ask for the full model."""

    @wraps(metric)
    def loss(logits: Float[Tensor, "batch out"], batch: BatchLike, full: Full) -> Any:
        return metric(logits, batch)  # `check_values` looks at what a user's function gives

    return loss


def _kl(logits: Float[Tensor, "batch out"], batch: BatchLike, full: Full) -> Float[Tensor, "batch"]:
    return kl_divergence(full(), logits)
