"""Settings of a study."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from hc_lens.analyses.study.config import PAPER_CASES, StudyConfig, demo, read_settings
from hc_lens.errors import HcLensError
from hc_lens.settings import make, plain


@pytest.mark.parametrize("full", [False, True])
def test_settings_come_back_from_toml_unchanged(full: bool, tmp_path) -> None:
    config = demo(full)
    (tmp_path / "study.toml").write_text(config.to_toml())
    again = read_settings(tmp_path / "study.toml")
    assert again == config
    assert again.sweep() == config.sweep()


def test_the_paper_sized_demo_has_twelve_seeds_and_the_whole_series() -> None:
    config = demo(full=True)
    assert len(config.seeds) == 12
    assert config.sweep().n_runs == 2 * 2 * 12
    assert list(config.checkpoints) == ["100", "200", "400", "800", "1200", "2000"]
    assert config.final == "2000"


def test_a_model_outside_the_series_is_its_last_checkpoint() -> None:
    config = dataclasses.replace(demo(), checkpoints={"400": "organism:400"})
    assert list(config.grid_sweep().checkpoints) == ["400", "final"]


def test_an_unknown_setting_names_the_nearest() -> None:
    with pytest.raises(HcLensError, match="'seed'; did you mean 'seeds'"):
        make(StudyConfig, plain(demo()) | {"seed": [1]}, "a study")
    for name in ("prune", "grid_prune"):
        with pytest.raises(HcLensError, match="'step'; did you mean 'steps'"):
            make(StudyConfig, plain(demo()) | {name: {"step": 3}}, "a study")


def test_a_study_needs_both_domains_and_two_sparsities() -> None:
    config = demo()
    with pytest.raises(HcLensError, match="named 'id' and 'ood'"):
        dataclasses.replace(config, evaluation={"id": config.evaluation["id"]})
    with pytest.raises(HcLensError, match="two sparsities"):
        dataclasses.replace(config, sparsities=(0.5,))


def test_the_early_checkpoint_must_be_in_the_series() -> None:
    with pytest.raises(HcLensError, match=r"one of the series .*'400'.*got '300'; give its name"):
        dataclasses.replace(demo(), early="300")


def test_the_papers_cases_are_names_of_hans_as_it_is_read(shared_data) -> None:
    from hc_lens.data.task import Task

    task = Task.named("hans", shared_data / "hans_validation.parquet")
    cases = set(task.dataset(task.splits[0])["case"][:])
    assert set(PAPER_CASES["hans"]) <= cases


def test_the_settings_need_no_heavy_import() -> None:
    code = (
        "import sys; from hc_lens.analyses.study import demo; demo(); "
        "print([n for n in ('torch', 'pandas', 'datasets', 'matplotlib') if n in sys.modules])"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"
