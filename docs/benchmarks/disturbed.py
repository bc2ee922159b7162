"""A command of hc-lens in a process of its own, and what can disturb it.

1. The process is forked from this one, which has imported everything, so that it starts at once.
   Its output, its temporary folder and its token cache are its own.
2. It can be killed at a moment, at one of the calls by which it changes folders, or in the middle
   of a write; and it can run on a disk that is too small.
"""

from __future__ import annotations

import builtins
import contextlib
import itertools
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, tzinfo
from pathlib import Path
from typing import Any

from datasets import config

from hc_lens.cli import dispatch, line_of

CALLS = ("rename", "replace", "fsync", "unlink", "rmdir", "mkdir")
"""Calls of the system before or after which a process is killed, beside those that open files."""
DONE, REFUSED, UNCLEAR, KILLED = "done", "refused", "unclear", "killed"
CODES = {0: DONE, 1: REFUSED, -signal.SIGKILL: KILLED, -signal.SIGXFSZ: KILLED}
AT_END: list[Callable[[], object]] = []
"""What a process does when its work is done."""
LONGEST = 180.0
"""Seconds after which work counts as hanging."""

Disturb = Callable[[], object]
"""What a process does to itself before it begins to work."""
Started = tuple[int, Path, Path, float]
"""The process, its folder, the folder of its output, and when it began."""


@dataclass
class Ended:
    """How a call of a command ended."""

    how: str
    shown: str
    said: str
    seconds: float


class Noon(datetime):
    """A clock that stands still, as the page of a study tells when it was made."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Noon:
        """Always the same."""
        return cls(2024, 1, 1, 12, tzinfo=tz)


def start(command: str, folder: Path, disturb: Disturb) -> Started:
    """Fork a process that runs a command in a folder, disturbed from its begin."""
    log = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f"{folder.name}-log-"))
    for name in ("shown", "said"):
        (log / name).touch()
    began = time.monotonic()
    process = os.fork()
    if process:
        return process, folder, log, began
    code = 3
    try:
        os.setsid()
        for number, name in ((1, "shown"), (2, "said")):
            os.dup2(os.open(log / name, os.O_WRONLY), number)
        sys.stdout, sys.stderr = open(1, "w"), open(2, "w")  # noqa: SIM115
        os.chdir(folder)
        tempfile.tempdir = str(folder / "tmp")
        config.HF_DATASETS_CACHE = str(folder / "cache")
        disturb()
        code = call(command.split())
        for last in (*AT_END, sys.stdout.flush, sys.stderr.flush):
            last()
    finally:
        os._exit(code)


def call(arguments: list[str]) -> int:
    """Run a command; 1 if it fails with one clear line, 3 if with anything else."""
    try:
        dispatch(arguments)
    except Exception as error:
        line = line_of(error)
        sys.stderr.write(f"hc-lens: {line}\n")
        if not line.startswith("unexpected"):
            return 1
        traceback.print_exc()
        return 3
    return 0


def finish(process: int, folder: Path, log: Path, began: float, after: float = LONGEST) -> Ended:
    """Wait for a process, and kill it some seconds after its begin if it is still there."""
    ended = status = 0
    while not ended:
        ended, status = os.waitpid(process, os.WNOHANG)
        if not ended and time.monotonic() - began > after:
            os.kill(process, signal.SIGKILL)
            ended, status = os.waitpid(process, 0)
        time.sleep(0.002)
    seconds = time.monotonic() - began
    shown, said = (
        (log / name).read_text().replace(str(folder), "FOLDER") for name in ("shown", "said")
    )
    shutil.rmtree(log)
    how = CODES.get(os.waitstatus_to_exitcode(status), UNCLEAR)
    if seconds > LONGEST:
        how, said = UNCLEAR, f"{said} hung for {LONGEST} seconds"
    return Ended(how, shown, said, seconds)


def watch(calls: Callable[[int, bool], object]) -> None:
    """Tell the number of each call that changes a folder, before (False) and after it (True)."""
    count = itertools.count(1)

    def watched(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **more: Any) -> Any:
            if original is opened and not set("wxa+") & set((*given, more.get("mode", "r"))[1]):
                return original(*given, **more)
            number = next(count)
            calls(number, False)
            result = original(*given, **more)
            calls(number, True)
            return result

        return call

    opened = builtins.open
    builtins.open = watched(opened)
    for name in CALLS:
        setattr(os, name, watched(getattr(os, name)))


def kill_at(number: int, after: bool) -> None:
    """Kill this process at one of its calls."""

    def kill(*now: object) -> None:
        if now == (number, after):
            os.kill(os.getpid(), signal.SIGKILL)

    watch(kill)


def note_down(notes: Path) -> None:
    """Write how many calls this process makes, and what it imports, when the work is done."""
    numbers = [0]
    watch(lambda number, _: numbers.append(number))
    AT_END.append(lambda: notes.write_text(json.dumps([numbers[-1], sorted(sys.modules)])))


def limit_files(size: int, kill: bool) -> None:
    """Let no file be larger: the write that makes it so is cut, then it kills or is an error."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL if kill else signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


@contextlib.contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Callable[[], object] | None]:
    """Put a small file system in place of a folder, with its files; None if that is forbidden."""
    mount = ["mount", "-t", "tmpfs", "none", str(folder), "-o"]
    aside = folder.with_name(f"{folder.name}-aside")
    shutil.copytree(folder, aside)
    if subprocess.run([*mount, f"size={size}"], capture_output=True).returncode:
        shutil.rmtree(aside)
        yield None
        return
    try:
        shutil.copytree(aside, folder, dirs_exist_ok=True)
        yield lambda: subprocess.run([*mount, "remount,size=1g"], check=True)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
        shutil.rmtree(aside)
