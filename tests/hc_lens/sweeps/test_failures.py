from __future__ import annotations

import dataclasses
import errno
import shutil
from pathlib import Path

import pandas as pd
import pytest

from hc_lens import records
from hc_lens.errors import HcLensError
from hc_lens.records import Records, RecordsError
from hc_lens.sweeps import perform as work
from tests import tiny
from tests.hc_lens.sweeps import made as sweeps
from tests.hc_lens.sweeps.made import run

pytestmark = pytest.mark.slow


def test_half_written_and_damaged_runs_are_done_again(copied, pruned):
    config, runs, store = copied
    undisturbed = sweeps.snapshot(store)
    keys = sorted((store / "runs").iterdir())
    (keys[0] / "done.json").unlink()
    cut = keys[1] / "subnetwork.safetensors"
    cut.write_bytes(cut.read_bytes()[:-1])
    (keys[2] / "evaluation.csv").unlink()
    shutil.rmtree(keys[3])
    again = run(config, store)
    assert len(pruned) == 4
    assert again.table.equals(runs.table)
    assert sweeps.snapshot(store) == undisturbed


def test_a_checkpoint_that_fails_to_load_fails_alone(finished, tmp_path):
    config, runs, _ = finished
    broken = tmp_path / "broken"
    shutil.copytree(config.checkpoints["early"], broken)
    (broken / "model.safetensors").write_bytes(b"nothing")
    points = {"early": config.checkpoints["early"], "broken": str(broken)}
    points |= {"none": str(tmp_path / "none"), "final": config.checkpoints["final"]}
    got = run(dataclasses.replace(config, checkpoints=points), tmp_path / "store")
    assert got.table.equals(runs.table)
    assert got.failed["checkpoint"].tolist() == ["broken"] * 4 + ["none"] * 4
    assert got.failed["why"].iloc[0].startswith("expected readable weights in")
    assert "expected a directory with a checkpoint" in got.failed["why"].iloc[-1]
    assert got.checkpoints == ("early", "broken", "none", "final")


def test_one_failed_run_does_not_stop_the_others_and_is_tried_again(
    finished, tmp_path, monkeypatch
):
    config, runs, undisturbed = finished
    real = work.prune

    def fail(model, batches, means, settings, **more):
        if settings.sparsity == 0.6 and settings.seed == 1:
            raise RuntimeError("unlucky")
        return real(model, batches, means, settings, **more)

    with monkeypatch.context() as patch:
        patch.setattr(work, "prune", fail)
        first = run(config, tmp_path / "store")
    assert len(first.subnetworks) == 6
    assert first.failed.values.tolist() == [
        ["early", 0.6, 1, "RuntimeError: unlucky"],
        ["final", 0.6, 1, "RuntimeError: unlucky"],
    ]
    second = run(config, tmp_path / "store")
    assert len(second.failed) == 0
    assert second.table.equals(runs.table)
    assert sweeps.snapshot(tmp_path / "store") == sweeps.snapshot(undisturbed)


def test_a_sweep_of_which_nothing_finishes_is_an_error_with_the_first_reason(tmp_path):
    config = sweeps.make(tmp_path / "data", ("final",), checkpoints={"none": str(tmp_path / "no")})
    with pytest.raises(
        HcLensError, match=r"all 4 failed; the first: expected a directory"
    ) as caught:
        run(config, tmp_path / "store")
    assert len(caught.value.finished.failed) == 4


def test_a_store_that_knows_another_model_by_the_name_says_so_and_keeps_its_runs(copied, tmp_path):
    config, _, store = copied
    before = sweeps.snapshot(store)
    tiny.save_checkpoint(tmp_path / "new", seed=9)
    points = {"early": config.checkpoints["early"], "final": str(tmp_path / "new")}
    got = run(dataclasses.replace(config, checkpoints=points), store)
    assert set(got.table["checkpoint"]) == {"early"}
    assert got.failed["checkpoint"].tolist() == ["final"] * 4
    assert (
        "its runs were not touched. Give the checkpoint another name" in got.failed["why"].iloc[0]
    )
    assert sweeps.snapshot(store) == before
    assert len(list((store / "prepared").iterdir())) == 2
    renamed = {**points, "final": config.checkpoints["final"], "new": str(tmp_path / "new")}
    again = run(dataclasses.replace(config, checkpoints=renamed), store)
    assert len(again.subnetworks) == 12


