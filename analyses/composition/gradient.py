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

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from scipy.stats import spearmanr
from torch import Tensor

from analyses.composition.exact import edge_keys
from analyses.composition.layers import (
    FROZEN,
    RECOMPUTED,
    TANGENT,
    Heads,
    Layer,
    Read,
    Resid,
    check_supported,
)
from analyses.composition.measures import Totals, each_batch, odds, over_cases, prepare
from analyses.composition.passes import Pass, Trunk, contributions
from analyses.composition.receivers import INPUTS, Receiver, Sender, as_senders, receivers_of
from hc_lens.errors import HcLensError
from hc_lens.hooks import mlp_name, z_name
from hc_lens.sources import Source
from hc_lens.suffix.sets import UnitSet
from hc_lens.units import Unit, UnitSpace

ATTRIBUTION = "attribution"


def edge_attribution(
    model: Any,
    datasets: Mapping[str, Any] | Any,
    means: Source | str,
    senders: Iterable[UnitSet] | None = None,
    *,
    norms: str = FROZEN,
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
    check_supported(model)
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise HcLensError(f"expected steps as a number of at least 0, got {steps!r}; 0 is plain")
    named, source = prepare(model, datasets, means, norms)
    space, trunk = UnitSpace.of(model), Trunk(model)
    edges = {
        sender: receivers_of(space, sender, trunk.parallel) for sender in as_senders(space, senders)
    }
    how = TANGENT if norms == RECOMPUTED else FROZEN
    totals = Totals(edge_keys(edges), (ATTRIBUTION,))
    for name, _, batch in each_batch(named, source, limit, progress, "attribution"):
        values = torch.cat(_attributions(trunk, source.on(batch), batch, edges, how, steps))
        totals.add(name, batch, {ATTRIBUTION: values})
    return totals.table()


def _attributions(
    trunk: Trunk, source: Source, batch: Any, edges: Mapping[Sender, list], how: str, steps: int
) -> list[Float[Tensor, "edges batch"]]:
    with torch.no_grad():
        stream = trunk.blocks.start(batch, source)
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

    def __init__(self, clean: Pass, guess: Tensor, sender: Sender = (), share: float = 0.0):
        """Run forward and backward; with a sender replaced by a share of its replacement."""
        super().__init__(clean.trunk, clean.stream)
        self._clean, self._sender, self._share = clean, sender, share
        self._leaves: dict[tuple[Any, str], Tensor] = {}
        with torch.enable_grad():
            total = odds(self.run().log_softmax(-1)[None], guess).sum()
            found = torch.autograd.grad(total, list(self._leaves.values()), allow_unused=True)
        self.gradients = dict(zip(self._leaves, found, strict=True))
        for run in self.runs:
            for name, value in vars(run).items():
                if value is not None:
                    setattr(run, name, value.detach())
        self.final = None if self.final is None else self.final.detach()

    @torch.no_grad()
    def of_edges(
        self, clean: Pass, sender: Sender, receivers: list[Receiver], how: str
    ) -> Float[Tensor, "edges batch"]:
        """The attribution of each edge of a sender on each row."""
        direct = contributions(self, sender, how, clean)
        rows = []
        products: dict[tuple[int, str], Tensor] = {}
        for receiver in receivers:
            if receiver.unit is None:
                rows.append(_dot(self.gradients[None, receiver.kind], direct.to_classifier))
                continue
            index = receiver.unit.layer
            if receiver.kind == "mlp":
                rows.append(_dot(self.gradients[index, "mlp"], direct.to_mlp[index]))
                continue
            change = direct.to_heads[index]
            if (index, receiver.kind) not in products:
                products[index, receiver.kind] = self._by_head(index, receiver.kind, change)
            rows.append(products[index, receiver.kind][:, receiver.unit.head])
        return torch.stack(rows).double()

    def _by_head(self, index: int, kind: str, change: Resid | None) -> Float[Tensor, "rows heads"]:
        gradient = self.gradients[index, kind]
        if change is None or gradient is None:
            return self.runs[index].z.new_zeros(
                len(self.runs[index].z), self.runs[index].z.shape[2]
            )
        moved = self.trunk.layers[index].project(change, kind, bias=False)
        return (gradient * moved).sum((1, 3))

    def _leaf(self, key: tuple[Any, str], like: Tensor) -> Tensor:
        self._leaves[key] = torch.zeros_like(like, requires_grad=True)
        return self._leaves[key]

    def projections(
        self, index: int, layer: Layer, x: Resid, reads: Resid
    ) -> tuple[Heads, Heads, Heads]:
        """Every head's own queries, keys and values."""
        made = (layer.project(reads, kind) for kind in INPUTS)
        q, k, v = (p + self._leaf((index, kind), p) for kind, p in zip(INPUTS, made, strict=True))
        return q, k, v

    def heads(self, index: int, z: Heads) -> Heads:
        """A sending head partly replaced."""
        chosen = [unit.head for unit in self._sender if unit.layer == index and unit.is_head]
        if not chosen:
            return z
        was = self._clean.runs[index].z
        value = self.stream.source.value(z_name(index), was).expand_as(was)
        z = z.clone()
        z[:, :, chosen] = torch.lerp(was, value, self._share)[:, :, chosen]
        return z

    def mlp_input(self, index: int, layer: Layer, mlp_in: Resid) -> Resid:
        """Every MLP's own input."""
        return mlp_in + self._leaf((index, "mlp"), mlp_in)

    def mlp(self, index: int, mlp_out: Resid) -> Resid:
        """A sending MLP partly replaced."""
        if Unit(index) not in self._sender:
            return mlp_out
        was = self._clean.runs[index].mlp_out
        assert was is not None
        value = self.stream.source.value(mlp_name(index), was).expand_as(was)
        return torch.lerp(was, value, self._share)

    def classifier(self, read: Read) -> Read:
        """The classifier's own input."""
        return read + self._leaf((None, "classifier"), read)


def _dot(gradient: Tensor, change: Tensor | None) -> Float[Tensor, "rows"]:
    if change is None or gradient is None:
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
    by = ["dataset", "sender", "receiver", "kind"]
    merged = over_cases(exact, by).merge(over_cases(attributed, by), on=by)
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
