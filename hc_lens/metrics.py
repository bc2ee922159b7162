"""What is measured on each row, and its table by dataset and case.

1. `held_metrics` compares some runs of a model with the full model, row by row. A row is right if
   the predicted label, in the task's own labels, is its gold label (two-way sets such as HANS:
   argmax over the model's labels, then neutral and contradiction are one). A prompt is right if a
   right answer has the largest logit of all its answers (`hc_lens.data.prompts`).
2. `Totals` adds the metrics up batch by batch and gives their means, one line for each run, dataset
   and case. Those of `ACCURACY` and `LOGIT` are over the rows with a label, NaN where none has one.
3. `label_metrics` tells which label each run says, and whether the gold label is the one that the
   task's heuristic answers. A case in which it always is, is *friendly* to the heuristic; one in
   which it never is, *adversarial* (`sides`).
4. `wilson` gives the interval of a share of rows.
5. `over_cases` joins the cases of a dataset again. `by_side` sets the friendly cases beside the
   adversarial ones, because a model that always says one label is right on all cases of one side.

6. `check_metrics` reads which metrics a user asks for: some of `NAMED`, or functions of the logits
   and the batch, which `try_metrics` calls once before the work begins.
7. Runs are given by what is held of them where a row is read. Of a large vocabulary the logits are
   made from it a few rows at a time, here and for losses with derivatives (`held_losses`).

`kl_divergence` and `cross_entropy` are also the losses of pruning.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import nll_loss
from torch.utils.checkpoint import checkpoint

from hc_lens.data.batches import cut
from hc_lens.data.known import ADVERSARIAL, FRIENDLY
from hc_lens.errors import HcLensError, check_choice
from hc_lens.masks.finite import check_finite
from hc_lens.masks.hooks import has_user_hooks
from hc_lens.metric_names import SmoothName
from hc_lens.protocols import BatchesLike, BatchLike

if TYPE_CHECKING:
    from hc_lens.models.reading import Readout

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
COSTS = (KL, LOSS)
"""Metrics in which less is better."""
SMOOTH: tuple[str, ...] = get_args(SmoothName)
"""The metrics with a derivative."""
NAMED = {**{name: name for name in (ACCURACY, AGREEMENT, *SMOOTH)}, DIFFERENCE: LOGIT}
"""The metrics that can be asked for by name."""
EVERY = (*dict.fromkeys(NAMED.values()), PREDICTION)
"""All metrics of a row."""
AT_ONCE = 2**21
"""Most logits that are measured at one time."""
Metric = Callable[[Float[Tensor, "batch out"], BatchLike], Float[Tensor, "batch"]]
"""One number for each row, from the logits where it is read and the batch."""
Full = Callable[[], Float[Tensor, "batch out"]]
"""Gives the full model's logits on the same rows, which are made only where they are needed."""
Loss = Callable[[Float[Tensor, "batch out"], BatchLike, Full], Float[Tensor, "batch"]]
"""One number for each row, from a run's logits, the batch and the full model's logits."""
Logits = Callable[[Float[Tensor, "*runs batch width"]], Float[Tensor, "*runs batch out"]]
"""Makes the logits of what is held of some rows (`hc_lens.models.reading.Readout.logits`)."""
TRIED = 2
"""Rows on which the metrics of a user are tried before the work begins."""
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
        _check_labelled(batch, "the cross-entropy")
        return nll_loss(batches.log_probs(logits, batch), batch.labels, reduction="none")

    return loss


def _check_labelled(batch: BatchLike, what: str) -> None:
    if bool((batch.labels < 0).any()):
        raise HcLensError(
            f"expected labelled rows for {what}, got rows without a label; pass rows "
            "with labels, or a loss of your own, such as for the label that the model predicts "
            "loss=lambda logits, batch: -logits.log_softmax(-1).amax(-1); prune takes 'kl' too"
        )


def check_metrics(given: object, columns: Iterable[str] = ()) -> dict[str, Metric | str]:
    """The `Metrics` that a user asks for, by their names in tables.

    Anything else, and a name that is not known, is an HcLensError. So is a name of a function that
    a table has already, with its own `columns`.
    """
    named = _by_name(given)
    for name, metric in named.items():
        if not callable(metric):
            check_choice("the metric", metric, NAMED)
            named[name] = NAMED[metric]
        if callable(metric) == (name in NAMED) or named[name] != NAMED.get(name, metric):
            raise HcLensError(
                f"expected a metric of hc_lens under its own name ({', '.join(NAMED)}), and yours "
                f"under another, got {name!r} for {metric!r}; rename it"
            )
    if named.keys() >= {LOGIT, DIFFERENCE}:
        raise HcLensError(
            f"expected each metric once, got {LOGIT!r} and {DIFFERENCE!r}, which are two names of "
            "one; leave one of them out"
        )
    taken = {*columns, *EVERY, LABELLED, HEURISTIC, *(f"{name}_change" for name in named)}
    for name, metric in named.items():
        if callable(metric) and (name in taken or name.startswith(SHARE)):
            raise HcLensError(
                "expected a metric of yours under a name that no other column of the table has, "
                f"got {name!r}; rename it, for example to 'my_{name}'"
            )
    return named


