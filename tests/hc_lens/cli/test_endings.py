"""How commands end."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys

import pytest

from hc_lens.errors import HcLensError
from hc_lens.records import failed
from tests.interrupts import heed_interrupts

MISSING = ("finetune", "model", "--out", "run")
EXPECTED = "expected --steps or --paper, got neither; say how long to train"


def fail(monkeypatch, error):
    """Make pruning end with an error."""

    def raising(*_, **__):
        raise error

    import hc_lens.pruning.train  # noqa: F401

    monkeypatch.setattr(sys.modules["hc_lens.pruning.train"], "prune", raising)


@pytest.fixture
def prune(call, read):
    return lambda *more: call("prune", *read, "--sparsity", 0.5, "--steps", 2, "--out", "x", *more)


def test_an_error_is_one_line_and_exit_code_1(call):
    done = call(*MISSING)
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == f"hc-lens: {EXPECTED}\n"


@pytest.mark.parametrize("place", [0, 1, 4])
def test_debug_before_or_after_the_command_shows_where_an_error_came_from(call, place):
    arguments = list(MISSING)
    arguments.insert(place, "--debug")
    done = call(*arguments)
    assert isinstance(done.exception, HcLensError)
    assert str(done.exception) == EXPECTED


def test_an_error_of_several_lines_becomes_one(prune, monkeypatch):
    fail(monkeypatch, HcLensError("expected a,\n  got b"))
    assert prune().stderr.endswith("hc-lens: expected a, got b\n")


def test_an_unexpected_error_names_itself_and_how_to_see_more(prune, monkeypatch):
    fail(monkeypatch, KeyError("x"))
    done = prune()
    assert done.exit_code == 1
    line = "hc-lens: unexpected KeyError: 'x'; run again with --debug to see where"
    assert done.stderr.splitlines()[-1] == line
    assert isinstance(prune("--debug").exception, KeyError)


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
    ids=["python", "safetensors"],
)
def test_a_full_disk_is_one_clear_line(prune, monkeypatch, error):
    fail(monkeypatch, error)
    done = prune()
    assert done.exit_code == 1
    assert done.stderr.splitlines()[-1] == (
        "hc-lens: expected room on the disk, got none left; free some and run the same command "
        "again, finished work is kept"
    )


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            PermissionError(13, "Permission denied", "x/page.html"),
            "expected access at x/page.html, got 'Permission denied'; give access, or name another "
            "folder",
        ),
        (
            OSError(30, "Read-only file system", "x/page.html"),
            "expected a disk that works at x/page.html, got 'Read-only file system'; check it and "
            "run the same command again, finished work is kept",
        ),
        (
            OSError(5, "Input/output error"),
            "expected a disk that works, got 'Input/output error'; check it and run the same "
            "command again, finished work is kept",
        ),
        (
            OSError(28, "No space left on device", "x/page.html"),
            "expected room on the disk, got none left at x/page.html; free some and run the same "
            "command again, finished work is kept",
        ),
        (
            OSError(errno.ENAMETOOLONG, "File name too long", "x/long"),
            "expected a name that the file system takes at x/long, got 'File name too long'; give "
            "a shorter one",
        ),
    ],
    ids=["no access", "read-only", "broken", "full", "long"],
)
def test_a_disk_that_fails_is_one_clear_line(prune, monkeypatch, error, line):
    fail(monkeypatch, error)
    assert prune().stderr.splitlines()[-1] == f"hc-lens: {line}"


def test_a_folder_that_is_full_is_named(prune, monkeypatch):
    error = failed("/full/disk", OSError(28, "No space left on device"))
    error.__cause__ = OSError(28, "No space left on device")
    fail(monkeypatch, error)
    assert "expected to write to /full/disk, got OSError" in prune().stderr.splitlines()[-1]


def test_a_full_disk_behind_another_error_is_told_too(prune, monkeypatch):
    error = HcLensError("expected a store")
    error.__cause__ = OSError(28, "No space left on device")
    fail(monkeypatch, error)
    assert "expected room on the disk" in prune().stderr


def test_ctrl_c_says_how_to_go_on_and_the_same_command_does(prune, monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        fail(patch, KeyboardInterrupt())
        done = prune()
    assert done.exit_code == 130
    line = done.stderr.splitlines()[-1]
    assert line.startswith("hc-lens: stopped; finished work is kept, run the same command again")
    assert "again to continue: hc-lens prune --model" in line
    assert (tmp_path / "x" / "means.safetensors").is_file()
    again = prune()
    assert again.exit_code == 0
    assert f"means of {os.path.join('x', 'means.safetensors')}" in again.stderr


@pytest.mark.slow
def test_ctrl_c_in_the_middle_of_a_process(read, tmp_path):
    line = [sys.executable, "-m", "hc_lens.cli", "prune", *map(str, read)]
    line += ["--sparsity", "0.5", "--steps", "1000000", "--out", str(tmp_path / "x")]
    process = subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=heed_interrupts,
    )  # fmt: skip
    assert process.stderr is not None
    while "pruning" not in (note := process.stderr.readline()):
        assert note, "the process ended before it pruned"
    process.send_signal(signal.SIGINT)
    try:
        shown, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, shown) == (130, "")
    assert said.count("\n") == 1
    assert said.startswith("hc-lens: stopped")
    found = {path.name for path in (tmp_path / "x").iterdir()}
    assert found - {".unfinished", ".records.json"} == {
        "command.toml",
        "means.safetensors",
        "records.json",
    }
