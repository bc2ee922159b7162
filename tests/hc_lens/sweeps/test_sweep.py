from __future__ import annotations

import dataclasses
import json

import fsspec
import pandas as pd
import pytest
import torch

import hc_lens as hc
from hc_lens.data.specs import checkpoint_of
from hc_lens.pruning.subnetwork import Subnetwork
from hc_lens.records import Records
from hc_lens.sweeps import perform as work
from hc_lens.sweeps import runs as running
from hc_lens.sweeps.runs import COLUMNS, read_runs, run_key, write_tables
from tests import tiny
from tests.hc_lens.sweeps import made as sweeps
from tests.hc_lens.sweeps.made import run


def test_every_run_equals_pruning_and_evaluating_by_hand(finished):
    config, runs, _ = finished
    assert len(runs.subnetworks) == config.n_runs == 8
    for checkpoint, path in config.checkpoints.items():
        model = hc.load(path)
        train = config.train.batches(model)
        data = {name: spec.batches(model) for name, spec in config.evaluation.items()}
        means = hc.collect_means(model, train, progress=False)
        for sparsity, seed in ((0.3, 1), (0.6, 0)):
            settings = hc.PruneConfig(sparsity, seed, steps=4)
            sub = hc.prune(model, train, means, settings, progress=False)
            found = runs.subnetworks[checkpoint, sparsity, seed]
            assert torch.equal(found.keep, sub.keep)
            assert torch.equal(found.scores, sub.scores)
            assert found.means == means.fingerprint
            table = hc.evaluate(model, data, means=means, subnetwork=sub, progress=False)
            chosen = {"checkpoint": checkpoint, "sparsity": sparsity, "seed": seed}
            mine = runs.table
            for column, value in chosen.items():
                mine = mine[mine[column] == value]
            expected = table[table["subnetwork"] == "subnetwork"].drop(columns="subnetwork")
            columns = list(expected.columns)
            assert mine[columns].reset_index(drop=True).equals(expected.reset_index(drop=True))
            full = table[table["subnetwork"] == "full"]
            known = runs.full[runs.full["checkpoint"] == checkpoint]
            assert known["accuracy"].tolist() == full["accuracy"].tolist()
            assert known["case"].tolist() == full["case"].tolist()


def test_the_tables_have_their_documented_shape(finished):
    _, runs, store = finished
    shares = [f"share_{label}" for label in sweeps.LABELS]
    assert list(runs.table.columns) == [*COLUMNS, *shares]
    scores = ["dataset", "case", "side", "n", "accuracy", "low", "high"]
    assert list(runs.full.columns) == ["checkpoint", *scores, *shares]
    assert list(runs.failed.columns) == ["checkpoint", "sparsity", "seed", "why"]
    assert runs.checkpoints == ("early", "final")
    assert len(runs.table) == 8 * 3  # in domain one case, out of domain two
    assert runs.table["run"].nunique() == 8
    assert repr(runs) == "Runs(8 finished, 0 failed, 2 checkpoints)"
    file = pd.read_parquet(store / "runs.parquet")
    assert list(file.columns) == [*COLUMNS, "model", "settings", *shares]
    order = ["checkpoint", "sparsity", "seed"]
    expected = runs.table.sort_values([*order, "run"], kind="stable", ignore_index=True)
    stored = file[list(expected.columns)]
    assert stored.equals(expected.astype(stored.dtypes))
    assert file["settings"].nunique() == 1
    assert len(pd.read_parquet(store / "full.parquet")) == 2 * 3


def test_further_metrics_are_columns_of_runs_and_full_models(tmp_path):
    plain = sweeps.small()
    config = dataclasses.replace(plain, metrics=("loss", "probability"))
    runs = run(config, tmp_path / "s")
    assert list(runs.table.columns[: len(COLUMNS) + 2]) == [*COLUMNS, "loss", "probability"]
    assert {"loss", "probability"} <= {*runs.full.columns}
    assert "kl" not in runs.full
    model = hc.load(checkpoint_of("organism:200"))
    rows = config.evaluation["id"].batches(model)
    (expected,) = hc.evaluate(model, rows, metrics=["loss"], progress=False)["loss"]
    known = runs.full.query("checkpoint == 'step-200' and dataset == 'id'")["loss"]
    assert known.tolist() == pytest.approx([expected], abs=1e-12)
    # Another sweep in the same store, whose runs are read back by themselves.
    assert set(run(plain, tmp_path / "s").table["run"]).isdisjoint(runs.table["run"])
    file = pd.read_parquet(tmp_path / "s" / "runs.parquet")
    (settings,) = set(file.loc[file["run"].isin(runs.table["run"]), "settings"])
    again = read_runs(tmp_path / "s", settings)
    assert set(again.table["run"]) == set(runs.table["run"])
    assert again.full["loss"].tolist() == runs.full["loss"].tolist()


