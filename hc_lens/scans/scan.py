"""Ablation scans: what the model loses without each unit, or without each set of units.

1. Every set of units is ablated in turn on every batch; `hc_lens.scans.engine` runs only the layers
   that the ablation can change, so the numbers are those of a full forward pass per set, sooner.
2. `scan` averages the metrics of each row (`hc_lens.metrics`) per dataset and case; `scan_rows`
   keeps them per row, for resampling. A language model's logits are made of a few sets at a time
   and are not kept.
3. With a store, what every finished batch leaves to read is a record: its logits, or, of a language
   model, what they are made of, so that other metrics can be had of it later. Its key is made of
   everything that decides it: the model, what replaces removed units, the batches and the sets.
4. With a precision `scan` measures a sample of the rows instead (`hc_lens.scans.precise`).

The full model is the set ``"full"``, always there and always first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, cast

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float
from safetensors.torch import load, save
from torch import Tensor
from tqdm.auto import tqdm
from typing_extensions import Unpack

from hc_lens.data.batches import Batches, named_batches
from hc_lens.errors import HcLensError
from hc_lens.masks.ablate import mask_edits
from hc_lens.masks.attached import warn_if_masked
from hc_lens.masks.finite import check_finite, check_weights, is_finite
from hc_lens.masks.hooks import Handle, has_user_hooks
from hc_lens.masks.replacements import Source, as_source
from hc_lens.metrics import (
    ACCURACY,
    AGREEMENT,
    FULL,
    KL,
    LOGIT,
    Metric,
    Metrics,
    Totals,
    check_metrics,
    held_metrics,
    try_metrics,
)
from hc_lens.models.fingerprint import fingerprint
from hc_lens.protocols import BatchesLike, BatchLike, Model
from hc_lens.records import Records, digest, json_bytes
from hc_lens.scans.engine import SuffixEngine
from hc_lens.units import UnitSet, UnitSpace, resolve_sets, set_label

if TYPE_CHECKING:
    from hc_lens.scans.precise import Precision
    from hc_lens.scans.sampler import Sampler

COLUMNS = (
    *("dataset", "case", "set", "n"),
    *("accuracy", "accuracy_change", "kl", "agreement", "logit_change"),
)
"""The columns of a scan."""
_METRICS = {"correct": ACCURACY, "agreement": AGREEMENT, "kl": KL, "logit": LOGIT}
"""The metric behind each array of `ScanRows`."""
Values = Mapping[str, Float[Tensor, "sets _"]]
"""Metrics of `hc_lens.metrics` by name."""


class ScanOptions(TypedDict, total=False):
    """What `scan` and `scan_rows` take by name."""

    metrics: Metrics
    """More to measure: names such as ``["probability"]``, or functions of (logits, batch) by name,
    which give one number per row from the logits where the row is read."""
    limit: int | None
    """Scan a sample of so many rows of each dataset; the sample is always the same one."""
    memory: int | str
    """Most bytes to hold beside the model and the results, such as 500_000_000 or "2GB"."""
    store: str | Path | None
    """Folder in which finished batches are kept; the same call continues from there."""
    progress: bool
    """Whether to show a progress bar."""


class PreciseOptions(ScanOptions, total=False):
    """What `scan` takes by name to stop at a stated precision."""

    precision: float
    """Half the width of each interval, in the unit of the metric: every set is measured on as many
    rows of each case as that takes. Without it every set is measured on every row."""
    confidence: float
    """Probability with which an interval holds the full scan's value; 0.95 by default."""
    simultaneous: bool
    """Whether all intervals of the scan hold together with this probability."""
    precision_of: str
    """The metric that is to be precise: ``"logit"`` by default, ``"kl"``, ``"accuracy"``,
    ``"agreement"`` or one of `metrics`."""
    by_case: bool
    """Whether each case has its own estimates (the default), or a dataset one for all its rows, as
    the case ``"all"``."""
    seed: int
    """Which rows are drawn; 0 by default."""


