"""A study of a language model on prompts: its steps, its sentences, its page."""

from __future__ import annotations

import html
import json
import math
import re
from pathlib import Path

import pandas as pd
import pytest

import hc_lens as hc
from hc_lens.analyses.study import findings
from hc_lens.analyses.study.cli import study
from hc_lens.analyses.study.config import read_settings
from hc_lens.analyses.study.results import one_case_in_domain
from hc_lens.analyses.study.steps import floor_of
from hc_lens.cli.parse import parse
from hc_lens.cli.work import Work
from tests.analyses.study.test_findings import FACTS
from tests.commands import Result, invoke
from tests.language_models import save_language_model

ABOUT_PAIRS = ("premise", "hypothesis", "label", "classifier", "other sentence")
"""Words that fit texts with labels alone."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a tiny language model."""
    return save_language_model(tmp_path_factory.mktemp("language") / "model")


@pytest.fixture(scope="module")
def finished(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """The run folder of a small study of it, and what the command said."""
    out = tmp_path_factory.mktemp("study") / "run"
    given = ["--model", checkpoint, "--task", "agreement", "--limit", 16, "--seeds", "0-1"]
    given += ["--evaluation-limit", 28, "--steps", 1, "--scan-rows", 20, "--trace-rows", 10]
    given += ["--checkpoints", f"only={checkpoint}", "--grid", "0.3,0.6", "--grid-seeds", 0]
    result = invoke("study", *given, "--examples", 1, "--workers", 1, "--out", out)
    assert result.exit_code == 0, result.output
    return out, result


@pytest.mark.slow
def test_a_study_of_agreement_is_evaluated_on_friendly_and_adversarial_cases(finished) -> None:
    out, _ = finished
    config = read_settings(out / "study.toml")
    assert config.train.task == "agreement"
    assert {name: spec.task for name, spec in config.evaluation.items()} == {
        "id": "agreement",
        "ood": "agreement-ood",
    }
    facts = json.loads((out / "facts.json").read_text())
    assert facts["cases"] == "adversarial"
    assert (facts["friendly_cases"], facts["adversarial_cases"]) == (8, 6)
    assert facts["adversarial_rows"] == 12


def places(word: str, text: str) -> list[int]:
    """Where a word stands in a text."""
    return [found.start() for found in re.finditer(word, text)]


@pytest.mark.slow
def test_nothing_of_its_report_fits_texts_with_labels_alone(finished) -> None:
    out, result = finished
    page = re.sub(r"<(script|style)\b.*?</\1>", "", (out / "report.html").read_text(), flags=re.S)
    text = html.unescape(re.sub(r"<[^>]+>", " ", page))
    for word in ABOUT_PAIRS:
        assert [text[at - 40 : at + 40] for at in places(word, text)] == []
        assert word not in result.stdout
    assert "is left out: a prompt is one text" in text
    assert 'class="hc-lens-canvas"' in page
    assert not (out / "steps" / "attention" / "attention.csv").exists()


@pytest.mark.slow
def test_its_in_domain_cases_are_one_in_what_is_said_of_the_seeds(finished) -> None:
    out, _ = finished
    spread = pd.read_csv(out / "steps" / "core" / "spread.csv")
    assert spread.loc[spread["dataset"] == "id", "case"].unique().tolist() == ["all"]
    runs = pd.read_csv(out / "steps" / "subnetworks" / "runs.csv")
    inside = runs[(runs["dataset"] == "id") & (runs["sparsity"] == 0.5)]
    right = (inside["accuracy"] * inside["n"]).groupby(inside["seed"]).sum()
    facts = json.loads((out / "facts.json").read_text())
    assert facts["first_id_lowest"] == pytest.approx(right.min() / 28, abs=1e-12)


def test_cases_in_domain_are_joined_over_their_rows() -> None:
    table = pd.DataFrame(
        {
            "checkpoint": "c",
            "dataset": ["id", "id", "ood"],
            "case": ["a", "b", "a"],
            "side": ["friendly", "friendly", "adversarial"],
            "n": [1, 3, 2],
            "accuracy": [1.0, 0.0, 0.5],
        }
    )
    joined = one_case_in_domain(table, ["checkpoint"])
    assert joined[["dataset", "case", "n", "accuracy"]].to_numpy().tolist() == [
        ["id", "all", 4, 0.25],
        ["ood", "a", 2, 0.5],
    ]
    alone = table.iloc[1:]
    assert one_case_in_domain(alone, ["checkpoint"]) is alone


def test_knowing_nothing_finds_one_answer_of_several(checkpoint: Path) -> None:
    rows = [
        {"prompt": "the dog", "right": ["is"], "wrong": ["are"]},
        {"prompt": "the cat", "right": ["is"], "wrong": ["are", "was", "were"]},
        {"prompt": "the boy", "right": ["is"], "wrong": []},
    ]
    batches = hc.Prompts.from_rows(rows).batches(hc.load(checkpoint))
    assert floor_of(batches) == pytest.approx((1 / 2 + 1 / 4 + 0) / 3)


def config_of(*given: object):
    """The settings of a study with some options."""
    call = parse("study", study, [*map(str, given), "--model", "m", "--out", "run"])
    assert call is not None
    return call.settings.config(Work(call))


def test_prompts_are_made_as_many_as_the_limits_say() -> None:
    config = config_of("--task", "agreement", "--evaluation-limit", 28)
    assert (config.train.limit, config.evaluation["ood"].limit) == (None, 28)
    assert config.evaluation["ood"].limit_per_case is None
    assert config_of("--task", "organism", "--ood", "organism-ood").train.limit == 20_000
    assert config_of("--task", "ioi", "--ood", "induction", "--limit", 9).train.limit == 9


SECOND = {name.replace("first", "second"): value for name, value in FACTS.items()}
PROMPTS = {**SECOND, **FACTS, "rows": "prompts", "full_said": math.nan, "full_said_share": math.nan}
LOST = {"friendly_change": -0.4, "friendly_change_low": -0.5, "friendly_change_high": -0.3}
KEPT = {"adversarial_change": 0.0, "adversarial_change_low": 0.0, "adversarial_change_high": 0.0}


def test_a_model_that_follows_the_heuristic_is_told_without_labels() -> None:
    said = findings.say_model(PROMPTS | {"full_balanced": 0.5})
    assert said.plain.endswith("Following the heuristic alone would do as well.")
    assert said.found is False


def test_subnetworks_that_lose_the_friendly_cases_are_told_without_labels() -> None:
    lost = {f"first_{name}": value for name, value in LOST.items()}
    said = findings.say_spread(PROMPTS | lost | {"first_balanced_side": 0.4}, "first")
    assert "on average no more than the heuristic alone would score" in said.plain
    assert said.plain.endswith("They lose what the heuristic gives.")
    said = findings.say_collapse(PROMPTS | LOST | KEPT)
    assert said.plain.endswith(": smaller subnetworks lose what the heuristic gives.")
    said = findings.say_collapse(PROMPTS | {"full_balanced": math.nan})
    assert "the loss of a heuristic cannot be told from generalising" in said.plain


@pytest.mark.parametrize("facts", [PROMPTS, PROMPTS | LOST | KEPT, PROMPTS | {"full_balanced": 0}])
def test_no_sentence_about_prompts_speaks_of_labels(facts) -> None:
    for said in findings.say(facts | {"edge_kind": "unembed"}):
        assert not [word for word in ABOUT_PAIRS if word in said.plain]
    assert "to the unembedding" in findings.say_trace(facts | {"edge_kind": "unembed"}).plain


@pytest.mark.slow
def test_a_classifier_cannot_be_studied_on_prompts(tmp_path: Path) -> None:
    given = ["--model", "organism", "--task", "agreement", "--out", tmp_path / "run"]
    result = invoke("study", *given)
    assert result.exit_code == 1
    assert "expected a language model for prompts, got a classifier" in result.stderr
