"""What a worker of a sweep does, in any process on any machine.

1. Prepare a checkpoint: load it, read all rows, take the fingerprints. Means and the full model's
   evaluation are computed unless the store has them.
2. Run: prune with the stored means, evaluate the subnetwork on every dataset, write the record
   (`hc_lens.sweeps.runs`). Of a path, each subnetwork is written as it is found, with what the
   path goes on from: after a stop it continues behind the last one. A run is refused if its
   checkpoint or rows changed under the sweep.
3. A process keeps the last checkpoint with its rows, its means and its own logits, so the runs of
   one checkpoint load and compute them once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from safetensors.torch import save

from hc_lens.data.batches import Batches
from hc_lens.data.specs import read_model
from hc_lens.errors import HcLensError
from hc_lens.evaluation import evaluate
from hc_lens.masks.means import Means, collect_means
from hc_lens.metrics import FULL
from hc_lens.models.fingerprint import fingerprint
from hc_lens.pruning.config import PruneConfig
from hc_lens.pruning.path import walk
from hc_lens.pruning.subnetwork import Subnetwork
from hc_lens.pruning.teacher import Teacher
from hc_lens.pruning.train import prune
from hc_lens.records import Files, Records, RecordsError, digest, failed, is_broken
from hc_lens.sweeps.config import SweepConfig
from hc_lens.sweeps.runs import (
    FULL_COLUMNS,
    KIND,
    MEANS,
    MEASURES,
    PREPARED,
    RUNS,
    STATE,
    Record,
    given,
    name_checkpoint,
    prepared_key,
    read_record,
    run_parts,
    with_others,
    write_record,
)
from hc_lens.version import __version__


@dataclass(frozen=True)
class Task:
    """One thing for a worker to do: prepare a checkpoint, do one of its runs, or all of a path."""

    sweep: str
    """Name of this call of the sweep; a process forgets what it kept for another."""
    config: Mapping[str, Any]
    """The sweep's settings as plain values."""
    store: str
    """Address of the store."""
    threads: int
    """Torch threads to use, which decide rounding and so the last bits of a result."""
    checkpoint: str
    """Name of the checkpoint."""
    seed: int = 0
    """Seed of the runs."""
    sparsities: Sequence[float] = ()
    """Sparsities of the runs; several come from one path."""
    keys: Sequence[str] = ()
    """Key of each run, from the fingerprints that the preparation found; empty to prepare."""
    device: str | None = None
    """Where the model runs; None for TransformerLens's choice."""

    @property
    def is_run(self) -> bool:
        """Whether there are runs to do, or a checkpoint to prepare."""
        return bool(self.keys)

    @property
    def runs(self) -> dict[float, str]:
        """Key of each run by its sparsity."""
        return dict(zip(self.sparsities, self.keys, strict=True))


