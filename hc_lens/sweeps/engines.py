"""Where the tasks of a sweep run: in this process, in processes of this machine, or on Ray.

1. An engine opens a pool. The pool takes tasks and gives outcomes, in the order in which they
   finish. All engines call `hc_lens.sweeps.perform.perform`, so they give the same results.
2. `Local`: each worker is a new Python process (`hc_lens.sweeps.worker`) with 1 torch thread by
   default, so that as many workers as cores do not fight, and the number of workers never changes
   a result. A worker that dies is replaced and its task tried once more; then the run has failed.
3. A free worker takes a run of the checkpoint it has in memory; else it prepares the next
   checkpoint; else it helps where most runs wait.
4. `Ray`: each task is a Ray task with its share of CPUs and GPUs; Ray chooses the node. When a node
   dies, its tasks go to another one, up to `retries` times each. Results go to the store, which
   every node must reach (an fsspec address or a shared folder), so none is lost with a node. A
   cluster that is started here sends no usage reports unless the user turned them on.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hc_lens.errors import HcLensError, check_choice, check_count, first_line
from hc_lens.models.loading import check_device
from hc_lens.sweeps.perform import Task, perform

REPORTS = "RAY_USAGE_STATS_ENABLED"
"""The variable by which Ray sends usage reports to its makers, or does not."""
TRIES = 2
"""How often a task may take its worker down before it has failed."""


@dataclass(frozen=True)
class Local:
    """Processes of this machine."""

    workers: int | None = None
    """Number of processes; None for cores / threads, 0 for this process itself."""
    threads: int = 1
    """Torch threads of each run; another number gives results that differ in rounding."""
    device: str | None = "cpu"
    """Where the models run; None for TransformerLens's choice."""

    def __post_init__(self) -> None:
        if self.workers is not None:
            check_count("workers", self.workers, 0)
        check_count("threads", self.threads)
        check_device(self.device)

    def open(self, n_runs: int) -> Pool:
        """A pool for at most so many runs."""
        if self.workers == 0:
            return Pool()
        workers = self.workers or max(1, cores() // self.threads)
        return _Processes(max(1, min(workers, n_runs)), self.threads)


@dataclass(frozen=True)
class Ray:
    """A Ray cluster: the one that is connected, the one at `address`, or a new local one."""

    workers: int | None = None
    """Most runs at one time; None for as many as the cluster has room for."""
    cpus: float = 1
    """CPUs of each run; also its torch threads."""
    gpus: float = 0
    """GPUs of each run; 0.5 puts two runs on one."""
    retries: int = 3
    """How often a task is tried again when its node or process dies."""
    address: str | None = None
    """Address of the cluster; None for RAY_ADDRESS, a cluster of this machine, or a new one."""
    device: str | None = None
    """Where the models run; None for TransformerLens's choice, a GPU where a run has one."""

    def __post_init__(self) -> None:
        if self.workers is not None:
            check_count("workers on Ray", self.workers)
        for name in ("cpus", "gpus", "retries"):
            given = getattr(self, name)
            if given < 0:
                raise HcLensError(f"expected {name} of at least 0, got {given}; raise it")

    @property
    def threads(self) -> int:
        """Torch threads of each run."""
        return max(1, int(self.cpus))

    def open(self, n_runs: int) -> Pool:
        """A pool for at most so many runs."""
        return _RayTasks(self, min(self.workers or n_runs, n_runs))


Engine = Local | Ray
_NAMED = {"local": Local, "ray": Ray}


def named(engine: str | Engine, workers: int | None) -> Engine:
    """The engine of a name, with so many workers."""
    if isinstance(engine, str):
        check_choice("engine", engine, _NAMED)
        return _NAMED[engine](workers)
    if workers is not None:
        raise HcLensError(
            f"expected workers inside the engine that is given, got workers={workers} beside "
            f"{engine}; write Local(workers={workers}) or Ray(workers={workers})"
        )
    return engine


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def take(waiting: list[Task], held: str | None) -> Task:
    """The best task for a worker that holds a checkpoint, taken out of the list."""
    runs = Counter(task.checkpoint for task in waiting if task.is_run)

    def rank(task: Task) -> tuple[bool, bool, int]:
        mine = task.is_run and task.checkpoint == held
        return not mine, task.is_run, -runs[task.checkpoint]

    chosen = min(waiting, key=rank)
    waiting.remove(chosen)
    return chosen


class Pool:
    """Tasks that wait or are under way: here they are done in this process, one after the other."""

    def __init__(self) -> None:
        self._waiting: list[Task] = []
        self._held: str | None = None

    def submit(self, task: Task) -> None:
        """Take a task; it runs when there is room."""
        self._waiting.append(task)
        self._hand_out()

    def _hand_out(self) -> None:
        """Start tasks that wait, as far as there is room; here each waits for `next`."""

    def next(self) -> tuple[Task, dict[str, Any]]:
        """Wait for a task to finish: the task and its outcome."""
        task = take(self._waiting, self._held)
        self._held = task.checkpoint
        return task, perform(task)

    def running(self) -> int:
        """How many runs are being computed."""
        return min(1, len(self._waiting))

    def close(self) -> None:
        """End everything that is under way."""


class _Processes(Pool):
    """A pool of worker processes."""

    def __init__(self, workers: int, threads: int):
        super().__init__()
        self._most, self._threads = workers, threads
        self._deaths: Counter[tuple[str, ...]] = Counter()
        self._outcomes: queue.SimpleQueue[tuple[_Worker, str]] = queue.SimpleQueue()
        self._workers: list[_Worker] = []
        for _ in range(workers):  # all at once: they import torch at the same time
            self._start()

    def _start(self) -> _Worker:
        worker = _Worker(self._threads, self._outcomes)
        self._workers.append(worker)
        return worker

    def _hand_out(self) -> None:
        idle = [worker for worker in self._workers if worker.task is None]
        while self._waiting and (idle or len(self._workers) < self._most):
            worker = idle.pop(0) if idle else self._start()
            worker.give(take(self._waiting, worker.held))

    def next(self) -> tuple[Task, dict[str, Any]]:
        while True:
            self._hand_out()
            worker, text = self._outcomes.get()
            task = worker.task
            worker.task = None
            if text:
                assert task is not None
                return task, json.loads(text)
            why = worker.why()
            self._workers.remove(worker)
            worker.end()
            if task is not None:
                name = (task.checkpoint, *task.keys)
                self._deaths[name] += 1
                if self._deaths[name] >= TRIES:
                    return task, {"error": why}
                self._waiting.insert(0, task)

    def running(self) -> int:
        return sum(worker.task is not None and worker.task.is_run for worker in self._workers)

    def close(self) -> None:
        for worker in self._workers:
            worker.end()


class _Worker:
    """One process and the task it has."""

    def __init__(self, threads: int, outcomes: queue.SimpleQueue[tuple[_Worker, str]]):
        # What libraries print in the process; its last line says why the process died.
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115
        env = {
            "PYTHONPATH": os.pathsep.join(item for item in sys.path if item),
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
            "TOKENIZERS_PARALLELISM": "false",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hc_lens.sweeps.worker", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env={**os.environ, **env},
            text=True,
            encoding="utf-8",
        )
        self.task: Task | None = None
        self.held: str | None = None
        self.listener = threading.Thread(target=self._listen, args=(outcomes,), daemon=True)
        self.listener.start()

    def _listen(self, outcomes: queue.SimpleQueue[tuple[_Worker, str]]) -> None:
        """Pass every outcome on, and an empty one when the process is gone."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.endswith("\n"):  # the process may die in the middle of a line
                outcomes.put((self, line))
        outcomes.put((self, ""))

    def give(self, task: Task) -> None:
        assert self.process.stdin is not None
        self.task, self.held = task, task.checkpoint
        # If it died while idle, its empty outcome tells.
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(asdict(task)) + "\n")
            self.process.stdin.flush()

    def why(self) -> str:
        """Why the process is gone."""
        code = self.process.wait()
        name = f"exit code {code}"
        if code < 0:
            name = signal.Signals(-code).name + (" (out of memory?)" if code == -9 else "")
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").strip().splitlines()
        return f"its worker process ended with {name}" + (f": {lines[-1]}" if lines else "")

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.listener.join()
        for stream in (self.process.stdin, self.process.stdout, self.errors):
            if stream is not None:
                # A task that the process could no longer read is of no use.
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


@contextlib.contextmanager
def without_reports() -> Iterator[None]:
    """Ray's usage reports off for a cluster that is started here, unless the user chose.

    A choice is the variable, or the file that ``ray enable-usage-stats`` writes.
    """
    file = os.environ.get("RAY_USAGE_STATS_CONFIG_PATH", "~/.ray/config.json")
    chosen = REPORTS in os.environ
    with contextlib.suppress(OSError, ValueError, AttributeError):
        text = Path(file).expanduser().read_text(encoding="utf-8")
        chosen |= json.loads(text).get("usage_stats") is not None
    if chosen:
        yield
        return
    os.environ[REPORTS] = "0"
    try:
        yield
    finally:
        os.environ.pop(REPORTS, None)


class _RayTasks(Pool):
    """A pool of Ray tasks."""

    def __init__(self, engine: Ray, most: int):
        super().__init__()
        try:
            import ray
        except ImportError as error:
            raise HcLensError(
                "expected the package ray for engine='ray', it is not installed; "
                "pip install 'hc-lens[ray]'"
            ) from error
        self._ray: Any = ray
        self._engine, self._most = engine, most
        self._ours = not ray.is_initialized()
        if self._ours:
            try:
                with without_reports():
                    ray.init(
                        address=engine.address, log_to_driver=False, logging_level=logging.WARNING
                    )
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise HcLensError(
                    f"expected a Ray cluster at {engine.address or 'this machine'}, got {error}; "
                    "start it with 'ray start --head'"
                ) from error
        self._remote = self._ray.remote(perform).options(
            num_cpus=engine.cpus,
            num_gpus=engine.gpus,
            max_retries=engine.retries,
            scheduling_strategy="SPREAD",  # short runs would otherwise all stay on the first node
        )
        self._under_way: dict[Any, Task] = {}

    def _hand_out(self) -> None:
        while self._waiting and len(self._under_way) < self._most:
            task = self._waiting.pop(0)
            self._under_way[self._remote.remote(task)] = task

    def next(self) -> tuple[Task, dict[str, Any]]:
        [ready], _ = self._ray.wait(list(self._under_way), num_returns=1)
        task = self._under_way.pop(ready)
        try:
            outcome = self._ray.get(ready)
        except self._ray.exceptions.RayError as error:  # its node died once too often
            outcome = {"error": first_line(error)}
        self._hand_out()
        return task, outcome

    def running(self) -> int:
        room = self._ray.cluster_resources().get("CPU", 0) / max(self._engine.cpus, 1e-9)
        return min(len(self._under_way), int(room))

    def close(self) -> None:
        for reference in self._under_way:
            self._ray.cancel(reference, force=True)
        self._under_way.clear()
        if self._ours:
            self._ray.shutdown()
