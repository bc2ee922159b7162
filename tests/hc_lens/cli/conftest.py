"""A tiny checkpoint, a file of rows, and calls of ``hc-lens`` in this process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import tiny
from tests.commands import invoke

ROWS = [
    {"premise": "the doctor ran .", "hypothesis": "the doctor slept .", "label": 1, "kind": "a"},
    {"premise": "the judge ran .", "hypothesis": "the judge ran .", "label": 0, "kind": "b"},
    {"premise": "a lawyer saw the judge", "hypothesis": "a judge ran", "label": 2, "kind": "a"},
    {
        "premise": "if the artist slept , the banker ran",
        "hypothesis": "who",
        "label": 1,
        "kind": "b",
    },
]


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    """A checkpoint of a tiny BERT: 2 layers, 8 heads, 2 MLPs."""
    return tiny.save_checkpoint(tmp_path_factory.mktemp("checkpoint") / "model")


@pytest.fixture(scope="session")
def other_model(tmp_path_factory) -> Path:
    """The same architecture with other weights."""
    return tiny.save_checkpoint(tmp_path_factory.mktemp("checkpoint") / "other", seed=1)


@pytest.fixture(scope="session")
def rows(tmp_path_factory) -> Path:
    """Rows as MNLI has them, in two splits."""
    folder = tmp_path_factory.mktemp("rows") / "mnli"
    folder.mkdir()
    for split in ("train", "validation"):
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    return folder


@pytest.fixture
def call(monkeypatch, tmp_path):
    """A function that runs ``hc-lens`` with some arguments, in a folder of its own."""
    monkeypatch.chdir(tmp_path)

    return invoke


@pytest.fixture
def read(model, rows):
    """The options that name the tiny checkpoint and its rows."""
    return ("--model", model, "--task", "mnli", "--path", rows)


@pytest.fixture
def pruned(call, read, tmp_path):
    """A folder of ``hc-lens prune``."""
    done = call("prune", *read, "--sparsity", 0.5, "--steps", 3, "--out", "pruned")
    assert done.exit_code == 0, done.output
    return tmp_path / "pruned"
