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
import os
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from hc_lens.data.specs import ORGANISM
from hc_lens.errors import HcLensError
from hc_lens.records import Records, RecordsError
from hc_lens.sweeps import engines
from hc_lens.sweeps.config import SweepConfig
from hc_lens.sweeps.engines import Engine
from hc_lens.sweeps.perform import Task, forget
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
    run_key,
    write_tables,
)

LINE_EVERY = 30.0
"""Seconds between two lines of progress where there is no bar."""


def sweep(
    config: SweepConfig,
    store: str | Path = "runs",
    *,
    engine: str | Engine = "local",
    workers: int | None = None,
    progress: bool = True,
    say: Callable[[str], None] | None = None,
) -> Runs:
    """Run what is missing of a sweep and read all of it.

    Args:
        config: which runs.
        store: folder or fsspec address of the records; may hold other sweeps too.
        engine: ``"local"``, ``"ray"``, or `hc_lens.sweeps.engines.Local` or `Ray` with their own
            settings.
        workers: runs at one time; by default as many as there are cores.
        progress: show done / running / failed, the time left and the last run's KL.
        say: gets the lines of progress where there is no bar, and which runs failed; by default
            they go to the error stream.

    Returns:
        The runs of `config`. Those that failed are in `failed` with the reason; another call tries
        them again.
    """
    chosen = engines.named(engine, workers)
    records = Records(store, KIND, owner=(RUNS, PREPARED, CHECKPOINTS, TABLE))
    work = _Sweep(config, records, chosen, _Progress(config.n_runs, progress, say))
    try:
        work.drive()
        write_tables(records)
    except RecordsError as error:
        with contextlib.suppress(OSError, RecordsError):  # reading needs a little room too
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


class _Progress:
    """What has become of the runs: a bar in a terminal or a notebook, else a line now and then."""

    def __init__(self, total: int, shown: bool, say: Callable[[str], None] | None = None):
        self.total, self.shown, self.say = total, shown, say or _say
        self.known = self.done = 0
        """Runs that the store already had, and those of this call that are finished."""
        self.failed: dict[Name, str] = {}
        """Why each failed run failed."""
        self.kl: float | None = None
        self._since = self._last_line = time.monotonic()
        self._bar: Any = None
        if shown and (sys.stderr.isatty() or "ipykernel" in sys.modules):
            layout = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"
            self._bar = tqdm(total=total, desc="sweep", bar_format=layout)

    def end(self, name: Name, kl: float | None, why: str) -> None:
        """Note a run of this call that finished, with its KL, or failed."""
        if kl is None:
            self.failed[name] = why
        else:
            self.done += 1
            self.kl = kl

    def show(self, running: int, last: bool = False) -> None:
        """Show the state if it is time to."""
        status = f"{running} running, {len(self.failed)} failed"
        ended = self.done + len(self.failed)
        if ended:
            # At the mean speed of this call; what the store already had took no time.
            left = (time.monotonic() - self._since) / ended * (self.total - self.known - ended)
            status += f", {tqdm.format_interval(left)} left"
        if self.kl is not None:
            status += f", last KL {self.kl:.4f}"
        if self._bar is not None:
            self._bar.n = self.known + ended
            self._bar.set_postfix_str(status)
        elif self.shown and (last or time.monotonic() - self._last_line >= LINE_EVERY):
            self._last_line = time.monotonic()
            self.say(f"sweep: {self.known + self.done} of {self.total} done, {status}")

    def close(self) -> None:
        """The last state, the end of the bar, and which runs failed: one line for each reason."""
        self.show(0, last=True)
        if self._bar is not None:
            self._bar.close()
        for why in dict.fromkeys(self.failed.values() if self.shown else ()):
            names = ["/".join(map(str, name)) for name in self.failed if self.failed[name] == why]
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            self.say(f"sweep: failed {', '.join(names[:3])}{more}: {why}")


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


