from __future__ import annotations

import json

import pytest
import transformers

from hc_lens.cli import load_check
from tests import tiny
from tests.lens import BRIDGES, hooked_only

NAMES = tiny.MNLI_LABELS.values()


NEWER = [] if BRIDGES else ["modernbert", "albert", "mpnet"]


@pytest.mark.parametrize("family", ["bert", "roberta", "gpt2", *NEWER])
def test_a_checkpoint_has_hugging_faces_logits(call, tmp_path, family):
    place = tiny.save_checkpoint(tmp_path / "model", family)
    # A context that holds the texts, which the byte tokenizer cuts into letters.
    texts = (("the cat", "a"), ("a", "the"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load_check, "PAIRS", texts)
        done = call("load-check", "--model", place, "--json")
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert document["labels"] == {"0": "entailment", "1": "neutral", "2": "contradiction"}
    layers = 3 if family == "modernbert" else 2
    assert document["units"] == f"{layers} layers, {4 * layers} heads and {layers} MLPs"
    assert document["parity"] is True
    assert document["family"] == family
    assert document["dtype"] == "float32"
    assert document["transformers"] == transformers.__version__
    where = ("largest_logit_difference", "random_rows_padded_right", "random_rows_padded_left")
    assert all(0 <= document[name] < 1e-4 for name in where)
    assert "your_rows" not in document


def test_the_organisms_checkpoint_is_found_by_its_step(call):
    done = call("load-check", "--model", "organism:400")
    assert done.exit_code == 0, done.output
    assert "parity                    yes" in done.stdout
    assert load_check.checkpoint_of("organism:400").endswith("step-00400")


@hooked_only
def test_a_users_rows_are_compared_too(call, tmp_path):
    place = tiny.save_checkpoint(tmp_path / "model", "deberta-v3")
    rows = tmp_path / "rows.csv"
    text = "premise,hypothesis,label\nthe doctor saw the judge,the judge ran,1\na student,a,0\n"
    rows.write_text(text, encoding="utf-8")
    own = ("--task", "mine", "--path", rows, "--columns", "premise,hypothesis")
    done = call("load-check", "--model", place, *own, "--labels", ",".join(NAMES), "--json")
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert document["family"] == "deberta-v2"
    assert document["exact"] == "logits, patterns, scans; composition without a convolution"
    assert 0 < document["your_rows"] < 1e-4
    assert 0 < document["your_rows_padded_left"] < 1e-4
    assert "mine/all" in document["inputs"]


def test_rows_without_a_task_are_refused(call, model):
    done = call("load-check", "--model", model, "--path", "rows.csv")
    assert done.exit_code == 1
    assert "expected --task with --path, got rows.csv alone" in done.stderr


def test_a_difference_above_the_tolerance_is_exit_code_1(call, model, other_model, monkeypatch):
    monkeypatch.setattr(load_check, "checkpoint_of", lambda _: str(other_model))
    done = call("load-check", "--model", model, "--json")
    assert done.exit_code == 1
    assert json.loads(done.stdout)["parity"] is False
    assert "expected logits within 0.0001 of Hugging Face's, got a difference of" in done.stderr


def test_a_checkpoint_that_does_not_load_is_one_line(call, tmp_path):
    done = call("load-check", "--model", tmp_path)
    assert done.exit_code == 1
    assert done.stderr.splitlines()[-1].startswith("hc-lens: expected config.json in")
