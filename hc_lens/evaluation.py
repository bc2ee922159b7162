"""Accuracy, agreement and KL of a model and its subnetworks, case by case.

1. Run the full model on each batch, or take its kept logits.
2. Run each subnetwork on the same batch: its binary mask, removed units at their replacement.
3. Compare them row by row and average over the rows of each case (`hc_lens.metrics`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd
import torch
from tqdm.auto import tqdm

from hc_lens.data.batches import named_batches
from hc_lens.errors import HcLensError
from hc_lens.masks.replacements import Source, as_source
from hc_lens.metrics import ACCURACY, AGREEMENT, FULL, KL, Totals, row_metrics
from hc_lens.protocols import BatchesLike, Model
from hc_lens.pruning.job import Teacher
from hc_lens.pruning.subnetwork import Subnetwork

METRICS = (ACCURACY, KL, AGREEMENT)
KEYS = ("subnetwork", "dataset", "case")


def evaluate(
    model: Model,
    data: BatchesLike | Mapping[str, BatchesLike],
    *,
    means: Source | str | None = None,
    subnetwork: Subnetwork | Sequence[Subnetwork] | Mapping[str, Subnetwork] | None = None,
    teachers: Mapping[str, Teacher] | None = None,
    progress: bool = True,
) -> pd.DataFrame:
    """One row per subnetwork, dataset and case: n, accuracy, kl, agreement.

    The full model, named ``"full"``, always comes first; `kl` and `agreement` compare with it.
    Accuracy is NaN for a case without labels.

    Args:
        means: what replaces removed units; needed with `subnetwork`.
        subnetwork: one, several, or several by name.
        teachers: the full model's kept logits by name of the dataset, so that calls on the same
            batches run the full model once.
    """
    networks = named(subnetwork)
    if networks and means is None:
        raise HcLensError(
            "expected means to replace the removed units of a subnetwork, got none; "
            "pass means=hc.collect_means(model, batches)"
        )
    source = as_source("zero" if means is None else means)
    runs = [FULL, *networks]
    totals = Totals(pd.DataFrame({"subnetwork": runs}), METRICS)
    seen: dict[tuple[str, str, str], None] = {}
    for name, batches in named_batches(data).items():
        teacher = Teacher(model) if teachers is None else teachers[name]
        for batch in tqdm(batches, desc=name, disable=not progress, leave=False):
            full = teacher.logits(batch)
            logits = [full]
            for network in networks.values():
                with torch.no_grad(), network.attach(model, source.on(batch)):
                    logits.append(model(**batch.inputs))
            metrics = row_metrics(batches, batch, full, torch.stack(logits))
            totals.add(name, batch.cases, batch.labels, metrics)
            seen |= {(run, name, case): None for run in runs for case in batch.cases}
    # In the order in which the rows came: a dataset's first cases first, the full model before all.
    table = totals.table().set_index(list(KEYS)).loc[list(seen)].reset_index()
    return table[[*KEYS, "n", *METRICS]]


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
