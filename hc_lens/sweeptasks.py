"""What a worker of a sweep does, in any process on any machine.

1. ``prepare`` a checkpoint: load it, read all rows, take the fingerprints. Means and the full
   model's evaluation are computed unless the store has them, under a key of the fingerprints.
2. ``run``: prune with the stored means, evaluate the subnetwork on every dataset, write the record.
3. A run's key is the hash of everything that decides its result: fingerprints of the model, of the
   training rows, of the rows of the means and of the evaluation rows, all settings of pruning, and
   the version of the method. A run is refused if its checkpoint or rows changed under the sweep.
4. A process keeps the last checkpoint with its rows, its means and its own logits, so the runs of
   one checkpoint load and compute them once.

Tasks and their outcomes are JSON texts, so every engine carries them as they are.
"""

from __future__ import annotations

import errno
import hashlib
import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pandas as pd
import torch

import hc_lens
from hc_lens.errors import HcLensError
from hc_lens.evaluate import FULL, evaluate
from hc_lens.means import Means, collect_means
from hc_lens.models.fingerprint import fingerprint
from hc_lens.prune import prune
from hc_lens.spec import read_model
from hc_lens.store import Subnetwork
from hc_lens.sweepconfig import SweepConfig
from hc_lens.sweepstore import Store, StoreError, json_bytes, open_store, store_failed
from hc_lens.teacher import Teacher

METHOD_VERSION = 1
"""Raised whenever means, pruning or evaluation give other numbers for the same input."""
RUNS, PREPARED, CHECKPOINTS = "runs", "prepared", "checkpoints"
MEASURES = ["dataset", "case", "n", "accuracy", "kl", "agreement"]


