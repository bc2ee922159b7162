"""A token cache of its own for every test, and rows to read."""

from __future__ import annotations

from pathlib import Path

import datasets
import pytest

import hc_lens as hc
from tests import tiny

PAIRS = [
    {"premise": "the doctor saw the judge .", "hypothesis": "a judge ran", "label": "neutral"},
    {"premise": "the old banker slept", "hypothesis": "a banker slept .", "label": "entailment"},
    {"premise": "who ran ?", "hypothesis": "the artist", "label": "contradiction"},
    {"premise": "the judge", "hypothesis": "the judge", "label": "entailment"},
    {"premise": "the student did not ran , today", "hypothesis": "ran", "label": "neutral"},
    {"premise": "if the doctor ran", "hypothesis": "the doctor ran", "label": "neutral"},
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep the token ids of a test out of the user's cache."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def bert():
    """A tiny BERT with MNLI's labels and a word-piece tokenizer."""
    return hc.load(tiny.tiny_hf("bert"), tokenizer=tiny.bert_tokenizer())


@pytest.fixture(scope="session")
def gpt2():
    """A tiny GPT-2 with MNLI's labels and a byte-level tokenizer without pad or pair template."""
    return hc.load(tiny.tiny_hf("gpt2"), tokenizer=tiny.byte_tokenizer())


@pytest.fixture
def task() -> hc.Task:
    """Six inference pairs in one split."""
    return hc.Task.from_rows(
        {"train": PAIRS},
        columns=("premise", "hypothesis"),
        labels=("entailment", "neutral", "contradiction"),
    )
