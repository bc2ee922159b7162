"""Edge attribution: the first-order version of path patching, for all edges at once.

1. M is the log-odds of the label that the clean run predicts: the KL divergence has no first order
   there, and the log-probability of a confident answer has next to none. One forward and one
   backward pass give M's gradient with respect to every receiver's own input: each head's q, k and
   v, each MLP's input, the classifier's.
2. An edge's attribution is that gradient times the change of the input by the sender's replaced
   contribution, to first order (Nanda 2023; Syed, Rager and Conmy 2023): with frozen norms the
   change itself, which is linear; with recomputed norms its derivative. So it is the derivative of
   `edge_effects`' margin_change, if the sender were replaced by a small part.
3. ``steps=n`` integrates (Sundararajan et al. 2017): for each sender the gradients are averaged
   over n runs in which it is replaced by the shares (i + 1/2)/n. With recomputed norms the
   attributions of a sender's edges then add up to the effect of ablating it, as n grows.

Without steps a batch costs two forward passes and one backward pass, whatever the number of edges;
what remains is one product per sender and layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float, Int
from scipy.stats import spearmanr
from torch import Tensor

from analyses.composition.config import FROZEN, NORMS, RECOMPUTED, Norms, check_count
from analyses.composition.effects import Rows
from analyses.composition.exact import ATTRIBUTION, EDGE, edge_keys
from analyses.composition.passes import (
    TANGENT,
    How,
    LayerRun,
    Output,
    Pass,
    Read,
    Trunk,
    contributions,
)
from analyses.composition.receivers import (
    CLASSIFIER,
    INPUTS,
    Receiver,
    Sender,
    as_senders,
    receivers_of,
)
from hc_lens.blocks import Kind, PerHead, Resid
from hc_lens.errors import HcLensError, check_choice
from hc_lens.masks.replacements import Source
from hc_lens.metrics import Totals, log_odds, over_cases
from hc_lens.protocols import BatchesLike, Model
from hc_lens.scans.layers import Stream
from hc_lens.units import UnitSet


def edge_attribution(
    model: Model,
    datasets: Mapping[str, BatchesLike] | BatchesLike,
    means: Source | str,
    senders: Iterable[UnitSet] | None = None,
    *,
    norms: Norms = FROZEN,
    steps: int = 0,
    limit: int | None = None,
    progress: bool = True,
) -> pd.DataFrame:
    """The attribution of every edge: sender, receiver, kind, dataset, case, n, attribution.

    Compare with `margin_change` of `edge_effects`: same sign, same units (nats).

    Args:
        model, datasets, means, senders, norms, limit, progress: as in `edge_effects`.
        steps: points of the integral; 0 takes the gradient at the clean run, for all senders at
            once. With steps every sender costs `steps` forward and backward passes.
    """
    trunk = Trunk(model)
    check_choice("norms", norms, NORMS)
    check_count("steps as a number", steps, 0)
    rows = Rows.of(model, datasets, means, limit)
    edges = {
        sender: receivers_of(trunk.space, sender, trunk.parallel)
        for sender in as_senders(trunk.space, senders)
    }
    how = TANGENT if norms == RECOMPUTED else FROZEN
    totals = Totals(edge_keys(edges), (ATTRIBUTION,))
    for name, batch in rows.pieces(progress, "attribution"):
        with torch.no_grad():
            stream = trunk.stream(batch, rows.source.on(batch))
        values = torch.cat(_attributions(trunk, stream, edges, how, steps))
        totals.add(name, batch.cases, batch.labels, {ATTRIBUTION: values})
    return totals.table()


def _attributions(
    trunk: Trunk,
    stream: Stream,
    edges: Mapping[Sender, Sequence[Receiver]],
    how: How,
    steps: int,
) -> list[Float[Tensor, "edges batch"]]:
    with torch.no_grad():
        clean = Pass(trunk, stream)
        guess = clean.run().argmax(-1)
    if not steps:
        gradients = LeafPass(clean, guess)
        return [gradients.of_edges(clean, sender, found, how) for sender, found in edges.items()]
    values = []
    for sender, found in edges.items():
        total = torch.zeros(len(found), stream.n_rows, dtype=torch.float64, device=guess.device)
        for step in range(steps):
            partly = LeafPass(clean, guess, sender, (step + 0.5) / steps)
            total += partly.of_edges(clean, sender, found, how)
        values.append(total / steps)
    return values


class LeafPass(Pass):
    """A pass whose every receiver has an input of its own to take a gradient of."""

    def __init__(
        self, clean: Pass, guess: Int[Tensor, "rows"], sender: Sender = (), share: float = 0.0
    ):
        """Run forward and backward; with a sender replaced by a share of its replacement."""
        super().__init__(clean.trunk, clean.stream, removed=sender)
        self._clean, self._share = clean, share
        self._leaves: dict[tuple[int | None, str], Tensor] = {}
        with torch.enable_grad():
            total = log_odds(self.run().log_softmax(-1), guess).sum()
            found = torch.autograd.grad(total, list(self._leaves.values()), allow_unused=True)
        self.gradients = dict(zip(self._leaves, found, strict=True))
        for run in self.runs:
            for name, value in vars(run).items():
                if isinstance(value, Tensor):
                    setattr(run, name, value.detach())
        self.final = self.final.detach()

    @torch.no_grad()
    def of_edges(
        self, clean: Pass, sender: Sender, receivers: Sequence[Receiver], how: How
    ) -> Float[Tensor, "edges batch"]:
        """The attribution of each edge of a sender on each row."""
        direct = contributions(self, sender, how, clean)
        by_head = cache(lambda at, kind: self._by_head(at, kind, direct.to_heads[at]))
        rows = []
        for receiver in receivers:
            unit = receiver.unit
            if unit is None:
                rows.append(_dot(self.gradients[None, CLASSIFIER], direct.to_classifier))
            elif unit.head is None:
                rows.append(_dot(self.gradients[unit.layer, "mlp"], direct.to_mlp[unit.layer]))
            else:
                rows.append(by_head(unit.layer, receiver.kind)[:, unit.head])
        return torch.stack(rows).double()

    def _by_head(self, index: int, kind: Kind, change: Resid | None) -> Float[Tensor, "rows heads"]:
        gradient, z = self.gradients[index, kind], self.runs[index].z
        if change is None or gradient is None:
            return z.new_zeros(len(z), z.shape[2])
        moved = self.trunk.blocks[index].project(change, kind, bias=False)
        return (gradient * moved).sum((1, 3))

    def _leaf(self, index: int | None, kind: str, like: Tensor) -> Tensor:
        self._leaves[index, kind] = torch.zeros_like(like, requires_grad=True)
        return self._leaves[index, kind]

    def projections(self, run: LayerRun) -> tuple[PerHead, PerHead, PerHead]:
        """Every head's own queries, keys and values."""
        made = zip(INPUTS, super().projections(run), strict=True)
        q, k, v = (value + self._leaf(run.index, kind, value) for kind, value in made)
        return q, k, v

    def mlp_input(self, run: LayerRun) -> Resid:
        """Every MLP's own input."""
        return run.mlp_in + self._leaf(run.index, "mlp", run.mlp_in)

    def replacement(self, run: LayerRun, what: Output) -> Float[Tensor, "rows pos ..."]:
        """A share of the way from the sender's output in the clean run to its replacement."""
        clean = self._clean.runs[run.index]
        return torch.lerp(getattr(clean, what), super().replacement(clean, what), self._share)

    def classifier(self, read: Read) -> Read:
        """The classifier's own input."""
        return read + self._leaf(None, CLASSIFIER, read)


