"""Every command that reads rows takes prompts and a language model."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

import hc_lens as hc
from hc_lens.data.specs import DataSpec
from tests.hc_lens.cli.test_words import PYTHON
from tests.language_models import save_language_model

PROMPTS = [
    {"prompt": "Now, the dog", "right": "is", "wrong": ["are"], "side": "friendly"},
    {"prompt": "Now, the dogs", "right": "are", "wrong": ["is", "was"], "side": "adversarial"},
]


@pytest.fixture(scope="module")
def language_model(tmp_path_factory):
    """A checkpoint of a tiny language model."""
    return save_language_model(tmp_path_factory.mktemp("language") / "model")


@pytest.fixture
def prompts(tmp_path):
    """A file of prompts of one's own."""
    (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, PROMPTS)))
    return tmp_path / "own.jsonl"


def test_a_scan_of_named_prompts_is_that_of_the_library(call, language_model):
    line = ("scan", "--model", language_model, "--task", "ioi", "--limit", 10, "--means", "zero")
    line = (*line, "--units", "L0.H1", "--metrics", "probability,log_odds")
    done = call(*line, "--json")
    assert done.exit_code == 0, done.output
    model = hc.load(language_model)
    batches = DataSpec("ioi", split="validation", limit=10).batches(model)
    metrics = ["probability", "log_odds"]
    own = hc.scan(model, {"ioi/validation": batches}, "zero", ["L0.H1"], metrics=metrics)
    pd.testing.assert_frame_equal(pd.DataFrame(json.loads(done.stdout)["table"]), own)
    header = call(*line).stdout.splitlines()[0].split()
    assert header[-2:] == ["log_odds", "log_odds_change"]


def test_removed_units_can_have_the_activations_of_the_counterfactuals(call, language_model):
    read = ("--model", language_model, "--task", "ioi", "--limit", 6, "--means", "counterfactual")
    done = call("scan", *read, "--units", "L0.H0,L1.MLP", "--out", "s")
    assert done.exit_code == 0, done.output
    model = hc.load(language_model)
    rows = DataSpec("ioi", limit=6, split="validation").batches(model)
    expected = hc.scan(model, rows, hc.Counterfactual(model), ["L0.H0", "L1.MLP"])
    found = pd.read_csv("s/table.csv")
    assert found["kl"].to_numpy() == pytest.approx(expected["kl"].to_numpy(), abs=1e-6)
    found = call("prune", *read, "--sparsity", 0.5, "--steps", 2, "--out", "half")
    assert found.exit_code == 0, found.output
    for more in (
        ("evaluate", "--subnetwork", "half"),
        ("analyse", "composition", "--core", "L0.H0"),
        ("analyse", "superadditive", "--core", "L0.H0,L0.H1"),
    ):
        done = call(*more, *read)
        assert done.exit_code == 0, done.output


def test_counterfactuals_that_prompts_do_not_have_are_told(call, language_model, prompts):
    read = ("--model", language_model, "--task", "own", "--path", prompts)
    done = call("scan", *read, "--means", "counterfactual")
    assert done.exit_code == 1
    assert "expected batches with counterfactuals" in done.stderr.splitlines()[-1]


