"""Integrated gradients of every unit, over its activations or over the inputs.

1. The effect of a unit on a row is estimated by ``(x - value) . grad``, with x its clean
   activation, value what replaces it, and the gradient of a metric by the activation: the
   derivative by the unit's entry of a mask of ones (`hc_lens.pruning.importance`). One gradient at
   the full model says little where the model saturates, so gradients are averaged along a path
   (Sundararajan, Taly and Yan 2017).
2. *Activations*: all units move together from their replacements (mask 0) to their activations
   (mask 1). The effects of all units then add up to m(all) - m(none), up to the number of steps.
3. *Inputs*: the stream in front of the first block moves from the mean over the tokens of the batch
   to the row's own, as in EAP-IG (Hanna, Pezzelle and Belinkov 2024, arXiv 2403.17806), and the
   gradient there is multiplied by the clean activations' distance from their replacements.
4. Steps are the midpoints of equal parts of the path.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from hc_lens.errors import HcLensError, check_count
from hc_lens.masks.ablate import mask_edits
from hc_lens.masks.attached import warn_if_masked
from hc_lens.masks.hooks import Edit, Handle, hook_points, hooked_units
from hc_lens.masks.replacements import Source, as_source
from hc_lens.metrics import Loss, Metric, held_losses
from hc_lens.models.inputs import mask_of
from hc_lens.models.reading import read_units
from hc_lens.protocols import BatchesLike, BatchLike, Model
from hc_lens.pruning.losses import named_loss
from hc_lens.pruning.teacher import Teacher
from hc_lens.units import UnitSpace

Along = Literal["activations", "inputs"]
"""What moves along the path."""
STREAM = "blocks.0.hook_resid_pre"
"""The hook point in front of the first block."""


def integrated(
    model: Model,
    batches: BatchesLike,
    means: Source | str,
    along: Along = "activations",
    *,
    loss: Metric | str = "logit",
    steps: int = 5,
    progress: bool = True,
) -> pd.DataFrame:
    """Integrated gradients of every unit: unit, importance, effect.

    ``effect`` is the mean over rows of what the unit adds to the metric, ``importance`` the mean of
    its absolute value.

    Args:
        means: what would replace a removed unit.
        along: what moves, activations or inputs.
        loss: the metric, one with a derivative or a function of (logits, batch).
        steps: points on the path.
    """
    warn_if_masked(model)
    check_count("steps", steps)
    space, source = hooked_units(model), as_source(means)
    source.check(model, space)
    if along == "inputs" and STREAM not in model.hook_dict:
        raise HcLensError(
            f"expected the hook point {STREAM} to move the inputs, got a {type(model).__name__} "
            "without it; integrate over activations"
        )
    path = _Path(model, space, source, named_loss(loss, batches), along)
    sums, absolute = torch.zeros(2, len(space), dtype=torch.float64)
    n_rows = 0
    for batch in tqdm(batches, desc="integrated", disable=not progress, leave=False):
        points = [(step + 0.5) / steps for step in range(steps)]
        effects = path.effects(batch, points).double().cpu()
        sums += effects.sum(0)
        absolute += effects.abs().sum(0)
        n_rows += len(batch.rows)
    columns = {"unit": space.labels, "importance": absolute / n_rows, "effect": sums / n_rows}
    return pd.DataFrame(columns)


class _Path:
    """The gradients of one model along a path."""

    def __init__(self, model: Model, space: UnitSpace, source: Source, loss: Loss, along: Along):
        self.model, self.space, self.along = model, space, along
        self._source, self._loss, self._teacher = source, loss, Teacher(model)

    def effects(self, batch: BatchLike, points: list[float]) -> Float[Tensor, "batch units"]:
        """The effect of each unit on each row."""
        source = self._source.on(batch)
        of_point = self._activations if self.along == "activations" else self._inputs(batch, source)
        shape, device = (len(batch.rows), len(self.space)), self.model.cfg.device
        total = torch.zeros(shape, device=device)
        for point in points:
            mask = torch.ones(shape, device=device, requires_grad=True)
            with torch.enable_grad(), Handle(self.model, of_point(mask, point, source)):
                held = self._teacher.readout.held(batch)
            with torch.enable_grad():
                full = partial(self._teacher.held, batch)
                logits = self._teacher.readout.logits
                value = held_losses(self._loss, batch, held, logits, full).sum()
            total += torch.autograd.grad(value, mask)[0] / len(points)
        return total

    def _activations(self, mask: Tensor, point: float, source: Source) -> Mapping[str, Edit]:
        # Scaled, the mask of ones is the point; its own derivative is that of the point's mask.
        return mask_edits(self.space, mask - (1 - point), source)

    def _inputs(
        self, batch: BatchLike, source: Source
    ) -> Callable[[Tensor, float, Source], Mapping[str, Edit]]:
        """A function that makes the edits of a point, with the batch's clean distances."""
        away: dict[str, Tensor] = {}

        def read(name: str, x: Tensor) -> None:
            away[name] = x - source.value(name, x)

        read_units(self.model, batch.inputs, read)
        real = mask_of(batch.inputs).bool()

        def moved(point: float, stream: Tensor) -> Tensor:
            middle = stream.detach()[real].mean(0)
            return middle + point * (stream - middle)

        def edits(mask: Tensor, point: float, source: Source) -> Mapping[str, Edit]:
            at = {
                name: _shift(mask[:, at], away[name])
                for name, at in hook_points(self.space).items()
            }
            return {STREAM: partial(moved, point), **at}

        return edits


def _shift(entries: Tensor, away: Tensor) -> Edit:
    """An edit that changes nothing, with the derivative of the entries along `away`."""
    wide = entries.reshape(len(away), 1, -1, 1) if away.ndim == 4 else entries.reshape(-1, 1, 1)
    return lambda x: x + (wide - 1) * away