def further(given: object, columns: Iterable[str]) -> dict[str, Metric | str]:
    """Those of `check_metrics` that a table with these columns does not have anyway."""
    known = list(columns)
    asked = check_metrics(given, known)
    return {name: metric for name, metric in asked.items() if name not in known}


def _by_name(given: object) -> dict[str, Any]:
    """Metrics by name, from a mapping or a list of names."""
    if isinstance(given, str) or callable(given) or not isinstance(given, Iterable):
        write = f"[{given!r}]" if isinstance(given, str) else "{'my_metric': my_metric}"
        raise HcLensError(
            "expected metrics as a list of names, or a mapping from names to functions, got "
            f"{given!r} alone; write metrics={write}"
        )
    names = list(given)
    for name in names:
        if not isinstance(name, str) or not name:
            raise HcLensError(
                f"expected the names of metrics as text, got {name!r}; give a function a name, as "
                "in metrics={'my_metric': my_metric}"
            )
    return dict(given) if isinstance(given, Mapping) else {name: name for name in names}


def try_metrics(
    asked: Mapping[str, Metric | str], datasets: Mapping[str, BatchesLike], readout: Readout
) -> None:
    """Call a user's own metrics once on the full model's logits of a few rows of each dataset.

    So that a mistake in one is found before any work is done.
    """
    own = {name: metric for name, metric in asked.items() if callable(metric)}
    for batches in datasets.values() if own else ():
        # A user's hook may expect the rows of a batch together.
        batch = batches[0]
        piece = batch if has_user_hooks(readout.model) else cut(batch, TRIED)[0]
        with torch.no_grad():
            held = readout.held(piece)
            check_finite(readout.model, piece.inputs, held)
            held_metrics(batches, piece, held[None], readout.logits, own)


def check_values(
    values: object, logits: Float[Tensor, "batch out"], batch: BatchLike, name: str, finite: bool
) -> Float[Tensor, "batch"]:
    """What a function of the logits says of each row, if that is one number for each row.

    Where the logits have a derivative it must have one too, and it must be finite where that is
    asked for; anything else is an HcLensError.
    """
    shape = getattr(values, "shape", None)
    if not isinstance(values, Tensor) or values.is_complex() or shape != batch.rows.shape:
        kind = "tensor" if isinstance(values, Tensor) else type(values).__name__
        found = f"a {kind}" if shape is None else f"a {kind} of shape {list(shape)}"
        raise HcLensError(
            f"expected one number for each of the {len(batch.rows)} rows of a batch from {name}, "
            f"got {found}; give a tensor of shape [{len(batch.rows)}]"
        )
    if logits.requires_grad and not values.requires_grad:
        raise HcLensError(
            f"expected numbers with a derivative by the logits from {name}, got {values.dtype} "
            "without one; compute them from the logits with functions of PyTorch, without "
            "detach(), no_grad(), argmax(), or a conversion to whole numbers or NumPy"
        )
    if finite and not bool(values.isfinite().all()):
        row = int(batch.rows[~values.isfinite()][0])
        raise HcLensError(
            f"expected finite numbers of {name}, got NaN or infinity for row {row}; look at how "
            "it divides or takes logarithms there"
        )
    return values if values.is_floating_point() else values.double()


def row_values(
    metric: Metric, logits: Float[Tensor, "batch out"], batch: BatchLike, name: str | None = None
) -> Float[Tensor, "batch"]:
    """What a metric says of each row, as `check_values` wants it."""
    shown = _name_of(metric) if name is None else f"the metric {name!r}"
    return check_values(metric(logits, batch), logits, batch, shown, finite=True)


def _name_of(function: Callable[..., object]) -> str:
    return getattr(function, "__name__", repr(function))