@dataclass(frozen=True)
class ScanRows:
    """The results of a scan row by row; row 0 of each array is the full model."""

    sets: tuple[str, ...]
    """Labels of the sets: ``"full"`` first, then as given."""
    rows: pd.DataFrame
    """What each row is: dataset, case, row (its position in the split), label (-1 if unknown)."""
    logits: Float[np.ndarray, "sets rows labels"] | None
    """A classifier's logits; None for a language model, whose vocabulary is too large to keep."""
    correct: Bool[np.ndarray, "sets rows"]
    """Whether the prediction is the row's label; False without a label."""
    agreement: Bool[np.ndarray, "sets rows"]
    """Whether the prediction is the full model's."""
    kl: Float[np.ndarray, "sets rows"]
    """KL divergence of the full model's distribution from the ablated one's, in nats."""
    logit: Float[np.ndarray, "sets rows"]
    """Log-odds of the row's label; NaN without a label. Of a prompt: of its right answers against
    the wrong ones."""
    more: Mapping[str, Float[np.ndarray, "sets rows"]] = field(default_factory=dict)
    """Further metrics that were asked for."""

    def index(self, units: UnitSet) -> int:
        """The index of a set in each array; a set that was not scanned is an HcLensError."""
        label = FULL if isinstance(units, str) and units == FULL else set_label(units)
        if label not in self._indices:
            raise HcLensError(
                f"expected a set that was scanned, got {label}; scan it with sets=[...]"
            )
        return self._indices[label]

    @cached_property
    def _indices(self) -> dict[str, int]:
        return {label: index for index, label in enumerate(self.sets)}

    def where(self, keep: Bool[np.ndarray, "rows"]) -> ScanRows:
        """Some of the rows, such as ``rows.where((rows.rows["case"] == "swap").to_numpy())``."""
        arrays = {name: getattr(self, name)[:, keep] for name in _METRICS}
        return replace(
            self,
            rows=self.rows.loc[keep].reset_index(drop=True),
            logits=None if self.logits is None else self.logits[:, keep],
            more={name: array[:, keep] for name, array in self.more.items()},
            **arrays,
        )

    def table(self) -> pd.DataFrame:
        """The table that `scan` gives."""
        pieces = []
        for dataset, at in self.rows.groupby("dataset", sort=False).indices.items():
            arrays = {metric: getattr(self, name)[:, at] for name, metric in _METRICS.items()}
            arrays |= {name: array[:, at] for name, array in self.more.items()}
            values = {metric: torch.tensor(array).double() for metric, array in arrays.items()}
            labels = torch.tensor(self.rows["label"].to_numpy()[at])
            pieces.append((str(dataset), self.rows["case"].iloc[at], labels, values))
        return _table(self.sets, tuple(self.more), pieces)


def scan(
    model: Model,
    datasets: Mapping[str, BatchesLike] | BatchesLike,
    means: Source | str,
    sets: Iterable[UnitSet] | None = None,
    **options: Unpack[PreciseOptions],
) -> pd.DataFrame:
    """What ablating each set does to the model, per dataset and case.

    Columns: dataset, case, set, n (rows), accuracy, accuracy_change (against the full model,
    negative for a drop), kl (of the full model from the ablated one, nats), agreement (share of
    rows with the full model's prediction), logit_change (mean change of the gold label's log-odds;
    of a prompt with one right and one wrong answer, of their logit difference), and each further
    metric with its change. Accuracy and logit are over rows with a label, NaN where there are none.
    The full model is the set "full".

    With ``precision=0.02`` the sets are measured on a sample of the rows, each on as many as it
    needs: n is how many, `low` and `high` are the interval of what is precise (`logit_change`, or
    the column of `precision_of`), and the other columns are means over the same n rows.

    Args:
        model: a HookedEncoder or HookedTransformer, of `hc.load` or your own. Its hooks stay on and
            run; see docs/method/evaluation.md.
        means: what replaces a removed unit: means, ``"zero"`` or another source.
        sets: the sets to ablate, each a list of units or a label such as ``"L2.H5+L3.H7"``; by
            default every unit alone. ``hc.pairs(units)`` gives some units and all their pairs.
        options: `PreciseOptions`: metrics, limit, memory, store, progress, and precision,
            confidence, simultaneous, precision_of, by_case, seed.
    """
    exact, settings = _without_precision(options)
    run = ScanJob(model, datasets, means, sets, **exact)
    if settings is not None:
        from hc_lens.scans.precise import precise_table

        with run.bar() as bar:
            samplers = run.samplers(settings.of, bar.update)
            table = precise_table(samplers, run.labels[1:], tuple(run.more), settings)
        return table.reindex(columns=[*_columns(tuple(run.more)), "low", "high"])
    results = run.results()
    pieces = ((name, b.cases, b.labels, rows) for name, b, _, rows in results)
    return _table(run.labels, tuple(run.more), pieces)


