"""The README's sessions run as they stand there, on small models instead of checkpoints."""

from __future__ import annotations

import pytest

import hc_lens as hc
from tests.docs.test_pages import ROOT, blocks
from tests.language_models import save_language_model

pytestmark = pytest.mark.slow

ON_THE_ORGANISM = {
    'hc.load("path-or-hub-id")': "hc.organism.load()",
    'hc.Task.named("mnli").batches(model, "train", limit=20_000, max_length=128)': (
        'hc.organism.task().batches(model, "train", limit=200, token_budget=512)'
    ),
    'hc.Task.named("hans").batches(model, "validation")': (
        'hc.organism.task("ood").batches(model, limit=32)'
    ),
    "L4.H0": "L3.H5",
    "seed=42": "seed=42, steps=10",
    "The doctor saw the lawyer.": "the pilot greeted the cook",
    "The lawyer slept.": "the cook smiled",
    "The lawyer saw the doctor.": "the cook greeted the pilot",
}
"""What the session says, and what it is run with."""


def test_the_session_with_a_classifier_runs() -> None:
    code, _ = blocks(ROOT / "README.md", "python")
    for shown, run in ON_THE_ORGANISM.items():
        assert shown in code
        code = code.replace(shown, run)
    names: dict = {}
    exec(compile(code, "README.md", "exec"), names)
    assert names["logits"].shape == (1, 3)
    assert len(names["sub"].removed) == 18
    assert isinstance(names["sub"], hc.Subnetwork)


def test_the_session_with_a_language_model_runs(tmp_path) -> None:
    _, code = blocks(ROOT / "README.md", "python")
    changes = {
        "path-or-hub-id": str(save_language_model(tmp_path)),
        '.named("': '.named(n=30, name="',
        "seed=42": "seed=42, steps=3",
    }
    for shown, run in changes.items():
        assert shown in code
        code = code.replace(shown, run)
    names: dict = {}
    exec(compile(code, "README.md", "exec"), names)
    assert len(names["sub"].removed) == 3  # half of 4 heads and 2 MLPs
    assert set(names["ood"].sides.values()) == {"friendly", "adversarial"}
