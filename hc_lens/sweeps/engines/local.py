"""The tasks of a sweep in processes of this machine.

1. Each worker is a new Python process with its own torch threads: 1 by default, so that as many
   workers as cores do not fight, and the number of workers never changes a result.
2. A free worker takes a run of the checkpoint it has in memory; else it prepares the next
   checkpoint; else it helps where most runs wait.
3. A worker that dies is replaced and its task tried once more; then the run has failed.
4. ``workers=0`` runs everything in this process.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from dataclasses import dataclass
from typing import Any

from hc_lens.errors import HcLensError
from hc_lens.sweeps.tasks import Perform, Pool, Task, take

TRIES = 2
"""How often a task may take its worker down before it has failed."""


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@dataclass(frozen=True)
class Local:
    """Processes of this machine."""

    workers: int | None = None
    """Number of processes; None for cores / threads, 0 for this process itself."""
    threads: int = 1
    """Torch threads of each run; another number gives results that differ in rounding."""

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 0:
            raise HcLensError(f"expected workers of at least 0, got {self.workers}; raise it")
        if self.threads < 1:
            raise HcLensError(f"expected threads of at least 1, got {self.threads}; raise it")

    def open(self, n_runs: int, perform: Perform) -> Pool:
        """A pool for at most so many runs."""
        if self.workers == 0:
            return Pool(perform)
        workers = self.workers or max(1, cores() // self.threads)
        return _Processes(perform, max(1, min(workers, n_runs)), self.threads)


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
            [sys.executable, "-m", "hc_lens.sweeps.engines.worker", str(os.getpid())],
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
            self.process.stdin.write(task.to_json() + "\n")
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


class _Processes(Pool):
    """A pool of worker processes."""

    def __init__(self, perform: Perform, workers: int, threads: int):
        super().__init__(perform)
        self._most, self._threads = workers, threads
        self._tries: Counter[str] = Counter()
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
                self._tries[task.to_json()] += 1
                if self._tries[task.to_json()] >= TRIES:
                    return task, {"error": why}
                self._waiting.insert(0, task)

    def running(self) -> int:
        return sum(worker.task is not None and worker.task.is_run for worker in self._workers)

    def close(self) -> None:
        for worker in self._workers:
            worker.end()