def scan_rows(
    model: Model,
    datasets: Mapping[str, BatchesLike] | BatchesLike,
    means: Source | str,
    sets: Iterable[UnitSet] | None = None,
    **options: Unpack[ScanOptions],
) -> ScanRows:
    """The results of `scan` for every row, in the order of the splits; arguments as there."""
    run = ScanJob(model, datasets, means, sets, **options)
    frames, kept = [], []
    for name, batch, held, values in run.results():
        columns = {"row": batch.rows.cpu().numpy(), "label": batch.labels.cpu().numpy()}
        frames.append(pd.DataFrame({"dataset": name, "case": list(batch.cases), **columns}))
        arrays = {key: values[metric].cpu() for key, metric in _METRICS.items()}
        for key in ("correct", "agreement"):
            arrays[key] = arrays[key] == 1
        arrays |= {f"more {key}": values[key].cpu() for key in run.more}
        if not run.readout.split:
            # NumPy does not have every kind of half precision.
            arrays["logits"] = (held if held.dtype == torch.float64 else held.float()).cpu()
        kept.append(arrays)
    rows = pd.concat(frames, ignore_index=True)
    order = np.lexsort((rows["row"].to_numpy(), pd.factorize(rows["dataset"])[0]))
    joined = {
        key: torch.cat([part[key] for part in kept], dim=1).numpy()[:, order] for key in kept[0]
    }
    more = {key: joined.pop(f"more {key}") for key in run.more}
    logits = joined.pop("logits", None)
    return ScanRows(
        run.labels, rows.iloc[order].reset_index(drop=True), logits, **joined, more=more
    )


