"""Where the tasks of a sweep run: here, in processes of this machine, or on a Ray cluster.

An engine opens a pool. The pool takes tasks (`hc_lens.sweeptasks.Task`) and gives outcomes, in the
order in which they finish. All engines call the same function, `hc_lens.sweeptasks.perform`, so
they give the same results.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from hc_lens.engines.local import Local
from hc_lens.engines.ray import Ray
from hc_lens.errors import HcLensError

if TYPE_CHECKING:
    from hc_lens.sweeptasks import Task

__all__ = ["Engine", "Local", "Pool", "Ray", "named"]


@runtime_checkable
class Pool(Protocol):
    """Tasks under way."""

    def submit(self, task: Task) -> None:
        """Take a task; it runs when there is room."""
        ...

    def next(self) -> tuple[Task, dict[str, Any]]:
        """Wait for a task to finish: the task and its outcome."""
        ...

    def running(self) -> int:
        """How many runs are being computed."""
        ...

    def close(self) -> None:
        """End everything that is under way."""
        ...


@runtime_checkable
class Engine(Protocol):
    """What `sweep` needs of an engine."""

    @property
    def threads(self) -> int:
        """Torch threads of each run."""
        ...

    def open(self, n_runs: int) -> Pool:
        """A pool for at most so many runs."""
        ...


def named(engine: str | Engine, workers: int | None) -> Engine:
    """The engine of a name, with so many workers."""
    if engine == "local":
        return Local(workers)
    if engine == "ray":
        return Ray(workers)
    if isinstance(engine, str):
        raise HcLensError(f"expected engine 'local' or 'ray', got {engine!r}; choose one")
    if workers is not None:
        raise HcLensError(
            f"expected workers inside the engine that is given, got workers={workers} beside "
            f"{engine}; write Local(workers={workers}) or Ray(workers={workers})"
        )
    return engine
