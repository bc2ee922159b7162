"""Path patching: what the answer loses if one receiver does not hear a sender (Wang et al. 2022).

1. A sender A writes ``z_A W_O[A]`` into the residual stream. Its direct contribution to a receiver
   is the part of the receiver's input that comes from A along the skip connections alone.
2. `edge_effects` replaces that part by what A's ablated (mean) output would contribute, leaves
   everything else in front of the receiver as in the clean run, and re-runs the model from there.
3. `joint_effects` patches several receivers of a sender together: they read a stream without A's
   contribution, all others one with it, and both see what earlier patched receivers changed.
4. Layer norms on the way: see `layers` (``norms="frozen"`` or ``"recomputed"``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd
import torch

from analyses.composition.engine import PathEngine
from analyses.composition.layers import FROZEN, check_supported
from analyses.composition.measures import Totals, each_batch, effects, prepare
from analyses.composition.receivers import (
    Receiver,
    Sender,
    as_receivers,
    as_senders,
    label_of,
    receivers_of,
)
from hc_lens.errors import HcLensError
from hc_lens.sources import Source
from hc_lens.suffix.sets import UnitSet, set_label
from hc_lens.units import UnitSpace

ALL = "all"
"""In `joint_effects`: every receiver of the sender."""
TOTAL = "ablated"
"""In the table of `joint_effects`: the sender ablated, all its paths at once."""


def edge_effects(
    model: Any,
    datasets: Mapping[str, Any] | Any,
    means: Source | str,
    senders: Iterable[UnitSet] | None = None,
    receivers: Iterable[Receiver | str] | None = None,
    *,
    norms: str = FROZEN,
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
    check_supported(model)
    named, source = prepare(model, datasets, means, norms)
    space = UnitSpace.of(model)
    engine = PathEngine(model, source, norms)
    given = None if receivers is None else _listed(receivers)
    edges = {
        sender: as_receivers(space, sender, given, engine.trunk.parallel)
        for sender in as_senders(space, senders)
    }
    totals = Totals(edge_keys(edges))
    for name, batches, batch in each_batch(named, source, limit, progress, "edges"):
        clean, logits = engine.start(batch)
        patched = [engine.edges(clean, sender, heard) for sender, heard in edges.items()]
        totals.add(name, batch, effects(batches, batch, logits, torch.cat(patched)))
    return totals.table()


def joint_effects(
    model: Any,
    datasets: Mapping[str, Any] | Any,
    means: Source | str,
    paths: Mapping[Any, Any] | Sequence[Any],
    *,
    norms: str = FROZEN,
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
    check_supported(model)
    named, source = prepare(model, datasets, means, norms)
    space, engine = UnitSpace.of(model), PathEngine(model, source, norms)
    parallel = engine.trunk.parallel
    plans: dict[tuple[Sender, str], list[Receiver]] = {}
    for given, heard in _pairs(paths):
        (sender,) = as_senders(space, [given])
        every = receivers_of(space, sender, parallel)
        chosen = every if heard == ALL else as_receivers(space, sender, heard, parallel)
        plans[sender, TOTAL] = every
        plans[sender, ALL if heard == ALL else label_of(chosen)] = chosen
    keys = {
        "sender": [set_label(sender) for sender, _ in plans],
        "receivers": [label for _, label in plans],
        "n_edges": [len(chosen) for chosen in plans.values()],
    }
    totals = Totals(pd.DataFrame(keys))
    for name, batches, batch in each_batch(named, source, limit, progress, "joint edges"):
        clean, logits = engine.start(batch)
        patched = [
            engine.ablated(clean, sender) if label == TOTAL else engine.joint(clean, sender, chosen)
            for (sender, label), chosen in plans.items()
        ]
        totals.add(name, batch, effects(batches, batch, logits, torch.stack(patched)))
    return totals.table()


def _pairs(paths: Mapping[Any, Any] | Sequence[Any]) -> list[tuple[Any, Any]]:
    """The pairs of a sender and its receivers that a user gave."""
    given = list(paths.items()) if isinstance(paths, Mapping) else list(paths)
    strange = [pair for pair in given if isinstance(pair, str) or len(pair) != 2]
    if strange or not given:
        raise HcLensError(
            "expected pairs of a sender and its receivers such as "
            f"[('L0.H6', ['L2.H4.q', 'L1.MLP'])], got {strange[0] if strange else 'none'!r}; "
            "('L0.H6', 'all') stands for all receivers"
        )
    return given


def edge_keys(edges: Mapping[Any, Sequence[Receiver]]) -> pd.DataFrame:
    """The columns sender, receiver and kind of some edges."""
    pairs = [(set_label(sender), heard) for sender, found in edges.items() for heard in found]
    return pd.DataFrame(
        {
            "sender": [label for label, _ in pairs],
            "receiver": [receiver.name for _, receiver in pairs],
            "kind": [receiver.kind for _, receiver in pairs],
        }
    )


def _listed(receivers: Iterable[Receiver | str]) -> list[Receiver | str]:
    return [receivers] if isinstance(receivers, str | Receiver) else list(receivers)
