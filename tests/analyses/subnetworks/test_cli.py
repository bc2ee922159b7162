"""The commands on a store that a small sweep of the organism wrote."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from hc_lens.cli import options
from hc_lens.sweeps.runs import Runs
from hc_lens.sweeps.sweep import sweep
from tests.commands import invoke
from tests.hc_lens.sweeps.made import small


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Runs]:
    store = tmp_path_factory.mktemp("stores") / "store"
    return store, sweep(small(), store, workers=0, progress=False)


def test_the_subnetworks_command_prints_the_core_and_writes_the_tables(
    swept: tuple[Path, Runs], tmp_path: Path
):
    store, runs = swept
    out = tmp_path / "out"
    given = [str(store), "--early", "step-200", "--fraction", "0.5", "--out", str(out)]
    result = invoke("analyse", "subnetworks", *given)
    assert "4 subnetworks of checkpoint step-1200, sparsities 0.25, 0.5" in result.output
    assert "heads are in at least 0.5 of them" in result.output
    assert "Spearman of the frequencies at 0.25 and 0.5" in result.output
    assert "the core of checkpoint step-200" in result.output
    heads = next(iter(runs.subnetworks.values())).space.heads
    assert len(pd.read_csv(out / "frequencies.csv")) == 2 * len(heads)
    drawn = ("spread", "sparsity", "frequencies")
    assert all((out / f"{name}.png").stat().st_size > 5000 for name in drawn)


def test_the_effective_size_command_prints_a_row_for_each_checkpoint_and_target(
    swept: tuple[Path, Runs], tmp_path: Path
):
    store, _ = swept
    given = [str(store), "--id-labels", "3", "--ood-labels", "2", "--out", str(tmp_path)]
    result = invoke("analyse", "effective-size", *given)
    assert result.exit_code == 0
    table = pd.read_csv(tmp_path / "table.csv")
    targets = table.groupby("checkpoint", sort=False)["target"].agg(set)
    assert targets.index.tolist() == ["step-200", "step-1200"]
    assert all({"id", "ood", "mix"} <= found for found in targets)
    assert table["missing"].eq(0).all()
    assert table["floor"].notna().all()


def test_the_commands_put_a_balanced_score_beside_an_ood_mean(
    swept: tuple[Path, Runs], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    store, runs = swept
    cases = sorted(set(runs.table.loc[runs.table["dataset"] == "ood", "case"]))
    sides = {case: ("friendly", "adversarial")[place % 2] for place, case in enumerate(cases)}
    table = runs.table.assign(side=runs.table["case"].map(sides).fillna(""))
    monkeypatch.setattr(options.Store, "read", lambda self: replace(runs, table=table))
    result = invoke("analyse", "subnetworks", store, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "the balanced score of each run" in result.stdout
    written = pd.read_csv(tmp_path / "out" / "sides.csv")
    last = table.loc[(table["checkpoint"] == "step-1200") & (table["dataset"] == "ood")]
    means = last.groupby(["sparsity", "seed", "side"])["accuracy"].mean()
    assert written["balanced"].tolist() == pytest.approx(
        means.groupby(["sparsity", "seed"]).mean().tolist()
    )
    result = invoke("analyse", "effective-size", store)
    targets = [line.split()[1] for line in result.stdout.splitlines()[1:]]
    assert targets == ["id", "ood", "balanced", "mix"] * 2


def test_a_checkpoint_that_the_store_lacks_is_an_error(swept: tuple[Path, Runs]):
    result = invoke("analyse", "subnetworks", swept[0], "--checkpoint", "end")
    assert result.exit_code == 1
    assert "among ['step-200', 'step-1200'], got 'end'" in result.stderr


def test_seeds_and_sparsities_choose_among_the_runs(swept: tuple[Path, Runs]):
    result = invoke("analyse", "subnetworks", swept[0], "--sparsity", 0.5, "--seeds", "1-2")
    assert "2 subnetworks of checkpoint step-1200, sparsities 0.5," in result.stdout
    result = invoke("analyse", "subnetworks", swept[0], "--seeds", "1,7")
    assert result.exit_code == 1
    assert "expected values of seed that the store has, got [7]; it has [1, 2]" in result.stderr


def test_a_store_that_has_grown_is_told(tmp_path: Path):
    store, out = tmp_path / "store", tmp_path / "out"
    sweep(small(seeds=(1,)), store, workers=0, progress=False)
    line = ("analyse", "effective-size", store, "--out", out)
    assert invoke(*line).exit_code == 0
    assert "is finished" in invoke(*line).stderr
    sweep(small(), store, workers=0, progress=False)
    assert "store has changed since" in invoke(*line).stderr
