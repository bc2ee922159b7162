"""Live progress of a sweep: done, running, failed, time left, the last run's KL.

In a terminal or a notebook it is a bar; elsewhere (a log file) a line now and then. Time left is
the mean time of the runs of this call, times the runs that remain; runs that the store already had
do not count.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from tqdm.auto import tqdm

LINE_EVERY = 30.0
"""Seconds between two lines where there is no bar."""


class Progress:
    """The state of a sweep, shown as it changes."""

    def __init__(self, total: int, shown: bool = True):
        self.total, self.shown = total, shown
        self.known = self.done = self.failed = self.running = 0
        self.kl: float | None = None
        self._since = self._last_line = time.monotonic()
        self._bar: Any = None
        if shown and (sys.stderr.isatty() or "ipykernel" in sys.modules):
            layout = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"
            self._bar = tqdm(total=total, desc="sweep", bar_format=layout)

    def skip(self, count: int) -> None:
        """Runs that the store already has."""
        self.known += count

    def finish(self, kl: float | None) -> None:
        """A run of this call; `kl` is None if it failed."""
        if kl is None:
            self.failed += 1
        else:
            self.done += 1
            self.kl = kl

    def seconds_left(self) -> float | None:
        """Estimate for the runs that remain; None before the first of this call."""
        ended = self.done + self.failed
        if not ended:
            return None
        return (time.monotonic() - self._since) / ended * (self.total - self.known - ended)

    def status(self) -> str:
        """The state in words."""
        left = self.seconds_left()
        parts = [f"{self.running} running", f"{self.failed} failed"]
        parts += [] if left is None else [f"{tqdm.format_interval(left)} left"]
        parts += [] if self.kl is None else [f"last KL {self.kl:.4f}"]
        return ", ".join(parts)

    def show(self, running: int, last: bool = False) -> None:
        """Show the state if it is time to."""
        self.running = running
        if self._bar is not None:
            self._bar.n = self.known + self.done + self.failed
            self._bar.set_postfix_str(self.status())
        elif self.shown and (last or time.monotonic() - self._last_line >= LINE_EVERY):
            self._last_line = time.monotonic()
            ended = self.known + self.done
            sys.stderr.write(f"sweep: {ended} of {self.total} done, {self.status()}\n")
            sys.stderr.flush()

    def close(self, failed: Mapping[tuple[str, float, int], str]) -> None:
        """The last state, the end of the bar, and which runs failed: one line for each reason."""
        self.show(0, last=True)
        if self._bar is not None:
            self._bar.close()
        for why in dict.fromkeys(failed.values() if self.shown else ()):
            names = [f"{name}/{sparsity}/{seed}" for (name, sparsity, seed), reason in
                     failed.items() if reason == why]  # fmt: skip
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            sys.stderr.write(f"sweep: failed {', '.join(names[:3])}{more}: {why}\n")
