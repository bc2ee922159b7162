"""Sweeps whose sparsities of a seed come from one path."""

from __future__ import annotations

import dataclasses
import shutil

import pytest
import torch

import hc_lens as hc
from hc_lens.pruning.train import GateTraining
from hc_lens.records import Records
from hc_lens.sweeps.runs import read_runs
from tests.hc_lens.sweeps import made as sweeps
from tests.hc_lens.sweeps.made import run

SPARSITIES = (0.2, 0.4, 0.6)


def make(folder, **changes):
    settings = {"prune": {"steps": 9}, "sparsities": SPARSITIES, "seeds": (0, 1), "as_paths": True}
    return sweeps.make(folder, ("final",), **{**settings, **changes})


def record_names(store):
    return set(Records.existing(store, "sweep").names("runs"))


def test_every_run_of_a_path_equals_the_path_made_by_hand(tmp_path):
    config = make(tmp_path / "data")
    runs = run(config, tmp_path / "store")
    model = hc.load(config.checkpoints["final"])
    train = config.train.batches(model)
    means = hc.collect_means(model, train, progress=False)
    for seed in (0, 1):
        settings = hc.PathConfig(SPARSITIES, seed, steps=9)
        for found in hc.prune_path(model, train, means, settings, progress=False):
            kept = runs.subnetworks["final", found.config["sparsity"], seed]
            assert torch.equal(kept.scores, found.scores)
            assert torch.equal(kept.keep, found.keep)
    assert len(runs.subnetworks) == config.n_runs == 6
    assert set(read_runs(tmp_path / "store").table["run"]) == set(runs.table["run"])


def test_paths_and_separate_runs_in_one_store_are_two_sweeps(tmp_path):
    config = make(tmp_path / "data", seeds=(0,))
    path = run(config, tmp_path / "store")
    apart = run(dataclasses.replace(config, as_paths=False), tmp_path / "store")
    assert set(path.table["run"]).isdisjoint(apart.table["run"])
    with pytest.raises(hc.HcLensError, match="got 2 sweeps"):
        read_runs(tmp_path / "store")


def test_a_path_that_stopped_in_the_middle_continues_to_the_same_bytes(tmp_path, monkeypatch):
    config = make(tmp_path / "data")
    run(config, tmp_path / "whole")
    step, made = GateTraining.step, []

    def fails(self, number, batches):
        if number == 7 and len(made) < 7:
            raise RuntimeError("the machine went down")
        made.append(number)
        return step(self, number, batches)

    monkeypatch.setattr(GateTraining, "step", fails)
    stopped = run(config, tmp_path / "again")
    # Of seed 0 the mask of 0.2 and that of 0.4 were read off after the steps 4 and 6.
    assert {name[1:] for name in stopped.subnetworks} == {(0.2, 0), (0.4, 0)} | {
        (sparsity, 1) for sparsity in SPARSITIES
    }
    assert stopped.failed["why"].tolist() == ["RuntimeError: the machine went down"]
    made.clear()
    monkeypatch.setattr(GateTraining, "step", lambda *given: made.append(given[1]) or step(*given))
    run(config, tmp_path / "again")
    assert made == [7, 8, 9]
    assert sweeps.snapshot(tmp_path / "again") == sweeps.snapshot(tmp_path / "whole")


def test_a_run_that_is_lost_from_the_middle_of_a_path_is_found_again_to_the_byte(tmp_path):
    config = make(tmp_path / "data", seeds=(0,))
    runs = run(config, tmp_path / "store")
    before = sweeps.snapshot(tmp_path / "store")
    lost = runs.table.loc[runs.table["sparsity"] == 0.4, "run"].iloc[0]
    shutil.rmtree(tmp_path / "store" / "runs" / lost)
    again = run(config, tmp_path / "store")
    assert again.table.equals(runs.table)
    assert sweeps.snapshot(tmp_path / "store") == before


def test_settings_that_a_path_does_not_have_are_refused(tmp_path):
    with pytest.raises(hc.HcLensError, match="'method'"):
        make(tmp_path / "data", prune={"method": "random"})
    with pytest.raises(hc.HcLensError, match="a preset"):
        make(tmp_path / "data", prune={"preset": "reference"})
    with pytest.raises(hc.HcLensError, match="from the lowest to the highest"):
        make(tmp_path / "data", sparsities=(0.6, 0.2))


def test_a_path_goes_through_a_file_of_settings(tmp_path):
    config = make(tmp_path / "data")
    assert hc.SweepConfig.from_dict(config.describe()) == config
    assert config.describe()["as_paths"] is True


@pytest.mark.slow
def test_paths_in_worker_processes_give_the_bytes_of_one_process(tmp_path):
    config = make(tmp_path / "data")
    run(config, tmp_path / "here")
    hc.sweep(config, tmp_path / "there", workers=2, progress=False)
    assert sweeps.snapshot(tmp_path / "there") == sweeps.snapshot(tmp_path / "here")
    assert len(record_names(tmp_path / "there")) == 6
