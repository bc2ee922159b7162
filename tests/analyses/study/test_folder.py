"""The run folder of a study."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from analyses.study.folder import RunFolder, read_table, write_table
from hc_lens.errors import HcLensError


class Counter:
    """A step that counts how often it ran."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, place: Path) -> None:
        self.calls += 1
        (place / "result.txt").write_text(str(self.calls))


def test_a_step_with_the_same_settings_runs_once(tmp_path: Path) -> None:
    step = Counter()
    for _ in range(3):
        place = RunFolder(tmp_path / "run", "model").step("means", {"rows": 3}, (), step)
    assert step.calls == 1
    assert (place / "result.txt").read_text() == "1"


def test_a_changed_setting_runs_the_step_and_what_builds_on_it_and_nothing_else(
    tmp_path: Path,
) -> None:
    steps = {name: Counter() for name in ("a", "b", "c")}

    def run(setting: int) -> None:
        folder = RunFolder(tmp_path / "run", "model")
        folder.step("a", {}, (), steps["a"])
        folder.step("b", {"setting": setting}, ("a",), steps["b"])
        folder.step("c", {}, ("b",), steps["c"])

    run(1), run(1), run(2)
    assert [steps[name].calls for name in "abc"] == [1, 2, 2]


def test_a_step_that_was_interrupted_leaves_nothing_and_runs_again(tmp_path: Path) -> None:
    def interrupted(place: Path) -> None:
        (place / "half.txt").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        RunFolder(tmp_path / "run", "model").step("means", {}, (), interrupted)
    step = Counter()
    place = RunFolder(tmp_path / "run", "model").step("means", {}, (), step)
    assert step.calls == 1
    assert sorted(file.name for file in place.iterdir()) == ["done.json", "result.txt"]


def test_the_folder_of_another_model_is_refused(tmp_path: Path) -> None:
    RunFolder(tmp_path / "run", "a" * 16)
    with pytest.raises(HcLensError, match=r"expected the model of the run folder .*aaaaaaaa.*bbbb"):
        RunFolder(tmp_path / "run", "b" * 16)


def test_a_folder_with_other_files_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(HcLensError, match="holds something else; choose another --out"):
        RunFolder(tmp_path, "model")
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_folder_in_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "study.json").write_text(json.dumps({"format": "hc_lens.study.0", "model": "m"}))
    with pytest.raises(HcLensError, match=r"hc_lens.study.1.*hc_lens.study.0"):
        RunFolder(tmp_path, "m")


def test_a_table_comes_back_exactly(tmp_path: Path) -> None:
    table = pd.DataFrame(
        {
            "checkpoint": ["200", "final"],
            "case": ["None", "a,b"],
            "x": [1 / 3, 1e-17],
            "on": [True, False],
        }
    )
    write_table(tmp_path, "t", table)
    back = read_table(tmp_path, "t")
    assert back["x"].tolist() == [1 / 3, 1e-17]
    assert back["checkpoint"].tolist() == ["200", "final"]
    assert back["case"].tolist() == ["None", "a,b"]
    assert back["on"].tolist() == [True, False]
