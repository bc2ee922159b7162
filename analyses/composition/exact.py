"""Path patching: what the answer loses if one receiver does not hear a sender (Wang et al. 2022).

1. A sender A writes ``z_A W_O[A]`` into the residual stream. Its direct contribution to a receiver
   is the part of the receiver's input that comes from A along the skip connections alone.
2. `edge_effects` replaces that part by what A's ablated (mean) output would contribute, leaves
   everything else in front of the receiver as in the clean run, and re-runs the model from there.
3. `joint_effects` patches several receivers of a sender together: they read a stream without A's
   contribution, all others one with it, and both see what earlier patched receivers changed.
4. Layer norms on the way: see `passes` (``norms="frozen"`` or ``"recomputed"``).
5. What a patched run changed of the clean one (`hc_lens.metrics`) is averaged over each case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from hc_lens.analyses.composition.config import Norms
from hc_lens.analyses.composition.engine import PathEngine
from hc_lens.analyses.composition.passes import Pass
from hc_lens.analyses.composition.receivers import Heard, Receiver, Sender, as_receivers, as_senders
from hc_lens.errors import HcLensError, check_choice
from hc_lens.masks.replacements import Source
from hc_lens.metrics import ACCURACY, AGREEMENT, KL, LOGIT, MARGIN, Totals, over_cases, row_metrics
from hc_lens.protocols import BatchesLike, Model
from hc_lens.scans.scan import limited_batches
from hc_lens.units import UnitSet, set_label

EDGE = ["sender", "receiver", "kind"]
"""The columns that name an edge."""
CHANGES = {ACCURACY: "accuracy_change", MARGIN: "margin_change", LOGIT: "logit_change"}
"""Metrics that are compared with the clean run, and the columns of their changes."""
MEASURES = (KL, "accuracy_change", AGREEMENT, "margin_change", "logit_change")
"""The columns that measure an effect."""
ATTRIBUTION = "attribution"
"""The column of `edge_attribution`."""
ALL = "all"
"""In `joint_effects`: every receiver of the sender."""
TOTAL = "ablated"
"""In the table of `joint_effects`: the sender ablated, all its paths at once."""

Paths = Mapping[UnitSet, Heard] | Sequence[tuple[UnitSet, Heard]]
"""Senders with their receivers, as a user writes them."""


def edge_effects(
    model: Model,
    datasets: Mapping[str, BatchesLike] | BatchesLike,
    means: Source | str,
    senders: Iterable[UnitSet] | None = None,
    receivers: Heard | None = None,
    *,
    norms: Norms = "frozen",
    limit: int | None = None,
    progress: bool = True,
) -> pd.DataFrame:
    """What patching each edge alone does, per dataset and case.

    Columns: sender, receiver, kind (q, k, v, qkv, mlp or classifier), dataset, case, n (rows), kl
    (of the clean run from the patched one, nats), accuracy_change, agreement (share of rows that
    keep their prediction), margin_change (log-odds of the label that the clean run predicts)
    and logit_change (log-odds of the gold label). Accuracy and logit are over rows with a label.

    Args:
        model: a classifier of `hc.load`, without hooks.
        datasets: batches by name, or batches alone.
        means: what replaces a sender's activation: means, ``"zero"`` or another source.
        senders: units, or sets of units such as ``"L0.H6+L1.H1"`` whose contributions are replaced
            together; default every head alone.
        receivers: labels such as ``"L2.H4.q"``, ``"L2.H4"``, ``"L2.MLP"``, ``"classifier"``;
            default every q, k, v, MLP and the classifier behind each sender.
        norms: how a contribution passes layer norms, ``"frozen"`` or ``"recomputed"``.
        limit: at most so many rows of each dataset; the sample is always the same one.
        progress: show a progress bar.
    """
    engine = PathEngine(model, means, norms)
    named = limited_batches(datasets, engine.source, limit)
    edges = {s: as_receivers(model, s, receivers) for s in as_senders(model, senders)}

    def patched(clean: Pass) -> Float[Tensor, "edges batch labels"]:
        return torch.cat([engine.edges(clean, sender, heard) for sender, heard in edges.items()])

    return _effects(engine, named, edge_keys(edges), patched, progress)


def joint_effects(
    model: Model,
    datasets: Mapping[str, BatchesLike] | BatchesLike,
    means: Source | str,
    paths: Paths,
    *,
    norms: Norms = "frozen",
    limit: int | None = None,
    progress: bool = True,
) -> pd.DataFrame:
    """What patching several receivers of a sender together does, beside ablating the sender.

    Columns: sender, receivers (labels joined by ``+``, ``"all"``, or ``"ablated"``), n_edges,
    dataset, case, n and the measures of `edge_effects`. Every sender has a row ``"ablated"``. With
    recomputed norms ``"all"`` equals it; with frozen norms the two differ by what the sender does
    to the scales of the layer norms.

    Args:
        model, datasets, means, norms, limit, progress: as in `edge_effects`.
        paths: pairs (or a mapping) of a sender and its receivers, ``"all"`` for all of them.
    """
    engine = PathEngine(model, means, norms)
    named = limited_batches(datasets, engine.source, limit)
    plans = _plans(model, paths)
    keys = [(set_label(sender), label, len(heard)) for (sender, label), heard in plans.items()]

    def patched(clean: Pass) -> Float[Tensor, "paths batch labels"]:
        found = [
            engine.ablated(clean, sender) if label == TOTAL else engine.joint(clean, sender, heard)
            for (sender, label), heard in plans.items()
        ]
        return torch.stack(found)

    table = pd.DataFrame(keys, columns=["sender", "receivers", "n_edges"])
    return _effects(engine, named, table, patched, progress)


def strongest(edges: pd.DataFrame, n: int, dataset: str | None = None) -> pd.DataFrame:
    """The n strongest of some edges: sender, receiver, kind and the means over datasets."""
    if dataset is not None:
        check_choice("a dataset", dataset, edges["dataset"].unique())
        edges = edges.loc[edges["dataset"] == dataset]
    measures = [name for name in (*MEASURES, ATTRIBUTION) if name in edges]
    by_dataset = over_cases(edges, ["dataset", *EDGE], measures)
    means: Any = by_dataset.groupby(EDGE, sort=False)[measures].mean()
    ordered = means.reset_index().sort_values(KL, ascending=False, kind="stable")
    return ordered.head(n).reset_index(drop=True)


def edge_keys(edges: Mapping[Sender, Sequence[Receiver]]) -> pd.DataFrame:
    """The columns sender, receiver and kind of some edges."""
    named = [
        (set_label(sender), receiver.name, receiver.kind)
        for sender, receivers in edges.items()
        for receiver in receivers
    ]
    return pd.DataFrame(named, columns=EDGE)


def _plans(model: Model, paths: Paths) -> dict[tuple[Sender, str], list[Receiver]]:
    """The receivers of every sender and label of the table."""
    pairs = list(paths.items()) if isinstance(paths, Mapping) else list(paths)
    strange = [pair for pair in pairs if isinstance(pair, str) or len(pair) != 2]
    if strange or not pairs:
        raise HcLensError(
            "expected pairs of a sender and its receivers such as "
            f"[('L0.H6', ['L2.H4.q', 'L1.MLP'])], got {strange[0] if strange else 'none'!r}; "
            "('L0.H6', 'all') stands for all receivers"
        )
    plans: dict[tuple[Sender, str], list[Receiver]] = {}
    for given, heard in pairs:
        (sender,) = as_senders(model, [given])
        chosen = as_receivers(model, sender, None if heard == ALL else heard)
        plans[sender, TOTAL] = as_receivers(model, sender)
        plans[sender, ALL if heard == ALL else "+".join(map(str, chosen))] = chosen
    return plans


def _effects(
    engine: PathEngine,
    named: Mapping[str, BatchesLike],
    keys: pd.DataFrame,
    patched: Callable[[Pass], Float[Tensor, "runs batch labels"]],
    progress: bool,
) -> pd.DataFrame:
    """For each dataset, case and run: the keys, dataset, case, n (rows) and the measures.

    `keys` says what each run is, such as its sender and receiver; `patched` gives the logits of all
    runs from the clean pass over a batch.
    """
    totals = Totals(keys, (KL, ACCURACY, AGREEMENT, MARGIN, LOGIT))
    for name, batch, clean in engine.passes(named, progress, "patching"):
        both = torch.cat([clean.logits[None], patched(clean)])
        metrics = row_metrics(named[name], batch, clean.logits, both)
        values = {
            key: value[1:] - value[:1] if key in CHANGES else value[1:]
            for key, value in metrics.items()
        }
        totals.add(name, batch.cases, batch.labels, values)
    return totals.table().rename(columns=CHANGES)
