"""Results are never written over in silence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import hc_lens as hc
from hc_lens.locks import alone
from hc_lens.models.fingerprint import fingerprint
from tests import tiny
from tests.damage import DAMAGES, flip
from tests.lens import THERE, in_the_other_version


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


def test_a_folder_that_was_finished_with_the_other_version_of_transformer_lens_says_so(
    call, read, model, tmp_path, monkeypatch
):
    arguments = ("means", *read, "--model", model, "--out", "m")
    assert call(*arguments).exit_code == 0
    there = in_the_other_version(fingerprint(hc.load(model)))
    monkeypatch.setattr("hc_lens.models.fingerprint.fingerprint", lambda _: there)
    done = call(*arguments)
    assert done.exit_code == 1
    here = 7 - THERE
    assert f"got results made with TransformerLens {here}" in done.stderr
    assert "give another --out" in done.stderr


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


def test_a_folder_that_another_command_is_writing_to_is_refused(means, tmp_path):
    means()
    lock = tmp_path / "m" / ".unfinished" / "lock"
    with alone(lock):
        for more in ((), ("--force",)):
            done = means(*more)
            assert done.exit_code == 1
            assert "expected to be the only one that writes to" in done.stderr
    assert means("--force").exit_code == 0


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(
    "file", ["result.json", "table.csv", "command.toml", "done.json", "records.json"]
)
def test_a_damaged_result_is_computed_again(call, read, tmp_path, damage, file):
    line = ("evaluate", *read, "--out", "e")
    first = call(*line)
    before = (tmp_path / "e" / file).read_bytes()
    damage(tmp_path / "e" / file)
    done = call(*line)
    assert (done.exit_code, done.stdout) == (0, first.stdout), done.output
    said = [text for text in done.stderr.splitlines() if "damaged" in text]
    assert len(said) == 1
    assert said[0].startswith("note: ")
    assert f"{file} is damaged or gone" in said[0]
    assert (tmp_path / "e" / file).read_bytes() == before


def test_means_of_a_stopped_command_that_are_damaged_are_collected_again(call, read, tmp_path):
    line = ("prune", *read, "--sparsity", 0.5, "--steps", 2, "--out", "x")
    assert call(*line).exit_code == 0
    before = (tmp_path / "x" / "means.safetensors").read_bytes()
    (tmp_path / "x" / "done.json").unlink()
    flip(tmp_path / "x" / "means.safetensors")
    done = call(*line)
    assert done.exit_code == 0, done.output
    assert "they are collected again" in done.stderr
    assert (tmp_path / "x" / "means.safetensors").read_bytes() == before


def test_a_stopped_command_continues_with_its_means_and_ends_in_the_same_bytes(
    call, read, tmp_path
):
    line = ("prune", *read, "--sparsity", 0.5, "--steps", 2, "--out", "x")
    assert call(*line).exit_code == 0
    before = (tmp_path / "x" / "result.json").read_bytes()
    for name in ("done.json", "result.json"):
        (tmp_path / "x" / name).unlink()
    done = call(*line)
    assert "collecting means" not in done.stderr
    assert (tmp_path / "x" / "result.json").read_bytes() == before


def test_means_of_rows_that_changed_after_a_stop_are_not_used(call, model, rows, tmp_path):
    own = tmp_path / "rows"
    shutil.copytree(rows, own)
    line = ("prune", "--model", model, "--task", "mnli", "--path", own)
    line += ("--sparsity", 0.5, "--steps", 2, "--out")
    assert call(*line, "x").exit_code == 0
    (tmp_path / "x" / "done.json").unlink()
    for file in own.rglob("*"):
        file.write_text(file.read_text().replace("doctor", "lawyer"))
    done = call(*line, "x")
    assert "collecting means" in done.stderr
    assert call(*line, "new").exit_code == 0
    new, continued = ((tmp_path / name / "means.safetensors").read_bytes() for name in ("new", "x"))
    assert continued == new


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


CORE = ("--core", "L0.H0,L1.H2")
SCORING = {
    "evaluate": (),
    "scan": ("--units", "L0.H0"),
    "analyse superadditive": (*CORE, "--pool", "L0.H0,L1.H2", "--n-resamples", 100),
    "analyse lexical-overlap": ("--n-bootstrap", 0),
    "analyse composition": CORE,
}
"""Commands that score a model on rows, with what they need beside the model and the rows."""


@pytest.mark.parametrize("name", SCORING)
def test_models_are_scored_on_held_out_rows_and_means_are_of_the_training_rows(
    call, read, rows, name
):
    has_ood = name != "analyse lexical-overlap"
    second = ("--ood", "hans", "--ood-path", rows.parent / "two") if has_ood else ()
    if has_ood and not second[-1].exists():
        second[-1].mkdir()
        for split in ("train", "validation"):
            row = {"premise": "the judge ran .", "hypothesis": "a judge ran", "label": 0}
            lines = [json.dumps({**row, "case": case}) for case in "ab"]
            (second[-1] / f"{split}.jsonl").write_text("\n".join(lines))
    done = call(*name.split(), *read, *second, *SCORING[name], "--out", "o", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)["read"]
    means = found.pop("means", "4 rows of mnli/train")
    assert means == "4 rows of mnli/train"
    expected = {"mnli/validation": "4 rows", "hans/validation": "2 rows"}
    assert found == {key: expected[key] for key in list(expected)[: 1 + has_ood]}
    for data, what in found.items():
        assert f"{data}: {what}\n" in done.stderr
    assert json.loads(Path("o/result.json").read_text())["read"].items() >= found.items()


@pytest.mark.parametrize("name", ["means", "prune"])
def test_means_and_subnetworks_come_from_the_training_rows(call, read, name):
    more = ("--sparsity", 0.5, "--steps", 2) if name == "prune" else ()
    done = call(name, *read, *more, "--out", "o", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["read"]["mnli/train"] == "4 rows"


def test_a_split_that_is_named_is_the_one_that_is_read(call, read):
    done = call("evaluate", *read, "--split", "train", "--json")
    assert json.loads(done.stdout)["read"] == {"mnli/train": "4 rows"}
    assert "held-out" not in done.stderr


def test_a_task_without_held_out_rows_is_scored_on_those_it_has_and_says_so(call, model, rows):
    one = ("--path", rows / "train.jsonl")
    done = call("evaluate", "--model", model, "--task", "mnli", *one)
    assert "note: mnli has no held-out split; train is scored\nmnli/train: 4 rows" in done.stderr


def test_a_finished_folder_of_another_split_is_refused(call, read, rows, model, tmp_path):
    own = tmp_path / "own"
    own.mkdir()
    (own / "train.jsonl").write_text((rows / "train.jsonl").read_text())
    line = ("evaluate", "--model", model, "--task", "mnli", "--path", "own", "--out", "o")
    assert call(*line).exit_code == 0
    (own / "validation.jsonl").write_text((rows / "validation.jsonl").read_text())
    done = call(*line)
    assert done.exit_code == 1
    assert "expected o to hold results of what is read now, got other results: mnli/" in done.stderr


@pytest.fixture
def unnamed(tmp_path):
    """A checkpoint whose labels are placeholders."""
    return tiny.save_checkpoint(
        tmp_path / "unnamed", labels={index: f"LABEL_{index}" for index in range(3)}
    )


@pytest.mark.parametrize("name", [name for name in SCORING if "lexical" not in name])
def test_a_checkpoint_without_label_names_works_with_given_ones(call, rows, unnamed, name):
    line = (*name.split(), "--model", unnamed, "--task", "mnli", "--path", rows, *SCORING[name])
    line += ("--ood", "") if name == "analyse composition" else ()
    done = call(*line)
    assert done.exit_code == 1
    assert done.stderr.endswith("what its logits mean, in order, with --model-labels A,B,...\n")
    named = ("--model-labels", "entailment,neutral,contradiction")
    assert call(*line, *named).exit_code == 0


def test_labels_that_contradict_the_checkpoint_are_refused(call, read):
    done = call("evaluate", *read, "--model-labels", "neutral,entailment,contradiction")
    assert done.exit_code == 1
    assert "expected names that agree with the checkpoint's own, ['entailment'" in done.stderr


def test_labels_may_come_from_a_settings_file(call, rows, unnamed, tmp_path):
    (tmp_path / "s.toml").write_text('model_labels = ["entailment", "neutral", "contradiction"]')
    line = ("--config", "s.toml", "--model", unnamed, "--task", "mnli", "--path", rows)
    assert call("evaluate", *line).exit_code == 0