def _dot(gradient: Tensor, change: Tensor | None) -> Float[Tensor, "rows"]:
    if change is None:
        return gradient.new_zeros(len(gradient))
    return (gradient * change).flatten(1).sum(1)


def agreement(exact: pd.DataFrame, attributed: pd.DataFrame, top: int = 20) -> pd.DataFrame:
    """Spearman's rank correlation of attributions with exact changes, per dataset.

    Columns: dataset, edges (``"top"``: the `top` edges with the largest exact change in size;
    ``"all"``), n, spearman. Both tables are averaged over their cases first.

    Args:
        exact: a table of `edge_effects`.
        attributed: a table of `edge_attribution` on the same rows.
        top: how many edges count as the top.
    """
    by = ["dataset", *EDGE]
    changes = over_cases(exact, by, ["margin_change"])
    merged = changes.merge(over_cases(attributed, by, [ATTRIBUTION]), on=by)
    if merged.empty:
        raise HcLensError(
            "expected two tables with the same edges and datasets, got none in common; make both "
            "with the same senders and batches"
        )
    rows = []
    for dataset, part in merged.groupby("dataset", sort=False):
        order = part["margin_change"].abs().sort_values(ascending=False).index
        for name, chosen in (("top", order[:top]), ("all", order)):
            both = part.loc[chosen, ["margin_change", ATTRIBUTION]]
            found: Any = spearmanr(both["margin_change"], both[ATTRIBUTION])
            rows.append((dataset, name, len(both), float(found.statistic)))
    return pd.DataFrame(rows, columns=["dataset", "edges", "n", "spearman"])
