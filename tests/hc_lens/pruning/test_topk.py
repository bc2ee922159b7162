"""Pruning by a hard mask of the top k units."""

from __future__ import annotations

import pytest
import torch

import hc_lens as hc
from hc_lens.pruning.gates import HardConcrete
from hc_lens.pruning.topk import straight_through
from hc_lens.units import UnitSpace

SPACE = UnitSpace((4, 4), (0, 1))


def test_every_row_keeps_exactly_k_units_and_scores_get_the_gradient_of_the_mask() -> None:
    gates = HardConcrete(SPACE, seed=0, init_mean=0.0, keep=["L0.H2"], remove=["L1.H0"])
    mask = straight_through(gates, 4, 50)
    assert set(mask.unique().tolist()) == {0.0, 1.0}
    assert (mask.sum(1) == 4).all()
    assert (mask[:, 2] == 1).all()
    assert (mask[:, 4] == 0).all()
    weights = torch.arange(10.0)
    (mask * weights).sum().backward()
    expected = 50 * weights * gates.free
    assert torch.equal(gates.log_alpha.grad, expected)


def test_the_noise_tries_units_near_the_threshold_and_not_those_far_from_it() -> None:
    gates = HardConcrete(SPACE, seed=0)
    with torch.no_grad():
        gates.log_alpha.copy_(torch.tensor([30.0, 30, 0, 0, 0, 0, -30, -30, -30, -30]))
    share = straight_through(gates, 4, 400).mean(0)
    assert (share[:2] == 1).all()
    assert (share[6:] == 0).all()
    assert ((share[2:6] - 0.5).abs() < 0.1).all()
    assert straight_through(gates, 4, None).shape == (10,)


def test_a_seed_gives_a_bit_identical_result_and_it_finds_a_planted_circuit() -> None:
    config = hc.circuits.PlantedConfig("bert", n_layers=2, n_true=3, noise=1.0, n_rows=64)
    known = hc.circuits.planted(config, "train")
    settings = hc.PruneConfig(0.7, 3, method="top-k", steps=60)
    first, second = (
        hc.prune(known.model, known.batches, "zero", settings, progress=False) for _ in range(2)
    )
    assert torch.equal(first.scores, second.scores)
    assert first.kept == [str(unit) for unit in known.units]
    assert first.config["method"] == "top-k"
    history = first.history
    assert (history["lambda_1"] == 0).all()
    assert history["sparsity"].iloc[-1] == pytest.approx(0.7)
    assert history["sparsity"].iloc[0] == pytest.approx(0.1)
