"""Composition scores against the products of whole matrices, and the random baseline."""

from __future__ import annotations

import pytest
import torch

import hc_lens as hc
from hc_lens.analyses.composition.weights import weight_scores
from hc_lens.errors import HcLensError
from tests import tiny
from tests.hc_lens.pairs import deep_model, pair_batches


def fold(norm, matrix, scale: float = 1.0):
    """Rows of a matrix behind a linearised layer norm."""
    return (matrix - matrix.mean(-1, keepdim=True)) * norm.w / scale


def score(sent, reads) -> float:
    return float((sent @ reads).norm() / (sent.norm() * reads.norm()))


def lookup(table, sender, receiver, kind, via=""):
    found = table[
        (table["sender"] == sender)
        & (table["receiver"] == receiver)
        & (table["kind"] == kind)
        & (table["via"] == via)
    ]
    assert len(found) == 1
    return found.iloc[0]


def test_a_post_norm_path_goes_through_the_norms_between():
    model = deep_model("bert")
    table = weight_scores(model, progress=False)
    first, second, third = model.blocks[0], model.blocks[1], model.blocks[2]
    own = fold(first.ln1, first.attn.W_V[1] @ first.attn.W_O[1])
    sent = fold(second.ln2, fold(second.ln1, fold(first.ln2, own)))
    attn = third.attn
    matrices = {
        "q": attn.W_Q[3] @ attn.W_K[3].T,
        "k": attn.W_K[3] @ attn.W_Q[3].T,
        "v": attn.W_V[3] @ attn.W_O[3],
    }
    for kind, reads in matrices.items():
        found = lookup(table, "L0.H1", "L2.H3", kind)
        assert found["score"] == pytest.approx(score(sent, reads))
        assert found["strength"] == pytest.approx(float((sent @ reads).norm()))
    assert lookup(table, "L0.H1", "L0.MLP", "mlp")["score"] == pytest.approx(
        score(own, first.mlp.W_in)
    )


def test_a_pre_norm_path_ends_in_the_receivers_own_norm():
    model = deep_model("gpt2")
    table = weight_scores(model, progress=False)
    attn = model.blocks[0].attn
    written = attn.W_V[1] @ attn.W_O[1]
    reader = model.blocks[2]
    reads = reader.attn.W_V[3] @ reader.attn.W_O[3]
    expected = score(fold(reader.ln1, written), reads)
    assert lookup(table, "L0.H1", "L2.H3", "v")["score"] == pytest.approx(expected)
    last = score(fold(model.ln_final, written), model.unembed.W_U)
    assert lookup(table, "L0.H1", "classifier", "classifier")["score"] == pytest.approx(last)


def test_rows_give_the_mean_scale_of_each_norm_and_leave_scores_alone():
    model = deep_model("bert")
    batches = pair_batches(model)
    without, given = (weight_scores(model, rows, progress=False) for rows in (None, batches))
    assert (without["score"] - given["score"]).abs().max() < 1e-12
    total, count = 0.0, 0
    for batch in batches:
        _, cache = model.run_with_cache(**batch.inputs)
        scale = cache["blocks.0.ln1.hook_scale"][..., 0]
        total, count = total + (scale * batch.mask).sum(), count + batch.mask.sum()
    ratio = lookup(without, "L0.H1", "L0.MLP", "mlp")["strength"]
    ratio /= lookup(given, "L0.H1", "L0.MLP", "mlp")["strength"]
    assert ratio == pytest.approx(float(total / count))


def test_a_path_through_an_mlp_is_linearised_at_its_mean_gradient():
    model = deep_model("bert")
    batches = pair_batches(model)
    table = weight_scores(model, batches, ["L0.H1"], mlps=True, progress=False)
    first = model.blocks[0]
    gate, count = 0.0, 0
    for batch in batches:
        _, cache = model.run_with_cache(**batch.inputs)
        x = cache["blocks.0.mlp.hook_pre"].detach().requires_grad_()
        (slope,) = torch.autograd.grad(torch.nn.functional.gelu(x).sum(), x)
        gate = gate + (slope * batch.mask[..., None]).sum((0, 1))
        count += batch.mask.sum()
    own = fold(first.ln1, first.attn.W_V[1] @ first.attn.W_O[1])
    sent = (own @ first.mlp.W_in * (gate / count)) @ first.mlp.W_out
    reads = model.blocks[1].attn.W_V[2] @ model.blocks[1].attn.W_O[2]
    found = lookup(table, "L0.H1", "L1.H2", "v", via="L0.MLP")
    assert found["score"] == pytest.approx(score(fold(first.ln2, sent), reads))
    assert set(table["via"]) == {"", "L0.MLP", "L1.MLP", "L2.MLP", "L3.MLP"}


def test_the_baseline_is_the_mean_over_random_bases():
    model = deep_model("bert")
    found = lookup(weight_scores(model, draws=4000, progress=False), "L0.H1", "L2.H3", "v")
    generator = torch.Generator().manual_seed(7)
    first, reader = model.blocks[0].attn, model.blocks[2].attn
    blocks = (model.blocks[0].ln1, model.blocks[0].ln2, model.blocks[1].ln1, model.blocks[1].ln2)
    sent = first.W_V[1] @ first.W_O[1]
    for norm in blocks:
        sent = fold(norm, sent)
    reads = reader.W_V[3] @ reader.W_O[3]
    drawn = []
    for _ in range(4000):
        noise = torch.randn(32, 32, generator=generator, dtype=torch.float64)
        drawn.append(score(sent @ torch.linalg.qr(noise).Q, reads))
    drawn = torch.tensor(drawn)
    error = 2**0.5 * drawn.std() / len(drawn) ** 0.5
    assert abs(found["baseline"] - drawn.mean()) < 4 * error
    assert found["excess"] == pytest.approx(found["score"] - found["baseline"])
    assert found["ratio"] == pytest.approx(found["score"] / found["baseline"])


def test_a_seed_gives_the_same_baseline_again():
    model = deep_model("gpt2")
    one, same, other = (weight_scores(model, seed=s, progress=False) for s in (0, 0, 1))
    assert one.equals(same)
    assert not one["baseline"].equals(other["baseline"])


@pytest.mark.parametrize("sender", ["L0.MLP", "L0.H1+L1.H2"])
def test_a_sender_that_is_no_single_head_is_refused(sender):
    with pytest.raises(HcLensError, match="expected single heads as senders"):
        weight_scores(deep_model("bert"), senders=[sender])


def test_gated_mlps_and_wrong_draws_are_refused():
    model = hc.load(tiny.tiny_hf("llama"), tokenizer=tiny.tokenizer_for("llama"))
    with pytest.raises(HcLensError, match="expected MLPs without gates"):
        weight_scores(model, mlps=True, progress=False)
    with pytest.raises(HcLensError, match="expected draws as a whole number of at least 1"):
        weight_scores(model, draws=0)
