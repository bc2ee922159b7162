"""Many prunings that survive: checkpoints x sparsities x seeds, each run kept when it is finished.

1. Prepare each checkpoint: load, fingerprints, means and full evaluation (`hc_lens.sweeptasks`).
2. The fingerprints give the key of each run. Runs that the store has are skipped, the others go to
   the engine (`hc_lens.engines`), which writes each finished one to the store
   (`hc_lens.sweepstore`).
3. A run that fails does not stop the others; it is named at the end, and a second call tries it
   again. A store that fails (full disk) stops the sweep; finished runs stay.
4. At the end, and at Ctrl-C, ``runs.parquet`` is written anew from the finished runs.
"""

from __future__ import annotations

import contextlib
import io
import json
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from hc_lens import engines
from hc_lens.errors import HcLensError
from hc_lens.spec import ORGANISM
from hc_lens.store import Subnetwork
from hc_lens.sweepconfig import SweepConfig
from hc_lens.sweepprogress import Progress
from hc_lens.sweepstore import Store, StoreError, open_store
from hc_lens.sweeptasks import (
    CHECKPOINTS,
    MEASURES,
    PREPARED,
    RUNS,
    Inputs,
    Task,
    digest,
    read_subnetwork,
    read_table,
)

if TYPE_CHECKING:
    from hc_lens.engines import Engine, Pool

Name = tuple[str, float, int]
"""Checkpoint, sparsity and seed of a run."""
TABLE, FULL_TABLE = "runs.parquet", "full.parquet"
COLUMNS = ["run", "checkpoint", "sparsity", "seed", *MEASURES]
FULL_COLUMNS = ["checkpoint", "dataset", "case", "n", "accuracy"]


@dataclass(frozen=True, eq=False)
class Runs:
    """The runs of one sweep."""

    table: pd.DataFrame
    """One row per run, dataset and case: run (its key), checkpoint, sparsity, seed, dataset, case,
    n, accuracy, kl, agreement."""
    full: pd.DataFrame
    """The full models: checkpoint, dataset, case, n, accuracy."""
    subnetworks: Mapping[Name, Subnetwork]
    """Subnetwork by (checkpoint, sparsity, seed)."""
    failed: pd.DataFrame
    """Runs that failed: checkpoint, sparsity, seed, why."""
    checkpoints: tuple[str, ...]
    """Names of the checkpoints, in order of training."""

    def __repr__(self) -> str:
        return (
            f"Runs({len(self.subnetworks)} finished, {len(self.failed)} failed, "
            f"{len(self.checkpoints)} checkpoints)"
        )


def sweep(
    config: SweepConfig,
    store: str | Path = "runs",
    *,
    engine: str | Engine = "local",
    workers: int | None = None,
    progress: bool = True,
) -> Runs:
    """Run what is missing of a sweep and read all of it.

    Args:
        config: which runs.
        store: folder or fsspec address of the records; may hold other sweeps too.
        engine: ``"local"``, ``"ray"``, or `hc_lens.engines.Local` / `Ray` with their settings.
        workers: runs at one time; by default as many as there are cores.
        progress: show done / running / failed, the time left and the last run's KL.

    Returns:
        The runs of `config`. Those that failed are in `failed` with the reason; another call tries
        them again.
    """
    chosen = engines.named(engine, workers)
    place = open_store(store)
    place.begin()
    work = _Sweep(config, place, chosen.threads, Progress(config.n_runs, progress))
    try:
        work.drive(chosen)
        write_tables(place)
    except StoreError as error:
        with contextlib.suppress(OSError):  # reading needs a little room too
            error.finished = work.runs()
        raise
    except KeyboardInterrupt:
        with contextlib.suppress(StoreError):
            write_tables(place)
        raise
    runs = work.runs()
    if not runs.subnetworks:
        error = HcLensError(
            f"expected at least one run to finish, all {len(runs.failed)} failed; the first: "
            f"{runs.failed['why'].iloc[0]}"
        )
        error.finished = runs
        raise error
    return runs


