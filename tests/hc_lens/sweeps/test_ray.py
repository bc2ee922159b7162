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
from hc_lens.sweeps.config import SweepConfig
from hc_lens.sweeps.engines import REPORTS, Local, Ray, without_reports
from hc_lens.sweeps.sweep import sweep
from tests import object_store
from tests.hc_lens.sweeps import made as sweeps

pytestmark = pytest.mark.slow

TIMEOUT = 240
needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="ray is not installed"
)


def in_own_process(config: SweepConfig, folder: Path, *stores: str) -> dict:
    """What the two-node script says; the script and its nodes end after TIMEOUT."""
    arguments = (json.dumps(config.describe()), str(folder), *stores)
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
    return json.loads(said.strip().splitlines()[-1])


def check(said: dict, config: SweepConfig, folder: Path) -> None:
    """Two nodes worked, one was killed in the middle, and every run finished all the same."""
    assert said["nodes"] == 2
    assert said["folders"] == [str(folder / "head"), str(folder / "other")]
    assert said["tasks_at_kill"] == 1
    assert 2 <= said["runs_at_kill"] < config.n_runs
    assert said["nodes_after_kill"] == 1
    assert said["failed_after_kill"] == []
    assert said["finished_after_kill"] == config.n_runs
    assert said["same"]


@needs_ray
def test_two_nodes_give_the_local_table_also_when_one_is_killed_in_the_middle(tmp_path):
    config = sweeps.make(tmp_path / "data", seeds=(0, 1, 2), prune={"steps": 40})
    here = sweep(config, tmp_path / "local", engine=Local(workers=0), progress=False)
    said = in_own_process(config, tmp_path, str(tmp_path / "whole"), str(tmp_path / "killed"))
    check(said, config, tmp_path)
    assert said["finished"] == [config.n_runs]
    assert len(here.subnetworks) == config.n_runs
    assert sweeps.snapshot(tmp_path / "whole") == sweeps.snapshot(tmp_path / "local")
    assert sweeps.snapshot(tmp_path / "killed") == sweeps.snapshot(tmp_path / "local")


@needs_ray
def test_two_nodes_that_share_a_failing_object_store_alone_give_the_local_table(
    tmp_path, monkeypatch
):
    config = sweeps.small(seeds=(1, 2, 3), prune={"steps": 4})
    sweep(config, tmp_path / "local", engine=Local(workers=0), progress=False)
    expected = sweeps.at_address(sweeps.snapshot(tmp_path / "local"))
    with object_store.serve() as server:
        object_store.set_environment(monkeypatch, server.endpoint)
        server.fail(0.03, seed=5)
        check(in_own_process(config, tmp_path, server.address("ray")), config, tmp_path)
        assert sum(server.failed[kind] for kind in object_store.KINDS) >= 10
        held = server.objects("ray")
    assert {path: held.get(path) for path in expected} == expected


def test_a_missing_ray_is_an_error_that_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    config = sweeps.make(tmp_path / "data", ("final",))
    with pytest.raises(HcLensError, match=r"not installed; pip install 'hc-lens\[ray\]'"):
        sweep(config, tmp_path / "store", engine="ray", progress=False)


@pytest.mark.parametrize(
    ("variable", "file", "during"),
    [
        (None, None, "0"),
        (None, "{}", "0"),
        (None, "not json", "0"),
        (None, '{"usage_stats": true}', None),
        (None, '{"usage_stats": false}', None),
        ("1", None, "1"),
        ("0", None, "0"),
    ],
)
def test_usage_reports_are_off_unless_the_user_chose(tmp_path, monkeypatch, variable, file, during):
    monkeypatch.setenv("RAY_USAGE_STATS_CONFIG_PATH", str(tmp_path / "config.json"))
    monkeypatch.delenv(REPORTS, raising=False)
    if variable is not None:
        monkeypatch.setenv(REPORTS, variable)
    if file is not None:
        (tmp_path / "config.json").write_text(file)
    with without_reports():
        assert os.environ.get(REPORTS) == during
    assert os.environ.get(REPORTS) == variable


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
