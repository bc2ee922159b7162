"""The strongest edges of a sender, without patching all of them on every row.

1. The receivers of one sender compete as the sets of `hc.top` do, by the same estimates and the
   same elimination (`hc_lens.scans.top`).
2. The attribution of an edge on each row (`gradient`) is its first-order effect, the control
   variate of its exact effect on the rows that are drawn (`engine`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm
from typing_extensions import Unpack

from hc_lens.analyses.composition.config import Norms
from hc_lens.analyses.composition.engine import PathEngine
from hc_lens.analyses.composition.exact import edge_keys
from hc_lens.analyses.composition.gradient import LeafPass
from hc_lens.analyses.composition.passes import How
from hc_lens.analyses.composition.receivers import (
    Heard,
    Receiver,
    Sender,
    as_receivers,
    as_senders,
)
from hc_lens.data.batches import named_batches
from hc_lens.masks.replacements import Source
from hc_lens.metrics import KL, Loss
from hc_lens.models.reading import Readout
from hc_lens.protocols import BatchesLike, BatchLike, Model
from hc_lens.pruning.importance import RowGradients
from hc_lens.scans.sampler import Sampler
from hc_lens.scans.scan import check_drawn
from hc_lens.scans.target import target
from hc_lens.scans.top import check_top, largest, top_table
from hc_lens.units import UnitSet


class TopEdgeOptions(TypedDict, total=False):
    """What `top_edges` takes by name."""

    receivers: Heard
    """Receivers that compete; by default every one behind the sender."""
    by: str
    """The metric that is compared: ``"kl"`` by default, ``"logit"``, ``"accuracy"`` or
    ``"agreement"``."""
    norms: Norms
    """As in `edge_effects`."""
    seed: int
    """Which rows are drawn; 0 by default."""
    progress: bool
    """Whether to show a progress bar."""


def top_edges(
    model: Model,
    batches: BatchesLike,
    means: Source | str,
    sender: UnitSet,
    k: int = 10,
    delta: float = 0.05,
    **options: Unpack[TopEdgeOptions],
) -> pd.DataFrame:
    """The k edges of a sender with the largest effects, with probability 1 - delta.

    Columns: rank, sender, receiver, kind, n (rows on which the edge was patched), the effect (`kl`,
    or the column of the metric `by`), low and high.

    Args:
        model, means: as in `edge_effects`.
        batches: one dataset; its cases count as its rows do.
        sender: a unit, or a set of units such as ``"L0.H6+L1.H1"``.
        k, delta: as in `hc.top`.
        options: `TopEdgeOptions`: receivers, by, norms, seed, progress.
    """
    check_top(k, delta)
    engine = PathEngine(model, means, options.get("norms", "frozen"))
    ((name, rows),) = check_drawn(named_batches(batches), engine.source).items()
    (units,) = as_senders(model, [sender])
    heard = as_receivers(model, units, options.get("receivers"))
    chosen = target(options.get("by", KL), {}, rows, Readout(model))
    hidden = not options.get("progress", True)
    with tqdm(desc="patching", disable=hidden, leave=False, unit="row") as bar:
        sampler = Sampler(
            EdgeRuns(engine, units, heard),
            rows,
            chosen,
            {chosen.name: chosen.name},
            lambda what, batch, make: make(),
            bar.update,
        )
        found = largest(sampler, f"{options.get('seed', 0)} {name}", k, delta)
    keys = edge_keys({units: [heard[index] for index in found.sets]})
    return top_table({column: keys[column].tolist() for column in keys}, found, sampler)


class EdgeRuns:
    """The patched edges of one sender, as `hc_lens.scans.runs.Runs`."""

    def __init__(self, engine: PathEngine, sender: Sender, receivers: Sequence[Receiver]):
        """Take the receivers of a sender."""
        self._engine, self._sender, self._receivers = engine, sender, receivers
        self._how: How = "tangent" if engine.norms == "recomputed" else "frozen"
        self.logits = engine.view.read_out

    @property
    def n_sets(self) -> int:
        """Every receiver."""
        return len(self._receivers)

    @torch.no_grad()
    def held(self, batch: BatchLike, chosen: Sequence[int]) -> Float[Tensor, "runs batch width"]:
        """The clean run, and each chosen edge patched."""
        heard = [self._receivers[index] for index in chosen]
        parts = []
        for clean in self._engine.cleans(batch):
            patched = self._engine.edges(clean, self._sender, heard)
            parts.append(torch.cat([clean.held[None], patched]))
        return torch.cat(parts, dim=1)

    @torch.no_grad()
    def full(self, batch: BatchLike) -> Float[Tensor, "batch width"]:
        """The clean run."""
        return torch.cat([clean.held for clean in self._engine.cleans(batch)])

    def gradients(self, batch: BatchLike, loss: Loss) -> RowGradients:
        """The attribution of every edge on each row."""
        parts, size = [], 0
        for clean in self._engine.cleans(batch):
            rows = range(size, size + clean.stream.n_rows)
            piece, size = batch.take(rows), rows.stop

            def measure(
                logits: Float[Tensor, "batch out"], piece: BatchLike = piece, clean=clean
            ) -> Float[Tensor, "batch"]:
                return loss(logits, piece, lambda: clean.logits)

            leaf = LeafPass(clean, measure)
            found = leaf.of_edges(self._sender, self._receivers, self._how)
            parts.append((clean.held, measure(clean.logits), found.T))
        held, losses, gradients = zip(*parts, strict=True)
        return RowGradients(torch.cat(held), torch.cat(losses), torch.cat(gradients))

    def first_order(
        self, gradients: Float[np.ndarray, "rows parts"], chosen: Sequence[int]
    ) -> Float[np.ndarray, "rows chosen"]:
        """The attributions themselves."""
        return gradients[:, list(chosen)]
