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

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypedDict

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import Unpack

from hc_lens.analyses.composition.config import Norms
from hc_lens.analyses.composition.engine import PathEngine
from hc_lens.analyses.composition.passes import Pass
from hc_lens.analyses.composition.receivers import Heard, Receiver, Sender, as_receivers, as_senders
from hc_lens.errors import HcLensError, check_choice
from hc_lens.masks.replacements import Source
from hc_lens.metrics import (
    ACCURACY,
    AGREEMENT,
    KL,
    LOGIT,
    MARGIN,
    Metrics,
    Totals,
    further,
    held_metrics,
    over_cases,
    try_metrics,
)
from hc_lens.models.reading import Readout
from hc_lens.protocols import BatchesLike, Model
from hc_lens.scans.scan import limited_batches
from hc_lens.units import UnitSet, set_label

EDGE = ["sender", "receiver", "kind"]
"""The columns that name an edge."""
_METRICS = (KL, ACCURACY, AGREEMENT, MARGIN, LOGIT)
"""The metrics that are always there."""
CHANGES = {ACCURACY: "accuracy_change", MARGIN: "margin_change", LOGIT: "logit_change"}
"""Metrics that are compared with the clean run, and the columns of their changes."""


def change_of(metric: str) -> str:
    """The column with the change of a metric."""
    return CHANGES.get(metric, f"{metric}_change")


MEASURES = (KL, "accuracy_change", AGREEMENT, "margin_change", "logit_change")
"""The columns that measure an effect."""
ATTRIBUTION = "attribution"
"""The column of `edge_attribution`."""
_COLUMNS = (*EDGE, "receivers", "n_edges", "dataset", "case", "n", *MEASURES, ATTRIBUTION)
"""What the metrics of a user cannot be called."""
ALL = "all"
"""In `joint_effects`: every receiver of the sender."""
TOTAL = "ablated"
"""In the table of `joint_effects`: the sender ablated, all its paths at once."""


class EdgeOptions(TypedDict, total=False):
    """What all functions of edges take by name."""

    norms: Norms
    """How a contribution passes layer norms, ``"frozen"`` (the default) or ``"recomputed"``."""
    limit: int | None
    """At most so many rows of each dataset; the sample is always the same one."""
    progress: bool
    """Whether to show a progress bar."""


class PatchOptions(EdgeOptions, total=False):
    """What `edge_effects` and `joint_effects` take by name."""

    metrics: Metrics
    """More whose change is measured: names such as ``["probability"]``, or functions of (logits,
    batch) by name, as in `hc.scan`."""


Paths = Mapping[UnitSet, Heard] | Sequence[tuple[UnitSet, Heard]]
"""Senders with their receivers, as a user writes them."""


def edge_effects(
    model: Model,
    datasets: Mapping[str, BatchesLike] | BatchesLike,
    means: Source | str,
    senders: Iterable[UnitSet] | None = None,
    receivers: Heard | None = None,
    **options: Unpack[PatchOptions],
) -> pd.DataFrame:
    """What patching each edge alone does, per dataset and case.

    Columns: sender, receiver, kind (q, k, v, qkv, mlp and classifier or unembed), dataset, case, n
    (rows), kl (of the clean run from the patched one, nats), accuracy_change, agreement (share of
    rows that keep their prediction), margin_change (log-odds of the label, or of the token, that
    the clean run predicts) and logit_change (log-odds of the gold label, or of a prompt's right
    answers against its wrong ones), and the change of each further metric. Accuracy and logit are
    over rows with a label.

    Args:
        model: a classifier or language model without hooks, of `hc.load` or TransformerLens.
        datasets: batches by name, or batches alone.
        means: what replaces a sender's activation: means, ``"zero"`` or another source.
        senders: units, or sets of units such as ``"L0.H6+L1.H1"`` whose contributions are replaced
            together; default every head alone.
        receivers: labels such as ``"L2.H4.q"``, ``"L2.H4"``, ``"L2.MLP"``, ``"classifier"``, or
            ``"unembed"`` of a language model; default every one behind each sender.
        options: `PatchOptions`: norms, metrics, limit, progress.
    """
    run = _Patching(model, datasets, means, **options)
    edges = {s: as_receivers(model, s, receivers) for s in as_senders(model, senders)}

    def patched(clean: Pass) -> Iterator[Float[Tensor, "edges batch width"]]:
        return (run.engine.edges(clean, sender, heard) for sender, heard in edges.items())

    return run.effects(edge_keys(edges), patched)


