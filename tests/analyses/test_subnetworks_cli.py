"""The commands on a store that a small sweep of the organism wrote."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from analyses import effective_size_cli, subnetworks_cli
from analyses.stores import natural, read_store
from hc_lens.errors import HcLensError
from hc_lens.spec import DataSpec
from hc_lens.sweep import Runs, sweep
from hc_lens.sweepconfig import SweepConfig


def small(**changes: object) -> SweepConfig:
    """Random subnetworks of two checkpoints: no training, so a matter of seconds."""
    settings = {
        "checkpoints": {"step-200": "organism:200", "step-1200": "organism:1200"},
        "train": DataSpec("organism", split="train", limit=8),
        "evaluation": {
            "id": DataSpec("organism", split="validation", limit=12),
            "ood": DataSpec("organism-ood", limit=40),
        },
        "sparsities": (0.25, 0.5),
        "seeds": (1, 2),
        "prune": {"method": "random"},
    }
    return SweepConfig(**{**settings, **changes})


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Runs]:
    store = tmp_path_factory.mktemp("stores") / "store"
    return store, sweep(small(), store, workers=0, progress=False)


def test_a_store_reads_back_as_the_sweep_gave_it(swept: tuple[Path, Runs]):
    store, runs = swept
    read = read_store(store)
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
        read_store(tmp_path)
    table = pd.read_parquet(tmp_path / "runs.parquet")
    for runs in (one, two):
        name = table.loc[table["run"] == runs.table["run"].iloc[0], "settings"].iloc[0]
        read = read_store(tmp_path, name[:8])
        assert read.table["run"].unique().tolist() == runs.table["run"].unique().tolist()
        pd.testing.assert_frame_equal(read.full, runs.full)


def test_a_folder_that_is_no_store_is_an_error_and_stays_as_it_is(tmp_path: Path):
    with pytest.raises(HcLensError, match=r"without store\.json; name the store= of a sweep"):
        read_store(tmp_path / "nothing")
    assert list(tmp_path.iterdir()) == []


def test_numbers_in_names_decide_the_order():
    names = ["step-1000", "step-200", "end", "20", "100"]
    assert sorted(names, key=natural) == ["end", "step-200", "step-1000", "20", "100"]


def test_the_subnetworks_command_prints_the_core_and_writes_the_tables(
    swept: tuple[Path, Runs], tmp_path: Path
):
    store, runs = swept
    out = tmp_path / "out"
    given = [str(store), "--early", "step-200", "--fraction", "0.5", "--out", str(out)]
    result = CliRunner().invoke(subnetworks_cli.app, given, catch_exceptions=False)
    assert "4 subnetworks of checkpoint step-1200, sparsities 0.25, 0.5" in result.output
    assert "heads are in at least 0.5 of them" in result.output
    assert "Spearman of the frequencies at 0.25 and 0.5" in result.output
    assert "the core of checkpoint step-200" in result.output
    heads = next(iter(runs.subnetworks.values())).space.heads
    assert len(pd.read_csv(out / "frequencies.csv")) == 2 * len(heads)
    drawn = ("spread", "sparsity", "frequencies", "frequency-table")
    assert all((out / f"{name}.png").stat().st_size > 5000 for name in drawn)


def test_the_effective_size_command_prints_a_row_for_each_checkpoint_and_target(
    swept: tuple[Path, Runs], tmp_path: Path
):
    store, _ = swept
    given = [str(store), "--id-labels", "3", "--ood-labels", "2", "--out", str(tmp_path)]
    result = CliRunner().invoke(effective_size_cli.app, given, catch_exceptions=False)
    assert result.exit_code == 0
    table = pd.read_csv(tmp_path / "effective-size.csv")
    assert table["checkpoint"].tolist() == ["step-200"] * 3 + ["step-1200"] * 3
    assert table["missing"].eq(0).all()
    assert table["floor"].notna().all()


def test_a_checkpoint_that_the_store_lacks_is_an_error(swept: tuple[Path, Runs]):
    result = CliRunner().invoke(subnetworks_cli.app, [str(swept[0]), "--checkpoint", "end"])
    assert isinstance(result.exception, HcLensError)
    assert "got 'end'; it has ['step-200', 'step-1200']" in str(result.exception)
