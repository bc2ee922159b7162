"""What a worker of a sweep does, in any process on any machine.

1. Prepare a checkpoint: load it, read all rows, take the fingerprints. Means and the full model's
   evaluation are computed unless the store has them.
2. Run: prune with the stored means, evaluate the subnetwork on every dataset, write the record
   (`hc_lens.sweeps.runs`). A run is refused if its checkpoint or rows changed under the sweep.
3. A process keeps the last checkpoint with its rows, its means and its own logits, so the runs of
   one checkpoint load and compute them once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch

from hc_lens.data.batches import Batches
from hc_lens.data.specs import read_model
from hc_lens.errors import HcLensError
from hc_lens.evaluation import evaluate
from hc_lens.masks.means import Means, collect_means
from hc_lens.metrics import FULL
from hc_lens.models.fingerprint import fingerprint
from hc_lens.pruning.job import Teacher
from hc_lens.pruning.train import prune
from hc_lens.records import Records, RecordsError, digest, failed, is_broken
from hc_lens.settings import plain_value
from hc_lens.sweeps.config import SweepConfig
from hc_lens.sweeps.runs import (
    FULL_COLUMNS,
    KIND,
    MEANS,
    MEASURES,
    PREPARED,
    RUNS,
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
    """One thing for a worker to do: prepare a checkpoint, or do one of its runs."""

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
    sparsity: float = 0.0
    """Sparsity of a run."""
    seed: int = 0
    """Seed of a run."""
    key: str = ""
    """Key of a run, from the fingerprints that the preparation found; empty to prepare."""
    device: str | None = None
    """Where the model runs; None for TransformerLens's choice."""

    @property
    def is_run(self) -> bool:
        """Whether this is a run, or the preparation of a checkpoint."""
        return bool(self.key)


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

    def run(self, store: Records, task: Task) -> float:
        """Prune, evaluate and write one run; its KL, mean over all evaluated rows."""
        parts = run_parts(self.inputs, self.config, task.sparsity, task.seed)
        if digest(parts) != task.key:
            raise HcLensError(
                f"expected the checkpoint {task.checkpoint!r} and its rows to stay as they were "
                "when the sweep began, got others; call the sweep again when they are complete"
            )
        means = self.prepare(store)
        config = self.config.prune_config(task.sparsity, task.seed)
        sub = prune(self.model, self.train, means, config, teacher=self.teacher, progress=False)
        table = self.evaluate(means=means, subnetwork=sub)
        table = with_others(table.loc[table["subnetwork"] != FULL], MEASURES)
        given = plain_value(self.config.prune)
        about = {"key": task.key, **parts, "given": given, **self.where()}
        write_record(store, RUNS, about, table, sub.save)
        return float((table["kl"] * table["n"]).sum() / table["n"].sum())


def _evaluated(batches: Batches) -> str:
    """Fingerprint of evaluation rows; the heuristic decides the sides of their cases."""
    if batches.heuristic is None:
        return batches.fingerprint
    return digest(batches.fingerprint, batches.heuristic)


def perform(task: Task) -> dict[str, Any]:
    """Do a task and tell the outcome; the only function that an engine calls."""
    before = torch.get_num_threads()
    torch.set_num_threads(task.threads)
    try:
        store = Records.existing(task.store, KIND)
        loaded = _load(task)
        if task.is_run:
            return {"kl": loaded.run(store, task)}
        # The name is taken before any work, so that two models never share one.
        name_checkpoint(store, task.checkpoint, fingerprint(loaded.model))
        loaded.prepare(store)
        return {"inputs": loaded.inputs}
    except Exception as error:  # one failed run does not stop the others
        if is_broken(error) and not isinstance(error, HcLensError):
            error = failed(task.store, error)
        kind = "store" if isinstance(error, RecordsError) else "error"
        said = str(error) if isinstance(error, HcLensError) else f"{type(error).__name__}: {error}"
        return {kind: said}
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
