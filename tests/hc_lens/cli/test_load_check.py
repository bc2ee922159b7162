from __future__ import annotations

import json

import pytest

from hc_lens.cli import load_check
from tests import tiny


@pytest.mark.parametrize("family", ["bert", "roberta", "gpt2"])
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
    assert document["units"] == "2 layers, 8 heads and 2 MLPs"
    assert document["parity"] is True
    assert document["largest_logit_difference"] < 1e-4


def test_the_organisms_checkpoint_is_found_by_its_step(call):
    done = call("load-check", "--model", "organism:400")
    assert done.exit_code == 0, done.output
    assert "parity                    yes" in done.stdout
    assert load_check.checkpoint_of("organism:400").endswith("step-00400")


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
