"""What is measured on each row, and its table by dataset and case.

1. `row_metrics` compares some runs of a model with the full model, row by row. A row is right if
   the predicted label, in the task's own labels, is its gold label (two-way sets such as HANS:
   argmax over the model's labels, then neutral and contradiction are one).
2. `Totals` adds the metrics up batch by batch and gives their means, one line for each run, dataset
   and case. Those of `ACCURACY` and `LOGIT` are over the rows with a label, NaN where none has one.
3. `label_metrics` tells which label each run says, and whether the gold label is the one that the
   task's heuristic answers. A case in which it always is, is *friendly* to the heuristic; one in
   which it never is, *adversarial* (`sides`).
4. `wilson` gives the interval of a share of rows.
5. `over_cases` joins the cases of a dataset again. `by_side` sets the friendly cases beside the
   adversarial ones, because a model that always says one label is right on all cases of one side.

`kl_divergence` and `cross_entropy` are also the losses of pruning.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import NormalDist
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import nll_loss

from hc_lens.data.known import ADVERSARIAL, FRIENDLY
from hc_lens.errors import HcLensError, check_choice
from hc_lens.protocols import BatchesLike, BatchLike

FULL = "full"
"""Name of the full model in every table."""
ACCURACY, AGREEMENT, KL, LOGIT, MARGIN = "accuracy", "agreement", "kl", "logit", "margin"
"""The metrics of a row: right, as the full model, KL from it, log-odds of the gold label, log-odds
of the label that the full model predicts."""
PREDICTION = "prediction"
"""The predicted label's id."""
SHARE, LABELLED, HEURISTIC = "share_", "has_label", "heuristic"
"""What `label_metrics` tells of a row: whether a label is predicted (a metric for each label, with
this prefix), whether the row has a label, whether that is the label which the heuristic answers."""
OF_LABELLED = (ACCURACY, LOGIT, HEURISTIC)
"""Metrics that only rows with a label have."""
Loss = Callable[[Float[Tensor, "batch labels"], BatchLike], Float[Tensor, "batch"]]
"""A loss per row, from the logits and the batch."""


def kl_divergence(
    full: Float[Tensor, "*#runs batch labels"], masked: Float[Tensor, "*runs batch labels"]
) -> Float[Tensor, "*runs batch"]:
    """KL(full || masked) of each row's label distribution, in nats, from logits."""
    theirs, ours = full.log_softmax(-1), masked.log_softmax(-1)
    return (theirs.exp() * (theirs - ours)).sum(-1)


def log_odds(
    log_probs: Float[Tensor, "*runs batch labels"], labels: Int[Tensor, "batch"]
) -> Float[Tensor, "*runs batch"]:
    """``log p - log(1 - p)`` of each row's label; of the first label for a row without one."""
    chosen = labels.clamp(min=0).expand(log_probs.shape[:-1])[..., None]
    others = log_probs.scatter(-1, chosen, -torch.inf).logsumexp(-1)
    return log_probs.gather(-1, chosen).squeeze(-1) - others


def cross_entropy(batches: BatchesLike) -> Loss:
    """Minus the log-probability of each row's label, in the labels of the batches' task."""

    def loss(logits: Float[Tensor, "batch labels"], batch: BatchLike) -> Float[Tensor, "batch"]:
        if bool((batch.labels < 0).any()):
            raise HcLensError(
                "expected labelled rows for the cross-entropy, got rows without a label; pass rows "
                "with labels, or a loss of your own, such as for the label that the model predicts "
                "loss=lambda logits, batch: -logits.log_softmax(-1).amax(-1); prune takes 'kl' too"
            )
        return nll_loss(batches.log_probs(logits), batch.labels, reduction="none")

    return loss


