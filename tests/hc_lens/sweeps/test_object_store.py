"""Sweeps on an object store that fails, and what reads them there."""

from __future__ import annotations

import pytest

from hc_lens.records import RecordsError
from hc_lens.sweeps.engines import Local
from hc_lens.sweeps.runs import read_runs
from hc_lens.sweeps.sweep import sweep
from tests import object_store
from tests.commands import invoke
from tests.hc_lens.sweeps import made as sweeps

pytestmark = pytest.mark.slow


@pytest.fixture
def server(monkeypatch):
    with object_store.serve() as server:
        object_store.set_environment(monkeypatch, server.endpoint)
        yield server


def held(server, store, expected) -> dict:
    """What the server has of some files."""
    found = server.objects(store)
    return {path: found.get(path) for path in expected}


def test_processes_on_a_failing_store_give_the_local_runs(finished, server, pruned):
    config, runs, undisturbed = finished
    expected = sweeps.at_address(sweeps.snapshot(undisturbed))
    server.fail(0.04, seed=2)
    got = sweep(config, server.address("faults"), engine=Local(workers=2), progress=False)
    assert sum(server.failed[kind] for kind in object_store.KINDS) >= 8
    assert got.table.equals(runs.table)
    assert held(server, "faults", expected) == expected
    server.fail(0, seed=0)
    again = sweeps.run(config, server.address("faults"))
    assert pruned == []
    assert again.table.equals(runs.table)
    assert held(server, "faults", expected) == expected


def test_a_store_that_fails_for_good_stops_the_sweep_and_the_same_call_goes_on(
    finished, server, pruned
):
    config, runs, undisturbed = finished
    expected = sweeps.at_address(sweeps.snapshot(undisturbed))
    address = server.address("stopped")

    def refuse_the_fourth_run(method: str, path: str) -> None:
        done = [name for name in server.objects("stopped/runs") if name.endswith("/done.json")]
        if len(done) == 3:
            server.refused = ("403 Forbidden", "AccessDenied")

    server.on_request = refuse_the_fourth_run
    with pytest.raises(RecordsError, match=f"read {address}, got PermissionError"):
        sweeps.run(config, address)
    server.on_request, server.refused = lambda method, path: None, None
    before = len(pruned)
    assert sweeps.run(config, address).table.equals(runs.table)
    assert len(pruned) - before == config.n_runs - 3
    assert held(server, "stopped", expected) == expected


def test_commands_write_and_read_an_address(server, tmp_path):
    address = server.address("commands")
    line = ("sweep", "--checkpoints", "end=organism", "--task", "organism", "--limit", 8)
    line = (*line, "--evaluation-limit", 12, "--sparsity", "0.25,0.5", "--seeds", "1,2")
    line = (*line, "--method", "random", "--workers", 1, "--store", address)
    result = invoke(*line, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert f"4 runs in {address}; what is there is not run again" in result.stderr
    assert len(read_runs(address).subnetworks) == 4
    result = invoke("analyse", "subnetworks", address)
    assert "4 subnetworks of checkpoint end, sparsities 0.25, 0.5" in result.output
    result = invoke("analyse", "effective-size", address, "--ood-name", "", "--id-labels", 3)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[1].split()[:2] == ["end", "id"]


def test_a_command_says_in_one_line_that_its_store_cannot_be_reached(server):
    server.refused = ("403 Forbidden", "AccessDenied")
    result = invoke("analyse", "subnetworks", server.address("denied"))
    assert result.exit_code == 1
    [line] = [line for line in result.stderr.splitlines() if "s3://" in line]
    assert f"expected to read {server.address('denied')}, got PermissionError: Forbidden" in line
    assert "Traceback" not in result.stderr
