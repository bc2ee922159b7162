"""A worker process of a sweep (`hc_lens.sweeps.engines.Local`): one task or outcome per line.

1. Tasks come on the standard input, outcomes go to what was the standard output, both as JSON;
   anything that a library prints goes to the error stream.
2. The worker ends when its input closes, and as soon as its parent is gone: also after the parent
   was killed, no process is left behind.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time

LOOK_EVERY = 0.25
"""Seconds between two looks at the parent."""


def end_with_parent(parent: int) -> None:
    """End this process when its parent is gone, whatever it is doing."""

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK_EVERY)
        os._exit(1)

    threading.Thread(target=look, daemon=True).start()


def main() -> None:
    """Perform tasks until the input closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C ends
    end_with_parent(int(sys.argv[1]))
    outcomes = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    from hc_lens.sweeps.perform import Task, perform  # seconds, in which the parent may end

    for line in sys.stdin:
        outcomes.write(json.dumps(perform(Task(**json.loads(line)))) + "\n")
        outcomes.flush()


if __name__ == "__main__":
    main()
