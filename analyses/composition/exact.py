"""Path patching: what the answer loses if one receiver does not hear a sender (Wang et al. 2022).

1. A sender A writes ``z_A W_O[A]`` into the residual stream. Its direct contribution to a receiver
   is the part of the receiver's input that comes from A along the skip connections alone.
2. `edge_effects` replaces that part by what A's ablated (mean) output would contribute, leaves
   everything else in front of the receiver as in the clean run, and re-runs the model from there.
3. `joint_effects` patches several receivers of a sender together: they read a stream without A's
   contribution, all others one with it, and both see what earlier patched receivers changed.
4. Layer norms on the way: see `passes` (``norms="frozen"`` or ``"recomputed"``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from analyses.composition.config import FROZEN, Norms
from analyses.composition.effects import MEASURES, Rows
from analyses.composition.engine import PathEngine
from analyses.composition.passes import Pass
from analyses.composition.receivers import Heard, Receiver, Sender, as_receivers, as_senders
from hc_lens.errors import HcLensError, check_choice
from hc_lens.masks.replacements import Source
from hc_lens.metrics import KL, over_cases
from hc_lens.protocols import BatchesLike, Model
from hc_lens.units import UnitSet, UnitSpace, set_label

EDGE = ["sender", "receiver", "kind"]
"""The columns that name an edge."""
ATTRIBUTION = "attribution"
"""The column of `edge_attribution`."""
ALL = "all"
"""In `joint_effects`: every receiver of the sender."""
TOTAL = "ablated"
"""In the table of `joint_effects`: the sender ablated, all its paths at once."""


def edge_effects(
    model: Model,
    datasets: Mapping[str, BatchesLike] | BatchesLike,
    means: Source | str,
    senders: Iterable[UnitSet] | None = None,
    receivers: Heard | None = None,
    *,
    norms: Norms = FROZEN,
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
    rows = Rows.of(model, datasets, means, limit)
    engine = PathEngine(model, rows.source, norms)
    space = engine.trunk.space
    edges = {
        sender: as_receivers(space, sender, receivers, engine.trunk.parallel)
        for sender in as_senders(space, senders)
    }

    def patched(clean: Pass) -> Float[Tensor, "edges batch labels"]:
        return torch.cat([engine.edges(clean, sender, heard) for sender, heard in edges.items()])

    return rows.effects(engine, edge_keys(edges), patched, progress)


def joint_effects(
    model: Model,
    datasets: Mapping[str, BatchesLike] | BatchesLike,
    means: Source | str,
    paths: Mapping[UnitSet, Heard] | Sequence[tuple[UnitSet, Heard]],
    *,
    norms: Norms = FROZEN,
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
    rows = Rows.of(model, datasets, means, limit)
    engine = PathEngine(model, rows.source, norms)
    plans = _plans(engine.trunk.space, paths, engine.trunk.parallel)
    keys = {
        "sender": [set_label(sender) for sender, _ in plans],
        "receivers": [label for _, label in plans],
        "n_edges": [len(chosen) for chosen in plans.values()],
    }

    def patched(clean: Pass) -> Float[Tensor, "paths batch labels"]:
        found = [
            engine.ablated(clean, sender) if label == TOTAL else engine.joint(clean, sender, chosen)
            for (sender, label), chosen in plans.items()
        ]
        return torch.stack(found)

    return rows.effects(engine, pd.DataFrame(keys), patched, progress)


def strongest(edges: pd.DataFrame, n: int, dataset: str | None = None) -> pd.DataFrame:
    """The n strongest of some edges: sender, receiver, kind and the means over datasets."""
    if dataset is not None:
        check_choice("a dataset", dataset, edges["dataset"].unique())
    chosen = edges if dataset is None else edges.loc[edges["dataset"] == dataset]
    measures = [name for name in (*MEASURES, ATTRIBUTION) if name in chosen]
    by_dataset = over_cases(chosen, ["dataset", *EDGE], measures)
    means: Any = by_dataset.groupby(EDGE, sort=False)[measures].mean()
    ordered = means.reset_index().sort_values(KL, ascending=False, kind="stable")
    return ordered.head(n).reset_index(drop=True)


def _plans(
    space: UnitSpace,
    paths: Mapping[UnitSet, Heard] | Sequence[tuple[UnitSet, Heard]],
    parallel: bool,
) -> dict[tuple[Sender, str], list[Receiver]]:
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
        (sender,) = as_senders(space, [given])
        chosen = as_receivers(space, sender, None if heard == ALL else heard, parallel)
        plans[sender, TOTAL] = as_receivers(space, sender, None, parallel)
        plans[sender, ALL if heard == ALL else "+".join(map(str, chosen))] = chosen
    return plans


def edge_keys(edges: Mapping[Sender, Sequence[Receiver]]) -> pd.DataFrame:
    """The columns sender, receiver and kind of some edges."""
    named = [
        (set_label(sender), receiver.name, receiver.kind)
        for sender, receivers in edges.items()
        for receiver in receivers
    ]
    return pd.DataFrame(named, columns=EDGE)
