"""One writer at a time."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hc_lens import locks
from hc_lens.errors import HcLensError
from hc_lens.locks import alone

HOLD = """
import sys, time
from pathlib import Path
from hc_lens.locks import alone
with alone(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "run" / ".unfinished").mkdir(parents=True)
    return tmp_path / "run" / ".unfinished" / "lock"


def no_locks(handle: int) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


def test_the_second_is_told_who_the_first_is_and_gets_in_when_it_was_killed(path):
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        message = (
            rf"writes to {re.escape(str(path.parents[1]))}, got another: process {process.pid} on "
            rf"{re.escape(socket.gethostname())}, since \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d"
        )
        with pytest.raises(HcLensError, match=message), alone(path):
            pass
    finally:
        process.kill()
        process.wait()
    with alone(path):
        pass


@pytest.mark.parametrize("supported", [True, False])
def test_a_lock_is_held_during_the_block_alone_also_after_an_error(path, monkeypatch, supported):
    if not supported:
        monkeypatch.setattr(locks, "lock", no_locks)
    refused = pytest.raises(HcLensError, match=f"process {os.getpid()} on")
    with alone(path), refused, alone(path):
        pass
    with contextlib.suppress(KeyError), alone(path):
        raise KeyError
    with alone(path):
        pass


def test_without_locks_of_the_system_a_dead_process_of_this_machine_holds_nothing(
    path, monkeypatch
):
    monkeypatch.setattr(locks, "lock", no_locks)
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    held = path.with_name("lock-held")
    held.write_text(f"{socket.gethostname()} {child} 2024-01-01")
    with alone(path):
        assert held.exists()
    assert not held.exists()
    held.write_text(f"elsewhere {child} 2024-01-01")
    with pytest.raises(HcLensError, match="expected to be the only one"), alone(path):
        pass


def test_an_error_that_is_no_lock_of_another_stays_its_own(path, monkeypatch):
    def broken(handle: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(locks, "lock", broken)
    with pytest.raises(OSError, match="Input/output error"), alone(path):
        pass


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_child_does_not_keep_the_lock_of_a_parent_that_has_left_it(path):
    (until, leave), (ready, begun) = os.pipe(), os.pipe()
    with locks.alone(path):
        child = os.fork()
        if child == 0:
            os.write(begun, b"x")
            os.read(until, 1)  # outlives the block of its parent
            os._exit(0)
    os.read(ready, 1)
    try:
        with locks.alone(path):
            pass
    finally:
        os.write(leave, b"x")
        os.waitpid(child, 0)
