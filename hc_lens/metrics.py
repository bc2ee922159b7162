"""What is measured on each row, and its table by dataset and case.

1. `row_metrics` compares some runs of a model with the full model, row by row. A row is right if
   the predicted label, in the task's own labels, is its gold label (two-way sets such as HANS:
   argmax over the model's labels, then neutral and contradiction are one). A prompt is right if a
   right answer has the largest logit of all its answers (`hc_lens.data.prompts`). A large
   vocabulary is measured a few rows at a time.
2. `Totals` adds the metrics up batch by batch and gives their means, one line for each run, dataset
   and case. Those of `ACCURACY` and `LOGIT` are over the rows with a label, NaN where none has one.
3. `label_metrics` tells which label each run says, and whether the gold label is the one that the
   task's heuristic answers. A case in which it always is, is *friendly* to the heuristic; one in
   which it never is, *adversarial* (`sides`).
4. `wilson` gives the interval of a share of rows.
5. `over_cases` joins the cases of a dataset again. `by_side` sets the friendly cases beside the
   adversarial ones, because a model that always says one label is right on all cases of one side.

6. `check_metrics` reads which metrics a user asks for: some of `NAMED`, or functions of the logits
   and the batch.

`kl_divergence` and `cross_entropy` are also the losses of pruning.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from statistics import NormalDist
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import nll_loss

from hc_lens.data.batches import cut
from hc_lens.data.known import ADVERSARIAL, FRIENDLY
from hc_lens.errors import HcLensError, check_choice
from hc_lens.protocols import BatchesLike, BatchLike

FULL = "full"
"""Name of the full model in every table."""
ACCURACY, AGREEMENT, KL, LOGIT, MARGIN = "accuracy", "agreement", "kl", "logit", "margin"
"""The metrics of a row: right, as the full model, KL from it, log-odds of the right answer against
the wrong ones (for a prompt with one of each their logit difference), log-odds of what the full
model predicts."""
ODDS, PROBABILITY, LOSS = "log_odds", "probability", "loss"
"""Of the right answer: ``log p - log(1 - p)``, p and ``-log p``; of a classifier, `ODDS` is
`LOGIT`."""
PREDICTION = "prediction"
"""The predicted label's id."""
SHARE, LABELLED, HEURISTIC = "share_", "has_label", "heuristic"
"""What `label_metrics` tells of a row: whether a label is predicted (a metric for each label, with
this prefix), whether the row has a label, whether that is the label which the heuristic answers."""
DIFFERENCE = "logit_difference"
"""Another name of `LOGIT`, by which it is known where models are asked for their next token."""
OF_LABELLED = (ACCURACY, LOGIT, DIFFERENCE, ODDS, PROBABILITY, LOSS, HEURISTIC)
"""Metrics that only rows with a label have."""
NAMED = {
    **{name: name for name in (ACCURACY, AGREEMENT, KL, LOGIT, MARGIN, ODDS, PROBABILITY, LOSS)},
    DIFFERENCE: LOGIT,
}
"""The metrics that can be asked for by name."""
SMOOTH = tuple(name for name in NAMED if name not in (ACCURACY, AGREEMENT))
"""Those with a derivative."""
EVERY = (*dict.fromkeys(NAMED.values()), PREDICTION)
"""All metrics of a row."""
AT_ONCE = 2**22
"""Most logits that are measured at one time."""
Metric = Callable[[Float[Tensor, "batch out"], BatchLike], Float[Tensor, "batch"]]
"""One number for each row, from the logits where it is read and the batch."""
Metrics = Sequence[str] | Mapping[str, Metric | str]
"""Metrics that a user asks for: names of `NAMED`, or also functions of their own by name."""


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


def odds(log_probs: Float[Tensor, "*runs batch"]) -> Float[Tensor, "*runs batch"]:
    """``log p - log(1 - p)`` from log p; where p rounds to 1 it is that of the next number."""
    below_one = log_probs.clamp(max=-torch.finfo(log_probs.dtype).eps)
    return below_one - torch.log(-torch.expm1(below_one))


def cross_entropy(batches: BatchesLike) -> Metric:
    """Minus the log-probability of each row's label, in the labels of the batches' task."""

    def loss(logits: Float[Tensor, "batch out"], batch: BatchLike) -> Float[Tensor, "batch"]:
        if bool((batch.labels < 0).any()):
            raise HcLensError(
                "expected labelled rows for the cross-entropy, got rows without a label; pass rows "
                "with labels, or a loss of your own, such as for the label that the model predicts "
                "loss=lambda logits, batch: -logits.log_softmax(-1).amax(-1); prune takes 'kl' too"
            )
        return nll_loss(batches.log_probs(logits, batch), batch.labels, reduction="none")

    return loss


