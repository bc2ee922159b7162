"""The tasks of a sweep, which reach their workers as lines of JSON, and a pool that does them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

Perform = Callable[[str], str]
"""Does a task and tells the outcome, both as JSON: `hc_lens.sweeps.perform.perform`."""


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
    sparsity: float | None = None
    """Sparsity of the run; None to prepare the checkpoint."""
    seed: int | None = None
    """Seed of the run."""
    key: str | None = None
    """Key of the run, from the fingerprints that the preparation found."""

    @property
    def is_run(self) -> bool:
        """Whether this is a run, or the preparation of a checkpoint."""
        return self.key is not None

    def to_json(self) -> str:
        """The task as one line of text."""
        return json.dumps(asdict(self))


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

    def __init__(self, perform: Perform):
        self._perform = perform
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
        return task, json.loads(self._perform(task.to_json()))

    def running(self) -> int:
        """How many runs are being computed."""
        return min(1, len(self._waiting))

    def close(self) -> None:
        """End everything that is under way."""
