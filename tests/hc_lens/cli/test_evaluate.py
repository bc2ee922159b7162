from __future__ import annotations

import json
import shutil

import pandas as pd
import pytest

import hc_lens as hc
from hc_lens.data.specs import DataSpec


def test_the_table_is_that_of_the_library(call, read, model, rows, pruned, tmp_path):
    line = ("evaluate", *read, "--split", "validation", "--subnetwork", pruned)
    done = call(*line, "--format", "parquet", "--out", "e", "--json")
    assert done.exit_code == 0, done.output
    hooked = hc.load(model)
    batches = DataSpec("mnli", str(rows), split="validation").batches(hooked)
    means = hc.Means.load(pruned / "means.safetensors")
    sub = hc.Subnetwork.load(pruned)
    own = hc.evaluate(hooked, {"mnli/validation": batches}, means=means, subnetwork={"pruned": sub})
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "e" / "table.parquet"), own)
    pd.testing.assert_frame_equal(pd.DataFrame(json.loads(done.stdout)["table"]), own)


def test_rows_of_ones_own_and_a_second_task_are_scored_by_case(call, model, rows, tmp_path):
    own = ("--columns", "premise,hypothesis", "--labels", "entailment,neutral,contradiction")
    files = ("--path", rows / "train.jsonl", "--ood-path", rows / "validation.jsonl")
    done = call(
        "evaluate", "--model", model, "--task", "mine", "--ood", "other", *files, *own,
        "--case", "kind", "--out", "e",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    table = pd.read_csv(tmp_path / "e" / "table.csv")
    assert sorted(zip(table["dataset"].str.split("/").str[0], table["case"], strict=True)) == [
        *(("mine", "a"), ("mine", "b"), ("other", "a"), ("other", "b")),
    ]
    assert table["n"].tolist() == [2, 2, 2, 2]
    assert "accuracy" in done.stdout


def test_friendly_and_adversarial_cases_are_set_beside_each_other(call, model, tmp_path):
    texts = {"premise": "the judge ran .", "hypothesis": "the judge ran ."}
    labels = {"a": "entailment", "b": "neutral", "c": "contradiction"}
    rows = [{**texts, "label": label, "kind": kind} for kind, label in labels.items()] * 3
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    line = ("evaluate", "--model", model, "--task", "mine", "--path", "rows.jsonl")
    line = (*line, "--columns", "premise,hypothesis", "--case", "kind", "--limit-per-case", 2)
    assert " on mine/all" not in call(*line).stdout
    done = call(*line, "--heuristic", "entailment", "--out", "e")
    assert done.exit_code == 0, done.output
    table = pd.read_csv(tmp_path / "e" / "table.csv")
    assert table["side"].tolist() == ["friendly", "adversarial", "adversarial"]
    assert table["n"].tolist() == [2, 2, 2]
    # One text has one answer, so the model is right on one of the three cases.
    friendly = float(table["accuracy"][0])
    adversarial = (1 - friendly) / 2
    told = f"friendly {friendly}, adversarial {adversarial}, balanced "
    told += f"{(friendly + adversarial) / 2}, said "
    found = [text for text in done.stdout.splitlines() if text.startswith("full on mine/all")]
    assert len(found) == 1
    assert told in found[0]
    assert found[0].endswith("said_share 1.0")
    assert call(*line, "--heuristic", "entailment", "--out", "e").stdout == done.stdout


def test_subnetworks_of_one_name_are_told_apart_by_their_folder(call, read, pruned, tmp_path):
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "pruned").symlink_to(pruned)
    both = ("--subnetwork", "pruned", "--subnetwork", "more/pruned")
    done = call("evaluate", *read, *both, "--json")
    table = pd.DataFrame(json.loads(done.stdout)["table"])
    assert list(table["subnetwork"]) == ["full", "pruned", "more/pruned"]


def test_other_means_than_those_a_subnetwork_was_found_with_are_noted(call, read, pruned):
    assert call("means", *read, "--limit", 2, "--out", "m").exit_code == 0
    done = call("evaluate", *read, "--subnetwork", pruned, "--means", "m")
    assert "note: pruned was found with other means than those used here" in done.stderr


def test_a_changed_subnetwork_under_the_same_name_is_refused(call, read, pruned):
    line = ("evaluate", *read, "--subnetwork", "pruned", "--out", "e")
    assert call(*line).exit_code == 0
    config = ("--config", "pruned/command.toml", "--seed", 5, "--method", "random", "--force")
    assert call("prune", *config).exit_code == 0
    done = call(*line)
    assert done.exit_code == 1
    assert "pruned has changed since" in done.stderr


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("--subnetwork", "nowhere"), "expected subnetwork.json and subnetwork.safetensors in"),
        (("--ood", "mnli"), "expected two sets of rows with different names, got mnli/validation"),
        (("--ood-path", "x"), "expected --ood with --ood-path, got x alone; name its task"),
        (("--means", "nowhere", "--subnetwork", "pruned"), "expected a readable safetensors file"),
    ],
)
def test_bad_input_is_one_line(call, read, rows, pruned, more, told):
    if more == ("--ood", "mnli"):
        more = ("--ood", "mnli", "--ood-path", rows)
    done = call("evaluate", *read, *more)
    assert done.exit_code == 1
    assert told in done.stderr.splitlines()[-1]


def test_a_subnetwork_of_another_model_is_refused(call, read, pruned, other_model):
    done = call(
        "evaluate", *read, "--model", other_model, "--subnetwork", pruned, "--means", "zero"
    )
    assert done.exit_code == 1
    assert "expected the model of this subnetwork" in done.stderr.splitlines()[-1]


def test_an_unknown_format_is_a_usage_error(call, read):
    done = call("evaluate", *read, "--format", "xls")
    assert done.exit_code == 2
    assert 'Invalid value "xls" for --format. Choose from: "csv", "parquet".' in done.stderr


def test_means_that_are_gone_from_beside_a_subnetwork_are_not_replaced_in_silence(
    call, read, pruned, tmp_path
):
    copy = tmp_path / "copy"
    shutil.copytree(pruned, copy)
    (copy / "means.safetensors").unlink()
    ended = call("evaluate", *read, "--subnetwork", str(copy))
    assert ended.exit_code == 1
    assert "expected means.safetensors in" in ended.stderr