def digest(value: Any) -> str:
    """32 hexadecimal digits that name a JSON value."""
    text = json.dumps(value, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Inputs:
    """Fingerprints of what a checkpoint's runs read."""

    model: str
    """Of the model."""
    train: str
    """Of the rows to prune on."""
    means: str
    """Of the rows of the means."""
    evaluation: Mapping[str, str]
    """Of the evaluation rows, by name."""

    def prepared_key(self) -> str:
        """Name of the record with the means and the full model's evaluation."""
        parts = {"model": self.model, "means": self.means, "evaluation": dict(self.evaluation)}
        return digest({"method": METHOD_VERSION, **parts})

    def parts(self, config: SweepConfig, sparsity: float, seed: int) -> dict[str, Any]:
        """Everything that decides the result of a run."""
        described = json.loads(json.dumps(config.prune_config(sparsity, seed).describe()))
        return {"method": METHOD_VERSION, **asdict(self), "prune": described}

    def run_key(self, config: SweepConfig, sparsity: float, seed: int) -> str:
        """Name of the record of a run."""
        return digest(self.parts(config, sparsity, seed))


@dataclass(frozen=True)
class Task:
    """One thing for a worker to do."""

    sweep: str
    """Name of this call of the sweep; a process forgets what it kept for another."""
    config: Mapping[str, Any]
    """The sweep's settings as plain values."""
    store: str
    """Place of the store."""
    threads: int
    """Torch threads to use, which decide rounding and so the last bits of a result."""
    checkpoint: str
    """Name of the checkpoint."""
    sparsity: float | None = None
    """Sparsity of the run; None to prepare the checkpoint."""
    seed: int | None = None
    """Seed of the run."""
    key: str | None = None
    """Key of the run, from the fingerprints that `prepare` found."""

    @property
    def is_run(self) -> bool:
        """Whether this is a run, or the preparation of a checkpoint."""
        return self.key is not None

    def to_json(self) -> str:
        """The task as one line of text."""
        return json.dumps(asdict(self))


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
    def about(self) -> dict[str, Any]:
        """Where the results come from, beyond their key."""
        versions = {"hc_lens": hc_lens.__version__, "torch": torch.__version__}
        device = str(self.model.cfg.device)
        return {"device": device, "threads": torch.get_num_threads(), "versions": versions}

    def prepare(self, store: Store) -> None:
        """Read the means from the store, or compute them and the full model's evaluation."""
        key = self.inputs.prepared_key()
        files = store.read(PREPARED, key)
        if files is None:
            means = collect_means(self.model, self.means_rows, progress=False)
            table = evaluate(self.model, self.data, teachers=self.teachers, progress=False)
            about = {"key": key, "inputs": asdict(self.inputs), **self.about}
            files = {
                "means.safetensors": file_bytes(means.save, "means.safetensors")[""],
                "evaluation.json": table_bytes(table.filter(items=MEASURES[:4])),
                "about.json": json_bytes(about),
            }
            store.write(PREPARED, key, files)
        # Read back even when just computed: every run of every process sees the stored bytes.
        self.means = with_files({"means": files["means.safetensors"]}, "means", Means.load)

    def run(self, store: Store, sparsity: float, seed: int) -> float:
        """Prune, evaluate and write one run; its KL, mean over all evaluated rows."""
        if self.means is None:
            self.prepare(store)
        assert self.means is not None
        sub = prune(
            self.model,
            self.train,
            self.means,
            self.config.prune_config(sparsity, seed),
            teacher=self.teacher,
            progress=False,
        )
        table = evaluate(
            self.model,
            self.data,
            means=self.means,
            subnetwork=sub,
            teachers=self.teachers,
            progress=False,
        )
        table = pd.DataFrame(table[table["subnetwork"] != FULL]).filter(items=MEASURES)
        parts = self.inputs.parts(self.config, sparsity, seed)
        about = {"key": digest(parts), **parts, "given": self.config.describe()["prune"]}
        files = {
            **file_bytes(sub.save),
            "evaluation.json": table_bytes(table),
            "about.json": json_bytes({**about, **self.about}),
        }
        store.write(RUNS, about["key"], files)
        return mean_kl(table)


def mean_kl(table: pd.DataFrame) -> float:
    """KL over all rows of a run's evaluation."""
    return float((table["kl"] * table["n"]).sum() / table["n"].sum())


def perform(text: str) -> str:
    """Do a task and tell the outcome; the only function that an engine calls."""
    task = Task(**json.loads(text))
    before = torch.get_num_threads()
    torch.set_num_threads(task.threads)
    try:
        return json.dumps(_perform(task))
    except StoreError as error:
        return json.dumps({"store": str(error)})
    except HcLensError as error:
        return json.dumps({"error": str(error)})
    except Exception as error:  # whatever a run dies of, the others go on
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return json.dumps({"store": str(store_failed(task.store, error))})
        return json.dumps({"error": f"{type(error).__name__}: {error}"})
    finally:
        torch.set_num_threads(before)


def _perform(task: Task) -> dict[str, Any]:
    store = open_store(task.store)
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
    for key in [key for key in _kept if key[0] == sweep]:
        del _kept[key]


def name_checkpoint(store: Store, name: str, model: str) -> None:
    """Note which model a name stands for; in one store it stands for one model only."""
    record = quote(name, safe="")
    store.write(CHECKPOINTS, record, {"about.json": json_bytes({"name": name, "model": model})})
    known = json.loads((store.read(CHECKPOINTS, record) or {})["about.json"])["model"]
    if known != model:
        raise HcLensError(
            f"expected the model that the store {store.place} knows as {name!r} ({known[:8]}), got "
            f"another ({model[:8]}); its runs were not touched. Give the checkpoint another name, "
            "or use another store"
        )


def file_bytes(save: Any, name: str = "") -> dict[str, bytes]:
    """The files that `save(path)` writes, by their path below it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / (name or "files")
        save(path)
        if path.is_file():
            return {"": path.read_bytes()}
        return {item.name: item.read_bytes() for item in sorted(path.iterdir())}


def with_files(files: Mapping[str, bytes], name: str, load: Any) -> Any:
    """What `load(path)` reads from files, which lie in a folder for the time of the call."""
    with tempfile.TemporaryDirectory() as folder:
        for file, content in files.items():
            (Path(folder) / file).write_bytes(content)
        return load(Path(folder) / name)


def read_subnetwork(files: Mapping[str, bytes]) -> Subnetwork:
    """The subnetwork of a run's record."""
    return with_files(files, "", Subnetwork.load)


def table_bytes(table: pd.DataFrame) -> bytes:
    """A table as JSON columns; a missing number is null."""
    columns = {
        str(name): [None if pd.isna(value) else value for value in column.tolist()]
        for name, column in table.items()
    }
    return json_bytes(columns)


def read_table(content: bytes) -> pd.DataFrame:
    """The table that `table_bytes` wrote, numbers bit by bit."""
    table = pd.DataFrame(json.loads(content))
    measures = [name for name in table if name in ("accuracy", "kl", "agreement")]
    return table.astype(dict.fromkeys(measures, "float64"))
