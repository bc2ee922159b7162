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

from hc_lens.sweeps.runs import Name

LINE_EVERY = 30.0
"""Seconds between two lines where there is no bar."""


class Progress:
    """The state of a sweep, shown as it changes."""

    def __init__(self, total: int, shown: bool = True):
        self.total, self.shown = total, shown
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

    def end(self, name: Name, outcome: Mapping[str, Any]) -> None:
        """Note a run of this call that finished or failed."""
        if "error" in outcome:
            self.failed[name] = outcome["error"]
        else:
            self.done += 1
            self.kl = outcome["kl"]

    def show(self, running: int, last: bool = False) -> None:
        """Show the state if it is time to."""
        if self._bar is not None:
            self._bar.n = self.known + self.done + len(self.failed)
            self._bar.set_postfix_str(self._status(running))
        elif self.shown and (last or time.monotonic() - self._last_line >= LINE_EVERY):
            self._last_line = time.monotonic()
            done = f"{self.known + self.done} of {self.total} done"
            sys.stderr.write(f"sweep: {done}, {self._status(running)}\n")
            sys.stderr.flush()

    def _status(self, running: int) -> str:
        parts = [f"{running} running", f"{len(self.failed)} failed"]
        ended = self.done + len(self.failed)
        if ended:
            left = (time.monotonic() - self._since) / ended * (self.total - self.known - ended)
            parts.append(f"{tqdm.format_interval(left)} left")
        if self.kl is not None:
            parts.append(f"last KL {self.kl:.4f}")
        return ", ".join(parts)

    def close(self) -> None:
        """The last state, the end of the bar, and which runs failed: one line for each reason."""
        self.show(0, last=True)
        if self._bar is not None:
            self._bar.close()
        for why in dict.fromkeys(self.failed.values() if self.shown else ()):
            names = ["/".join(map(str, name)) for name in self.failed if self.failed[name] == why]
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            sys.stderr.write(f"sweep: failed {', '.join(names[:3])}{more}: {why}\n")
