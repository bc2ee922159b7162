"""Settings of a study."""

from __future__ import annotations

import dataclasses

import pytest

from analyses.study.config import PAPER_CASES, StudyConfig, demo
from hc_lens.cli.settings import write_toml
from hc_lens.errors import HcLensError


@pytest.mark.parametrize("full", [False, True])
def test_settings_come_back_from_toml_unchanged(full: bool, tmp_path) -> None:
    from analyses.study import read_settings

    config = demo(full)
    (tmp_path / "study.toml").write_text(write_toml(config.describe()))
    again = read_settings(tmp_path / "study.toml")
    assert again.describe() == config.describe()
    assert again.sweep().describe() == config.sweep().describe()


def test_the_paper_sized_demo_has_twelve_seeds_and_the_whole_series() -> None:
    config = demo(full=True)
    assert len(config.seeds) == 12
    assert config.sweep().n_runs == 2 * 2 * 12
    assert list(config.checkpoints) == ["100", "200", "400", "800", "1200", "2000"]
    assert config.final == "2000"


def test_a_model_outside_the_series_is_its_last_checkpoint() -> None:
    config = dataclasses.replace(demo(), checkpoints={"400": "organism:400"})
    grid = config.grid_sweep()
    assert grid is not None
    assert list(grid.checkpoints) == ["400", "final"]


def test_no_series_means_no_grid() -> None:
    assert dataclasses.replace(demo(), checkpoints={}, early=None).grid_sweep() is None


def test_an_unknown_setting_names_the_nearest() -> None:
    described = demo().describe() | {"seed": [1]}
    with pytest.raises(HcLensError, match="'seed'; did you mean 'seeds'"):
        StudyConfig.from_dict(described)
    described = demo().describe()
    described["prune"] = {"step": 3}
    with pytest.raises(HcLensError, match="'step'; did you mean 'steps'"):
        StudyConfig.from_dict(described)


def test_a_study_needs_both_domains_and_two_sparsities() -> None:
    config = demo()
    with pytest.raises(HcLensError, match="named 'id' and 'ood'"):
        dataclasses.replace(config, evaluation={"id": config.evaluation["id"]})
    with pytest.raises(HcLensError, match="two sparsities"):
        dataclasses.replace(config, sparsities=(0.5,))


def test_the_early_checkpoint_must_be_in_the_series() -> None:
    with pytest.raises(HcLensError, match=r"expected early= to name one of .*got '300'"):
        dataclasses.replace(demo(), early="300")


def test_the_papers_cases_are_names_of_hans_as_it_is_read(shared_data) -> None:
    from hc_lens.data import Task

    task = Task.named("hans", shared_data / "hans_validation.parquet")
    cases = set(task.dataset(task.splits[0])["case"][:])
    assert set(PAPER_CASES["hans"]) <= cases
