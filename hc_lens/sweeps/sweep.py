"""Many prunings that survive: checkpoints x sparsities x seeds, each run kept when it is finished.

1. Prepare each checkpoint (`hc_lens.sweeps.perform`): load, fingerprints, means, full evaluation.
2. The fingerprints give the key of each run (`hc_lens.sweeps.runs`). Runs that the store has are
   skipped, the others go to the engine (`hc_lens.sweeps.engines`), which writes each finished one
   to the store (`hc_lens.records`).
3. A run that fails does not stop the others; it is named at the end, and a second call tries it
   again. A store that fails (full disk) stops the sweep; finished runs stay.
4. At the end, and at Ctrl-C, ``runs.parquet`` is written anew from the finished runs.
"""

from __future__ import annotations

import contextlib
import itertools
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hc_lens.data.specs import ORGANISM
from hc_lens.errors import HcLensError
from hc_lens.records import Records, RecordsError
from hc_lens.sweeps import engines
from hc_lens.sweeps.config import SweepConfig
from hc_lens.sweeps.engines import Engine
from hc_lens.sweeps.perform import forget, perform
from hc_lens.sweeps.progress import Progress
from hc_lens.sweeps.runs import (
    CHECKPOINTS,
    KIND,
    PREPARED,
    RUNS,
    TABLE,
    Inputs,
    Name,
    Record,
    Runs,
    gather,
    read_record,
    write_tables,
)
from hc_lens.sweeps.tasks import Task


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
        engine: ``"local"``, ``"ray"``, or `hc_lens.sweeps.engines.Local` or `Ray` with their own
            settings.
        workers: runs at one time; by default as many as there are cores.
        progress: show done / running / failed, the time left and the last run's KL.

    Returns:
        The runs of `config`. Those that failed are in `failed` with the reason; another call tries
        them again.
    """
    chosen = engines.named(engine, workers)
    records = Records(store, KIND, owner=(RUNS, PREPARED, CHECKPOINTS, TABLE))
    work = _Sweep(config, records, chosen.threads, Progress(config.n_runs, progress))
    try:
        work.drive(chosen)
        write_tables(records)
    except RecordsError as error:
        with contextlib.suppress(OSError):  # reading needs a little room too
            error.finished = work.runs()
        raise
    except KeyboardInterrupt:
        with contextlib.suppress(RecordsError):
            write_tables(records)
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
    store: Records
    threads: int
    progress: Progress
    inputs: dict[str, Inputs] = field(default_factory=dict)
    """Fingerprints by checkpoint, of those that are prepared."""
    under_way: dict[str, list[Name]] = field(default_factory=dict)
    """Runs by key: two names of one model share a run."""
    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Name of this call."""

    def __post_init__(self) -> None:
        self.described = portable(self.config)

    def drive(self, engine: Engine) -> None:
        """Prepare every checkpoint and do every run that the store does not have."""
        pool = engine.open(self.config.n_runs, perform)
        try:
            waiting = len(self.config.checkpoints)
            for checkpoint in self.config.checkpoints:
                pool.submit(self.task(checkpoint))
            while waiting:
                self.progress.show(pool.running())
                task, outcome = pool.next()
                waiting -= 1
                if "store" in outcome:
                    raise RecordsError(outcome["store"])
                for run in self.end(task, outcome):
                    pool.submit(run)
                    waiting += 1
        finally:
            pool.close()
            forget(self.token)
            self.progress.close()

    def task(self, checkpoint: str, **run: Any) -> Task:
        """A task of this call."""
        return Task(self.token, self.described, self.store.address, self.threads, checkpoint, **run)

    def names(self, checkpoint: str) -> list[Name]:
        """The runs of a checkpoint: all sparsities of a seed before the next seed."""
        pairs = itertools.product(self.config.seeds, self.config.sparsities)
        return [(checkpoint, sparsity, seed) for seed, sparsity in pairs]

    def end(self, task: Task, outcome: Mapping[str, Any]) -> list[Task]:
        """Note a task that ended; the runs that a prepared checkpoint still needs."""
        names = self.names(task.checkpoint) if task.key is None else self.under_way.pop(task.key)
        if task.is_run or "error" in outcome:
            for name in names:
                self.progress.end(name, outcome)
            return []
        inputs = self.inputs[task.checkpoint] = Inputs(**outcome["inputs"])
        missing: list[Task] = []
        for name in names:
            _, sparsity, seed = name
            key = inputs.run_key(self.config, sparsity, seed)
            if key in self.under_way:
                self.under_way[key].append(name)
            elif read_record(self.store, RUNS, key) is not None:
                self.progress.known += 1
            else:
                self.under_way[key] = [name]
                missing.append(self.task(task.checkpoint, sparsity=sparsity, seed=seed, key=key))
        return missing

    def runs(self) -> Runs:
        """What the store has of this sweep, in order of training."""
        found: list[tuple[str, Record]] = []
        prepared: dict[str, str | None] = {}
        for checkpoint in self.config.checkpoints:
            inputs = self.inputs.get(checkpoint)
            prepared[checkpoint] = None if inputs is None else inputs.prepared_key()
            if inputs is None:
                continue
            for name in self.names(checkpoint):
                run = read_record(self.store, RUNS, inputs.run_key(self.config, *name[1:]))
                if run is not None and name not in self.progress.failed:
                    found.append((checkpoint, run))
        return gather(self.store, found, prepared, self.progress.failed)


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
