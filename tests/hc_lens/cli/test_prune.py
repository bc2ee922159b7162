"""``hc-lens means`` and ``hc-lens prune``."""

from __future__ import annotations

import json
import sys

import pytest

import hc_lens as hc
from hc_lens.cli.options import given
from hc_lens.cli.parse import parse
from hc_lens.cli.prune import run
from hc_lens.data.specs import DataSpec
from hc_lens.errors import HcLensError


def test_means_are_those_of_the_library(call, read, model, rows, tmp_path):
    done = call("means", *read, "--by", "position", "--out", "m", "--json")
    document = json.loads(done.stdout)
    hooked = hc.load(model)
    own = hc.collect_means(hooked, DataSpec("mnli", str(rows)).batches(hooked), by="position")
    assert document["fingerprint"] == own.fingerprint
    assert document["tokens"] == own.n_tokens
    assert hc.Means.load(tmp_path / "m" / "means.safetensors").fingerprint == own.fingerprint


def test_a_subnetwork_is_the_one_that_the_library_finds(pruned, model, rows):
    hooked = hc.load(model)
    batches = DataSpec("mnli", str(rows)).batches(hooked)
    means = hc.collect_means(hooked, batches)
    own = hc.prune(hooked, batches, means, hc.PruneConfig(0.5, 0, steps=3), progress=False)
    found = hc.Subnetwork.load(pruned)
    assert found.kept == own.kept
    assert found.means == means.fingerprint


def test_the_json_document_is_all_of_stdout_and_is_kept(call, read, tmp_path):
    line = ("prune", *read, "--sparsity", 0.5, "--seed", 3, "--method", "random", "--out", "x")
    done = call(*line, "--json")
    document = json.loads(done.stdout)
    assert len(document["kept"]) == 5
    assert sorted(document["kept"] + document["removed"]) == sorted(
        hc.UnitSpace((4, 4), (0, 1)).labels
    )
    assert document == json.loads((tmp_path / "x" / "result.json").read_text())


def test_units_are_kept_and_means_taken_from_elsewhere(call, read, pruned, tmp_path):
    more = ("--keep", "L0.H1,L1.H3", "--heads-only", "--means", pruned, "--lr", "0.05")
    done = call("prune", *read, "--sparsity", 0.5, "--steps", 2, "--out", "x", *more)
    assert done.exit_code == 0, done.output
    found = hc.Subnetwork.load(tmp_path / "x")
    assert {"L0.H1", "L1.H3", "L0.MLP", "L1.MLP"} <= set(found.kept)
    assert found.config["lr"] == 0.05
    assert not (tmp_path / "x" / "means.safetensors").exists()


def test_zero_replaces_removed_units(call, read, tmp_path):
    done = call("prune", *read, "--sparsity", 0.5, "--steps", 2, "--means", "zero", "--out", "x")
    assert done.exit_code == 0, done.output
    assert hc.Subnetwork.load(tmp_path / "x").means == "zero"


def test_means_of_another_model_are_refused(call, read, other_model, pruned):
    line = ("prune", *read, "--sparsity", 0.5, "--out", "x", "--means", pruned)
    done = call(*line, "--model", other_model)
    assert done.exit_code == 1
    assert "expected means of this model" in done.stderr


def settings(line):
    called = parse("prune", run, f"--model m --task t --sparsity 0.5 --out o {line}".split())
    assert called is not None
    return called.settings


def test_the_reference_settings_are_a_start():
    config = settings("--reference --seed 1 --steps 7 --keep L0.H0").config()
    assert (config.steps, config.keep) == (7, ("L0.H0",))
    assert config.init_mean == hc.PruneConfig.reference(0.5, 1).init_mean


def test_settings_are_read_by_their_kind():
    line = "--lr 0.05 --no-per-row --stretch=-0.2,1.2 --patience 5 --clip 1 --loss kl"
    assert given(settings(line).pruning) == {
        "lr": 0.05,
        "per_row": False,
        "stretch": (-0.2, 1.2),
        "patience": 5,
        "clip": 1.0,
        "loss": "kl",
    }


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("--lrr", 1), "Unknown option: --lrr. Did you mean --lr?"),
        (("--lr",), "expected a value for --lr, got none"),
        (("--lr", "fast"), 'Invalid value for --lr: unable to convert "fast" into float'),
        (("--per-row=maybe",), 'Invalid value for --per-row: unable to convert "maybe" into bool'),
        (("--method", "luck"), 'Invalid value "luck" for --method. Choose from: "gates"'),
        (("--stretch", "a,b"), "expected a number, got 'a'"),
    ],
)
def test_a_setting_that_cannot_be_read_is_a_usage_error(call, read, more, told):
    done = call("prune", *read, "--sparsity", 0.5, "--out", "x", *more)
    assert done.exit_code == 2
    assert told in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("--task", "mnlii"), "expected one of the tasks mnli, snli"),
        (("--steps", 0), "expected steps as a whole number of at least 1, got 0"),
        (("--sparsity", 1.5), "expected"),
        (("--keep", "L9.H9"), "expected a unit of a model with 2 layers"),
    ],
)
def test_bad_input_is_one_line(call, read, more, told):
    done = call("prune", *read, "--sparsity", 0.5, "--out", "x", *more)
    assert done.exit_code == 1
    assert done.stderr.splitlines()[-1].startswith("hc-lens: expected")
    assert told in done.stderr.splitlines()[-1]


def test_the_last_good_subnetwork_is_kept_when_the_loss_is_lost(call, read, pruned, monkeypatch):
    error = HcLensError("expected a finite loss")
    error.finished = hc.Subnetwork.load(pruned)

    def lost(*_, **__):
        raise error

    monkeypatch.setattr(sys.modules["hc_lens.pruning.train"], "prune", lost)
    done = call("prune", *read, "--sparsity", 0.5, "--out", "x")
    assert done.exit_code == 1
    assert hc.Subnetwork.load("x/last-good").kept == error.finished.kept
