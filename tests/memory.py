"""How much memory a piece of work needs."""

from __future__ import annotations

from itertools import accumulate

from torch.profiler import ProfilerActivity, profile


def peak_bytes(run) -> int:
    """The most bytes of tensors that were alive at once during a call, beyond those before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = profiler.profiler.kineto_results.events()
    changes = (event.nbytes() for event in events if event.name() == "[memory]")
    return max(accumulate(changes), default=0)
