"""Optimal ablation: constants that cost least."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import hc_lens as hc
from hc_lens.errors import HcLensError
from hc_lens.masks.hooks import mlp_name
from tests import tiny
from tests.batches import Batches, Rows, random_batches
from tests.lens import HookedTransformer, HookedTransformerConfig, hooked_only


@pytest.fixture(scope="module")
def known():
    config = hc.circuits.PlantedConfig("bert", n_layers=2, n_true=3, noise=2.0, n_rows=60)
    return hc.circuits.planted(config, "train")


@pytest.fixture(scope="module")
def means(known):
    return hc.collect_means(known.model, known.batches, progress=False)


def cost(model, batches, source) -> float:
    """KL summed over every unit ablated alone."""
    table = hc.scan(model, {"rows": batches}, source, progress=False)
    return float(table["kl"].sum())


def test_the_constants_cost_less_than_the_means(family) -> None:
    model = hc.load(tiny.tiny_hf(family))
    batches = random_batches(model, ((7,) * 12, (5,) * 12))
    means = hc.collect_means(model, batches, progress=False)
    config = hc.OptimalConfig(steps=200)
    found = hc.optimal_constants(model, batches, means, config, progress=False)
    assert cost(model, batches, found) < 0.95 * cost(model, batches, means)


def test_a_seed_gives_the_same_constants_which_are_saved_like_means(known, means, tmp_path) -> None:
    config = hc.OptimalConfig(steps=5)
    state = torch.get_rng_state()
    first, again = (
        hc.optimal_constants(known.model, known.batches, means, config, progress=False)
        for _ in range(2)
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert first.fingerprint == again.fingerprint != means.fingerprint
    other = replace(config, seed=1)
    found = hc.optimal_constants(known.model, known.batches, means, other, progress=False)
    assert found.fingerprint != first.fingerprint
    assert hc.Means.load(first.save(tmp_path / "m.safetensors")).fingerprint == first.fingerprint


@hooked_only
def test_of_a_squared_change_the_best_constant_gives_the_mean_output() -> None:
    cfg = HookedTransformerConfig(
        n_layers=1, d_model=6, n_heads=1, d_head=3, d_mlp=8, n_ctx=6, d_vocab=12, d_vocab_out=2,
        act_fn="relu", normalization_type=None, seed=0, device="cpu", dtype=torch.float64,
    )  # fmt: skip
    model = HookedTransformer(cfg).requires_grad_(False).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    ids = torch.randint(12, (30, 4), generator=generator)
    inputs = {"input": ids, "attention_mask": torch.ones_like(ids)}
    batches = Batches([Rows(inputs, torch.arange(30), torch.arange(30) % 1, ("all",) * 30)])
    means = hc.collect_means(model, batches, progress=False)
    config = hc.OptimalConfig(steps=400, lr=0.05, loss="logit_difference")
    found = hc.optimal_constants(model, batches, means, config, progress=False)
    _, cache = model.run_with_cache(ids)
    direction = model.unembed.W_U[:, 0] - model.unembed.W_U[:, 1]
    best = (cache[mlp_name(0)][:, -1] @ direction).mean()
    assert found.at_token[mlp_name(0)] @ direction == pytest.approx(best.item(), rel=0.02)
    # The mean over all positions is something else.
    assert means.at_token[mlp_name(0)] @ direction != pytest.approx(best.item(), rel=0.05)


def test_bad_input_is_named(known, means) -> None:
    by_position = hc.collect_means(known.model, known.batches, by="position", progress=False)
    with pytest.raises(HcLensError, match="expected means by token"):
        hc.optimal_constants(known.model, known.batches, by_position)
    with pytest.raises(HcLensError, match="a learning rate above 0"):
        hc.OptimalConfig(lr=0.0)
    with pytest.raises(HcLensError, match="steps"):
        hc.OptimalConfig(steps=0)
