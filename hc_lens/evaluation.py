"""Accuracy, agreement and KL of a model and its subnetworks, case by case.

1. Run the full model on each batch, or take its kept logits.
2. Run each subnetwork on the same batch: its binary mask, removed units at their replacement.
3. Compare them row by row and average over the rows of each case (`hc_lens.metrics`).
4. Put the table in order: the full model first, datasets as given, cases as the split has them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from hc_lens.data.batches import cut, named_batches
from hc_lens.errors import HcLensError, HcLensWarning, warn
from hc_lens.masks.attached import warn_if_masked
from hc_lens.masks.finite import check_weights
from hc_lens.masks.hooks import hooked_units
from hc_lens.masks.replacements import Source, as_source
from hc_lens.masks.run import MaskedRun
from hc_lens.metrics import (
    ACCURACY,
    AGREEMENT,
    FULL,
    HEURISTIC,
    KL,
    LABELLED,
    PREDICTION,
    SHARE,
    Metric,
    Metrics,
    Totals,
    further,
    held_metrics,
    label_metrics,
    label_names,
    sides,
    try_metrics,
    wilson,
)
from hc_lens.models.inputs import rows_at_once
from hc_lens.models.reading import Readout
from hc_lens.protocols import BatchesLike, BatchLike, Model
from hc_lens.pruning.subnetwork import Subnetwork
from hc_lens.pruning.teacher import Teacher

METRICS = (ACCURACY, KL, AGREEMENT)
COLUMNS = (
    *("subnetwork", "dataset", "case", "side", "n"),
    *(ACCURACY, "low", "high", KL, AGREEMENT),
)
"""Columns of the table; after them come further metrics and the shares of the predicted labels."""
Run = Callable[[BatchLike], dict[str, Float[Tensor, "runs batch"]]]
"""Gives the metrics of the full model and of every subnetwork on a batch."""


class OtherMeansWarning(HcLensWarning):
    """A subnetwork was found with another replacement of removed units than it is scored with."""


def evaluate(
    model: Model,
    data: BatchesLike | Mapping[str, BatchesLike],
    *,
    means: Source | str | None = None,
    subnetwork: Subnetwork | Sequence[Subnetwork] | Mapping[str, Subnetwork] | None = None,
    metrics: Metrics = (),
    teachers: Mapping[str, Teacher] | None = None,
    progress: bool = True,
) -> pd.DataFrame:
    """One row per subnetwork, dataset and case.

    Columns: subnetwork, dataset, case, side, n, accuracy, low, high, kl, agreement, the further
    `metrics`, and ``share_<label>`` for each label of the tasks. `low` and `high` are the 95%
    interval of the accuracy, `side` is "friendly" or "adversarial" to the task's heuristic, a share
    is that of the rows on which the label is predicted (docs/method/evaluation.md).

    The full model, named ``"full"``, always comes first; `kl` and `agreement` compare with it.
    Accuracy is NaN for a case without labels.

    Args:
        means: what replaces removed units; needed with `subnetwork`. Others than those that a
            subnetwork was found with give a warning.
        subnetwork: one, several, or several by name.
        metrics: more to measure: names such as ``["logit_difference", "probability"]``, or
            functions of (logits, batch) by name, which give one number per row from the logits
            where the row is read.
        teachers: the full model's kept logits by name of the dataset, so that calls on the same
            batches run the full model once.
    """
    warn_if_masked(model)
    check_weights(model)
    networks = named(subnetwork)
    if networks and means is None:
        raise HcLensError(
            "expected means to replace the removed units of a subnetwork, got none; "
            "pass means=hc.collect_means(model, batches)"
        )
    source = as_source("zero" if means is None else means)
    if networks:
        source.check(model, hooked_units(model))
    for network in networks.values():
        network.check(model)
    _compare_means(networks, source)
    more, datasets = further(metrics, COLUMNS), named_batches(data)
    try_metrics(more, datasets, Readout(model))
    masked = MaskedRun(model, source) if networks else None
    runs, parts = [FULL, *networks], []
    for name, batches in datasets.items():
        teacher = Teacher(model) if teachers is None else teachers[name]
        run = partial(_measured, teacher, masked, list(networks.values()), more, batches)
        parts.append(_by_case(runs, name, batches, tuple(more), run, progress))
    table = pd.concat(parts, ignore_index=True)
    order = table["subnetwork"].map({name: index for index, name in enumerate(runs)})
    return table.loc[order.sort_values(kind="stable").index].reset_index(drop=True)


def _compare_means(networks: Mapping[str, Subnetwork], source: Source) -> None:
    """Warn if a subnetwork was found with another source than this one."""
    used = getattr(source, "fingerprint", None)
    for name, network in networks.items():
        if used is not None and network.means and network.means != used:
            warn(f"{name} was found with other means than those used here", OtherMeansWarning)


def _measured(
    teacher: Teacher,
    masked: MaskedRun | None,
    networks: Sequence[Subnetwork],
    more: Mapping[str, Metric | str],
    batches: BatchesLike,
    batch: BatchLike,
) -> dict[str, Float[Tensor, "runs batch"]]:
    """The metrics of the full model and of every subnetwork on a batch."""
    model, readout = teacher.model, teacher.readout
    held = [teacher.held(batch)]
    if masked is not None:
        row_wise = masked.source.row_wise
        pieces = cut(batch, rows_at_once(model, batch.inputs) if row_wise else len(batch.rows))
        with torch.no_grad():
            for mask in (network.mask for network in networks):
                runs = [masked.held(piece, mask, "a subnetwork") for piece in pieces]
                held.append(torch.cat(runs))
    wanted = {**{name: name for name in (*METRICS, PREDICTION)}, **more}
    with torch.no_grad():
        found = held_metrics(batches, batch, torch.stack(held), readout.logits, wanted)
    return found | label_metrics(batches, batch, found[PREDICTION])


def _by_case(
    runs: Sequence[str],
    name: str,
    batches: BatchesLike,
    more: tuple[str, ...],
    run: Run,
    progress: bool,
) -> pd.DataFrame:
    """The table of one dataset, with its cases in the order of the split."""
    shares = [f"{SHARE}{label}" for label in label_names(batches)]
    keys = pd.DataFrame({"subnetwork": list(runs)})
    totals = Totals(keys, (*METRICS, *more, LABELLED, HEURISTIC, *shares))
    first: dict[str, int] = {}
    for batch in tqdm(batches, desc=name, disable=not progress, leave=False):
        totals.add(name, batch.cases, batch.labels, run(batch))
        for case, row in zip(batch.cases, batch.rows.tolist(), strict=True):
            first[case] = min(row, first.setdefault(case, row))
    table = totals.table()
    labelled = (table["n"] * table[LABELLED]).round()
    table["low"], table["high"] = wilson(table[ACCURACY].to_numpy(), labelled.to_numpy())
    table["side"] = sides(table[HEURISTIC])
    order = table["case"].map(first).sort_values(kind="stable").index
    return table.loc[order, [*COLUMNS, *more, *shares]]


def named(
    subnetwork: Subnetwork | Sequence[Subnetwork] | Mapping[str, Subnetwork] | None,
) -> dict[str, Subnetwork]:
    """Subnetworks by name: ``"subnetwork"`` for one, ``"0"``, ``"1"``, ... for a list."""
    if isinstance(subnetwork, Subnetwork):
        return {"subnetwork": subnetwork}
    if isinstance(subnetwork, Mapping):
        networks = dict(subnetwork)
    else:
        networks = {str(index): network for index, network in enumerate(subnetwork or ())}
    if FULL in networks:
        raise HcLensError(
            f"expected names other than {FULL!r} (the full model's own), got {list(networks)}; "
            "rename the subnetwork"
        )
    return networks