def test_a_changed_checkpoint_directory_never_gives_the_old_results(tmp_path):
    config = sweeps.make(tmp_path / "data", ("final",), seeds=(0,))
    first = run(config, tmp_path / "store")
    tiny.save_checkpoint(Path(config.checkpoints["final"]), seed=7)
    with pytest.raises(HcLensError, match="got another"):
        run(config, tmp_path / "store")
    second = run(config, tmp_path / "other")
    assert not set(first.table["run"]) & set(second.table["run"])


def test_a_checkpoint_that_changes_under_the_sweep_is_refused(tmp_path, monkeypatch):
    config = sweeps.make(tmp_path / "data", ("final",), seeds=(0,))
    real = work._load

    def changing(task):
        if task.is_run:
            work.forget()
            tiny.save_checkpoint(Path(config.checkpoints["final"]), seed=5)
        return real(task)

    monkeypatch.setattr(work, "_load", changing)
    with pytest.raises(HcLensError, match="'final' and its rows to stay as they were"):
        run(config, tmp_path / "store")
    assert Records(tmp_path / "store", "sweep").names("runs") == []


def test_a_full_disk_stops_cleanly_and_a_second_call_finishes(finished, tmp_path, monkeypatch):
    config, runs, undisturbed = finished
    store, real, room = tmp_path / "store", records._write_flushed, [40]

    def full(path, content):
        room[0] -= 1
        if room[0] < 0:
            real(path, content[: len(content) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, content)

    Records(store, "sweep").write_file("runs.parquet", b"the old table")
    with monkeypatch.context() as patch:
        patch.setattr(records, "_write_flushed", full)
        with pytest.raises(RecordsError, match="No space left on device; make room") as caught:
            run(config, store)
    done = caught.value.finished
    assert 0 < len(done.subnetworks) < 8
    assert (store / "runs.parquet").read_bytes() == b"the old table"
    assert list((store / ".unfinished").iterdir()) == []
    assert run(config, store).table.equals(runs.table)
    assert sweeps.snapshot(store) == sweeps.snapshot(undisturbed)


def test_a_full_disk_at_the_table_keeps_the_old_table(copied, monkeypatch):
    config, runs, store = copied
    before = sweeps.snapshot(store)

    real = records._write_flushed

    def full(path, content):
        if content[:4] == b"PAR1":
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(records, "_write_flushed", full)
        with pytest.raises(RecordsError, match="No space left") as caught:
            run(config, store)
    assert caught.value.finished.table.equals(runs.table)
    assert sweeps.snapshot(store) == before


def test_ctrl_c_keeps_finished_runs_and_their_table(finished, tmp_path, monkeypatch):
    config, runs, undisturbed = finished
    real, calls = work.prune, []

    def interrupted(*args, **kwargs):
        calls.append(args)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(work, "prune", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(config, tmp_path / "store")
    assert pd.read_parquet(tmp_path / "store" / "runs.parquet")["run"].nunique() == 3
    assert run(config, tmp_path / "store").table.equals(runs.table)
    assert sweeps.snapshot(tmp_path / "store") == sweeps.snapshot(undisturbed)


def test_a_log_gets_lines_with_the_state_and_the_failures(finished, tmp_path, capsys):
    config = finished[0]
    points = {"final": config.checkpoints["final"], "none": str(tmp_path / "none")}
    run(dataclasses.replace(config, checkpoints=points), tmp_path / "store", progress=True)
    lines = capsys.readouterr().err.splitlines()
    assert lines[-2].startswith("sweep: 4 of 8 done, 0 running, 4 failed, 00:00 left, last KL ")
    assert lines[-1].startswith(
        "sweep: failed none/0.3/0, none/0.6/0, none/0.3/1 and 1 more: expected a directory"
    )


@pytest.mark.parametrize("name", ["records.json", "store.json"])
def test_a_store_of_another_format_is_not_touched(finished, tmp_path, name):
    (tmp_path / name).write_text('{"format": "hc_lens.sweep.0"}')
    said = r"got 'hc_lens\.sweep\.0'" if name == "records.json" else "layout of an older version"
    with pytest.raises(HcLensError, match=said):
        run(finished[0], tmp_path)
    assert [item.name for item in tmp_path.iterdir()] == [name]


def test_runs_of_somebody_else_are_not_touched(finished, tmp_path):
    (tmp_path / "runs").mkdir()
    with pytest.raises(HcLensError, match=r"with \['runs'\] and no records.json; nothing was"):
        run(finished[0], tmp_path)
    assert [item.name for item in tmp_path.iterdir()] == ["runs"]
