from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from hc_lens.errors import HcLensError
from hc_lens.records import Records
from hc_lens.sweeps import engines
from hc_lens.sweeps.engines import Local, cores, take
from hc_lens.sweeps.perform import Task
from hc_lens.sweeps.sweep import sweep
from tests.hc_lens.sweeps import made as sweeps
from tests.interrupts import heed_interrupts

pytestmark = pytest.mark.slow


def task(checkpoint: str, seed: int | None = None) -> Task:
    """A run of a checkpoint, or its preparation."""
    run = (
        {} if seed is None else {"seed": seed, "sparsities": [0.5], "keys": [f"{checkpoint}{seed}"]}
    )
    return Task("token", {}, "store", 1, checkpoint, **run)


def test_a_worker_first_takes_runs_of_the_checkpoint_it_holds():
    waiting = [task("c"), task("a", 0), task("b", 0), task("b", 1)]
    assert take(waiting, "a") == task("a", 0)
    assert take(waiting, "a") == task("c")  # then it prepares another
    assert take(waiting, "a") == task("b", 0)  # then it helps where most runs wait
    assert waiting == [task("b", 1)]


def test_a_worker_without_a_checkpoint_helps_where_most_runs_wait():
    waiting = [task("a", 0), task("b", 0), task("b", 1)]
    assert take(waiting, None) == task("b", 0)


def test_workers_in_processes_give_the_bytes_of_one_process(tmp_path):
    config = sweeps.make(tmp_path / "data")
    before = torch.get_num_threads()
    here = sweep(config, tmp_path / "here", engine=Local(workers=0), progress=False)
    assert torch.get_num_threads() == before
    there = sweep(config, tmp_path / "there", workers=2, progress=False)
    assert there.table.equals(here.table)
    assert sweeps.snapshot(tmp_path / "there") == sweeps.snapshot(tmp_path / "here")


@pytest.mark.skipif(os.name == "nt", reason="sends SIGSTOP")
def test_a_worker_that_is_killed_is_replaced_and_its_run_done_again(tmp_path):
    config = sweeps.make(tmp_path / "data", ("final",), seeds=(0, 1, 2), prune={"steps": 20})
    Records(tmp_path / "store", "sweep")
    pool = Local(workers=1).open(6)
    try:
        described = config.describe()
        pool.submit(Task("token", described, str(tmp_path / "store"), 1, "final"))
        first, outcome = pool.next()
        assert "inputs" in outcome
        [worker] = pool._workers  # type: ignore[attr-defined]
        # Stopped first, so that it cannot finish the task before it is killed.
        os.kill(worker.process.pid, signal.SIGSTOP)
        pool.submit(first)
        os.kill(worker.process.pid, signal.SIGKILL)
        again, outcome = pool.next()
        assert again == first
        assert "inputs" in outcome
        [other] = pool._workers  # type: ignore[attr-defined]
        assert other.process.pid != worker.process.pid
    finally:
        pool.close()


def test_a_run_that_takes_its_worker_down_twice_has_failed_and_says_why(monkeypatch, tmp_path):
    # A worker that cannot even import what it needs.
    (tmp_path / "hc_lens").mkdir()
    (tmp_path / "hc_lens" / "__init__.py").write_text("raise ImportError('broken on purpose')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    pool = Local(workers=1).open(1)
    try:
        pool.submit(task("a"))
        failed, outcome = pool.next()
    finally:
        pool.close()
    assert failed == task("a")
    assert outcome == {
        "error": "its worker process ended with exit code 1: ImportError: broken on purpose"
    }


SCRIPT = """
import json, sys
from hc_lens.sweeps.sweep import sweep
from hc_lens.sweeps.config import SweepConfig
# No "if __name__ == '__main__'" on purpose: a script as people write it.
sweep(SweepConfig.from_dict(json.loads(sys.argv[1])), sys.argv[2], workers=1)
"""


@pytest.mark.skipif(os.name == "nt", reason="sends SIGINT")
def test_ctrl_c_in_a_script_keeps_finished_runs_and_leaves_no_process(tmp_path):
    config = sweeps.make(tmp_path / "data", ("final",), seeds=tuple(range(40)))
    (tmp_path / "script.py").write_text(SCRIPT)
    store = tmp_path / "store"
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "script.py"), json.dumps(config.describe()), str(store)],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[3])},
        start_new_session=True,  # a group of its own: Ctrl-C goes to all of it
        preexec_fn=heed_interrupts,
    )
    limit = time.monotonic() + 90
    while len(list(store.glob("runs/*"))) < 2 and time.monotonic() < limit:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert "KeyboardInterrupt" in errors
    assert (store / "runs.parquet").exists()
    assert 2 <= len(list(store.glob("runs/*"))) < config.n_runs
    time.sleep(0.5)
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


def test_local_workers_compute_on_the_cpu_and_those_of_ray_where_they_have_room():
    assert (Local().device, engines.Ray().device) == ("cpu", None)


def test_the_default_is_a_worker_for_each_core():
    assert engines.named("local", None) == Local()
    assert engines.named("local", 3) == Local(workers=3)
    assert cores() >= 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Local(workers=-1), "workers as a whole number of at least 0, got -1"),
        (lambda: Local(device="cudaa"), r"device that is there \(cpu.*got 'cudaa'"),
        (lambda: Local(threads=0), "threads as a whole number of at least 1, got 0"),
        (lambda: engines.named("slurm", None), r"engine among \['local', 'ray'\], got 'slurm'"),
        (lambda: engines.named(Local(), 2), r"write Local\(workers=2\)"),
    ],
)
def test_a_wrong_engine_is_an_error(make, message):
    with pytest.raises(HcLensError, match=message):
        make()
