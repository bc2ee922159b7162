"""The logits of a large vocabulary are made of a few rows at a time, whatever is asked of a model.

Counted are the logits that the unembedding makes, and the bytes of all tensors that are there.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

import hc_lens as hc
from hc_lens import metrics
from hc_lens.metrics import held_losses
from hc_lens.models.reading import Readout
from hc_lens.pruning.losses import faithful_loss
from hc_lens.pruning.teacher import Teacher
from tests.hc_lens.test_language_models import SILENT, load, own, prompts
from tests.lens import REASON
from tests.memory import peak_bytes

Unembed = pytest.importorskip("transformer_lens.components", reason=REASON).Unembed
VOCABULARY = 2_000
ROWS = 21


def large(d_vocab: int = VOCABULARY, n_rows: int = ROWS, dtype=torch.float64):
    """A causal language model with more tokens than it has numbers, and one batch of prompts."""
    model = own(d_vocab=d_vocab, dtype=dtype, seed=1)
    made = [
        {
            "prompt": [1, 2 + row, 3],
            "right": 4,
            "wrong": [5] if row % 2 else [],
            "counterfactual": [3, 2 + row, 6],
            "case": "xy"[row % 2],
        }
        for row in range(n_rows)
    ]
    return model, hc.Prompts.from_rows(made).batches(model, prepend_bos=False)


def table(frame) -> np.ndarray:
    return frame.select_dtypes("number").to_numpy()


def pruned(method: str, **settings):
    def work(model, batches):
        config = hc.PruneConfig(0.2, method=method, steps=2, **settings)
        return hc.prune(model, batches, "zero", config, **SILENT).scores.numpy()

    return work


def evaluated(model, batches):
    source, without = hc.Counterfactual(model), hc.Subnetwork.from_units(model, ["L0.H0"])
    return table(hc.evaluate(model, batches, means=source, subnetwork=without, **SILENT))


WORK = {
    "evaluate": evaluated,
    "scan": lambda model, batches: table(hc.scan(model, batches, "zero", **SILENT)),
    "importance": lambda model, batches: table(hc.importance(model, batches, "zero", **SILENT)),
    "importance, log_odds": lambda model, batches: table(
        hc.importance(model, batches, hc.Counterfactual(model), loss="log_odds", **SILENT)
    ),
    "prune": pruned("gates"),
    "prune, margin": pruned("gates", loss="margin"),
    "importance method": pruned("importance"),
    "greedy": pruned("greedy"),
}


@pytest.fixture
def made(monkeypatch) -> list[int]:
    """The rows whose logits each call of an unembedding makes."""
    calls, real = [], Unembed.forward

    def count(self, residual):
        logits = real(self, residual)
        calls.append(logits.shape[:-1].numel())
        return logits

    # On the class: a forward pass replaced on the model itself counts as a user's hook.
    monkeypatch.setattr(Unembed, "forward", count)
    return calls


@pytest.mark.parametrize("name", sorted(WORK))
def test_no_more_than_a_few_rows_are_unembedded_at_once_and_the_numbers_stay(
    name, made, monkeypatch
):
    model, batches = large()
    monkeypatch.setattr(metrics, "AT_ONCE", ROWS * VOCABULARY)
    whole = WORK[name](model, batches)
    assert max(made) == ROWS
    made.clear()
    monkeypatch.setattr(metrics, "AT_ONCE", 4 * VOCABULARY)
    np.testing.assert_allclose(WORK[name](model, batches), whole, rtol=1e-9, atol=1e-12)
    assert max(made) == 4


def test_means_and_counterfactuals_need_no_unembedding(made):
    model, batches = large()
    (batch,) = batches
    means = hc.collect_means(model, batches, **SILENT)
    bound = hc.Counterfactual(model).on(batch)
    assert made == []
    _, here = model.run_with_cache(**batch.inputs)
    _, there = model.run_with_cache(**batch.counterfactual)
    for name in ("blocks.1.attn.hook_z", "blocks.0.hook_mlp_out"):
        torch.testing.assert_close(means.at_token[name], here[name].mean((0, 1)))
        assert torch.equal(bound.value(name, here[name]), there[name])


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_a_counterfactual_is_run_a_few_rows_at_a_time(family, monkeypatch):
    model = load(family)
    batch = max(prompts(model, family), key=len)
    whole, seen = hc.Counterfactual(model).on(batch), []
    monkeypatch.setattr("hc_lens.models.inputs.rows_at_once", lambda model, inputs: 2)
    monkeypatch.setattr(
        "hc_lens.masks.replacements.read_units",
        lambda model, inputs, read, real=hc.masks.replacements.read_units: (
            seen.append(len(inputs["input"])),
            real(model, inputs, read),
        ),
    )
    pieces = hc.Counterfactual(model).on(batch)
    assert max(seen) == 2
    assert sum(seen) == len(batch)
    for name in ("blocks.2.attn.hook_z", "blocks.0.hook_mlp_out"):
        nothing = torch.zeros(())
        torch.testing.assert_close(
            pieces.value(name, nothing), whole.value(name, nothing), rtol=0, atol=1e-12
        )


def test_a_users_hook_behind_the_last_block_still_runs_for_means():
    model, batches = large()
    seen = []
    model.add_hook("ln_final.hook_normalized", lambda x, hook: seen.append(x.shape))
    hc.collect_means(model, batches, **SILENT)
    assert seen == [(ROWS, 3, 16)]


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_a_users_hook_on_the_model_itself_still_runs_for_means(family):
    model = load(family)
    batches, seen = prompts(model, family), []
    with model.register_forward_pre_hook(lambda *given: seen.append(1)):
        assert not Readout(model).split
        hc.collect_means(model, batches, **SILENT)
    assert len(seen) == len(batches)


def test_a_stream_that_is_not_finite_is_still_found_out():
    model, batches = large()
    with torch.no_grad():
        model.embed.W_E[3] = torch.inf
    with pytest.raises(hc.HcLensError, match="begin at the hook point hook_embed"):
        hc.collect_means(model, batches, **SILENT)


@pytest.mark.parametrize("loss", ["kl", "cross-entropy", "logit_difference", "log_odds", "margin"])
def test_losses_of_a_few_rows_at_a_time_have_the_same_gradient(loss, monkeypatch):
    model, batches = large()
    (batch,) = batches
    teacher, readout = Teacher(model), Readout(model)
    with torch.no_grad(), hc.ablate(model, ["L0.MLP"], "zero"):
        held = readout.held(batch)
    held.requires_grad_()
    named = faithful_loss(loss, batches)

    def found():
        full = partial(teacher.held, batch)
        rows = held_losses(named, batch, held, readout.logits, full)
        return rows.detach(), torch.autograd.grad((rows * torch.arange(ROWS)).sum(), held)[0]

    whole = found()
    monkeypatch.setattr(metrics, "AT_ONCE", 4 * VOCABULARY)
    for piecewise, at_once in zip(found(), whole, strict=True):
        torch.testing.assert_close(piecewise, at_once, rtol=1e-10, atol=1e-12)
    assert whole[1].abs().max() > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", [*sorted(WORK), "means", "counterfactual"])
def test_a_vocabulary_of_50_000_needs_less_than_the_logits_of_one_run(name, monkeypatch):
    model, batches = large(50_000, 200, torch.float32)
    (batch,) = batches
    work = {
        **WORK,
        "means": lambda model, batches: hc.collect_means(model, batches, **SILENT),
        "counterfactual": lambda model, batches: hc.Counterfactual(model).on(batch),
    }[name]
    monkeypatch.setattr(metrics, "AT_ONCE", 4 * 50_000)
    of_one_run = 50_000 * len(batch) * 4
    assert peak_bytes(lambda: work(model, batches)) < of_one_run
