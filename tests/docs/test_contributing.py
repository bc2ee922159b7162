"""The examples of the page on contributing work as they stand there."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import transformers

import hc_lens as hc
from hc_lens.cli import call
from hc_lens.models import loading
from hc_lens.pruning.job import Job
from hc_lens.pruning.teacher import Teacher
from tests import tiny
from tests.docs.test_pages import ROOT, blocks


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A function from a word to the module that the first example with that word makes."""

    def make(word: str) -> ModuleType:
        page = ROOT / "docs" / "contributing.md"
        (code,) = [text for text in blocks(page, "python") if word in text]
        path = tmp_path / "example.py"
        path.write_text(code, encoding="utf-8")
        spec = importlib.util.spec_from_file_location("example", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "example", module)
        spec.loader.exec_module(module)
        return module

    return make


@pytest.fixture
def rows() -> tuple:
    model = hc.organism.load()
    return model, hc.organism.task("ood").batches(model, limit=32)


def test_the_example_of_a_family_gives_the_logits_of_hugging_face(example, monkeypatch) -> None:
    monkeypatch.setitem(loading.FAMILIES, "ernie", example("EncoderFamily").FAMILY)
    config = transformers.ErnieConfig(**tiny.SIZES, **tiny.COMMON)
    with torch.random.fork_rng():
        original = tiny.roughen(transformers.ErnieForSequenceClassification(config)).double().eval()
    inputs = tiny.tiny_inputs(0, "right")
    with torch.no_grad():
        expected = original(**inputs).logits
        got = hc.load(original, dtype=torch.float64)(**inputs)
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(got, expected, atol=1e-10, rtol=0)


def test_the_example_of_a_replacement_is_scanned_stored_and_limited(
    example, rows, tmp_path
) -> None:
    model, batches = rows
    source = example("class Scaled").Scaled(1.0)
    settings = {"sets": ["L1.H2"], "limit": 16, "store": tmp_path / "scan", "progress": False}
    table = hc.scan(model, batches, source, **settings)
    assert table["kl"].abs().max() < 1e-9
    halved = example("class Scaled").Scaled(0.0)
    as_zero = hc.scan(model, batches, "zero", sets=["L1.H2"], limit=16, progress=False)
    by_scale = hc.scan(model, batches, halved, **settings)
    torch.testing.assert_close(
        torch.tensor(by_scale["kl"].to_numpy()),
        torch.tensor(as_zero["kl"].to_numpy()),
        atol=1e-5,
        rtol=0,
    )


def test_the_example_of_a_pruning_method_removes_the_last_layers(example, rows) -> None:
    model, batches = rows
    method = example("def deepest_first").deepest_first
    config = hc.PruneConfig(sparsity=0.5, seed=0)
    found = method(Job(model, batches, hc.Zero(), config, Teacher(model)))
    assert {hc.Unit.parse(label).layer for label in found.removed} == {2, 3}
    assert len(found.removed) == 18


def test_the_example_of_an_analysis_is_a_command(example, capsys, tmp_path) -> None:
    run = example("def confidence").run
    chosen = ["--model", "organism", "--task", "organism-ood", "--limit", "32"]
    out = tmp_path / "out"
    call("analyse confidence", run, [*chosen, "--least", "0", "--out", str(out), "--json"])
    shown = json.loads(capsys.readouterr().out)
    assert {row["sure"] for row in shown["table"]} == {1.0}
    assert (out / "table.csv").is_file()