def test_prune_means_and_evaluate_go_from_prompts_to_a_score_by_side(call, language_model):
    read = ("--model", language_model, "--task", "agreement", "--limit", 16)
    assert call("means", *read, "--out", "m").exit_code == 0
    more = ("--sparsity", 0.5, "--steps", 2, "--loss", "logit_difference", "--means", "m")
    done = call("prune", *read, *more, "--out", "half")
    assert done.exit_code == 0, done.output
    assert hc.Subnetwork.load("half").config["loss"] == "logit_difference"
    line = ("evaluate", *read, "--ood", "agreement-ood", "--ood-limit", 28, "--subnetwork", "half")
    done = call(*line, "--means", "m", "--metrics", "logit_difference", "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    table = pd.DataFrame(told["table"])
    assert not [name for name in table if name.startswith("share_")]
    assert table["logit_difference"].notna().all()
    ood = "agreement-ood/validation"
    entry = told[f"half on {ood}"]
    chosen = table[(table["subnetwork"] == "half") & (table["dataset"] == ood)]
    for side in ("friendly", "adversarial"):
        mean = chosen.loc[chosen["side"] == side, "accuracy"].mean()
        assert entry[side] == pytest.approx(mean, abs=1e-4)
    assert "said" not in entry


def test_prompts_of_ones_own_need_a_path_alone(call, language_model, prompts):
    line = ("evaluate", "--model", language_model, "--task", "mine", "--path", prompts)
    done = call(*line, "--json")
    assert done.exit_code == 0, done.output
    table = pd.DataFrame(json.loads(done.stdout)["table"])
    assert table[["dataset", "case", "side"]].to_numpy().tolist() == [
        ["mine/all", "friendly", "friendly"],
        ["mine/all", "adversarial", "adversarial"],
    ]


def test_a_metric_that_every_table_has_is_not_shown_twice(call, language_model, prompts):
    line = ("evaluate", "--model", language_model, "--task", "mine", "--path", prompts)
    header = call(*line, "--metrics", "kl,accuracy,loss,loss").stdout.splitlines()
    shown = next(text.split() for text in header if "accuracy" in text)
    assert shown[-3:] == ["kl", "agreement", "loss"]
    assert shown.count("accuracy") == shown.count("kl") == 1


def test_a_sweep_of_a_language_model_is_read_by_the_analyses(call, language_model):
    line = ("--checkpoints", f"last={language_model}", "--task", "agreement", "--limit", 16)
    line = (*line, "--ood", "agreement-ood", "--evaluation-limit", 28, "--workers", 1)
    line = (*line, "--metrics", "logit_difference")
    done = call("sweep", *line, "--sparsity", 0.5, "--seeds", "0-1", "--steps", 2, "--out", "s")
    assert done.exit_code == 0, done.output
    assert "balanced" in done.stdout
    assert "logit_difference" in done.stdout
    assert "said" not in done.stdout
    for name in ("subnetworks", "effective-size"):
        read = call("analyse", name, "s/runs", "--out", name)
        assert read.exit_code == 0, read.output
        assert "balanced" in read.stdout
        assert "said" not in read.stdout
    more = ("--measure", "logit_difference", "--margin", 100, "--out", "size")
    assert call("analyse", "effective-size", "s/runs", *more).exit_code == 0
    assert set(pd.read_csv("size/table.csv")["effective_size"]) == {50}
    more = ("--measure", "kl", "--out", "spread")
    assert call("analyse", "subnetworks", "s/runs", *more).exit_code == 0
    assert set(pd.read_csv("spread/table.csv")["full"]) == {0}


@pytest.mark.parametrize("analysis", ["superadditive", "composition"])
def test_an_analysis_of_heads_takes_prompts(call, language_model, analysis):
    line = ("analyse", analysis, "--model", language_model, "--task", "ioi", "--limit", 6)
    done = call(*line, "--core", "L0.H0,L0.H1", "--means", "zero")
    assert done.exit_code == 0, done.output


def test_the_wiring_is_also_traced_on_adversarial_prompts_of_the_task(call, language_model):
    line = ("analyse", "composition", "--model", language_model, "--task", "agreement")
    done = call(*line, "--limit", 6, "--core", "L0.H0", "--means", "zero", "--out", "t")
    assert done.exit_code == 0, done.output
    assert set(pd.read_csv("t/edges.csv")["dataset"]) == {"id", "ood"}


def test_what_helps_with_prompts_is_told_in_options(call, language_model, prompts):
    read = ("--model", language_model, "--task", "own", "--path", prompts)
    for more, told in (
        (("--means", "counterfactual"), "a counterfactual of the same number of tokens"),
        (("--max-length", 9), "expected no --max-length for prompts"),
        (("--means", "zero", "--memory", "1KB"), "; raise --memory, or shorten the prompts"),
        (("--token-budget", 2), "; raise it, or shorten the prompts"),
    ):
        done = call("scan", *read, *more)
        assert done.exit_code == 1
        line = done.stderr.splitlines()[-1]
        assert told in line
        assert not PYTHON.search(line)
        assert "hc.Counterfactual" not in line


def test_a_misspelt_column_is_told_in_a_note(call, language_model, prompts):
    prompts.write_text(prompts.read_text().replace('"wrong"', '"wrongs"'))
    done = call("evaluate", "--model", language_model, "--task", "own", "--path", prompts)
    assert done.exit_code == 0, done.output
    notes = [line for line in done.stderr.splitlines() if line.startswith("note: column")]
    assert len(notes) == 1
    assert "column 'wrongs' of own/all is not read" in notes[0]


@pytest.mark.parametrize("option", ["--text", "--premise"])
def test_the_attention_of_a_language_model_to_one_text(call, language_model, option):
    line = ("attention", "--model", language_model, option, "Now, the dog", "--out", "a")
    done = call(*line)
    assert done.exit_code == 0, done.output
    assert 'text = "Now, the dog"' in Path("a/command.toml").read_text()
    assert '<span class="hc-lens-name">text</span>' in Path("a/attention.html").read_text()


@pytest.mark.parametrize(
    ("checkpoint", "more", "told"),
    [
        ("model", ("--task", "ioi"), "expected a language model for prompts, got a classifier"),
        ("language_model", ("--task", "organism"), "expected a classifier for the task 'organism'"),
        ("language_model", ("--task", "ioi", "--labels", "a,b"), "expected prompts without labels"),
        ("language_model", ("--task", "ioi", "--max-length", 9), "expected no --max-length for"),
        ("language_model", ("--task", "ioi", "--limit", 0), "expected limit"),
        ("language_model", ("--task", "ioi", "--metrics", "acc"), "expected the metric among"),
    ],
)
@pytest.mark.parametrize("command", ["scan", "evaluate"])
def test_what_cannot_work_is_told_in_one_line(request, call, command, checkpoint, more, told):
    done = call(command, "--model", request.getfixturevalue(checkpoint), *more)
    assert done.exit_code == 1
    assert told in done.stderr.splitlines()[-1]
    assert "collecting" not in done.stderr


def test_lexical_overlap_and_finetune_refuse_prompts_before_a_model_is_loaded(call, language_model):
    read = ("--model", language_model, "--task", "ioi")
    for line in (("analyse", "lexical-overlap"), ("finetune", "--steps", 1, "--out", "f")):
        done = call(*line, *read)
        assert done.exit_code == 1
        assert "expected a task of texts with labels, got the prompts 'ioi'" in done.stderr
        assert "loading" not in done.stderr


def test_a_language_model_loads_with_the_logits_of_hugging_face(call, language_model):
    done = call("load-check", "--model", language_model)
    assert done.exit_code == 0, done.output
    assert "labels" not in done.stdout
