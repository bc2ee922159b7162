"""Ablation scans: what the model loses without each unit, or without each set of units.

1. Every set of units is ablated in turn on every batch; `hc_lens.suffix` runs only the layers that
   the ablation can change, so the numbers are those of a full forward pass per set, sooner.
2. Per row: is the prediction right, is it that of the full model, the KL divergence from the full
   model's distribution over the model's labels, and the logit of the gold label,
   ``log p(gold) - log(1 - p(gold))`` in the task's labels.
3. `scan` averages them per dataset and case; `scan_rows` keeps them per row, for resampling.

The full model is the set ``"none"``, always there and always first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from tqdm.auto import tqdm

from hc_lens.data.batches import sample
from hc_lens.errors import HcLensError
from hc_lens.evaluate import kl_divergence
from hc_lens.sources import Source, as_source
from hc_lens.suffix.blocks import is_row_wise
from hc_lens.suffix.engine import SuffixEngine, take_rows
from hc_lens.suffix.hooked import check_classifier
from hc_lens.suffix.sets import FULL, UnitSet, resolve_sets, set_label
from hc_lens.suffix.store import ScanStore
from hc_lens.units import Unit, UnitSpace

COLUMNS = (
    *("dataset", "case", "set", "n"),
    *("accuracy", "accuracy_change", "kl", "agreement", "logit_change"),
)
"""The columns of a scan."""


@dataclass(frozen=True)
class ScanRows:
    """The results of a scan row by row; row 0 of each array is the full model."""

    sets: tuple[str, ...]
    """Labels of the sets: ``"none"`` first, then as given."""
    rows: pd.DataFrame
    """One row a row: dataset, case, row (its position in the split), label (-1 if unknown)."""
    logits: Float[np.ndarray, "sets rows labels"]
    """The model's logits."""
    correct: Bool[np.ndarray, "sets rows"]
    """Whether the prediction is the row's label; False without a label."""
    agreement: Bool[np.ndarray, "sets rows"]
    """Whether the prediction is the full model's."""
    kl: Float[np.ndarray, "sets rows"]
    """KL divergence of the full model's distribution from the ablated one's, in nats."""
    logit: Float[np.ndarray, "sets rows"]
    """Log-odds of the row's label; NaN without a label."""

    def place(self, units: UnitSet) -> int:
        """Where a set stands; a set that was not scanned is an HcLensError."""
        label = FULL if isinstance(units, str) and units == FULL else set_label(units)
        if label not in self._places:
            raise HcLensError(
                f"expected a set that was scanned, got {label}; scan it with sets=[...]"
            )
        return self._places[label]

    @cached_property
    def _places(self) -> dict[str, int]:
        return {label: place for place, label in enumerate(self.sets)}

    def where(self, keep: Bool[np.ndarray, "rows"]) -> ScanRows:
        """Some of the rows, such as ``rows.where((rows.rows["case"] == "swap").to_numpy())``."""
        arrays = {name: getattr(self, name)[:, keep] for name in ("logits", *_SUMMED)}
        return replace(self, rows=self.rows.loc[keep].reset_index(drop=True), **arrays)

    def table(self) -> pd.DataFrame:
        """The table that `scan` gives."""
        totals: dict[tuple[str, str], _Totals] = {}
        for found, places in self.rows.groupby(["dataset", "case"], sort=False).indices.items():
            key = cast(tuple[str, str], found)
            labelled = torch.tensor(self.rows["label"].to_numpy()[places] >= 0)
            arrays = {name: torch.as_tensor(getattr(self, name)[:, places]) for name in _SUMMED}
            totals[key] = _Totals(len(self.sets))
            totals[key].add(arrays, labelled)
        return _joined(totals, self.sets)


def scan(
    model: Any,
    datasets: Mapping[str, Any] | Any,
    means: Source | str,
    sets: Iterable[UnitSet] | None = None,
    *,
    units: Iterable[Unit | str] | None = None,
    pairs: bool = False,
    limit: int | None = None,
    memory: int | str = "1GB",
    store: str | Path | None = None,
    progress: bool = True,
) -> pd.DataFrame:
    """What ablating each set does to the model, per dataset and case.

    Columns: dataset, case, set, n (rows), accuracy, accuracy_change (against the full model,
    negative for a drop), kl (of the full model from the ablated one, nats), agreement (share of
    rows with the full model's prediction), logit_change (mean change of the gold label's log-odds).
    Accuracy and logit are over rows with a label, NaN where there are none. The full model is the
    set "none".

    Args:
        model: a classifier of `hc.load`. Its hooks stay on and run; see docs/method/scan.md.
        datasets: batches by name, or batches alone.
        means: what replaces a removed unit: means, ``"zero"`` or another source.
        sets: the sets to ablate, each a list of units; default every unit alone.
        units: instead of `sets`, the units to ablate alone (and in pairs).
        pairs: also ablate every pair of `units`.
        limit: scan a sample of so many rows of each dataset; the sample is always the same one.
        memory: most bytes to hold beside the model and the results, such as 500_000_000 or "2GB".
        store: folder in which finished batches are kept; the same call continues from there.
        progress: show a progress bar.
    """
    named, labels, results = _scan(
        model, datasets, means, sets, units, pairs, limit, memory, store, progress
    )
    totals: dict[tuple[str, str], _Totals] = {}
    for name, batch, logits in results:
        metrics = _metrics(named[name], batch, logits)
        cases = np.asarray(batch.cases)
        for case in dict.fromkeys(batch.cases):
            at = torch.tensor(np.flatnonzero(cases == case))
            part = {key: value[:, at] for key, value in metrics.items()}
            total = totals.setdefault((name, case), _Totals(len(labels)))
            total.add(part, batch.labels.cpu()[at] >= 0)
    return _joined(totals, labels)