def row_metrics(
    batches: BatchesLike,
    batch: BatchLike,
    full: Float[Tensor, "batch labels"],
    logits: Float[Tensor, "runs batch labels"],
) -> dict[str, Float[Tensor, "runs batch"]]:
    """Every metric of some runs on a batch, against the full model's logits on it.

    In a task without labels the predictions are the model's own labels, and `LOGIT` is NaN.
    """
    whole, runs = full.double(), logits.double()
    flat, shape = runs.flatten(0, 1), logits.shape[:2]
    unlabelled, names = batch.labels < 0, getattr(batches, "labels", None)
    # Batches that do not name their labels have some all the same.
    if names is None or len(names) > 0:
        ours, theirs = batches.predictions(flat).view(shape), batches.predictions(whole)
        logit = log_odds(batches.log_probs(flat).view(*shape, -1), batch.labels)
    else:
        ours, theirs = runs.argmax(-1), whole.argmax(-1)
        logit = torch.full_like(runs[..., 0], torch.nan)
    return {
        ACCURACY: (ours == batch.labels).double().masked_fill(unlabelled, torch.nan),
        AGREEMENT: (ours == theirs).double(),
        KL: kl_divergence(whole, runs),
        LOGIT: logit.masked_fill(unlabelled, torch.nan),
        MARGIN: log_odds(runs.log_softmax(-1), whole.argmax(-1)),
        PREDICTION: ours.double(),
    }


def label_metrics(
    batches: BatchesLike, batch: BatchLike, predictions: Float[Tensor, "runs batch"]
) -> dict[str, Float[Tensor, "runs batch"]]:
    """Which label each run says, and what the rows' own labels are.

    Without names of labels nothing is said of the predictions; without a heuristic `HEURISTIC` is
    NaN.
    """
    names = list(getattr(batches, "labels", None) or ())
    heuristic = getattr(batches, "heuristic", None)
    answered = torch.full_like(predictions, torch.nan)
    if heuristic is not None:
        check_choice("the heuristic's answer", heuristic, names)
        answered = (batch.labels == names.index(heuristic)).double().expand_as(predictions)
    said = {f"{SHARE}{name}": (predictions == index).double() for index, name in enumerate(names)}
    return {
        LABELLED: (batch.labels >= 0).double().expand_as(predictions),
        HEURISTIC: answered,
        **said,
    }


def sides(answered: pd.Series) -> pd.Series:
    """The side of each case, from the share of its rows on which the heuristic is right.

    Empty where the rows differ, and where there is no heuristic or no label.
    """
    return answered.map({1.0: FRIENDLY, 0.0: ADVERSARIAL}).fillna("")


def case_sides(batches: BatchesLike) -> dict[str, str]:
    """The side of each case of a dataset, in order of their names."""
    totals = Totals(pd.DataFrame(index=[0]), [HEURISTIC])
    for batch in batches:
        nothing = torch.full((1, len(batch.labels)), torch.nan, dtype=torch.float64)
        totals.add("", batch.cases, batch.labels, label_metrics(batches, batch, nothing))
    table = totals.table()
    return dict(zip(table["case"], sides(table[HEURISTIC]), strict=True))


def wilson(
    share: Float[np.ndarray, "*shape"], n: Float[np.ndarray, "*shape"], level: float = 0.95
) -> tuple[Float[np.ndarray, "*shape"], Float[np.ndarray, "*shape"]]:
    """Ends of the interval of a share of n rows (Wilson 1927); NaN without rows."""
    z2, rows = NormalDist().inv_cdf((1 + level) / 2) ** 2, np.where(n > 0, n, np.nan)
    centre, width = (
        share + z2 / (2 * rows),
        np.sqrt(z2 * (share * (1 - share) + z2 / (4 * rows)) / rows),
    )
    low, high = ((centre + sign * width) / (1 + z2 / rows) for sign in (-1, 1))
    return low.clip(0, 1), high.clip(0, 1)