def check_metrics(given: Metrics) -> dict[str, Metric | str]:
    """What a user asks for, by its name in tables; a name that is not known is an HcLensError."""
    named: dict[str, Metric | str] = (
        dict(given) if isinstance(given, Mapping) else {name: name for name in given}
    )
    for name, metric in named.items():
        if not callable(metric):
            check_choice("the metric", metric, NAMED)
            named[name] = NAMED[metric]
        if callable(metric) == (name in NAMED) or (not callable(metric) and name != metric):
            raise HcLensError(
                f"expected a metric of hc_lens under its own name ({', '.join(NAMED)}), and yours "
                f"under another, got {name!r} for {metric!r}; rename it"
            )
    return named


def row_values(
    metric: Metric, logits: Float[Tensor, "batch out"], batch: BatchLike
) -> Float[Tensor, "batch"]:
    """What a function says of each row; anything but one number per row is an HcLensError."""
    values = metric(logits, batch)
    name, shape = getattr(metric, "__name__", repr(metric)), getattr(values, "shape", None)
    if shape != batch.rows.shape:
        found = type(values).__name__ if shape is None else f"a tensor of shape {list(shape)}"
        raise HcLensError(
            f"expected one number for each of the {len(batch.rows)} rows of a batch from {name}, "
            f"got {found}; give a tensor of shape [{len(batch.rows)}]"
        )
    return values


