"""Edge attribution: the first-order version of path patching, for all edges at once.

1. M is a metric with a derivative (`hc_lens.metrics`). By default it is the margin, the log-odds of
   the label or token that the clean run predicts: the KL divergence has no first order there, and
   the log-probability of a confident answer has next to none. One forward and one backward pass
   give M's gradient with respect to every receiver's own input: each head's q, k and v, each MLP's
   input, the classifier's.
2. An edge's attribution is that gradient times the change of the input by the sender's replaced
   contribution, to first order (Nanda 2023; Syed, Rager and Conmy 2023): with frozen norms the
   change itself, which is linear; with recomputed norms its derivative. So it is the derivative of
   the change of M in `edge_effects`, if the sender were replaced by a small part.
3. ``steps=n`` integrates (Sundararajan et al. 2017): for each sender the gradients are averaged
   over n runs in which it is replaced by the shares (i + 1/2)/n. With recomputed norms the
   attributions of a sender's edges then add up to the effect of ablating it, as n grows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from scipy.stats import spearmanr
from torch import Tensor
from typing_extensions import Unpack

from hc_lens.analyses.composition.engine import PathEngine
from hc_lens.analyses.composition.exact import ATTRIBUTION, EDGE, EdgeOptions, edge_keys
from hc_lens.analyses.composition.passes import Direct, How, Input, LayerRun, Output, Pass
from hc_lens.analyses.composition.receivers import (
    INPUTS,
    Receiver,
    Sender,
    as_receivers,
    as_senders,
)
from hc_lens.errors import HcLensError, check_choice, check_count
from hc_lens.masks.replacements import Source
from hc_lens.metrics import (
    KL,
    MARGIN,
    SMOOTH,
    Metric,
    Totals,
    over_cases,
    row_values,
    smooth_metric,
)
from hc_lens.protocols import BatchesLike, BatchLike, Model
from hc_lens.scans.scan import limited_batches
from hc_lens.units import UnitSet

Measure = Callable[[Float[Tensor, "batch out"]], Float[Tensor, "batch"]]
"""A metric of the rows of one batch."""
ATTRIBUTED = tuple(name for name in SMOOTH if name != KL)
"""Metrics that can be attributed: the KL divergence has no first order at the clean run."""


def edge_attribution(
    model: Model,
    datasets: Mapping[str, BatchesLike] | BatchesLike,
    means: Source | str,
    senders: Iterable[UnitSet] | None = None,
    *,
    metric: str | Metric = MARGIN,
    steps: int = 0,
    **options: Unpack[EdgeOptions],
) -> pd.DataFrame:
    """The attribution of every edge: sender, receiver, kind, dataset, case, n, attribution.

    Compare with the change of the same metric in `edge_effects`, such as `margin_change`: same
    sign, same units.

    Args:
        model, datasets, means, senders: as in `edge_effects`.
        metric: what is attributed: the name of a metric with a derivative, or a function of
            (logits, batch) that gives one number per row.
        steps: points of the integral. With 0 two forward passes and a backward pass over a batch
            serve all edges; otherwise every sender costs `steps` of both.
        options: `EdgeOptions`: norms, limit, progress.
    """
    norms = options.get("norms", "frozen")
    engine = PathEngine(model, means, norms)
    check_count("steps", steps, 0)
    check_attributed(metric)
    named = limited_batches(datasets, engine.source, options.get("limit"))
    edges = {sender: as_receivers(model, sender) for sender in as_senders(model, senders)}
    how = "tangent" if norms == "recomputed" else "frozen"
    # Under the metric's own name, so that rows without a label count as they do for the metric.
    column = ATTRIBUTION if callable(metric) else metric
    totals = Totals(edge_keys(edges), (column,))
    progress = options.get("progress", True)
    for name, batch, clean in engine.passes(named, progress, "attribution"):
        measure = _measure(metric, named[name], batch, clean)
        values = torch.cat(_attributions(clean, edges, how, steps, measure))
        totals.add(name, batch.cases, batch.labels, {column: values})
    return totals.table().rename(columns={column: ATTRIBUTION})


def check_attributed(metric: str | Metric) -> None:
    """Raise an HcLensError for a metric that has no derivative at the clean run."""
    if callable(metric):
        return
    check_choice("a metric with a derivative at the clean run", metric, ATTRIBUTED)


def _measure(metric: str | Metric, batches: BatchesLike, batch: BatchLike, clean: Pass) -> Measure:
    """The metric of the rows of a batch, as a function of their logits."""
    if callable(metric):
        return lambda logits: row_values(metric, logits, batch)
    named = smooth_metric(metric, batches)
    return lambda logits: named(logits, batch, lambda: clean.logits)


def _attributions(
    clean: Pass,
    edges: Mapping[Sender, Sequence[Receiver]],
    how: How,
    steps: int,
    measure: Measure,
) -> list[Float[Tensor, "edges batch"]]:
    """The attributions of each sender's edges on each row."""
    plain = [] if steps else [LeafPass(clean, measure)]
    values = []
    for sender, found in edges.items():
        shares = ((step + 0.5) / steps for step in range(steps))
        passes = plain or (LeafPass(clean, measure, sender, share) for share in shares)
        made = [each.of_edges(sender, found, how) for each in passes]
        values.append(sum(made, start=torch.zeros(())) / len(made))
    return values


