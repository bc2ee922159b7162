"""What a store of sweeps holds, read without its settings."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from hc_lens.data.specs import DataSpec
from hc_lens.errors import HcLensError
from hc_lens.sweeps.runs import Runs, natural, read_runs
from hc_lens.sweeps.sweep import sweep
from tests.hc_lens.sweeps.made import small

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


def test_numbers_in_names_decide_the_order():
    names = ["step-1000", "step-200", "end", "20", "100"]
    assert sorted(names, key=natural) == ["end", "step-200", "step-1000", "20", "100"]
