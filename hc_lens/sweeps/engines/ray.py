"""The tasks of a sweep on a Ray cluster.

1. Each task is a Ray task with its share of CPUs and GPUs; Ray chooses the node.
2. Results go to the store, which every node must reach: an fsspec address or a shared folder.
   Only a short text comes back.
3. When a node dies, Ray gives its tasks to another one, up to `retries` times each. A finished run
   is in the store, so nothing is lost with the node.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from hc_lens.errors import HcLensError
from hc_lens.sweeps.tasks import Perform, Pool, Task


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

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise HcLensError(
                f"expected workers of at least 1 on Ray, got {self.workers}; leave it out for as "
                "many as there is room for"
            )
        for name in ("cpus", "gpus", "retries"):
            if getattr(self, name) < 0:
                raise HcLensError(
                    f"expected {name} of at least 0, got {getattr(self, name)}; raise it"
                )

    @property
    def threads(self) -> int:
        """Torch threads of each run."""
        return max(1, int(self.cpus))

    def open(self, n_runs: int, perform: Perform) -> Pool:
        """A pool for at most so many runs."""
        try:
            import ray
        except ImportError as error:
            raise HcLensError(
                "expected the package ray for engine='ray', it is not installed; "
                "pip install 'hc-lens[ray]'"
            ) from error
        return _Tasks(ray, self, min(self.workers or n_runs, n_runs), perform)


class _Tasks(Pool):
    """A pool of Ray tasks."""

    def __init__(self, ray: Any, engine: Ray, most: int, perform: Perform):
        super().__init__(perform)
        self._ray, self._engine, self._most = ray, engine, most
        self._ours = not ray.is_initialized()
        if self._ours:
            try:
                ray.init(address=engine.address, log_to_driver=False, logging_level="WARNING")
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise HcLensError(
                    f"expected a Ray cluster at {engine.address or 'this machine'}, got {error}; "
                    "start it with 'ray start --head'"
                ) from error
        self._remote = ray.remote(perform).options(
            num_cpus=engine.cpus,
            num_gpus=engine.gpus,
            max_retries=engine.retries,
            scheduling_strategy="SPREAD",  # short runs would otherwise all stay on the first node
        )
        self._under_way: dict[Any, Task] = {}

    def _hand_out(self) -> None:
        while self._waiting and len(self._under_way) < self._most:
            task = self._waiting.pop(0)
            self._under_way[self._remote.remote(task.to_json())] = task

    def next(self) -> tuple[Task, dict[str, Any]]:
        [ready], _ = self._ray.wait(list(self._under_way), num_returns=1)
        task = self._under_way.pop(ready)
        try:
            outcome = json.loads(self._ray.get(ready))
        except self._ray.exceptions.RayError as error:  # its node died once too often
            reason = str(error).strip().splitlines() or [type(error).__name__]
            outcome = {"error": f"{type(error).__name__}: {reason[0]}"}
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
