"""Sweeps that are killed with SIGKILL, again and again, equal an undisturbed one bit by bit."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hc_lens.masks.means import Means
from hc_lens.records import Records
from tests.hc_lens.sweeps import made as sweeps

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL"),
]

KILLS = 24


class Zygote:
    """Forks sweeps of one config on demand."""

    def __init__(self, config):
        root = Path(__file__).parents[3]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.hc_lens.sweeps.zygote", json.dumps(config.describe())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=root,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        )
        assert self.listen() == "ready"

    def listen(self) -> str:
        line = self.process.stdout.readline().strip()  # type: ignore[union-attr]
        if not line:
            raise AssertionError(self.process.stderr.read())  # type: ignore[union-attr]
        return line

    def start(self, store: Path, **command) -> int:
        """The process id of a sweep that just began."""
        self.process.stdin.write(json.dumps({"store": str(store), **command}) + "\n")  # type: ignore[union-attr]
        self.process.stdin.flush()  # type: ignore[union-attr]
        return int(self.listen())

    def ended(self) -> int:
        """Exit code of the sweep, when it has ended; -9 if it was killed."""
        return int(self.listen())


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    """A zygote, an undisturbed store, the seconds it took, the number of runs."""
    folder = tmp_path_factory.mktemp("kill")
    config = sweeps.make(folder / "data", seeds=tuple(range(5)), prune={"steps": 5})
    zygote = Zygote(config)
    began = time.monotonic()
    zygote.start(folder / "undisturbed")
    assert zygote.ended() == 0
    seconds = time.monotonic() - began
    yield zygote, folder / "undisturbed", seconds, config.n_runs
    zygote.process.stdin.close()  # type: ignore[union-attr]
    zygote.process.wait(timeout=10)


def assert_same(store: Path, undisturbed: Path, n_runs: int) -> None:
    """Every run once, all bytes of runs and tables equal, the same means, nothing left over."""
    assert len(list((store / "runs").iterdir())) == n_runs
    assert sweeps.snapshot(store) == sweeps.snapshot(undisturbed)
    kept = sorted(path.name for path in (store / "prepared").iterdir())
    assert kept == sorted(path.name for path in (undisturbed / "prepared").iterdir())
    for name in kept:
        mine, theirs = (folder / "prepared" / name for folder in (store, undisturbed))
        for file in ("evaluation.csv", "about.json"):
            assert (mine / file).read_bytes() == (theirs / file).read_bytes()
        first, second = (Means.load(folder / "means.safetensors") for folder in (mine, theirs))
        assert first.fingerprint == second.fingerprint
    assert list((store / ".unfinished").iterdir()) == []


def assert_nothing_half_written_is_visible(store: Path) -> None:
    """Whatever has a name in the store is complete, at every moment."""
    if not (store / "records.json").exists():
        return
    opened = Records.existing(store, "sweep")
    for kind in ("runs", "prepared", "checkpoints"):
        for name in opened.names(kind):
            assert opened.read(f"{kind}/{name}") is not None


def test_a_sweep_killed_at_random_moments_equals_an_undisturbed_one(setting, tmp_path):
    zygote, undisturbed, seconds, n_runs = setting
    draw, kills = random.Random(0), 0
    stores: list[Path] = []
    stages: set[tuple[int, int]] = set()
    code = 0
    while kills < KILLS:
        if code == 0:  # the last sweep came to its end: the next kills fall on a new one
            stores.append(tmp_path / f"store-{len(stores)}")
        # Short against the whole sweep, so that the kills fall on all its parts.
        zygote.start(stores[-1], kill_after=draw.uniform(0, 0.35 * seconds))
        code = zygote.ended()
        assert code in (0, -signal.SIGKILL)
        assert_nothing_half_written_is_visible(stores[-1])
        if code != 0:
            kills += 1
            stages.add((len(stores), len(list(stores[-1].glob("runs/*")))))
    assert len(stages) >= 5
    for store in stores:
        zygote.start(store)
        assert zygote.ended() == 0
        assert_same(store, undisturbed, n_runs)


def test_a_sweep_killed_in_the_middle_of_each_file_equals_an_undisturbed_one(setting, tmp_path):
    zygote, undisturbed, _, n_runs = setting
    store = tmp_path / "store"
    for number in (1, 2, 3, 4, 5, 6, 7, 9, 12, 14, 23, 30):
        zygote.start(store, die_at=number)
        assert zygote.ended() == -signal.SIGKILL
        assert_nothing_half_written_is_visible(store)
    zygote.start(store)
    assert zygote.ended() == 0
    assert_same(store, undisturbed, n_runs)
    for number in (2, 3):  # after the test of the store come the two tables
        zygote.start(store, die_at=number)
        assert zygote.ended() == -signal.SIGKILL
        assert sweeps.snapshot(store) == sweeps.snapshot(undisturbed)


def children(pid: int) -> list[int]:
    """Process ids of a process's children."""
    listed = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for path in listed for child in path.read_text().split()]


def gone(pid: int) -> bool:
    """Whether a process has ended; one that waits for its parent to notice counts as ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in "ZX"


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for processes in /proc")
def test_worker_processes_die_with_a_killed_sweep_and_their_work_stays(setting, tmp_path):
    zygote, undisturbed, _, n_runs = setting
    store = tmp_path / "store"
    pid = zygote.start(store, workers=2)
    limit = time.monotonic() + 60
    # Stopped while it is looked at: it hands out no run between the look and the kill.
    os.kill(pid, signal.SIGSTOP)
    while len(list(store.glob("runs/*"))) < 3 and time.monotonic() < limit:
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.01)
        os.kill(pid, signal.SIGSTOP)
    workers = children(pid)
    assert len(workers) == 2
    os.kill(pid, signal.SIGKILL)
    assert zygote.ended() == -signal.SIGKILL
    limit = time.monotonic() + 10
    while not all(map(gone, workers)) and time.monotonic() < limit:
        time.sleep(0.05)
    assert all(map(gone, workers))
    assert 3 <= len(list(store.glob("runs/*"))) < n_runs
    assert_nothing_half_written_is_visible(store)
    zygote.start(store, workers=2)
    assert zygote.ended() == 0
    assert_same(store, undisturbed, n_runs)
