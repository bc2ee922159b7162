"""The steps of a study, and how they are run and kept."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from hc_lens.analyses import study
from hc_lens.analyses.study.config import demo
from hc_lens.analyses.study.results import Results
from hc_lens.analyses.study.steps import KIND, REPORT, SETTINGS, Step, Study, list_steps, run_steps
from hc_lens.errors import HcLensError
from hc_lens.records import Records


class Counter:
    """A step that counts how often it ran."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, study: Study, found: Results, out: Path, **settings: object) -> None:
        self.calls += 1
        (out / "result.txt").write_text(str(self.calls))


def open_folder(path: Path) -> Records:
    return Records(path, KIND, {"model": "model"}, owner=True)


def run(path: Path, *steps: Step) -> dict[str, Path]:
    return run_steps(open_folder(path), steps, Study(demo(), path / "runs"))


def test_a_step_with_the_same_settings_runs_once(tmp_path: Path) -> None:
    counter = Counter()
    step = Step("means", counter, settings={"rows": 3})
    folders = [run(tmp_path / "run", step) for _ in range(3)]
    assert counter.calls == 1
    assert (folders[-1]["means"] / "result.txt").read_text() == "1"


def test_a_changed_setting_runs_the_step_and_what_builds_on_it_and_nothing_else(
    tmp_path: Path,
) -> None:
    counters = {name: Counter() for name in ("a", "b", "c")}
    for setting in (1, 1, 2):
        run(
            tmp_path / "run",
            Step("a", counters["a"]),
            Step("b", counters["b"], ("a",), {"setting": setting}),
            Step("c", counters["c"], ("b",)),
        )
    assert [counters[name].calls for name in "abc"] == [1, 2, 2]


def test_a_step_gets_its_settings_and_the_folders_that_it_needs_and_no_others(
    tmp_path: Path,
) -> None:
    seen: list[tuple[Results, dict]] = []

    def look(study: Study, found: Results, out: Path, **settings: object) -> None:
        seen.append((found, settings))
        (out / "result.txt").write_text("seen")

    steps = [Step("a", Counter()), Step("b", Counter()), Step("c", look, ("b",), {"rows": 3})]
    folders = run(tmp_path / "run", *steps)
    found, settings = seen[0]
    assert settings == {"rows": 3}
    assert found.folders == {"b": folders["b"]}


def test_a_step_that_was_interrupted_leaves_nothing_and_runs_again(tmp_path: Path) -> None:
    def interrupted(study: Study, found: Results, out: Path) -> None:
        (out / "half.txt").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run", Step("means", interrupted))
    assert not (tmp_path / "run" / "steps" / "means").exists()
    counter = Counter()
    folders = run(tmp_path / "run", Step("means", counter))
    assert counter.calls == 1
    assert sorted(file.name for file in folders["means"].iterdir()) == ["done.json", "result.txt"]


def test_no_report_is_made_of_a_folder_in_which_a_step_has_failed(tmp_path: Path) -> None:
    def settings(study: Study, found: Results, out: Path) -> None:
        (out / SETTINGS).write_text(demo().to_toml())

    def failing(study: Study, found: Results, out: Path) -> None:
        raise HcLensError("no")

    last = Step(REPORT, settings, ("means", "core"))
    run(tmp_path / "run", Step("means", Counter()), Step("core", Counter()), last)
    changed = Step("means", Counter(), settings={"rows": 3})
    with pytest.raises(HcLensError, match="no"):
        run(tmp_path / "run", changed, Step("core", failing, ("means",)), last)
    with pytest.raises(HcLensError, match="expected the run folder of a finished study"):
        study.report(tmp_path / "run", tmp_path / "page.html")


def test_the_folder_of_another_model_is_refused(tmp_path: Path) -> None:
    Records(tmp_path / "run", KIND, {"model": "a" * 16}, owner=True)
    with pytest.raises(HcLensError, match=r"whose model is 'aaaaaaaa.*bbbb"):
        Records(tmp_path / "run", KIND, {"model": "b" * 16}, owner=True)


def test_a_folder_with_other_files_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(HcLensError, match="nothing was touched, name another folder"):
        open_folder(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_folder_in_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "study.json").write_text(json.dumps({"format": "hc_lens.study.0", "model": "m"}))
    with pytest.raises(HcLensError, match=r"older version of hc_lens.*study.json"):
        open_folder(tmp_path)


def test_every_step_comes_after_those_that_it_builds_on_and_gets_what_it_takes(
    tmp_path: Path,
) -> None:
    known: Sequence[str] = []
    study = Study(demo(), tmp_path)
    for step in list_steps(study):
        assert set(step.needs) <= set(known), step.name
        inspect.signature(step.run).bind(study, Results({}), tmp_path, **step.settings)
        known = [*known, step.name]
    assert known[0] == "inputs"
    assert known[-1] == REPORT


def test_no_series_means_no_grid(tmp_path: Path) -> None:
    config = dataclasses.replace(demo(), checkpoints={}, early=None)
    names = [step.name for step in list_steps(Study(config, tmp_path))]
    assert "composition" in names
    assert not {"grid", "effective_size"} & set(names)


def test_a_step_runs_again_when_something_else_that_its_files_depend_on_has_changed(
    tmp_path: Path,
) -> None:
    counter = Counter()
    for weights in ("a", "a", "b"):
        run(tmp_path / "run", Step("grid", counter, also={"models": weights}))
    assert counter.calls == 2