@dataclass
class _Sweep:
    """The state of one call."""

    config: SweepConfig
    store: Store
    threads: int
    progress: Progress
    inputs: dict[str, Inputs] = field(default_factory=dict)
    """Fingerprints by checkpoint, of those that are prepared."""
    failed: dict[Name, str] = field(default_factory=dict)
    """Why each failed run failed."""

    def __post_init__(self) -> None:
        self.described = portable(self.config)
        self.token = uuid.uuid4().hex
        self.under_way: dict[str, list[Name]] = {}
        """Runs by key: two names of one model share a run."""

    def drive(self, engine: Engine) -> None:
        """Prepare every checkpoint and do every run that the store does not have."""
        pool = engine.open(self.config.n_runs)
        try:
            self._drive(pool)
        finally:
            pool.close()
            self.progress.close(self.failed)

    def _drive(self, pool: Pool) -> None:
        waiting = len(self.config.checkpoints)
        for checkpoint in self.config.checkpoints:
            pool.submit(self.task(checkpoint))
        while waiting:
            self.progress.show(pool.running())
            task, outcome = pool.next()
            waiting -= 1
            if "store" in outcome:
                raise StoreError(outcome["store"])
            if task.is_run:
                self.end_run(task, outcome)
                continue
            for run in self.end_preparation(task, outcome):
                pool.submit(run)
                waiting += 1

    def task(self, checkpoint: str, **run: Any) -> Task:
        """A task of this call."""
        return Task(self.token, self.described, self.store.place, self.threads, checkpoint, **run)

    def names(self, checkpoint: str) -> Iterator[Name]:
        """The runs of a checkpoint: all sparsities of a seed before the next seed."""
        for seed in self.config.seeds:
            for sparsity in self.config.sparsities:
                yield checkpoint, sparsity, seed

    def end_preparation(self, task: Task, outcome: Mapping[str, Any]) -> list[Task]:
        """The runs that a prepared checkpoint still needs."""
        names = list(self.names(task.checkpoint))
        if "error" in outcome:
            for name in names:
                self.fail(name, outcome["error"])
            return []
        inputs = self.inputs[task.checkpoint] = Inputs(**outcome["inputs"])
        missing: list[Task] = []
        for name in names:
            _, sparsity, seed = name
            key = inputs.run_key(self.config, sparsity, seed)
            if key in self.under_way:
                self.under_way[key].append(name)
            elif self.store.read(RUNS, key) is not None:
                self.progress.skip(1)
            else:
                self.under_way[key] = [name]
                missing.append(self.task(task.checkpoint, sparsity=sparsity, seed=seed, key=key))
        return missing

    def end_run(self, task: Task, outcome: Mapping[str, Any]) -> None:
        """Note a run that ended, under all its names."""
        assert task.key is not None
        for name in self.under_way.pop(task.key):
            if "error" in outcome:
                self.fail(name, outcome["error"])
            else:
                self.progress.finish(outcome["kl"])

    def fail(self, name: Name, why: str) -> None:
        """Note a run that failed."""
        self.failed[name] = why
        self.progress.finish(None)

    def runs(self) -> Runs:
        """What the store has of this sweep."""
        tables: list[pd.DataFrame] = []
        full: list[pd.DataFrame] = []
        subnetworks: dict[Name, Subnetwork] = {}
        for checkpoint, inputs in self.in_order():
            files = self.store.read(PREPARED, inputs.prepared_key())
            if files is not None:
                full.append(_full_rows(checkpoint, files))
            for name in self.names(checkpoint):
                key = inputs.run_key(self.config, *name[1:])
                files = self.store.read(RUNS, key)
                if files is not None and name not in self.failed:
                    subnetworks[name] = read_subnetwork(files)
                    tables.append(_run_rows(key, name, files))
        failed = [(*name, why) for name, why in self.failed.items()]
        return Runs(
            table=_joined(tables, COLUMNS),
            full=_joined(full, FULL_COLUMNS),
            subnetworks=subnetworks,
            failed=pd.DataFrame(failed, columns=["checkpoint", "sparsity", "seed", "why"]),
            checkpoints=tuple(self.config.checkpoints),
        )

    def in_order(self) -> Iterator[tuple[str, Inputs]]:
        """The prepared checkpoints in order of training."""
        for checkpoint in self.config.checkpoints:
            if checkpoint in self.inputs:
                yield checkpoint, self.inputs[checkpoint]