class LeafPass(Pass):
    """A pass whose every receiver has an input of its own to take a gradient of."""

    def __init__(self, clean: Pass, measure: Measure, sender: Sender = (), share: float = 0.0):
        """Run forward and backward; with a sender replaced by a share of its replacement."""
        super().__init__(clean.view, clean.stream, removed=sender)
        self._clean, self._share = clean, share
        self._leaves: dict[tuple[int | None, str], Tensor] = {}
        with torch.enable_grad():
            self.run()
            measured = measure(self.logits).sum()
        # The inputs of a replaced unit have no gradient: nobody hears them.
        leaves = list(self._leaves.values())
        found = torch.autograd.grad(measured, leaves, materialize_grads=True)
        self.gradients = dict(zip(self._leaves, found, strict=True))

    def heard(self, kind: str, value: Input, run: LayerRun | None = None) -> Input:
        """Every receiver's own input."""
        leaf = torch.zeros_like(value, requires_grad=True)
        self._leaves[None if run is None else run.index, kind] = leaf
        return value + leaf

    def replacement(self, run: LayerRun, what: Output) -> Input:
        """A share of the way from the sender's output in the clean run to its replacement."""
        clean = self._clean.runs[run.index]
        return torch.lerp(getattr(clean, what), super().replacement(clean, what), self._share)

    @torch.no_grad()
    def of_edges(
        self, sender: Sender, receivers: Sequence[Receiver], how: How
    ) -> Float[Tensor, "edges batch"]:
        """The attribution of each edge of a sender on each row."""
        direct = Direct(self._clean, sender, how, self.runs, self._clean.runs)
        to_heads = cache(direct.to_heads)

        @cache
        def by_head(index: int, kind: str) -> Float[Tensor, "rows heads"]:
            assert kind in INPUTS
            moved = self.view.blocks[index].project(to_heads(index), kind, bias=False)
            return (self.gradients[index, kind] * moved).sum((1, 3))

        rows = []
        for receiver in receivers:
            unit = receiver.unit
            if unit is not None and unit.head is not None:
                rows.append(by_head(unit.layer, receiver.kind)[:, unit.head])
                continue
            change = direct.to_last() if unit is None else direct.to_mlp(unit.layer)
            products = self.gradients[receiver.layer, receiver.kind] * change
            rows.append(products.flatten(1).sum(1))
        return torch.stack(rows).double()


def agreement(
    exact: pd.DataFrame, attributed: pd.DataFrame, top: int = 20, change: str = "margin_change"
) -> pd.DataFrame:
    """Spearman's rank correlation of attributions with exact changes, per dataset.

    Columns: dataset, edges (``"top"``: the `top` edges with the largest exact change in size;
    ``"all"``), n, spearman. The tables of `edge_effects` and `edge_attribution` on the same rows
    are averaged over their cases first; `change` names the exact change of the attributed metric.
    """
    by = ["dataset", *EDGE]
    changes = over_cases(exact, by, [change])
    merged = changes.merge(over_cases(attributed, by, [ATTRIBUTION]), on=by)
    if merged.empty:
        raise HcLensError(
            "expected two tables with the same edges and datasets, got none in common; make both "
            "with the same senders and batches"
        )
    rows = []
    for dataset, part in merged.groupby("dataset", sort=False):
        ordered = part.sort_values(change, key=abs, ascending=False)
        for name, chosen in (("top", ordered.head(top)), ("all", ordered)):
            found: Any = spearmanr(chosen[change], chosen[ATTRIBUTION])
            rows.append((dataset, name, len(chosen), float(found.statistic)))
    return pd.DataFrame(rows, columns=["dataset", "edges", "n", "spearman"])