def parse_memory(memory: int | str) -> int:
    """Bytes, from a number of bytes or text such as ``"500MB"``."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]?)B?\s*", str(memory), re.IGNORECASE)
    if found is None:
        raise HcLensError(
            "expected memory as a positive number of bytes or text such as '500MB', got "
            f"{memory!r}; give one of these"
        )
    return int(float(found[1]) * {"": 1, "K": 1e3, "M": 1e6, "G": 1e9}[found[2].upper()])


def limited_batches(
    datasets: Mapping[str, BatchesLike] | BatchesLike, source: Source, limit: int | None
) -> dict[str, BatchesLike]:
    """The batches by name, with at most `limit` rows each, if the source can be cut like that."""
    named = named_batches(datasets)
    if limit is None:
        return named
    if not source.row_wise:
        raise HcLensError(
            f"expected no limit= with {type(source).__name__}, which needs the rows of a batch "
            "together; draw the rows when the batches are made: task.batches(model, limit=...)"
        )
    for name, batches in named.items():
        limited = getattr(batches, "limited", None)
        if limited is None:
            raise HcLensError(
                "expected batches of task.batches(...) to draw a sample from, got a "
                f"{type(batches).__name__}; leave limit= out"
            )
        named[name] = limited(limit)
    return named


def check_drawn(datasets: Mapping[str, BatchesLike], source: Source) -> dict[str, Batches]:
    """The datasets, if their rows can be drawn one by one."""
    if not source.row_wise:
        raise HcLensError(
            f"expected rows that can be drawn one by one, got {type(source).__name__}, which needs "
            "the rows of a batch together; scan every row, or replace by means"
        )
    named = {}
    for name, batches in datasets.items():
        if not isinstance(batches, Batches):
            raise HcLensError(
                "expected batches of task.batches(...) to draw rows from, got a "
                f"{type(batches).__name__}; scan every row"
            )
        named[name] = batches
    return named


def _without_precision(options: PreciseOptions) -> tuple[ScanOptions, Precision | None]:
    """The options of an exact scan, and the precision that was asked for."""
    from hc_lens.scans.precise import Precision

    given: dict[str, Any] = dict(options)
    names = PreciseOptions.__annotations__.keys() - ScanOptions.__annotations__.keys()
    chosen = {name.removeprefix("precision_"): given.pop(name) for name in names & given.keys()}
    if chosen.get("precision") is None:
        if others := sorted(names & options.keys() - {"precision"}):
            raise HcLensError(
                f"expected precision= with {others[0]}=, got {others[0]}= alone; give precision=, "
                "such as 0.02, or leave it out"
            )
        return cast(ScanOptions, given), None
    return cast(ScanOptions, given), Precision(**chosen)


class ScanJob:
    """The batches, the sets and the engine of one scan, and where its finished batches are kept."""

    def __init__(
        self,
        model: Model,
        datasets: Mapping[str, BatchesLike] | BatchesLike,
        means: Source | str,
        sets: Iterable[UnitSet] | None,
        **options: Unpack[ScanOptions],
    ):
        if unknown := [name for name in options if name not in ScanOptions.__annotations__]:
            raise TypeError(f"a scan has no argument {unknown[0]!r}")
        self.more: dict[str, Metric | str] = check_metrics(options.get("metrics", ()), COLUMNS)
        self._progress, store = options.get("progress", True), options.get("store")
        warn_if_masked(model)
        check_weights(model)
        space, source = UnitSpace.of(model), as_source(means)
        found = resolve_sets(space, sets)
        source.check(model, space)
        self._named = limited_batches(datasets, source, options.get("limit"))
        self.labels = (FULL, *map(set_label, found))
        self._sets = [(), *found]
        memory = parse_memory(options.get("memory", "1GB"))
        self._engine = SuffixEngine(model, self._sets, source, memory)
        self.readout = self._engine.layers.readout
        try_metrics(self.more, self._named, self.readout)
        self._records = None if store is None else Records(store, "scan")
        self._keys = {} if self._records is None else self._begin(self._records)

    def results(
        self,
    ) -> Iterator[tuple[str, BatchLike, Float[Tensor, "sets batch width"], Values]]:
        """Each batch with its dataset, and what every set left to read and its metrics."""
        rows = sum(getattr(batches, "n_rows", 0) for batches in self._named.values())
        total, hidden = len(self.labels) * rows or None, not self._progress
        wanted = {**{name: name for name in _METRICS.values()}, **self.more}
        with tqdm(total=total, desc="scan", disable=hidden, leave=False, unit="row") as bar:
            for name, batches in self._named.items():
                for index, batch in enumerate(batches):
                    held = self._held(name, index, batch, bar.update)
                    with torch.no_grad():
                        found = held_metrics(batches, batch, held, self.readout.logits, wanted)
                    yield name, batch, held, found

    def samplers(self, of: str, report: Callable[[int], object]) -> dict[str, Sampler]:
        """What measures the sets on samples of each dataset's rows, for the metric `of`."""
        from hc_lens.scans.runs import UnitRuns
        from hc_lens.scans.sampler import Sampler
        from hc_lens.scans.target import target

        named = check_drawn(self._named, self._engine.source)
        runs = UnitRuns(self._engine, self._checked)
        wanted = {**{name: name for name in _METRICS.values()}, **self.more}
        return {
            name: Sampler(
                runs,
                batches,
                target(of, self.more, batches, self.readout),
                wanted,
                partial(self._kept, name),
                report,
            )
            for name, batches in named.items()
        }

    def bar(self) -> tqdm:  # tqdm 4.66 cannot be subscripted when it runs
        """A progress bar of rows times sets, of which nobody knows how many there will be."""
        return tqdm(desc="scan", disable=not self._progress, leave=False, unit="row")

    def _kept(
        self, name: str, what: str, batch: BatchLike, make: Callable[[], Mapping[str, Tensor]]
    ) -> Mapping[str, Tensor]:
        """What was made of a batch of rows that were drawn, from the store if it is there."""
        if self._records is None:
            return make()
        scan_key = self._keys[name]
        key = digest(scan_key, what, batch.rows.tolist())
        record = f"{scan_key}/drawn-{key}"
        found = self._read(record, key, "drawn")
        return found or self._write(record, key, "drawn", make())

    def _held(
        self, name: str, index: int, batch: BatchLike, report: Callable[[int], object]
    ) -> Float[Tensor, "sets batch width"]:
        """What every set leaves to read on a batch, from the store if it is there."""
        if self._records is None:
            return self._checked(batch, self._engine.held(batch, report))
        scan_key, part = self._keys[name], "held" if self.readout.split else "logits"
        record, key = f"{scan_key}/batch-{index:06d}", digest(scan_key, batch.rows.tolist())
        found = self._read(record, key, part)
        if found is not None:
            report(len(self.labels) * len(batch.rows))
            return self._checked(batch, found[part].to(batch.labels.device))
        held = self._checked(batch, self._engine.held(batch, report))
        self._write(record, key, part, {part: held})
        return held

    def _read(self, record: str, key: str, file: str) -> Mapping[str, Tensor] | None:
        """The tensors of a record of the store, if it is there."""
        files = self._records.read(record, key) if self._records is not None else None
        return None if files is None else load(files[f"{file}.safetensors"])

    def _write(
        self, record: str, key: str, file: str, made: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        """Keep tensors in the store."""
        assert self._records is not None
        on_cpu = {name: value.cpu().contiguous() for name, value in made.items()}
        self._records.write(record, {f"{file}.safetensors": save(on_cpu)}, key)
        return made

    def _checked(
        self,
        batch: BatchLike,
        held: Float[Tensor, "sets batch width"],
        chosen: Sequence[int] | None = None,
    ) -> Float[Tensor, "sets batch width"]:
        """What is held of all sets, or of those chosen by index.

        If some of it is not finite, an HcLensError that says of which set and where.
        """
        if is_finite(held):
            return held
        model, space = self._engine.model, self._engine.space
        indices = range(len(self.labels)) if chosen is None else chosen
        for index, own in zip(indices, held, strict=True):
            label, units = self.labels[index], self._sets[index]
            mask = torch.ones(len(space), device=model.cfg.device)
            mask[space.indices(units)] = 0.0
            run = f"the model without {label}" if units else "the model"
            with Handle(model, mask_edits(space, mask, self._engine.source.on(batch))):
                check_finite(model, batch.inputs, own, run)
        return held

    def _begin(self, records: Records) -> dict[str, str]:
        """Write what is scanned into the store; the key of each dataset."""
        engine, keys = self._engine, {}
        if has_user_hooks(engine.model):
            raise HcLensError(
                "expected a model without hooks to keep results for later, got one with hooks, "
                "whose effect on the results has no name on disk; take the hooks off, or scan "
                "without store="
            )
        for given in (engine.source, *self._named.values()):
            if getattr(given, "fingerprint", None) is None:
                raise HcLensError(
                    "expected a name on disk to keep results for later, got "
                    f"{type(given).__name__}, which has no fingerprint; scan without store="
                )
        for name, batches in self._named.items():
            about = {
                "model": fingerprint(engine.model),
                "source": engine.source.fingerprint,
                "batches": getattr(batches, "fingerprint", None),
                "sets": self.labels,
            }
            keys[name] = digest(about)
            # Beside the batches, so that a reader can tell what the folder holds.
            records.write(f"{keys[name]}/about", {"scan.json": json_bytes(about)}, keys[name])
        return keys


def _table(
    sets: Sequence[str],
    more: Sequence[str],
    pieces: Iterable[tuple[str, Iterable[str], Tensor, Values]],
) -> pd.DataFrame:
    """The table of a scan, from pieces as `Totals.add` takes them."""
    totals = Totals(pd.DataFrame({"set": list(sets)}), (ACCURACY, KL, AGREEMENT, LOGIT, *more))
    for piece in pieces:
        totals.add(*piece)
    table = totals.table()
    for name in (ACCURACY, LOGIT, *more):
        # Within a dataset and case the full model comes first.
        full = table.groupby(["dataset", "case"], sort=False)[name].transform("first")
        table[f"{name}_change"] = table[name] - full
    return table.reindex(columns=_columns(more))


def _columns(more: Sequence[str]) -> list[str]:
    """The columns of a scan with further metrics."""
    further = [column for name in more for column in (name, f"{name}_change")]
    return list(dict.fromkeys([*COLUMNS, *further]))
