"""Results are never written over in silence."""

from __future__ import annotations

import json

import pytest


@pytest.fixture
def means(call, read):
    return lambda *more: call("means", *read, "--out", "m", *more)


def test_a_finished_folder_is_shown_again_and_left_alone(means, tmp_path):
    first = means()
    before = (tmp_path / "m" / "means.safetensors").stat().st_mtime_ns
    second = means()
    assert (second.exit_code, second.stdout) == (0, first.stdout)
    assert "m is finished; --force computes it again" in second.stderr
    assert (tmp_path / "m" / "means.safetensors").stat().st_mtime_ns == before


def test_force_computes_again_and_leaves_other_files(means, tmp_path):
    means()
    (tmp_path / "m" / "mine.txt").write_text("mine")
    before = (tmp_path / "m" / "means.safetensors").stat().st_mtime_ns
    assert means("--force", "--limit", 2).exit_code == 0
    assert (tmp_path / "m" / "means.safetensors").stat().st_mtime_ns > before
    assert json.loads((tmp_path / "m" / "result.json").read_text())["rows"] == 2
    assert (tmp_path / "m" / "mine.txt").read_text() == "mine"


def test_other_settings_are_refused_with_the_first_that_differs(means):
    means()
    done = means("--limit", 2)
    assert done.exit_code == 1
    assert done.stderr == (
        "hc-lens: expected the settings in m/command.toml to go on there, got limit 2 where they "
        "have None; give another --out, or pass --force to write over it\n"
    )


def test_a_folder_of_something_else_is_refused(means, tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "mine.txt").write_text("mine")
    done = means()
    assert done.exit_code == 1
    assert "expected a new folder for the results, got m with ['mine.txt']; give" in done.stderr
    assert [place.name for place in (tmp_path / "m").iterdir()] == ["mine.txt"]


def test_a_folder_of_another_model_under_the_same_name_is_refused(
    call, read, model, other_model, tmp_path
):
    link = tmp_path / "checkpoint"
    link.symlink_to(model)
    arguments = ("means", *read, "--model", "checkpoint", "--out", "m")
    assert call(*arguments).exit_code == 0
    link.unlink()
    link.symlink_to(other_model)
    done = call(*arguments)
    assert done.exit_code == 1
    assert "expected m to hold results of what is read now" in done.stderr
    assert "the model has changed since" in done.stderr


def test_a_failed_start_leaves_no_folder(call, read, tmp_path):
    assert call("means", *read, "--split", "nothing", "--out", "m").exit_code == 1
    assert not (tmp_path / "m").exists()


def test_a_file_in_the_folders_place_is_an_error(means, tmp_path):
    (tmp_path / "m").write_text("a file")
    done = means()
    assert done.exit_code == 1
    assert "expected a folder for the results that can be made, got" in done.stderr


def test_a_damaged_result_is_an_error(means, tmp_path):
    means()
    (tmp_path / "m" / "result.json").write_text("{")
    done = means()
    assert done.exit_code == 1
    assert "expected a result in m/result.json, got" in done.stderr