def scan_rows(
    model: Any,
    datasets: Mapping[str, Any] | Any,
    means: Source | str,
    sets: Iterable[UnitSet] | None = None,
    *,
    units: Iterable[Unit | str] | None = None,
    pairs: bool = False,
    limit: int | None = None,
    memory: int | str = "1GB",
    store: str | Path | None = None,
    progress: bool = True,
) -> ScanRows:
    """The results of `scan` for every row, in the order of the splits; arguments as there."""
    named, labels, results = _scan(
        model, datasets, means, sets, units, pairs, limit, memory, store, progress
    )
    frames, kept = [], []
    for name, batch, logits in results:
        columns = {"row": batch.rows.cpu().numpy(), "label": batch.labels.cpu().numpy()}
        frames.append(pd.DataFrame({"dataset": name, "case": list(batch.cases), **columns}))
        # NumPy has no half precision of every kind.
        exact = logits if logits.dtype == torch.float64 else logits.float()
        kept.append({"logits": exact.cpu(), **_metrics(named[name], batch, logits)})
    rows = pd.concat(frames, ignore_index=True)
    place = {name: number for number, name in enumerate(named)}
    order = np.lexsort((rows["row"].to_numpy(), rows["dataset"].map(place).to_numpy()))
    arrays = {
        key: torch.cat([part[key] for part in kept], dim=1).numpy()[:, order] for key in kept[0]
    }
    return ScanRows(labels, rows.iloc[order].reset_index(drop=True), **arrays)


def parse_memory(memory: int | str) -> int:
    """Bytes, from a number of bytes or text such as ``"500MB"``."""
    if isinstance(memory, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]?)B\s*", memory, re.IGNORECASE)
        if match is not None:
            return int(float(match[1]) * {"": 1, "K": 1e3, "M": 1e6, "G": 1e9}[match[2].upper()])
    elif not isinstance(memory, bool) and memory > 0:
        return int(memory)
    raise HcLensError(
        f"expected memory as a positive number of bytes or text such as '500MB', got {memory!r}; "
        "give one of these"
    )


def _scan(
    model: Any,
    datasets: Mapping[str, Any] | Any,
    means: Source | str,
    sets: Iterable[UnitSet] | None,
    units: Iterable[Unit | str] | None,
    pairs: bool,
    limit: int | None,
    memory: int | str,
    store: str | Path | None,
    progress: bool,
) -> tuple[dict[str, Any], tuple[str, ...], Iterator[tuple[str, Any, Tensor]]]:
    """The datasets by name, the labels of the sets, and the logits of every batch to come."""
    check_classifier(model)
    space, source = UnitSpace.of(model), as_source(means)
    named = _named(datasets)
    found = resolve_sets(space, sets, units, pairs)
    source.check(model, space)
    check_limit(limit, source)
    labels = (FULL, *(set_label(units) for units in found))
    engine = SuffixEngine(model, [(), *found], source, parse_memory(memory))
    stores = {
        name: ScanStore(store, model, source, batches, labels, limit) if store else None
        for name, batches in named.items()
    }
    return named, labels, _run(engine, named, stores, limit, progress)


def _run(
    engine: SuffixEngine,
    named: Mapping[str, Any],
    stores: Mapping[str, ScanStore | None],
    limit: int | None,
    progress: bool,
) -> Iterator[tuple[str, Any, Float[Tensor, "sets batch labels"]]]:
    """Each batch with the logits of every set, from the store where they are there."""
    rows = {name: _n_rows(batches) for name, batches in named.items()}
    n_rows = sum(count if limit is None else min(count, limit) for count in rows.values())
    n_sets = len(engine.parts)
    bar = tqdm(total=n_rows * n_sets, desc="scan", disable=not progress, leave=False, unit="row")
    with bar:
        for name, batches in named.items():
            store = stores[name]
            for place, batch in enumerate(_limited(batches, limit)):
                logits = None if store is None else store.load(place, batch)
                if logits is None:
                    logits = engine.logits(batch, bar.update)
                    if store is not None:
                        store.save(place, batch, logits)
                else:
                    bar.update(n_sets * len(batch.rows))
                yield name, batch, logits.to(batch.labels.device)


