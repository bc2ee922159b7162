"""Gradient importance of every unit, in one backward pass per batch.

1. Run the model under a mask of ones with one row per row of the batch.
2. The gradient of a row's loss with respect to its mask is the first-order effect of each unit on
   that row: loss(mask) is about loss(1) - sum of (1 - m) * gradient.
3. ``importance`` is the mean over rows of the absolute gradient (Michel, Levy and Neubig 2019,
   equation 3); ``effect`` is minus the mean gradient, the estimated rise of the loss when the unit
   is ablated (attribution patching of nodes; Nanda 2023).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from hc_lens.errors import HcLensError
from hc_lens.masks.attached import warn_if_masked
from hc_lens.masks.finite import check_weights
from hc_lens.masks.hooks import hooked_units
from hc_lens.masks.replacements import Source, as_source
from hc_lens.masks.run import MaskedRun
from hc_lens.metrics import Loss, Metric, held_losses
from hc_lens.protocols import BatchesLike, BatchLike, Model, check_batch
from hc_lens.pruning.losses import CROSS_ENTROPY, first_order_loss


class RowGradients(NamedTuple):
    """The full model on some rows, and how each unit's mask changes a loss of each row."""

    held: Float[Tensor, "batch width"]
    """What the full model left where each row is read."""
    losses: Float[Tensor, "batch"]
    """The loss of each row."""
    gradients: Float[Tensor, "batch units"]
    """Its gradient by the row's mask."""


def importance(
    model: Model,
    batches: BatchesLike,
    means: Source | str,
    *,
    loss: Metric | str | None = None,
    progress: bool = True,
) -> pd.DataFrame:
    """Importance of every unit: unit, importance, effect; one row for each unit, in mask order.

    Args:
        batches: rows with labels, unless `loss` is a function.
        means: what would replace a removed unit.
        loss: what the effect is on: a metric such as ``"logit_difference"`` (see
            `hc_lens.metrics.SMOOTH`; not KL, which has no gradient at the full model), or a
            function of (logits, batch) that gives one number per row, from the logits where the
            row is read; default ``"cross-entropy"``.
    """
    warn_if_masked(model)
    check_weights(model)
    given = CROSS_ENTROPY if loss is None else loss
    return mean_gradients(model, batches, as_source(means), given, progress)


def mean_gradients(
    model: Model,
    batches: BatchesLike,
    source: Source,
    loss: Metric | str,
    progress: bool = True,
) -> pd.DataFrame:
    """The table of `importance`."""
    space, of_labels = hooked_units(model), not callable(loss)
    if of_labels and not hasattr(batches, "log_probs"):
        raise HcLensError(
            f"expected batches with the labels of a task, got a {type(batches).__name__}; make "
            "them with task.batches(model, ...), or pass loss=... with a function of (logits, "
            "batch) that gives one loss per row"
        )
    source.check(model, space)
    row_loss, run = first_order_loss(loss, batches), MaskedRun(model, source)
    absolute = torch.zeros(len(space), dtype=torch.float64)
    signed, n_rows = absolute.clone(), 0
    for batch in tqdm(batches, desc="importance", disable=not progress, leave=False):
        check_batch(batch, "inputs", "rows", *["labels"] * of_labels)
        gradient = row_gradients(run, batch, row_loss).gradients
        absolute += gradient.abs().sum(0).double().cpu()
        signed -= gradient.sum(0).double().cpu()
        n_rows += len(batch.rows)
    if n_rows == 0:
        raise HcLensError("expected at least one batch, got none; check the split")
    columns = {"unit": space.labels, "importance": absolute / n_rows, "effect": signed / n_rows}
    return pd.DataFrame(columns)


def row_gradients(run: MaskedRun, batch: BatchLike, loss: Loss) -> RowGradients:
    """The gradient of each row's loss by its own mask, in one forward and one backward pass.

    The loss of a row depends on its own mask alone, so the gradient of their sum is that of each.
    """
    mask = torch.ones(len(batch.rows), len(run.space), device=run.model.cfg.device)
    with torch.enable_grad():
        held = run.held(batch, mask.requires_grad_())
        full: Callable[[], Tensor] = held.detach
        losses = held_losses(loss, batch, held, run.readout.logits, full)
        (gradients,) = torch.autograd.grad(losses.sum(), mask)
    return RowGradients(held.detach(), losses.detach(), gradients)