def joint_effects(
    model: Model,
    datasets: Mapping[str, BatchesLike] | BatchesLike,
    means: Source | str,
    paths: Paths,
    **options: Unpack[PatchOptions],
) -> pd.DataFrame:
    """What patching several receivers of a sender together does, beside ablating the sender.

    Columns: sender, receivers (labels joined by ``+``, ``"all"``, or ``"ablated"``), n_edges,
    dataset, case, n and the measures of `edge_effects`. Every sender has a row ``"ablated"``. With
    recomputed norms ``"all"`` equals it; with frozen norms the two differ by what the sender does
    to the scales of the layer norms.

    Args:
        model, datasets, means, options: as in `edge_effects`.
        paths: pairs (or a mapping) of a sender and its receivers, ``"all"`` for all of them.
    """
    run = _Patching(model, datasets, means, **options)
    engine = run.engine
    plans = _plans(model, paths)
    keys = [(set_label(sender), label, len(heard)) for (sender, label), heard in plans.items()]

    def patched(clean: Pass) -> Iterator[Float[Tensor, "paths batch width"]]:
        found = [
            engine.ablated(clean, sender) if label == TOTAL else engine.joint(clean, sender, heard)
            for (sender, label), heard in plans.items()
        ]
        yield torch.stack(found)

    table = pd.DataFrame(keys, columns=["sender", "receivers", "n_edges"])
    return run.effects(table, patched)


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


class _Patching:
    """The engine, the rows and the metrics of one call."""

    def __init__(
        self,
        model: Model,
        datasets: Mapping[str, BatchesLike] | BatchesLike,
        means: Source | str,
        *,
        norms: Norms = "frozen",
        metrics: Metrics = (),
        limit: int | None = None,
        progress: bool = True,
    ):
        self._more = further(metrics, (*_METRICS, *_COLUMNS))
        self._progress = progress
        self.engine = PathEngine(model, means, norms)
        self._named = limited_batches(datasets, self.engine.source, limit)
        try_metrics(self._more, self._named, Readout(model))

    @torch.no_grad()
    def effects(
        self,
        keys: pd.DataFrame,
        patched: Callable[[Pass], Iterator[Float[Tensor, "runs batch width"]]],
    ) -> pd.DataFrame:
        """For each dataset, case and run: the keys, dataset, case, n (rows) and the measures.

        `keys` says what each run is, such as its sender and receiver; `patched` gives what all runs
        leave to read, some at a time, from the clean pass over a batch.
        """
        wanted = {name: name for name in _METRICS} | self._more
        changes = CHANGES | {name: change_of(name) for name in self._more}
        totals = Totals(keys, list(wanted))
        for name, batch, clean in self.engine.passes(self._named, self._progress, "patching"):
            parts: dict[str, list[Tensor]] = {metric: [] for metric in wanted}
            for held in patched(clean):
                # The clean run is the first.
                runs, logits = torch.cat([clean.held[None], held]), self.engine.view.read_out
                found = held_metrics(self._named[name], batch, runs, logits, wanted)
                for metric, value in found.items():
                    part = value[1:] - value[:1] if metric in changes else value[1:]
                    parts[metric].append(part)
            values = {metric: torch.cat(part) for metric, part in parts.items()}
            totals.add(name, batch.cases, batch.labels, values)
        return totals.table().rename(columns=changes)
