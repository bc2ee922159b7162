from __future__ import annotations

import json

import pandas as pd
import pytest

import hc_lens as hc
from hc_lens.cli.scan import by_dataset
from hc_lens.data.specs import DataSpec


def test_the_table_is_that_of_the_library(call, read, model, rows, pruned, tmp_path):
    line = ("scan", *read, "--means", pruned, "--units", "L0.H1,L1.MLP", "--pairs")
    done = call(*line, "--out", "s", "--json")
    assert done.exit_code == 0, done.output
    hooked = hc.load(model)
    own = hc.scan(
        hooked,
        {"mnli/validation": DataSpec("mnli", str(rows), split="validation").batches(hooked)},
        hc.Means.load(pruned / "means.safetensors"),
        hc.pairs(["L0.H1", "L1.MLP"]),
    )
    assert list(own["set"]) == ["full", "L0.H1", "L1.MLP", "L0.H1+L1.MLP"]
    pd.testing.assert_frame_equal(pd.DataFrame(json.loads(done.stdout)["table"]), own)
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "s" / "table.csv"), own)
    assert list((tmp_path / "s" / "batches").rglob("*.safetensors"))


def test_every_unit_is_scanned_unless_sets_are_named(call, read):
    table = json.loads(call("scan", *read, "--means", "zero", "--json").stdout)["table"]
    assert [row["set"] for row in table] == ["full", *hc.UnitSpace((4, 4), (0, 1)).labels]
    done = call("scan", *read, "--means", "zero", "--sets", "L0.H1+L1.H2,L0.MLP", "--json")
    assert [row["set"] for row in json.loads(done.stdout)["table"]] == [
        *("full", "L0.H1+L1.H2", "L0.MLP")
    ]


def test_means_are_collected_on_the_training_rows(call, read):
    done = call("scan", *read, "--split", "validation", "--units", "L0.H0")
    assert done.exit_code == 0, done.output
    assert "collecting means over 4 rows of mnli/train" in done.stderr


def test_the_shown_table_averages_cases_over_their_rows():
    numbers = {"accuracy_change": 0.0, "kl": 0.0, "agreement": 1.0, "logit_change": 0.0}
    about = {"dataset": "d", "set": "full", **numbers}
    table = pd.DataFrame(
        [
            {**about, "case": "a", "n": 1, "accuracy": 1.0},
            {**about, "case": "b", "n": 3, "accuracy": 0.0},
            {**about, "case": "c", "n": 5, "accuracy": float("nan")},
        ]
    )
    shown = by_dataset(table)
    assert shown["n"].tolist() == [9]
    assert shown["accuracy"].tolist() == [0.25]


def test_cases_are_shown_on_request(call, model, rows):
    own = ("--columns", "premise,hypothesis", "--labels", "entailment,neutral,contradiction")
    line = ("scan", "--model", model, "--task", "mine", "--path", rows / "train.jsonl", *own)
    line = (*line, "--case", "kind", "--units", "L0.H0", "--means", "zero")
    assert len(call(*line).stdout.splitlines()) == 3
    assert len(call(*line, "--by-case").stdout.splitlines()) == 5


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("--sets", "L0.H1", "--pairs"), "expected either --sets or --units and --pairs, got both"),
        (("--units", "X1"), "expected a unit label such as 'L4.H0' or 'L4.MLP', got 'X1'"),
        (("--memory", "much"), "expected memory as"),
    ],
)
def test_bad_input_is_one_line(call, read, more, told):
    done = call("scan", *read, "--means", "zero", *more)
    assert done.exit_code == 1
    assert told in done.stderr.splitlines()[-1]


def test_a_precision_measures_samples_of_the_rows(call, model):
    line = ("scan", "--model", "organism", "--task", "organism", "--limit", "400")
    line += ("--means", "zero", "--units", "L0.H0,L2.H3", "--precision", "0.05", "--json")
    done = call(*line, "--seed", "3", "--confidence", "0.9")
    assert done.exit_code == 0, done.output
    table = pd.DataFrame(json.loads(done.stdout)["table"])
    assert list(table["case"]) == ["all"] * 3
    assert ((table["high"] - table["low"]) / 2 <= 0.05 + 1e-9).all()
    assert (table["n"] <= 400).all()
    refused = call(*line, "--top", "3")
    assert refused.exit_code == 1
    assert "expected either --precision or --top, got both" in refused.stderr


def test_the_largest_effects_are_found_by_name(call):
    line = (
        "scan",
        "--model",
        "organism",
        "--task",
        "organism",
        "--limit",
        "400",
        "--means",
        "zero",
    )
    done = call(*line, "--top", "2", "--precision-of", "kl", "--json")
    assert done.exit_code == 0, done.output
    table = pd.DataFrame(json.loads(done.stdout)["table"])
    assert list(table.columns) == ["rank", "set", "n", "kl", "low", "high"]
    assert list(table["rank"]) == [1, 2]
    refused = call(*line, "--top", "2", "--ood", "organism-ood")
    assert "expected the rows of one task to rank sets on with --top" in refused.stderr