class _Sweep:
    """The state of one call."""

    def __init__(self, config: SweepConfig, store: Records, engine: Engine, progress: _Progress):
        self.config, self.store, self.engine, self.progress = config, store, engine, progress
        self.inputs: dict[str, Inputs] = {}
        """Fingerprints by checkpoint, of those that are prepared."""
        self.under_way: dict[str, list[Name]] = {}
        """Runs by key: two names of one model share a run."""
        # What all tasks of this call have in common, and a name for the call.
        common = (uuid.uuid4().hex, portable(config), store.address, engine.threads)
        self.task = partial(Task, *common, device=engine.device)

    def drive(self) -> None:
        """Prepare every checkpoint and do every run that the store does not have."""
        pool = self.engine.open(self.config.n_runs)
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
            forget()
            self.progress.close()

    def groups(self, checkpoint: str) -> list[list[Name]]:
        """The runs of a checkpoint by task: all sparsities of a seed before the next seed."""
        pairs = itertools.product(self.config.seeds, self.config.groups())
        return [[(checkpoint, each, seed) for each in group] for seed, group in pairs]

    def names(self, checkpoint: str) -> list[Name]:
        """The runs of a checkpoint, in the same order."""
        return list(itertools.chain(*self.groups(checkpoint)))

    def end(self, task: Task, outcome: Mapping[str, Any]) -> list[Task]:
        """Note a task that ended; the tasks that a prepared checkpoint still needs."""
        if task.is_run:
            for key in task.keys:
                kl = outcome.get("kl", {}).get(key)
                # A worker that dies on a path cannot say what it had written of it.
                if kl is None and read_record(self.store, RUNS, key) is not None:
                    self.progress.known += len(self.under_way.pop(key, ()))
                for name in self.under_way.pop(key, ()):
                    self.progress.end(name, kl, outcome.get("error", ""))
            return []
        if "error" in outcome:
            for name in self.names(task.checkpoint):
                self.progress.end(name, None, outcome["error"])
            return []
        inputs = self.inputs[task.checkpoint] = outcome["inputs"]
        tasks = (self.missing(group, inputs) for group in self.groups(task.checkpoint))
        return [task for task in tasks if task is not None]

    def missing(self, group: list[Name], inputs: Inputs) -> Task | None:
        """The task of runs that come from one pruning, unless the store has them all."""
        keys = [run_key(inputs, self.config, *name[1:]) for name in group]
        wanted = False
        for name, key in zip(group, keys, strict=True):
            if key in self.under_way:
                self.under_way[key].append(name)
            elif read_record(self.store, RUNS, key) is not None:
                self.progress.known += 1
            else:
                self.under_way[key], wanted = [name], True
        sparsities = [sparsity for _, sparsity, _ in group]
        return self.task(group[0][0], group[0][2], sparsities, keys) if wanted else None

    def runs(self) -> Runs:
        """What the store has of this sweep, in order of training."""
        found: dict[Name, Record] = {}
        for checkpoint in self.config.checkpoints:
            for name in self.names(checkpoint) if checkpoint in self.inputs else ():
                key = run_key(self.inputs[checkpoint], self.config, *name[1:])
                run = read_record(self.store, RUNS, key)
                if run is not None and name not in self.progress.failed:
                    found[name] = run
        known = {name: self.inputs.get(name) for name in self.config.checkpoints}
        return gather(self.store, found, known, self.progress.failed)


def portable(config: SweepConfig) -> dict[str, Any]:
    """The settings with absolute paths, so that another process finds the same files."""

    def absolute(path: str) -> str:
        there = Path(path).expanduser()
        return str(there.absolute()) if os.path.exists(there) else path

    described = config.describe()
    for name, model in described["checkpoints"].items():
        if model.partition(":")[0] != ORGANISM:
            described["checkpoints"][name] = absolute(model)
    for spec in (described["train"], described.get("means", {}), *described["evaluation"].values()):
        if "path" in spec:
            spec["path"] = absolute(spec["path"])
    return described
