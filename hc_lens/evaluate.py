"""Accuracy, agreement and KL of a model and its subnetworks, case by case.

1. Run the full model on each batch.
2. Run each subnetwork on the same batch: its binary mask, removed units at their replacement.
3. A row is right if the predicted label, in the task's own labels, is its gold label (two-way sets
   such as HANS: argmax over the model's labels, then neutral and contradiction are one).
4. KL is KL(full || subnetwork) of the label distributions in nats; agreement is the share of rows
   with the full model's predicted label.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from hc_lens.errors import HcLensError
from hc_lens.sources import Source, as_source
from hc_lens.store import Subnetwork
from hc_lens.teacher import Teacher

FULL = "full"
"""Name of the full model in the tables."""


def kl_divergence(
    full: Float[Tensor, "batch labels"], masked: Float[Tensor, "batch labels"]
) -> Float[Tensor, "batch"]:
    """KL(full || masked) of each row's label distribution, in nats, from logits."""
    theirs, ours = full.log_softmax(-1), masked.log_softmax(-1)
    return (theirs.exp() * (theirs - ours)).sum(-1)


def evaluate(
    model: Any,
    data: Mapping[str, Any],
    *,
    means: Source | str | None = None,
    subnetwork: Subnetwork | Sequence[Subnetwork] | Mapping[str, Subnetwork] | None = None,
    teachers: Mapping[str, Teacher] | None = None,
    progress: bool = True,
) -> pd.DataFrame:
    """One row per subnetwork, dataset and case: n, accuracy, kl, agreement.

    Args:
        model: a hooked classifier.
        data: `hc.Batches` by name of the dataset.
        means: what replaces removed units; needed with `subnetwork`.
        subnetwork: one, several, or several by name. None evaluates the full model alone; the full
            model, named ``"full"``, is always the first of the table.
        teachers: a `hc_lens.teacher.Teacher` of this model by name of the dataset, so that calls on
            the same batches run the full model once.
        progress: show a progress bar.

    Accuracy is NaN for a case without labels. `kl` and `agreement` compare with the full model.
    """
    networks = named(subnetwork)
    if networks and means is None:
        raise HcLensError(
            "expected means to replace the removed units of a subnetwork, got none; "
            "pass means=hc.collect_means(model, batches)"
        )
    source = None if means is None else as_source(means)
    records: list[pd.DataFrame] = []
    for name, batches in data.items():
        teacher = None if teachers is None else teachers[name]
        for batch in tqdm(batches, desc=name, disable=not progress, leave=False):
            with torch.no_grad():
                full = model(**batch.inputs) if teacher is None else teacher.logits(batch)
            records.append(_rows(FULL, name, batches, batch, full, full))
            for label, network in networks.items():
                assert source is not None
                with torch.no_grad(), network.attach(model, source.on(batch)):
                    logits = model(**batch.inputs)
                records.append(_rows(label, name, batches, batch, full, logits))
    if not records:
        raise HcLensError("expected at least one batch to evaluate, got none; check the splits")
    return summarise(pd.concat(records, ignore_index=True))


def named(
    subnetwork: Subnetwork | Sequence[Subnetwork] | Mapping[str, Subnetwork] | None,
) -> dict[str, Subnetwork]:
    """Subnetworks by name: ``"subnetwork"`` for one, ``"0"``, ``"1"``, ... for a list."""
    if subnetwork is None:
        return {}
    if isinstance(subnetwork, Subnetwork):
        return {"subnetwork": subnetwork}
    if isinstance(subnetwork, Mapping):
        networks = dict(subnetwork)
    else:
        networks = {str(place): network for place, network in enumerate(subnetwork)}
    if FULL in networks:
        raise HcLensError(
            f"expected names other than {FULL!r} (the full model's own), got {list(networks)}; "
            "rename the subnetwork"
        )
    return networks


def _rows(
    network: str, dataset: str, batches: Any, batch: Any, full: Tensor, logits: Tensor
) -> pd.DataFrame:
    """One row per row of the batch: right or not (NaN without a label), KL, agreement."""
    columns: dict[str, Any] = {"subnetwork": network, "dataset": dataset, "case": batch.cases}
    guesses, theirs = batches.predictions(logits), batches.predictions(full)
    right = (guesses == batch.labels).double()
    right[batch.labels < 0] = torch.nan
    columns["accuracy"] = right.cpu().numpy()
    columns["kl"] = kl_divergence(full.double(), logits.double()).cpu().numpy()
    columns["agreement"] = (guesses == theirs).double().cpu().numpy()
    return pd.DataFrame(columns)


def summarise(rows: pd.DataFrame) -> pd.DataFrame:
    """Means over rows of accuracy, kl and agreement, with n, in order of first appearance."""
    measures = ("accuracy", "kl", "agreement")
    columns = {"n": ("kl", "size"), **{name: (name, "mean") for name in measures}}
    return pd.DataFrame(
        rows.groupby(["subnetwork", "dataset", "case"], sort=False).agg(**columns)
    ).reset_index()