def row_metrics(
    batches: BatchesLike,
    batch: BatchLike,
    full: Float[Tensor, "batch out"],
    logits: Float[Tensor, "runs batch out"],
    wanted: Mapping[str, Metric | str] | Sequence[str] = EVERY,
) -> dict[str, Float[Tensor, "runs batch"]]:
    """Metrics of some runs on a batch, against the full model's logits on it.

    In a task without labels the predictions are the model's own labels, and what is said of the
    right answer is NaN. `wanted` are names of metrics, or metrics as `check_metrics` gives them.
    """
    asked = wanted if isinstance(wanted, Mapping) else {name: name for name in wanted}
    size, parts = max(1, AT_ONCE // logits.shape[-1]), []
    for index, piece in enumerate([batch] if len(full) <= size else cut(batch, size)):
        at = slice(index * size, (index + 1) * size)
        step, own = max(1, AT_ONCE // full[at].numel()), logits[:, at]
        found = [
            _Measured(batches, piece, full[at], own[run : run + step]).values(asked)
            for run in range(0, len(logits), step)
        ]
        parts.append({name: torch.cat([each[name] for each in found]) for name in asked})
    return {name: torch.cat([part[name] for part in parts], dim=1) for name in asked}


def held_metrics(
    batches: BatchesLike,
    batch: BatchLike,
    held: Float[Tensor, "runs batch width"],
    logits: Callable[[Tensor], Tensor],
    wanted: Mapping[str, Metric | str] | Sequence[str] = EVERY,
) -> dict[str, Float[Tensor, "runs batch"]]:
    """`row_metrics` of what some runs left where each row is read, the full model's first.

    `logits` makes the logits of it (`hc_lens.models.reading.Readout.logits`), of a few runs at a
    time.
    """
    full = logits(held[0])
    step = max(1, AT_ONCE // full.numel())
    found = [
        row_metrics(batches, batch, full, logits(held[run : run + step]), wanted)
        for run in range(0, len(held), step)
    ]
    return {name: torch.cat([each[name] for each in found]) for name in found[0]}


def smooth_metric(
    name: str, batches: BatchesLike, full: Callable[[BatchLike], Float[Tensor, "batch out"]]
) -> Metric:
    """A metric by its name, as a function with derivatives; `full` gives the full model's logits.

    One that has no derivative is an HcLensError.
    """
    check_choice("a metric with a derivative", name, SMOOTH)

    def metric(logits: Float[Tensor, "batch out"], batch: BatchLike) -> Float[Tensor, "batch"]:
        measured = _Measured(batches, batch, full(batch), logits[None])
        return measured.values({name: NAMED[name]})[name][0]

    return metric


class _Measured:
    """Some runs on some rows; each metric is computed when it is asked for."""

    def __init__(
        self,
        batches: BatchesLike,
        batch: BatchLike,
        full: Float[Tensor, "batch out"],
        logits: Float[Tensor, "runs batch out"],
    ):
        self._batches, self._batch, self._logits = batches, batch, logits
        self._full, self._runs = full.double(), logits.double()
        names = getattr(batches, "labels", None)
        self._labelled = names is None or len(names) > 0
        """Whether the task has labels; batches that do not name theirs have some all the same."""

    def values(self, asked: Mapping[str, Metric | str]) -> dict[str, Float[Tensor, "runs batch"]]:
        """The metrics under their names."""
        named: dict[str, Callable[[], Tensor]] = {
            ACCURACY: lambda: self._of_labelled((self._ours == self._batch.labels).double()),
            AGREEMENT: lambda: (self._ours == self._predictions(self._full)).double(),
            KL: lambda: kl_divergence(self._full, self._runs),
            LOGIT: lambda: self._of_labelled(log_odds(self._log_probs, self._batch.labels)),
            ODDS: lambda: self._of_labelled(odds(self._right)),
            PROBABILITY: lambda: self._of_labelled(self._right.exp()),
            LOSS: lambda: self._of_labelled(-self._right),
            MARGIN: lambda: log_odds(self._runs.log_softmax(-1), self._full.argmax(-1)),
            PREDICTION: self._ours.double,
        }
        return {
            name: self._own(name, metric) if callable(metric) else named[metric]()
            for name, metric in asked.items()
        }

    @cached_property
    def _ours(self) -> Int[Tensor, "runs batch"]:
        return self._predictions(self._runs)

    @cached_property
    def _log_probs(self) -> Float[Tensor, "runs batch labels"]:
        if self._labelled:
            return self._batches.log_probs(self._runs, self._batch)
        return torch.full_like(self._runs[..., :1], torch.nan)

    @property
    def _right(self) -> Float[Tensor, "runs batch"]:
        """Log-probability of each row's right answer; of the first label without one."""
        labels = self._batch.labels.clamp(min=0).expand(self._runs.shape[:-1])
        return self._log_probs.gather(-1, labels[..., None])[..., 0]

    def _predictions(self, logits: Float[Tensor, "*runs batch out"]) -> Int[Tensor, "*runs batch"]:
        if self._labelled:
            return self._batches.predictions(logits, self._batch)
        return logits.argmax(-1)

    def _of_labelled(self, values: Float[Tensor, "runs batch"]) -> Float[Tensor, "runs batch"]:
        return values.masked_fill(self._batch.labels < 0, torch.nan)

    def _own(self, name: str, metric: Metric) -> Float[Tensor, "runs batch"]:
        """A metric of the user's own; one that is not finite is an HcLensError."""
        found = [row_values(metric, run, self._batch).detach().double() for run in self._logits]
        values = torch.stack(found)
        if not bool(values.isfinite().all()):
            row = int(self._batch.rows[(~values.isfinite()).any(0)][0])
            raise HcLensError(
                f"expected finite numbers of the metric {name!r}, got NaN or infinity for row "
                f"{row}; look at how it divides or takes logarithms there"
            )
        return values


def label_metrics(
    batches: BatchesLike, batch: BatchLike, predictions: Float[Tensor, "runs batch"]
) -> dict[str, Float[Tensor, "runs batch"]]:
    """Which label each run says, and what the rows' own labels are.

    Without names of labels nothing is said of the predictions; without a heuristic `HEURISTIC` is
    NaN.
    """
    names = label_names(batches)
    heuristic, known = getattr(batches, "heuristic", None), getattr(batches, "sides", None) or {}
    answered = torch.full_like(predictions, torch.nan)
    if heuristic is not None:
        check_choice("the heuristic's answer", heuristic, names)
        answered = (batch.labels == names.index(heuristic)).double().expand_as(predictions)
    elif known:
        share = {FRIENDLY: 1.0, ADVERSARIAL: 0.0}
        said = [share.get(known.get(case, ""), torch.nan) for case in batch.cases]
        answered = torch.tensor(said, dtype=torch.float64).to(predictions).expand_as(predictions)
    said = {f"{SHARE}{name}": (predictions == index).double() for index, name in enumerate(names)}
    return {
        LABELLED: (batch.labels >= 0).double().expand_as(predictions),
        HEURISTIC: answered,
        **said,
    }


def label_names(batches: BatchesLike) -> list[str]:
    """Names of the labels that a model can say; prompts have answers of their own instead."""
    return [] if hasattr(batches, "sides") else list(getattr(batches, "labels", None) or ())


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
