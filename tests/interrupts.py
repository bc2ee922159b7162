"""Ctrl-C in a child process, whatever started the tests."""

from __future__ import annotations

import signal


def heed_interrupts() -> None:
    """Undo that SIGINT is ignored, which a process in the background of a shell hands on."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