def test_a_run_folder_is_a_subnetwork_that_can_be_loaded(finished):
    _, runs, store = finished
    key = runs.table["run"].iloc[0]
    name = tuple(runs.table[["checkpoint", "sparsity", "seed"]].iloc[0])
    assert torch.equal(Subnetwork.load(store / "runs" / key).keep, runs.subnetworks[name].keep)
    about = json.loads((store / "runs" / key / "about.json").read_text())
    assert about["key"] == key
    assert about["threads"] == 1
    assert about["prune"]["steps"] == 4


def test_a_finished_sweep_runs_nothing_again(copied, pruned):
    config, runs, store = copied
    before = {path: path.stat().st_mtime_ns for path in (store / "runs").rglob("*")}
    again = run(config, store)
    assert pruned == []
    assert again.table.equals(runs.table)
    assert again.full.equals(runs.full)
    assert before == {path: path.stat().st_mtime_ns for path in (store / "runs").rglob("*")}


def test_more_seeds_and_sparsities_run_only_the_new_ones(copied, pruned):
    config, runs, store = copied
    before = {path: path.stat().st_mtime_ns for path in (store / "runs").rglob("*")}
    more = dataclasses.replace(config, seeds=(0, 1, 2), sparsities=(0.3, 0.6, 0.8))
    again = run(more, store)
    new = [(0.8, 0), (0.8, 1), (0.3, 2), (0.6, 2), (0.8, 2)]
    assert sorted(pruned) == sorted(new * 2)  # once for each of the two checkpoints
    assert len(again.subnetworks) == 18
    old = again.table[again.table["run"].isin(runs.table["run"])].reset_index(drop=True)
    assert len(old) == len(runs.table)
    for path, time in before.items():
        if path.parent.parent == store / "runs":
            assert path.stat().st_mtime_ns == time
    # The smaller sweep still gets its own runs only.
    assert run(config, store).table.equals(runs.table)


def test_means_and_full_evaluation_are_computed_once_per_checkpoint(copied, monkeypatch):
    config, _, store = copied
    calls = []
    monkeypatch.setattr(work, "collect_means", lambda *args, **kwargs: calls.append(args))
    run(dataclasses.replace(config, seeds=(0, 1, 5)), store)
    assert calls == []


def test_the_full_model_runs_once_per_row_for_all_runs_of_a_checkpoint(tmp_path, monkeypatch):
    config = sweeps.make(tmp_path / "data", ("final",), seeds=(0, 1, 2))
    rows = []
    real = work.Teacher.logits

    def logits(self, batch):
        before = len(self._kept)
        result = real(self, batch)
        if len(self._kept) > before:
            rows.append(len(batch.rows))
        return result

    monkeypatch.setattr(work.Teacher, "logits", logits)
    run(config, tmp_path / "store")
    assert sum(rows) <= 3 * 24


@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"},
        {"train": "other"},
        {"means": "other"},
        {"evaluation": {"id": "d", "ood": "other"}},
        {"evaluation": {"id": "d"}},
        {"evaluation": {"x": "d", "ood": "e"}},
    ],
)
def test_everything_that_decides_a_result_is_in_the_key(tmp_path, change):
    config = sweeps.make(tmp_path / "data", ("final",))
    inputs = {"model": "a", "train": "b", "means": "c", "evaluation": {"id": "d", "ood": "e"}}
    key = run_key(inputs, config, 0.3, 0)
    assert run_key(json.loads(json.dumps(inputs)), config, 0.3, 0) == key
    assert run_key({**inputs, **change}, config, 0.3, 0) != key