def _limited(batches: Any, limit: int | None) -> Iterator[Any]:
    """The batches, cut to a sample of their rows that does not depend on the batches."""
    if limit is None or limit >= _n_rows(batches):
        yield from batches
        return
    chosen = set(batches.rows[sample(_n_rows(batches), limit, seed=0)].tolist())
    for batch in batches:
        places = [place for place, row in enumerate(batch.rows.tolist()) if row in chosen]
        if places:
            yield take_rows(batch, places)


def _n_rows(batches: Any) -> int:
    return batches.n_rows if hasattr(batches, "n_rows") else sum(len(b.rows) for b in batches)


def _named(datasets: Mapping[str, Any] | Any) -> dict[str, Any]:
    named = {getattr(datasets, "name", "rows"): datasets}
    if isinstance(datasets, Mapping):
        named = dict(datasets)
    for batches in named.values():
        if not all(hasattr(batches, name) for name in ("labels", "predictions", "log_probs")):
            raise HcLensError(
                "expected batches by name such as {'mnli': task.batches(model)}, got a "
                f"{type(batches).__name__}; make batches with task.batches(model, ...)"
            )
    empty = [name for name, batches in named.items() if _n_rows(batches) == 0]
    if empty or not named:
        what = f"none in {empty[0]!r}" if empty else "no dataset"
        raise HcLensError(f"expected rows to scan, got {what}; check the split")
    return named


def check_limit(limit: int | None, source: Source) -> None:
    """Refuse a limit that is no number of rows, or that a source of whole batches cannot bear."""
    if limit is None:
        return
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise HcLensError(f"expected limit as a positive number of rows, got {limit!r}; raise it")
    if not is_row_wise(source):
        raise HcLensError(
            f"expected no limit= with {type(source).__name__}, which needs the rows of a batch "
            "together; draw the rows when the batches are made: task.batches(model, limit=...)"
        )


def _metrics(batches: Any, batch: Any, logits: Float[Tensor, "sets batch labels"]) -> dict:
    """The results of every row: correct, agreement, kl, logit; each [sets, batch]."""
    n_sets, rows = logits.shape[:2]
    flat, labels = logits.flatten(0, 1), batch.labels
    full = logits[0].repeat(n_sets, 1)
    kl = kl_divergence(full.double(), flat.double()).view(n_sets, rows)
    known = len(batches.labels) > 0
    predictions = (batches.predictions(flat) if known else flat.argmax(-1)).view(n_sets, rows)
    logit = torch.full_like(kl, torch.nan)
    if known:
        task = batches.log_probs(flat.double()).view(n_sets, rows, -1)
        gold = labels.clamp(min=0).expand(n_sets, rows)[..., None]
        others = task.scatter(-1, gold, -torch.inf).logsumexp(-1)
        logit = (task.gather(-1, gold).squeeze(-1) - others).masked_fill(labels < 0, torch.nan)
    return {
        "correct": (predictions == labels).cpu(),
        "agreement": (predictions == predictions[0]).cpu(),
        "kl": kl.cpu(),
        "logit": logit.cpu(),
    }


_SUMMED = ("correct", "agreement", "kl", "logit")


class _Totals:
    """Running sums of the results of every set, over the rows of one case."""

    def __init__(self, n_sets: int):
        self.n, self.n_labelled = 0, 0
        self.sums = {key: torch.zeros(n_sets, dtype=torch.float64) for key in _SUMMED}

    def add(self, metrics: Mapping[str, Tensor], labelled: Tensor) -> None:
        """Add some rows: correct, agreement, kl, logit, each [sets, rows]."""
        self.n += len(labelled)
        self.n_labelled += int(labelled.sum())
        for key in _SUMMED:
            values = metrics[key][:, labelled] if key in ("correct", "logit") else metrics[key]
            self.sums[key] += values.double().sum(1)

    def table(self, dataset: str, case: str, labels: Sequence[str]) -> pd.DataFrame:
        """The means of this case, one row a set."""
        by_all = {key: (self.sums[key] / self.n).numpy() for key in ("kl", "agreement")}
        n_labelled = self.n_labelled or float("nan")
        accuracy, logit = ((self.sums[key] / n_labelled).numpy() for key in ("correct", "logit"))
        columns = {
            "dataset": dataset,
            "case": case,
            "set": list(labels),
            "n": self.n,
            "accuracy": accuracy,
            "accuracy_change": accuracy - accuracy[0],
            "kl": by_all["kl"],
            "agreement": by_all["agreement"],
            "logit_change": logit - logit[0],
        }
        return pd.DataFrame(columns, columns=pd.Index(COLUMNS))


def _joined(totals: Mapping[tuple[str, str], _Totals], labels: Sequence[str]) -> pd.DataFrame:
    """The tables of all cases: datasets in their order, cases by name."""
    datasets = list(dict.fromkeys(dataset for dataset, _ in totals))
    order = sorted(totals, key=lambda key: (datasets.index(key[0]), key[1]))
    return pd.concat([totals[key].table(*key, labels) for key in order], ignore_index=True)
