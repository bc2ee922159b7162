"""Where the tasks of a sweep run: here, in processes of this machine, or on a Ray cluster.

An engine opens a pool (`hc_lens.sweeps.tasks.Pool`). The pool takes tasks and gives outcomes, in
the order in which they finish. All engines call the same function, so they give the same results.
"""

from __future__ import annotations

from hc_lens.errors import HcLensError
from hc_lens.sweeps.engines.local import Local
from hc_lens.sweeps.engines.ray import Ray

Engine = Local | Ray
_NAMED = {"local": Local, "ray": Ray}


def named(engine: str | Engine, workers: int | None) -> Engine:
    """The engine of a name, with so many workers."""
    if isinstance(engine, str):
        if engine not in _NAMED:
            raise HcLensError(f"expected engine 'local' or 'ray', got {engine!r}; choose one")
        return _NAMED[engine](workers)
    if workers is not None:
        raise HcLensError(
            f"expected workers inside the engine that is given, got workers={workers} beside "
            f"{engine}; write Local(workers={workers}) or Ray(workers={workers})"
        )
    return engine