def portable(config: SweepConfig) -> dict[str, Any]:
    """The settings with absolute paths, so that another process finds the same files."""
    described = config.describe()

    def absolute(path: str) -> str:
        there = Path(path).expanduser()
        return str(there.absolute()) if there.exists() else path

    described["checkpoints"] = {
        name: model if model.partition(":")[0] == ORGANISM else absolute(model)
        for name, model in described["checkpoints"].items()
    }
    specs = [described["train"], *described["evaluation"].values(), described.get("means") or {}]
    for spec in specs:
        if spec.get("path") is not None:
            spec["path"] = absolute(spec["path"])
    return described


def write_tables(store: Store) -> None:
    """Write the tables of all finished runs and full models of a store, from their records.

    A checkpoint has the names that sweeps gave it. `model` is its fingerprint; `settings` is a hash
    of the rows and of the settings other than sparsity and seed, by which sweeps that share a store
    are told apart.
    """
    names: dict[str, list[str]] = {}
    for record in store.names(CHECKPOINTS):
        about = _about(store.read(CHECKPOINTS, record))
        if about is not None:
            names.setdefault(about["model"], []).append(about["name"])
    tables: list[pd.DataFrame] = []
    full: list[pd.DataFrame] = []
    for key in store.names(RUNS):
        files = store.read(RUNS, key)
        about = _about(files)
        if files is None or about is None:
            continue
        prune, rows = about["prune"], ("method", "train", "means", "evaluation", "given")
        extra = {"model": about["model"], "settings": digest([about[name] for name in rows])}
        for checkpoint in names.get(about["model"], []):
            table = _run_rows(key, (checkpoint, prune["sparsity"], prune["seed"]), files)
            tables.append(table.assign(**extra))
    for key in store.names(PREPARED):
        files = store.read(PREPARED, key)
        about = _about(files)
        if files is None or about is None:
            continue
        model = about["inputs"]["model"]
        full += [_full_rows(name, files).assign(model=model) for name in names.get(model, [])]
    _write_parquet(store, TABLE, _joined(tables, [*COLUMNS, "model", "settings"]))
    _write_parquet(store, FULL_TABLE, _joined(full, [*FULL_COLUMNS, "model"]))


def _write_parquet(store: Store, name: str, table: pd.DataFrame) -> None:
    # Sorted, so that the file does not tell in which order the runs finished.
    order = [column for column in ("checkpoint", "sparsity", "seed", "run") if column in table]
    table = table.sort_values(order, kind="stable", ignore_index=True)
    buffer = io.BytesIO()
    table.to_parquet(buffer, index=False)
    store.write_file(name, buffer.getvalue())


def _about(files: Mapping[str, bytes] | None) -> dict[str, Any] | None:
    return None if files is None else json.loads(files["about.json"])


def _run_rows(key: str, name: Name, files: Mapping[str, bytes]) -> pd.DataFrame:
    checkpoint, sparsity, seed = name
    table = read_table(files["evaluation.json"])
    table = table.assign(run=key, checkpoint=checkpoint, sparsity=sparsity, seed=seed)
    return table.filter(items=COLUMNS)


def _full_rows(checkpoint: str, files: Mapping[str, bytes]) -> pd.DataFrame:
    table = read_table(files["evaluation.json"]).assign(checkpoint=checkpoint)
    return table.filter(items=FULL_COLUMNS)


def _joined(tables: list[pd.DataFrame], columns: list[str]) -> pd.DataFrame:
    if not tables:
        return pd.DataFrame(columns=columns)
    return pd.concat(tables, ignore_index=True).filter(items=columns)
