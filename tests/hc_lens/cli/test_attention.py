from __future__ import annotations

import pytest

PAIR = ("--premise", "the doctor ran .", "--hypothesis", "the doctor slept .")


def test_the_page_has_the_heads_and_the_sentences(call, model, pruned, tmp_path):
    line = ("attention", "--model", model, *PAIR, "--heads", "L0.H1,L1.H3", "--out", "a")
    done = call(*line, "--subnetwork", pruned)
    assert done.exit_code == 0, done.output
    assert "a/attention.html" in done.stdout
    page = (tmp_path / "a" / "attention.html").read_text()
    assert all(text in page for text in ("L0.H1", "L1.H3", "doctor", "slept"))
    assert "L0.H0" not in page


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("--heads", "L9.H0"), "expected"),
        (("--subnetwork", "bare"), "expected --means to replace the removed units, got none; give"),
        (("--subnetwork", "pruned", "--subnetwork", "bare"), "expected at most one --subnetwork"),
    ],
)
def test_bad_input_is_one_line(call, model, pruned, tmp_path, more, told):
    (tmp_path / "bare").mkdir()
    for name in ("subnetwork.json", "subnetwork.safetensors"):
        (tmp_path / "bare" / name).write_bytes((pruned / name).read_bytes())
    done = call("attention", "--model", model, *PAIR, "--out", "a", *more)
    assert done.exit_code == 1
    assert told in done.stderr.splitlines()[-1]


def test_settings_of_an_earlier_name_are_read(call, model, tmp_path):
    (tmp_path / "c.toml").write_text('premise = "a lawyer ran"\nheads = ["L0.H1"]\n')
    line = ("attention", "--model", model, "--config", "c.toml")
    assert call(*line, "--out", "a").exit_code == 0
    assert "lawyer" in (tmp_path / "a" / "attention.html").read_text()
    done = call(*line, "--text", "the judge ran", "--out", "b")
    assert done.exit_code == 0, done.output
    page = (tmp_path / "b" / "attention.html").read_text()
    assert "judge" in page
    assert "lawyer" not in page
    assert call("attention", "--config", "b/command.toml", "--out", "c").exit_code == 0
    assert (tmp_path / "c" / "attention.html").read_text() == page


def test_a_text_that_is_typed_has_no_counterfactual(call, model):
    described = call("attention", "--help").stdout
    assert "--text / --premise TEXT" in described
    assert "counterfactual" not in described
    done = call("attention", "--model", model, *PAIR, "--out", "a", "--means", "counterfactual")
    assert done.exit_code == 1
    assert "expected --means as a file, a folder or zero, got counterfactual" in done.stderr
    assert "loading" not in done.stderr


def test_a_subnetwork_of_another_model_is_refused(call, other_model, pruned):
    line = ("attention", "--model", other_model, *PAIR, "--out", "a", "--subnetwork", pruned)
    done = call(*line)
    assert done.exit_code == 1
    assert "expected the model of this subnetwork" in done.stderr.splitlines()[-1]
