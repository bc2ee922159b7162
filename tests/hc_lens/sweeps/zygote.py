"""A process that has imported everything and forks sweeps, so that a test can kill many of them.

It reads one JSON command a line: ``store``, ``workers``, ``kill_after``, ``die_at``. The child says
its pid and runs the sweep; when it has ended, its exit code follows. With ``kill_after`` the child
is killed after so many seconds; with ``die_at`` n it kills itself in the middle of the n-th file
that it writes.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import transformers.models.bert.modeling_bert  # noqa: F401

from hc_lens import records
from hc_lens.models.loading import load  # noqa: F401
from hc_lens.sweeps.config import SweepConfig
from hc_lens.sweeps.engines import Local
from hc_lens.sweeps.sweep import sweep


def say(text: object) -> None:
    sys.__stdout__.write(f"{text}\n")  # type: ignore[union-attr]
    sys.__stdout__.flush()  # type: ignore[union-attr]


def die_in_write(number: int) -> None:
    """Write half of the n-th file, then kill this process."""
    real, left = records._write_flushed, [number]

    def write(path, content):
        left[0] -= 1
        if left[0] == 0:
            real(path, content[: len(content) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        real(path, content)

    records._write_flushed = write


def child(config: SweepConfig, command: dict) -> None:
    say(os.getpid())
    if command.get("die_at"):
        die_in_write(command["die_at"])
    try:
        engine = Local(workers=command.get("workers", 0))
        sweep(config, command["store"], engine=engine, progress=False)
    except BaseException as error:
        sys.stderr.write(f"{error!r}\n")
        os._exit(1)
    os._exit(0)


def wait(pid: int, kill_after: float | None) -> int:
    """Exit code of a child. Only its parent can be sure that the pid is still the child's."""
    limit = time.monotonic() + (kill_after or 0)
    while kill_after is not None:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= limit:
            os.kill(pid, signal.SIGKILL)
            break
        time.sleep(0.002)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main() -> None:
    config = SweepConfig.from_dict(json.loads(sys.argv[1]))
    say("ready")
    for line in iter(sys.stdin.readline, ""):
        pid = os.fork()
        if pid == 0:
            child(config, json.loads(line))
        say(wait(pid, json.loads(line).get("kill_after")))


if __name__ == "__main__":
    main()
