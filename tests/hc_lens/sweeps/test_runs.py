"""What a store of sweeps holds, read without its settings."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from hc_lens.data.specs import DataSpec
from hc_lens.errors import HcLensError
from hc_lens.models.fingerprint import BRIDGE
from hc_lens.records import Records
from hc_lens.sweeps import runs as running
from hc_lens.sweeps.runs import KIND, Runs, name_checkpoint, natural, read_runs
from hc_lens.sweeps.sweep import sweep
from tests.hc_lens.sweeps.made import small
from tests.lens import BRIDGES, THERE, in_the_other_version

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Runs]:
    store = tmp_path_factory.mktemp("stores") / "store"
    return store, sweep(small(), store, workers=0, progress=False)


def test_a_store_reads_back_as_the_sweep_gave_it(swept: tuple[Path, Runs]):
    store, runs = swept
    read = read_runs(store)
    assert read.checkpoints == ("step-200", "step-1200") == runs.checkpoints
    keys = ["checkpoint", "sparsity", "seed", "dataset", "case"]
    pd.testing.assert_frame_equal(
        read.table.sort_values(keys, ignore_index=True),
        runs.table.sort_values(keys, ignore_index=True),
    )
    pd.testing.assert_frame_equal(read.full, runs.full)
    assert set(read.subnetworks) == set(runs.subnetworks)
    for name, network in runs.subnetworks.items():
        assert read.subnetworks[name].kept == network.kept


def test_two_sweeps_of_a_store_are_told_apart_by_their_settings(tmp_path: Path):
    first = small(checkpoints={"a": "organism:200"}, sparsities=(0.5,), seeds=(1,))
    other = small(
        checkpoints={"a": "organism:200"},
        sparsities=(0.5,),
        seeds=(1,),
        evaluation={"id": DataSpec("organism", split="validation", limit=6)},
    )
    one, two = (sweep(given, tmp_path, workers=0, progress=False) for given in (first, other))
    with pytest.raises(HcLensError, match=r"got 2 sweeps for settings ''; it has .* \(1 runs\)"):
        read_runs(tmp_path)
    table = pd.read_parquet(tmp_path / "runs.parquet")
    for runs in (one, two):
        name = table.loc[table["run"] == runs.table["run"].iloc[0], "settings"].iloc[0]
        read = read_runs(tmp_path, name[:8])
        assert read.table["run"].unique().tolist() == runs.table["run"].unique().tolist()
        pd.testing.assert_frame_equal(read.full, runs.full)


def test_a_folder_that_is_no_store_is_an_error_and_stays_as_it_is(tmp_path: Path):
    with pytest.raises(HcLensError, match=r"without records\.json; name the folder or address"):
        read_runs(tmp_path / "nothing")
    assert list(tmp_path.iterdir()) == []


def test_the_name_of_a_checkpoint_is_not_a_path(tmp_path: Path):
    store = Records(tmp_path / "store", KIND)
    store.write("runs/one", {"a": b"a"})
    names = [".", "..", "../..", "/", "runs/one", 300 * "x"]
    for name in names:
        name_checkpoint(store, name, f"model of {name}")
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
    assert store.read("runs/one") == {"a": b"a"}
    known = {json.loads(store.read(f"checkpoints/{found}")["about.json"])["name"]
             for found in store.names("checkpoints")}  # fmt: skip
    assert known == set(names)
    with pytest.raises(HcLensError, match=r"knows as '\.'"):
        name_checkpoint(store, ".", "another")


def test_a_store_of_the_other_version_of_transformer_lens_says_so(tmp_path: Path):
    store, model = Records(tmp_path / "store", KIND), 8 * "1a2b"
    name_checkpoint(store, "final", in_the_other_version(model + BRIDGE if BRIDGES else model))
    with pytest.raises(HcLensError, match=f"got a store made with TransformerLens {THERE}.*use an"):
        name_checkpoint(store, "final", model + BRIDGE if BRIDGES else model)


def test_numbers_in_names_decide_the_order():
    names = ["step-1000", "step-200", "end", "20", "100"]
    assert sorted(names, key=natural) == ["end", "step-200", "step-1000", "20", "100"]


def test_runs_carry_the_sides_and_labels_of_their_evaluation(swept: tuple[Path, Runs]):
    _, runs = swept
    for table in (runs.table, runs.full):
        ood = table[table["dataset"] == "ood"]
        friendly = ood["case"].str.endswith("_friendly")
        assert (ood["side"] == friendly.map({True: "friendly", False: "adversarial"})).all()
        assert (table.loc[table["dataset"] == "id", "side"] == "").all()
        assert table["accuracy"].between(table["low"], table["high"]).all()
        assert ((ood["share_entailment"] + ood["share_non-entailment"]).round(9) == 1).all()


def test_runs_of_an_earlier_method_are_read_with_their_own_full_models(tmp_path, monkeypatch):
    config = small(checkpoints={"a": "organism:200"}, sparsities=(0.5,), seeds=(1,))
    with monkeypatch.context() as patched:
        patched.setattr(running, "METHOD_VERSION", running.METHOD_VERSION - 1)
        old = sweep(config, tmp_path, workers=0, progress=False)
    read = read_runs(tmp_path)
    pd.testing.assert_frame_equal(read.full, old.full)
    assert len(read.full) > 0


def test_a_run_with_another_heuristic_is_another_run(tmp_path):
    plain = small(checkpoints={"a": "organism:200"}, sparsities=(0.5,), seeds=(1,))
    spec = DataSpec("organism-ood", limit_per_case=2)
    keys = []
    for heuristic in (None, "non-entailment"):
        rows = {"ood": replace(spec, heuristic=heuristic)}
        runs = sweep(replace(plain, evaluation=rows), tmp_path, workers=0, progress=False)
        keys += runs.table["run"].unique().tolist()
        swap = runs.table.set_index("case")["side"]["swap"]
        assert swap == ("adversarial" if heuristic is None else "friendly")
    assert len(set(keys)) == 2
