"""What a worker of a sweep does, in any process on any machine.

1. ``prepare`` a checkpoint: load it, read all rows, take the fingerprints. Means and the full
   model's evaluation are computed unless the store has them.
2. ``run``: prune with the stored means, evaluate the subnetwork on every dataset, write the record
   (`hc_lens.sweeps.runs`). A run is refused if its checkpoint or rows changed under the sweep.
3. A process keeps the last checkpoint with its rows, its means and its own logits, so the runs of
   one checkpoint load and compute them once.

Tasks and their outcomes are JSON texts, so every engine carries them as they are.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import cached_property
from typing import Any
from urllib.parse import quote

import pandas as pd
import torch

from hc_lens.data.specs import read_model
from hc_lens.errors import HcLensError
from hc_lens.evaluation import evaluate
from hc_lens.masks.means import Means, collect_means
from hc_lens.metrics import FULL
from hc_lens.models.fingerprint import fingerprint
from hc_lens.pruning.teacher import Teacher
from hc_lens.pruning.train import prune
from hc_lens.records import (
    Records,
    RecordsError,
    as_folder,
    digest,
    failed,
    files_of,
    is_full,
    json_bytes,
    table_bytes,
)
from hc_lens.settings import plain_value
from hc_lens.sweeps.config import SweepConfig
from hc_lens.sweeps.runs import (
    ABOUT,
    CHECKPOINTS,
    EVALUATION,
    FULL_COLUMNS,
    KIND,
    MEASURES,
    PREPARED,
    RUNS,
    Inputs,
)
from hc_lens.sweeps.tasks import Task
from hc_lens.version import __version__

MEANS = "means.safetensors"


class Loaded:
    """A checkpoint with its rows in memory, and what its runs share."""

    def __init__(self, config: SweepConfig, name: str):
        self.name, self.config = name, config
        self.model = read_model(config.checkpoints[name])
        self.train = config.train.batches(self.model)
        same = config.means is None or config.means == config.train
        self.means_rows = self.train if same else config.means.batches(self.model)  # type: ignore[union-attr]
        self.data = {key: spec.batches(self.model) for key, spec in config.evaluation.items()}
        self.inputs = Inputs(
            model=fingerprint(self.model),
            train=self.train.fingerprint,
            means=self.means_rows.fingerprint,
            evaluation={key: batches.fingerprint for key, batches in self.data.items()},
        )
        self.teacher = Teacher(self.model)
        self.teachers = {key: Teacher(self.model) for key in self.data}
        self.means: Means | None = None

    @cached_property
    def where(self) -> dict[str, Any]:
        """Where the results come from, beyond their key."""
        versions = {"hc_lens": __version__, "torch": torch.__version__}
        device = str(self.model.cfg.device)
        return {"device": device, "threads": torch.get_num_threads(), "versions": versions}

    def prepare(self, store: Records) -> Means:
        """The means from the store; if it lacks them, compute them and the full evaluation."""
        if self.means is None:
            key = self.inputs.prepared_key()
            files = store.read(f"{PREPARED}/{key}")
            if files is None:
                means = collect_means(self.model, self.means_rows, progress=False)
                table = evaluate(self.model, self.data, teachers=self.teachers, progress=False)
                files = {
                    **files_of(lambda folder: means.save(folder / MEANS)),
                    EVALUATION: table_bytes(table.filter(items=FULL_COLUMNS)),
                    ABOUT: json_bytes({"key": key, **asdict(self.inputs), **self.where}),
                }
                store.write(f"{PREPARED}/{key}", files)
            # Read back even when just computed: every run of every process sees the stored bytes.
            with as_folder(files) as folder:
                self.means = Means.load(folder / MEANS)
        return self.means

    def run(self, store: Records, sparsity: float, seed: int) -> float:
        """Prune, evaluate and write one run; its KL, mean over all evaluated rows."""
        means = self.prepare(store)
        sub = prune(
            self.model,
            self.train,
            means,
            self.config.prune_config(sparsity, seed),
            teacher=self.teacher,
            progress=False,
        )
        table = evaluate(
            self.model,
            self.data,
            means=means,
            subnetwork=sub,
            teachers=self.teachers,
            progress=False,
        )
        table = pd.DataFrame(table[table["subnetwork"] != FULL]).filter(items=MEASURES)
        parts = self.inputs.parts(self.config, sparsity, seed)
        about = {"key": digest(parts), **parts, "given": plain_value(self.config.prune)}
        files = {
            **files_of(sub.save),
            EVALUATION: table_bytes(table),
            ABOUT: json_bytes({**about, **self.where}),
        }
        store.write(f"{RUNS}/{about['key']}", files)
        return float((table["kl"] * table["n"]).sum() / table["n"].sum())


def perform(text: str) -> str:
    """Do a task and tell the outcome; the only function that an engine calls."""
    task = Task(**json.loads(text))
    before = torch.get_num_threads()
    torch.set_num_threads(task.threads)
    try:
        return json.dumps(_perform(task))
    except Exception as error:  # whatever a run dies of, the others go on
        if is_full(error) and not isinstance(error, HcLensError):
            error = failed(task.store, error)
        kind = "store" if isinstance(error, RecordsError) else "error"
        said = str(error) if isinstance(error, HcLensError) else f"{type(error).__name__}: {error}"
        return json.dumps({kind: said})
    finally:
        torch.set_num_threads(before)


def _perform(task: Task) -> dict[str, Any]:
    store = Records.existing(task.store, KIND)
    loaded = _load(task)
    if not task.is_run:
        # The name is taken before any work, so that two models never share one.
        name_checkpoint(store, task.checkpoint, loaded.inputs.model)
        loaded.prepare(store)
        return {"inputs": asdict(loaded.inputs)}
    assert task.sparsity is not None
    assert task.seed is not None
    if loaded.inputs.run_key(loaded.config, task.sparsity, task.seed) != task.key:
        raise HcLensError(
            f"expected the checkpoint {task.checkpoint!r} and its rows to stay as they were when "
            "the sweep began, got others; call the sweep again when they are complete"
        )
    return {"kl": loaded.run(store, task.sparsity, task.seed)}


_kept: dict[tuple[str, str], Loaded] = {}


def _load(task: Task) -> Loaded:
    """The task's checkpoint; only the last one is kept."""
    key = (task.sweep, task.checkpoint)
    if key not in _kept:
        _kept.clear()
        _kept[key] = Loaded(SweepConfig.from_dict(task.config), task.checkpoint)
    return _kept[key]


def forget(sweep: str) -> None:
    """Let go of the checkpoint that a sweep in this process kept."""
    if any(name == sweep for name, _ in _kept):
        _kept.clear()


def name_checkpoint(store: Records, name: str, model: str) -> None:
    """Note which model a name stands for; in one store it stands for one model only."""
    record = f"{CHECKPOINTS}/{quote(name, safe='')}"
    store.write(record, {ABOUT: json_bytes({"name": name, "model": model})})
    known = json.loads((store.read(record) or {})[ABOUT])["model"]
    if known != model:
        raise HcLensError(
            f"expected the model that the store {store.address} knows as {name!r} ({known[:8]}), "
            f"got another ({model[:8]}); its runs were not touched. Give the checkpoint another "
            "name, or use another store"
        )
