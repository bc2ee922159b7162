"""Runs of a model on any rows: the full model, changed ones, and what a derivative says of these.

What a sample of rows is drawn from does not matter to how a change is made. `Runs` is all that the
estimates of `hc_lens.scans.sampler` ask of it: ablated sets of units (`UnitRuns`) have it, and so
have the patched edges of a sender (`hc_lens.analyses.composition.top`).
"""

# The members of a protocol have no bodies.
# pyright: reportReturnType=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from hc_lens.data.batches import cut
from hc_lens.errors import HcLensError
from hc_lens.masks.run import MaskedRun
from hc_lens.metrics import Loss
from hc_lens.models.inputs import mask_of, rows_at_once
from hc_lens.protocols import BatchLike
from hc_lens.pruning.importance import RowGradients, row_gradients
from hc_lens.scans.engine import SuffixEngine


@runtime_checkable
class Runs(Protocol):
    """Some changes of one model."""

    @property
    def n_sets(self) -> int:
        """How many changes there are."""

    def held(self, batch: BatchLike, chosen: Sequence[int]) -> Float[Tensor, "runs batch width"]:
        """What the full model leaves to read, and after it what some of the changed ones leave."""

    def logits(self, held: Float[Tensor, "*runs batch width"]) -> Float[Tensor, "*runs batch out"]:
        """The logits of what is held."""

    def full(self, batch: BatchLike) -> Float[Tensor, "batch width"]:
        """What the full model alone leaves to read."""

    def gradients(self, batch: BatchLike, loss: Loss) -> RowGradients:
        """The gradient of each row's loss by each part of the changes."""

    def first_order(
        self, gradients: Float[np.ndarray, "rows parts"], chosen: Sequence[int]
    ) -> Float[np.ndarray, "rows chosen"]:
        """The first-order effects of some changes, from the gradients."""


Checked = Callable[[BatchLike, Tensor, Sequence[int]], Tensor]
"""Gives back what some sets of an engine left of a batch, if it is finite."""


class UnitRuns:
    """Ablated sets of units."""

    def __init__(self, engine: SuffixEngine, checked: Checked):
        """Take the sets of an engine, of which the first is the full model."""
        self._engine, self._checked = engine, checked
        self._run = MaskedRun(engine.model, engine.source)
        self.logits = engine.layers.readout.logits
        space = engine.space
        self._units = np.zeros((len(space), self.n_sets), dtype=np.float32)
        for index, parts in enumerate(engine.parts[1:]):
            units = [unit for part in parts for unit in part]
            self._units[space.indices(units), index] = 1.0

    @property
    def n_sets(self) -> int:
        """Every set of the engine but the full model."""
        return len(self._engine.parts) - 1

    @torch.no_grad()
    def held(self, batch: BatchLike, chosen: Sequence[int]) -> Float[Tensor, "runs batch width"]:
        """By suffix re-execution, of the chosen sets alone."""
        sets = [0, *(index + 1 for index in chosen)]
        return self._checked(batch, self._engine.of_sets(sets).held(batch), sets)

    def full(self, batch: BatchLike) -> Float[Tensor, "batch width"]:
        """The engine without any set."""
        return self.held(batch, [])[0]

    def gradients(self, batch: BatchLike, loss: Loss) -> RowGradients:
        """One forward and one backward pass over so many rows at a time as the memory holds."""
        found = [row_gradients(self._run, piece, loss) for piece in self._pieces(batch)]
        held, losses, gradients = zip(*found, strict=True)
        return RowGradients(torch.cat(held), torch.cat(losses), torch.cat(gradients))

    def first_order(
        self, gradients: Float[np.ndarray, "rows parts"], chosen: Sequence[int]
    ) -> Float[np.ndarray, "rows chosen"]:
        """Minus the sum of the gradients of a set's units."""
        return -(gradients @ self._units[:, list(chosen)])

    def _pieces(self, batch: BatchLike) -> list[BatchLike]:
        """The batch in pieces whose activations, kept for the way back, fit into the memory."""
        cfg, pos = self._engine.model.cfg, mask_of(batch.inputs).shape[1]
        numbers = 16 * cfg.d_model + 4 * (cfg.d_mlp or 0) + 2 * cfg.n_heads * pos
        need = cfg.n_layers * pos * numbers * cfg.dtype.itemsize
        fit = self._engine.memory // need
        if fit < 1:
            raise HcLensError(
                f"expected memory for the gradients of at least one row of {pos} tokens "
                f"({need:,} bytes), got {self._engine.memory:,} bytes; raise memory=, or "
                "scan without precision="
            )
        return cut(batch, min(fit, rows_at_once(self._engine.model, batch.inputs)))