class Loaded:
    """A checkpoint with its rows in memory, and what its runs share."""

    def __init__(self, config: SweepConfig, name: str, device: str | None = None):
        self.config = config
        labels = config.model_labels or None
        self.model = read_model(config.checkpoints[name], device=device, labels=labels)
        self.train = config.train.batches(self.model)
        same = config.means is None or config.means == config.train
        self.means_rows = self.train if same else config.means.batches(self.model)  # type: ignore[union-attr]
        self.data = {key: spec.batches(self.model) for key, spec in config.evaluation.items()}
        self.inputs = {
            "model": fingerprint(self.model),
            "train": self.train.fingerprint,
            "means": self.means_rows.fingerprint,
            "evaluation": {key: _evaluated(batches) for key, batches in self.data.items()},
            # Named only where there are any, so that runs without them keep their keys.
            **({"metrics": list(config.metrics)} if config.metrics else {}),
        }
        self.teacher = Teacher(self.model)
        self.teachers = {key: Teacher(self.model) for key in self.data}
        self.means: Means | None = None

    def evaluate(self, **chosen: Any) -> pd.DataFrame:
        """The evaluation of the full model, and of a subnetwork if one is given."""
        return evaluate(
            self.model,
            self.data,
            metrics=self.config.metrics,
            teachers=self.teachers,
            progress=False,
            **chosen,
        )

    def where(self) -> dict[str, Any]:
        """Where results come from, beyond what decides them."""
        versions = {"hc_lens": __version__, "torch": torch.__version__}
        device = str(self.model.cfg.device)
        return {"device": device, "threads": torch.get_num_threads(), "versions": versions}

    def prepare(self, store: Records) -> Means:
        """The means from the store; if it lacks them, compute them and the full evaluation."""
        if self.means is None:
            key = prepared_key(self.inputs)
            record = read_record(store, PREPARED, key)
            if record is None:
                means = collect_means(self.model, self.means_rows, progress=False)
                table = self.evaluate()
                record = write_record(
                    store,
                    PREPARED,
                    {"key": key, **self.inputs, **self.where()},
                    with_others(table, FULL_COLUMNS),
                    lambda folder: means.save(folder / MEANS),
                )
            # Read back even when just computed: every run of every process sees the stored bytes.
            self.means = record.means()
        return self.means

    def run(self, store: Records, task: Task) -> Iterator[tuple[str, float]]:
        """Prune, evaluate and write; the key of each run when it is written, and its KL."""
        for sparsity, key in task.runs.items():
            if digest(run_parts(self.inputs, self.config, sparsity, task.seed)) != key:
                raise HcLensError(
                    f"expected the checkpoint {task.checkpoint!r} and its rows to stay as they "
                    "were when the sweep began, got others; call the sweep again when they are "
                    "complete"
                )
        means = self.prepare(store)
        config = self.config.prune_config(task.sparsities[0], task.seed)
        shared: dict[str, Any] = {"teacher": self.teacher, "progress": False}
        if isinstance(config, PruneConfig):
            sub = prune(self.model, self.train, means, config, **shared)
            yield self.write(store, task, config.sparsity, sub, {})
            return
        last = _last_of_path(store, task)
        state = None if last is None else last.state()
        for sub, now in walk(self.model, self.train, means, config, state=state, **shared):
            # What stood behind a gap in the store is found again, to the bit.
            yield self.write(store, task, now["sparsity"].item(), sub, {STATE: save(now)})

    def write(
        self, store: Records, task: Task, sparsity: float, sub: Subnetwork, more: Files
    ) -> tuple[str, float]:
        """Evaluate a subnetwork and write its run; its key and its KL, mean over all rows."""
        parts, key = run_parts(self.inputs, self.config, sparsity, task.seed), task.runs[sparsity]
        table = self.evaluate(means=self.prepare(store), subnetwork=sub)
        table = with_others(table.loc[table["subnetwork"] != FULL], MEASURES)
        about = {"key": key, **parts, "given": given(self.config), **self.where()}

        def fill(folder: Path) -> None:
            sub.save(folder)
            for name, content in more.items():
                (folder / name).write_bytes(content)

        write_record(store, RUNS, about, table, fill)
        return key, float((table["kl"] * table["n"]).sum() / table["n"].sum())


def _last_of_path(store: Records, task: Task) -> Record | None:
    """The last run of a path before the first that the store lacks."""
    records = (read_record(store, RUNS, key) for key in task.keys)
    found = list(itertools.takewhile(lambda record: record is not None, records))
    return found[-1] if found else None


def _evaluated(batches: Batches) -> str:
    """Fingerprint of evaluation rows; the heuristic decides the sides of their cases."""
    if batches.heuristic is None:
        return batches.fingerprint
    return digest(batches.fingerprint, batches.heuristic)


def perform(task: Task) -> dict[str, Any]:
    """Do a task and tell the outcome; the only function that an engine calls."""
    before = torch.get_num_threads()
    torch.set_num_threads(task.threads)
    kls: dict[str, float] = {}
    try:
        store = Records.existing(task.store, KIND)
        loaded = _load(task)
        if task.is_run:
            for key, kl in loaded.run(store, task):
                kls[key] = kl
            return {"kl": kls}
        # The name is taken before any work, so that two models never share one.
        name_checkpoint(store, task.checkpoint, fingerprint(loaded.model))
        loaded.prepare(store)
        return {"inputs": loaded.inputs}
    except Exception as error:  # one failed run does not stop the others
        if is_broken(error) and not isinstance(error, HcLensError):
            error = failed(task.store, error)
        kind = "store" if isinstance(error, RecordsError) else "error"
        said = str(error) if isinstance(error, HcLensError) else f"{type(error).__name__}: {error}"
        return {kind: said, "kl": kls}
    finally:
        torch.set_num_threads(before)


_kept: dict[tuple[str, str], Loaded] = {}


def _load(task: Task) -> Loaded:
    """The task's checkpoint; only the last one is kept."""
    key = (task.sweep, task.checkpoint)
    if key not in _kept:
        forget()
        _kept[key] = Loaded(SweepConfig.from_dict(task.config), task.checkpoint, task.device)
    return _kept[key]


def forget() -> None:
    """Let go of the checkpoint that this process kept."""
    _kept.clear()
