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


def test_other_settings_are_refused_with_the_first_that_differs(means, tmp_path):
    means()
    done = means("--limit", 2)
    assert done.exit_code == 1
    told = f"hc-lens: expected to continue the work in {tmp_path / 'm'}, whose limit is None, got 2"
    assert done.stderr.startswith(told)
    assert done.stderr.endswith(", or pass --force to write over it\n")
    assert done.stderr.count("\n") == 1


def test_a_folder_of_something_else_is_refused(means, tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "mine.txt").write_text("mine")
    done = means()
    assert done.exit_code == 1
    told = f"expected a new folder, got {tmp_path / 'm'} with ['mine.txt']"
    assert told in done.stderr
    assert "or pass --force to write over it" in done.stderr
    assert [path.name for path in (tmp_path / "m").iterdir()] == ["mine.txt"]


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
    assert "expected a folder, got the file m" in done.stderr


def test_a_damaged_result_is_an_error(means, tmp_path):
    means()
    (tmp_path / "m" / "result.json").write_text("{")
    done = means()
    assert done.exit_code == 1
    assert "expected the result in m as it was written, got files that have changed" in done.stderr


def test_a_folder_of_an_older_layout_is_refused_and_left_alone(means, tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "command.toml").write_text('command = "means"')
    for more in ((), ("--force",)):
        done = means(*more)
        assert done.exit_code == 1
        assert "in the layout of an older version of hc_lens" in done.stderr
        assert "pass --force" not in done.stderr
    assert [found.name for found in (tmp_path / "m").iterdir()] == ["command.toml"]


def test_the_table_of_a_finished_folder_is_read_from_its_file(call, read, tmp_path):
    for suffix in ("csv", "parquet"):
        line = ("evaluate", *read, "--out", suffix, "--format", suffix)
        first, again = call(*line), call(*line)
        assert first.exit_code == 0, first.output
        assert again.stdout == first.stdout, again.stderr
        assert json.loads(call(*line, "--json").stdout)["table"][0]["subnetwork"] == "full"
        assert "table" not in json.loads((tmp_path / suffix / "result.json").read_text())
