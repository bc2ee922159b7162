"""What patching did to the rows, summed per dataset and case.

Per row, against the clean run: the KL divergence of its label distribution from the patched one's
(nats), whether the prediction is right and whether it stays, the change of the margin, which is
the log-odds of the label that the clean run predicts, and the change of the gold label's log-odds
in the task's labels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from analyses.composition.engine import pieces
from analyses.composition.layers import NORMS
from hc_lens.data.batches import sample
from hc_lens.errors import HcLensError
from hc_lens.evaluate import kl_divergence
from hc_lens.scan import check_limit
from hc_lens.sources import Source, as_source
from hc_lens.suffix.engine import take_rows
from hc_lens.units import UnitSpace

MEASURES = ("kl", "accuracy_change", "agreement", "margin_change", "logit_change")
"""The columns that measure an effect."""
_OF_LABELLED = ("accuracy_change", "logit_change")


def effects(
    batches: Any,
    batch: Any,
    clean: Float[Tensor, "batch labels"],
    patched: Float[Tensor, "edges batch labels"],
) -> dict[str, Float[Tensor, "edges batch"]]:
    """The measures of every patched run and row."""
    n, rows = patched.shape[:2]
    full, flat = clean.double(), patched.double().flatten(0, 1)
    kl = kl_divergence(full.repeat(n, 1), flat).view(n, rows)
    guess = clean.argmax(-1)
    margin = odds(flat.log_softmax(-1).view(n, rows, -1), guess)
    margin = margin - odds(full.log_softmax(-1)[None], guess)
    known = len(batches.labels) > 0
    now = (batches.predictions(flat) if known else flat.argmax(-1)).view(n, rows)
    was = batches.predictions(full) if known else full.argmax(-1)
    labels = batch.labels
    logit = torch.full_like(kl, torch.nan)
    if known:
        logit = odds(batches.log_probs(flat).view(n, rows, -1), labels)
        logit = logit - odds(batches.log_probs(full)[None], labels)
    return {
        "kl": kl,
        "accuracy_change": (now == labels).double() - (was == labels).double(),
        "agreement": (now == was).double(),
        "margin_change": margin,
        "logit_change": logit,
    }


def odds(
    log_probs: Float[Tensor, "edges batch labels"], labels: Int[Tensor, "batch"]
) -> Float[Tensor, "edges batch"]:
    """Log-odds ``log p - log(1 - p)`` of each row's label; any label's for a row without one."""
    gold = labels.clamp(min=0).expand(log_probs.shape[:2])[..., None]
    others = log_probs.scatter(-1, gold, -torch.inf).logsumexp(-1)
    return log_probs.gather(-1, gold).squeeze(-1) - others


class Totals:
    """Running means of some measures per dataset and case, one entry per key (an edge)."""

    def __init__(self, keys: pd.DataFrame, measures: Sequence[str] = MEASURES):
        """Begin.

        Args:
            keys: what each entry is, one row an entry.
            measures: the columns to be filled.
        """
        self.keys, self.measures = keys, tuple(measures)
        self._sums: dict[tuple[str, str], dict[str, Tensor]] = {}
        self._n: dict[tuple[str, str], Tensor] = {}

    def add(
        self, dataset: str, batch: Any, values: Mapping[str, Float[Tensor, "entries batch"]]
    ) -> None:
        """Add the rows of a batch."""
        cases, labelled = np.asarray(batch.cases), (batch.labels >= 0).cpu()
        for case in dict.fromkeys(batch.cases):
            at = torch.tensor(cases == case)
            empty = {name: torch.zeros(len(self.keys), dtype=torch.float64) for name in values}
            sums = self._sums.setdefault((dataset, case), empty)
            counts = self._n.setdefault((dataset, case), torch.zeros(2))
            counts += torch.tensor([int(at.sum()), int((at & labelled).sum())])
            for name, value in values.items():
                chosen = at & labelled if name in _OF_LABELLED else at
                sums[name] += value.double().cpu()[:, chosen].sum(1)

    def table(self) -> pd.DataFrame:
        """One row per dataset, case and entry: the keys, n (rows) and the means."""
        order = list(dict.fromkeys(dataset for dataset, _ in self._sums))
        parts = []
        for dataset, case in sorted(self._sums, key=lambda key: (order.index(key[0]), key[1])):
            n, labelled = self._n[dataset, case].tolist()
            part = self.keys.assign(dataset=dataset, case=case, n=int(n))
            for name in self.measures:
                count = labelled if name in _OF_LABELLED else n
                total = self._sums[dataset, case][name]
                part[name] = (total / (count or float("nan"))).numpy()
            parts.append(part)
        return pd.concat(parts, ignore_index=True)


def over_cases(table: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """The means over all rows of each `by` group: the cases' means weighted by their rows."""
    names = [name for name in table.columns if name in (*MEASURES, "attribution")]
    weighted = table.assign(**{name: table[name] * table["n"] for name in names})
    summed: Any = weighted.groupby(list(by), sort=False)[[*names, "n"]].sum(min_count=1)
    return summed[names].div(summed["n"], axis=0).assign(n=summed["n"]).reset_index()


def prepare(
    model: Any, datasets: Mapping[str, Any] | Any, means: Source | str, norms: str
) -> tuple[dict[str, Any], Source]:
    """The datasets by name and the source, after checks that all analyses share."""
    if norms not in NORMS:
        raise HcLensError(f"expected norms among {NORMS}, got {norms!r}; choose one")
    source = as_source(means)
    source.check(model, UnitSpace.of(model))
    named = dict(datasets) if isinstance(datasets, Mapping) else None
    if named is None:
        named = {getattr(datasets, "name", "rows"): datasets}
    for batches in named.values():
        if not all(hasattr(batches, name) for name in ("labels", "predictions", "log_probs")):
            raise HcLensError(
                "expected batches by name such as {'mnli': task.batches(model)}, got a "
                f"{type(batches).__name__}; make batches with task.batches(model, ...)"
            )
    if not named or any(len(batches) == 0 for batches in named.values()):
        raise HcLensError("expected rows in every dataset, got none; check the split")
    return named, source


def each_batch(
    named: Mapping[str, Any],
    source: Source,
    limit: int | None,
    progress: bool,
    what: str,
    cut: Callable[[Any, Source], Iterator[Any]] = pieces,
) -> Iterator[tuple[str, Any, Any]]:
    """Dataset name, its batches, and every batch in pieces, at most `limit` rows a dataset."""
    check_limit(limit, source)
    total = sum(len(batches) for batches in named.values())
    with tqdm(total=total, desc=what, disable=not progress, leave=False, unit="batch") as bar:
        for name, batches in named.items():
            for batch in _limited(batches, limit):
                for piece in cut(batch, source):
                    yield name, batches, piece
                bar.update()


def _limited(batches: Any, limit: int | None) -> Iterator[Any]:
    """The batches, cut to a sample of their rows that does not depend on the batches."""
    if limit is None or limit >= batches.n_rows:
        yield from batches
        return
    chosen = set(batches.rows[sample(batches.n_rows, limit, seed=0)].tolist())
    for batch in batches:
        places = [place for place, row in enumerate(batch.rows.tolist()) if row in chosen]
        if places:
            yield take_rows(batch, places)
