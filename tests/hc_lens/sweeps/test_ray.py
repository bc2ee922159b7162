from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hc_lens.errors import HcLensError
from hc_lens.sweeps import engines
from hc_lens.sweeps.engines import Local, Ray
from hc_lens.sweeps.sweep import sweep
from tests.hc_lens.sweeps import made as sweeps

pytestmark = pytest.mark.slow

TIMEOUT = 240
needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="ray is not installed"
)


def in_own_process(*arguments: str) -> str:
    """What the two-node script says; the script and its nodes end after TIMEOUT."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.hc_lens.sweeps.ray_cluster", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    try:
        said, errors = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 0, errors[-3000:]
    return said


@needs_ray
def test_two_nodes_give_the_local_table_also_when_one_is_killed_in_the_middle(tmp_path):
    config = sweeps.make(tmp_path / "data", seeds=(0, 1, 2), prune={"steps": 40})
    here = sweep(config, tmp_path / "local", engine=Local(workers=0), progress=False)
    text = in_own_process(json.dumps(config.describe()), str(tmp_path))
    said = json.loads(text.strip().splitlines()[-1])
    assert said["nodes"] == said["busy_nodes"] == 2
    assert said["finished"] == config.n_runs == len(here.subnetworks)
    assert said["failed"] == 0
    assert sweeps.snapshot(tmp_path / "whole") == sweeps.snapshot(tmp_path / "local")
    assert said["tasks_at_kill"] == 1
    assert 2 <= said["runs_at_kill"] < config.n_runs
    assert said["nodes_after_kill"] == 1
    assert said["failed_after_kill"] == []
    assert said["finished_after_kill"] == config.n_runs
    assert said["same"]
    assert sweeps.snapshot(tmp_path / "killed") == sweeps.snapshot(tmp_path / "local")


def test_a_missing_ray_is_an_error_that_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    config = sweeps.make(tmp_path / "data", ("final",))
    with pytest.raises(HcLensError, match=r"not installed; pip install 'hc-lens\[ray\]'"):
        sweep(config, tmp_path / "store", engine="ray", progress=False)


def test_threads_follow_the_cpus_of_a_run():
    assert Ray().threads == 1
    assert Ray(cpus=4).threads == 4
    assert Ray(cpus=0.5).threads == 1
    assert engines.named("ray", 3) == Ray(workers=3)


@pytest.mark.parametrize("settings", [{"cpus": -1}, {"gpus": -0.5}, {"retries": -2}])
def test_a_negative_setting_is_an_error(settings):
    with pytest.raises(HcLensError, match="of at least 0"):
        Ray(**settings)


def test_no_workers_at_all_is_an_error_on_ray():
    with pytest.raises(HcLensError, match="workers on Ray as a whole number of at least 1, got 0"):
        Ray(workers=0)