def test_settings_and_method_version_are_in_the_key(tmp_path, monkeypatch):
    config = sweeps.make(tmp_path / "data", ("final",))
    inputs = {"model": "a", "train": "b", "means": "c", "evaluation": {"id": "d"}}
    key = run_key(inputs, config, 0.3, 0)
    others = [
        run_key(inputs, config, 0.3, 1),
        run_key(inputs, config, 0.6, 0),
        run_key(inputs, dataclasses.replace(config, prune={"steps": 5}), 0.3, 0),
        run_key(inputs, dataclasses.replace(config, prune={"steps": 4, "lr": 0.2}), 0.3, 0),
        run_key(inputs, dataclasses.replace(config, prune={"preset": "reference"}), 0.3, 0),
    ]
    assert len({key, *others}) == 6
    spelled = dataclasses.replace(config, prune={"steps": 4, "lr": 0.1})  # the default, spelled out
    assert run_key(inputs, spelled, 0.3, 0) == key
    monkeypatch.setattr(running, "METHOD_VERSION", running.METHOD_VERSION + 1)
    assert run_key(inputs, config, 0.3, 0) != key


def test_names_for_placeholders_reach_the_model_and_the_key(tmp_path):
    unnamed = {index: f"LABEL_{index}" for index in range(3)}
    tiny.save_checkpoint(tmp_path / "final", labels=unnamed)
    orders = [sweeps.LABELS, sweeps.LABELS[::-1]]
    loaded = []
    for labels in orders:
        config = sweeps.make(tmp_path, ("final",), model_labels=labels)
        loaded.append(work.Loaded(config, "final", "cpu"))
    assert [tuple(each.model.labels.values()) for each in loaded] == orders
    keys = [run_key(each.inputs, each.config, 0.3, 0) for each in loaded]
    assert keys[0] != keys[1]


def test_two_names_of_one_model_share_a_run(finished, tmp_path, pruned):
    config, runs, _ = finished
    path = config.checkpoints["final"]
    points = {"last": path, "best": path}
    got = run(dataclasses.replace(config, checkpoints=points), tmp_path / "store")
    assert len(pruned) == 4
    assert len(got.subnetworks) == 8
    expected = runs.table[runs.table["checkpoint"] == "final"]
    for name in points:
        mine = got.table[got.table["checkpoint"] == name]
        assert mine["run"].tolist() == expected["run"].tolist()
        assert mine["kl"].tolist() == expected["kl"].tolist()
    assert set(pd.read_parquet(tmp_path / "store" / "runs.parquet")["checkpoint"]) == set(points)


def test_two_sweeps_share_a_store_and_each_gets_its_own(copied):
    config, runs, store = copied
    other = dataclasses.replace(config, prune={"steps": 6}, seeds=(0,))
    mine = run(other, store)
    assert len(mine.subnetworks) == 4
    assert not set(mine.table["run"]) & set(runs.table["run"])
    assert run(config, store).table.equals(runs.table)
    file = pd.read_parquet(store / "runs.parquet")
    assert file["run"].nunique() == 12
    assert file.groupby("settings")["run"].nunique().tolist() in ([4, 8], [8, 4])


def test_changed_rows_are_other_runs(copied, tmp_path):
    config, runs, store = copied
    rows = sweeps.rows(sweeps.write_rows(tmp_path / "more.jsonl", 20, 8))
    got = run(dataclasses.replace(config, means=rows, seeds=(0,)), store)
    assert not set(got.table["run"]) & set(runs.table["run"])
    model = hc.load(config.checkpoints["final"])
    means = hc.collect_means(model, rows.batches(model), progress=False)
    assert got.subnetworks["final", 0.3, 0].means == means.fingerprint


def test_the_table_can_be_made_again_from_the_run_folders(copied):
    _, _, store = copied
    before = sweeps.snapshot(store)
    (store / "runs.parquet").unlink()
    (store / "full.parquet").write_bytes(b"corrupt")
    write_tables(Records(store, "sweep"))
    assert sweeps.snapshot(store) == before


def test_a_store_without_rename_gives_the_same_runs(finished):
    config, runs, undisturbed = finished
    try:
        got = run(config, "memory://sweep")
        assert got.table.equals(runs.table)
        assert run(config, "memory://sweep").table.equals(runs.table)
        files = fsspec.filesystem("memory")
        expected = sweeps.at_address(sweeps.snapshot(undisturbed))
        assert {path: files.cat_file(f"/sweep/{path}") for path in expected} == expected
    finally:
        fsspec.filesystem("memory").rm("/sweep", recursive=True)