class Totals:
    """Running means of some metrics per dataset and case, one line for each run.

    The `keys` say what each run is, such as its unit or its edge.
    """

    def __init__(self, keys: pd.DataFrame, metrics: Sequence[str]):
        self.keys, self.metrics = keys, tuple(metrics)
        self._sums: dict[str, dict[str, dict[str, Any]]] = {}

    def add(
        self,
        dataset: str,
        cases: Iterable[str],
        labels: Int[Tensor, "rows"],
        values: Mapping[str, Float[Tensor, "runs rows"]],
    ) -> None:
        """Add some rows with their cases and labels."""
        names, labelled = np.asarray(list(cases)), (labels >= 0).cpu()
        on_cpu = {name: values[name].double().cpu() for name in self.metrics}
        for case in dict.fromkeys(names.tolist()):
            at = torch.from_numpy(names == case)
            sums = self._sums.setdefault(dataset, {}).setdefault(case, defaultdict(float))
            sums["n"] += int(at.sum())
            sums["labelled"] += int((at & labelled).sum())
            for name, value in on_cpu.items():
                sums[name] += value[:, at & labelled if name in OF_LABELLED else at].sum(1)

    def table(self) -> pd.DataFrame:
        """The keys, dataset, case, n (rows) and the means: datasets as added, cases by name."""
        parts = []
        for dataset, cases in self._sums.items():
            for case, sums in sorted(cases.items()):
                part = self.keys.assign(dataset=dataset, case=case, n=int(sums["n"]))
                for name in self.metrics:
                    count = sums["labelled"] if name in OF_LABELLED else sums["n"]
                    part[name] = (sums[name] / (count or torch.nan)).numpy()
                parts.append(part)
        return pd.concat(parts, ignore_index=True)


def over_cases(table: pd.DataFrame, keys: Sequence[str], metrics: Sequence[str]) -> pd.DataFrame:
    """One line for each value of the keys: the mean of each metric over the rows of all cases.

    A case in which a metric is missing does not count for it.
    """
    names = list(metrics)
    rows = table[names].notna().mul(table["n"], axis=0)
    totals = (table[names].fillna(0) * rows).join(table[[*keys, "n"]])
    counts = rows.join(table[list(keys)])
    summed = totals.groupby(list(keys), sort=False)[["n", *names]].sum()
    counted = counts.groupby(list(keys), sort=False)[names].sum()
    summed[names] = summed[names] / counted.where(counted > 0)
    return summed.reset_index()


def by_side(table: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """One line for each value of the keys: friendly cases beside adversarial ones.

    Columns: friendly and adversarial (means of the accuracy over the cases of that side, each case
    counting the same), balanced (the mean of both), said (the label that is said most often) and
    said_share (its share, the mean of both sides' shares). A side without cases is NaN, and so is
    what needs both sides.

    Args:
        table: of `hc.evaluate` or of a sweep; without a column `side` everything is NaN.
        keys: columns such as subnetwork and dataset.
    """
    names = [name for name in table.columns if name.startswith(SHARE)]
    index = pd.DataFrame(table[list(keys)].drop_duplicates()).set_index(list(keys)).index
    side = table.get("side", pd.Series("", index=table.index))
    friendly, adversarial = (
        table.loc[side == name].groupby(list(keys))[[ACCURACY, *names]].mean().reindex(index)
        for name in (FRIENDLY, ADVERSARIAL)
    )
    both = (friendly + adversarial) / 2
    # Where a share is missing it must not win.
    shares = both[names].rename(columns=lambda name: name.removeprefix(SHARE)).fillna(-1)
    found = pd.DataFrame(
        {
            FRIENDLY: friendly[ACCURACY],
            ADVERSARIAL: adversarial[ACCURACY],
            "balanced": both[ACCURACY],
            "said": shares.idxmax(axis=1) if names else "",
            "said_share": both[names].max(axis=1),
        }
    )
    found["said"] = found["said"].where(found["said_share"].notna())
    return found.reset_index()
