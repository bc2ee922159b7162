import subprocess
import sys

import pytest
import torch

import hc_lens as hc
from hc_lens.models.fingerprint import fingerprint
from tests import tiny


@pytest.mark.slow
def test_the_fingerprint_is_the_same_in_another_process(tmp_path):
    folder = tiny.save_checkpoint(tmp_path / "checkpoint")
    code = f"import hc_lens as hc; print(hc.load({str(folder)!r}).fingerprint)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == hc.load(folder).fingerprint


def test_weights_labels_and_dtype_each_change_the_fingerprint():
    original = tiny.tiny_hf("bert")
    renamed = tiny.tiny_hf("bert", labels={0: "a", 1: "b", 2: "c"})
    seen = {
        hc.load(original).fingerprint,
        hc.load(tiny.tiny_hf("bert", seed=1)).fingerprint,
        hc.load(renamed).fingerprint,
        hc.load(original, dtype=torch.float64).fingerprint,
    }
    assert len(seen) == 4
    assert hc.load(tiny.tiny_hf("bert")).fingerprint in seen


def test_writing_to_a_weight_changes_the_fingerprint_and_undoing_restores_it():
    model = hc.load(tiny.tiny_hf("bert"))
    before = model.fingerprint
    kept = model.W_U.clone()
    with torch.no_grad():
        model.W_U.add_(1.0)
    assert model.fingerprint != before
    with torch.no_grad():
        model.W_U.copy_(kept)
    assert model.fingerprint == before


def test_hooks_do_not_change_the_fingerprint():
    model = hc.load(tiny.tiny_hf("bert"))
    before = fingerprint(model)
    model.add_hook("blocks.0.hook_mlp_out", lambda value, hook: value * 2)
    assert fingerprint(model) == before
