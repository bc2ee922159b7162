"""Gradient importance of every unit, in one backward pass per batch.

1. Run the model under a mask of ones with one row per row of the batch.
2. The gradient of a row's loss with respect to its mask is the first-order effect of each unit on
   that row: loss(mask) is about loss(1) - sum of (1 - m) * gradient.
3. ``importance`` is the mean over rows of the absolute gradient (Michel, Levy and Neubig 2019,
   equation 3); ``effect`` is minus the mean gradient, the estimated rise of the loss when the unit
   is ablated (attribution patching of nodes; Nanda 2023).
"""

from __future__ import annotations

from functools import partial

import pandas as pd
import torch
from tqdm.auto import tqdm

from hc_lens.errors import HcLensError
from hc_lens.masks.ablate import mask_edits
from hc_lens.masks.attached import warn_if_masked
from hc_lens.masks.finite import check_finite, check_weights
from hc_lens.masks.hooks import Handle, hooked_units
from hc_lens.masks.replacements import Source, as_source
from hc_lens.metrics import Metric, held_losses
from hc_lens.protocols import BatchesLike, Model, check_batch
from hc_lens.pruning.losses import CROSS_ENTROPY, first_order_loss
from hc_lens.pruning.teacher import Teacher


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
    row_loss, teacher = first_order_loss(loss, batches), Teacher(model)
    absolute = torch.zeros(len(space), dtype=torch.float64)
    signed, n_rows = absolute.clone(), 0
    for batch in tqdm(batches, desc="importance", disable=not progress, leave=False):
        check_batch(batch, "inputs", "rows", *["labels"] * of_labels)
        rows = len(batch.rows)
        mask = torch.ones(rows, len(space), device=model.cfg.device, requires_grad=True)
        edits = mask_edits(space, mask, source.on(batch))
        with torch.enable_grad(), Handle(model, edits):
            held = teacher.readout.held(batch)
            check_finite(model, batch.inputs, held)
        with torch.enable_grad():
            # Not under the mask: the teacher may have to run the full model here.
            full = partial(teacher.held, batch)
            total = held_losses(row_loss, batch, held, teacher.readout.logits, full).sum()
        (gradient,) = torch.autograd.grad(total, mask)
        absolute += gradient.abs().sum(0).double().cpu()
        signed -= gradient.sum(0).double().cpu()
        n_rows += rows
    if n_rows == 0:
        raise HcLensError("expected at least one batch, got none; check the split")
    columns = {"unit": space.labels, "importance": absolute / n_rows, "effect": signed / n_rows}
    return pd.DataFrame(columns)