def in_pieces(batch: BatchLike, n_out: int) -> list[tuple[slice, BatchLike]]:
    """A batch in pieces of so few rows that their logits, `n_out` each, can be held at one time."""
    size = max(1, AT_ONCE // n_out)
    cuts = enumerate(cut(batch, size))
    return [(slice(index * size, (index + 1) * size), piece) for index, piece in cuts]


@torch.no_grad()
def _n_out(logits: Logits, held: Float[Tensor, "batch width"]) -> int:
    """How many logits a row has."""
    return logits(held[:1]).shape[-1]


def held_metrics(
    batches: BatchesLike,
    batch: BatchLike,
    held: Float[Tensor, "runs batch width"],
    logits: Logits,
    wanted: Mapping[str, Metric | str] | Sequence[str] = EVERY,
) -> dict[str, Float[Tensor, "runs batch"]]:
    """Metrics of some runs from what they left where each row is read, the full model's first.

    The logits are made of a few rows and a few runs at a time. In a task without labels the
    predictions are the model's own labels, and what is said of the right answer is NaN. `wanted`
    are names of metrics, or metrics as `check_metrics` gives them.
    """
    asked = wanted if isinstance(wanted, Mapping) else {name: name for name in wanted}
    parts: list[dict[str, Tensor]] = []
    for at, piece in in_pieces(batch, _n_out(logits, held[0])):
        full = logits(held[0, at])
        step = max(1, AT_ONCE // full.numel())
        found = [
            _Measured(batches, piece, lambda full=full: full, logits(runs)).values(asked)
            for runs in held[:, at].split(step)
        ]
        parts.append({name: torch.cat([each[name] for each in found]) for name in asked})
    return {name: torch.cat([part[name] for part in parts], dim=1) for name in asked}


def held_losses(
    loss: Loss,
    batch: BatchLike,
    held: Float[Tensor, "batch width"],
    logits: Logits,
    full: Callable[[], Float[Tensor, "batch width"]],
    finite: bool = True,
) -> Float[Tensor, "batch"]:
    """The loss of each row, with derivatives, from what a run left where the row is read.

    The logits are made of a few rows at a time, and again for their derivatives, so that neither
    those of a large batch nor their gradients are ever there together. `full` gives what the full
    model left; a loss may be infinite unless it is to be `finite`.
    """

    def of_piece(part: Tensor, at: slice, piece: BatchLike) -> Tensor:
        @torch.no_grad()
        def compared() -> Tensor:
            return logits(full()[at])

        own = logits(part)
        return check_values(loss(own, piece, compared), own, piece, _name_of(loss), finite)

    pieces = in_pieces(batch, _n_out(logits, held))
    if len(pieces) == 1:
        return of_piece(held, *pieces[0])
    found = [checkpoint(of_piece, held[at], at, piece, use_reentrant=False) for at, piece in pieces]
    return torch.cat(found)


def smooth_metric(name: str, batches: BatchesLike) -> Loss:
    """A metric by its name, as a function with derivatives; one without is an HcLensError."""
    check_choice("a metric with a derivative", name, SMOOTH)

    def metric(
        logits: Float[Tensor, "batch out"], batch: BatchLike, full: Full
    ) -> Float[Tensor, "batch"]:
        if NAMED[name] in OF_LABELLED:
            _check_labelled(batch, name)
        measured = _Measured(batches, batch, full, logits[None])
        return measured.values({name: NAMED[name]})[name][0]

    metric.__name__ = name
    return metric


class _Measured:
    """Some runs on some rows; each metric is computed when it is asked for."""

    def __init__(
        self,
        batches: BatchesLike,
        batch: BatchLike,
        full: Full,
        logits: Float[Tensor, "runs batch out"],
    ):
        self._batches, self._batch, self._logits = batches, batch, logits
        self._given, self._runs = full, logits.double()
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
    def _full(self) -> Float[Tensor, "batch out"]:
        return self._given().double()

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
        """A metric of the user's own."""
        found = [row_values(metric, run, self._batch, name) for run in self._logits]
        return torch.stack(found).detach().double()


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


@dataclass
class _Sums:
    """What was added up of one case."""

    n: int = 0
    labelled: int = 0
    metrics: dict[str, Tensor | float] = field(default_factory=lambda: defaultdict(float))


class Totals:
    """Running means of some metrics per dataset and case, one line for each run.

    The `keys` say what each run is, such as its unit or its edge.
    """

    def __init__(self, keys: pd.DataFrame, metrics: Sequence[str]):
        self.keys, self.metrics = keys, tuple(metrics)
        self._sums: dict[str, dict[str, _Sums]] = {}

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
            sums = self._sums.setdefault(dataset, {}).setdefault(case, _Sums())
            sums.n += int(at.sum())
            sums.labelled += int((at & labelled).sum())
            for name, value in on_cpu.items():
                counted = at & labelled if name in OF_LABELLED else at
                sums.metrics[name] += value[:, counted].sum(1)

    def table(self) -> pd.DataFrame:
        """The keys, dataset, case, n (rows) and the means: datasets as added, cases by name."""
        parts = []
        for dataset, cases in self._sums.items():
            for case, sums in sorted(cases.items()):
                part = self.keys.assign(dataset=dataset, case=case, n=sums.n)
                for name in self.metrics:
                    count = sums.labelled if name in OF_LABELLED else sums.n
                    part[name] = np.asarray(sums.metrics[name] / (count or torch.nan))
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
