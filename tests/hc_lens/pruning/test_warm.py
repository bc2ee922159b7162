"""Warm starts: the gradients against differences, the start of the gates by hand."""

from __future__ import annotations

import math

import pytest
import torch

import hc_lens as hc
from hc_lens.masks.ablate import mask_edits
from hc_lens.masks.hooks import Handle, has_user_hooks
from hc_lens.pruning.job import Job
from hc_lens.pruning.teacher import Teacher
from hc_lens.pruning.train import GateTraining, ready
from hc_lens.pruning.warm import fisher, standard_logs, warm_start
from tests.batches import random_batches
from tests.hc_lens.pairs import deep_model


def job(loss="kl", **changes) -> Job:
    model = deep_model("bert")
    config = hc.PruneConfig(0.5, 3, steps=4, loss=loss, **changes)
    return ready(model, random_batches(model), hc.Zero(), config, None, Teacher(model), False)


def log_probs(given: Job, batch, mask):
    with torch.no_grad(), Handle(given.model, mask_edits(given.space, mask, hc.Zero().on(batch))):
        return given.teacher.readout.logits(given.teacher.readout.held(batch)).log_softmax(-1)


def differences(given: Job, batch, unit: int, step: float = 1e-4):
    """The slope of every log probability of every row along one unit's mask, from two runs."""
    moved = torch.zeros(len(given.space), dtype=torch.float64)
    moved[unit] = step
    higher, lower = (log_probs(given, batch, 1 + sign * moved) for sign in (1, -1))
    return (higher - lower) / (2 * step)


def test_the_squared_gradients_of_drawn_answers_are_those_of_finite_differences():
    given = job()
    found = fisher(given, given.batches, torch.Generator().manual_seed(0))
    generator, total, rows = torch.Generator().manual_seed(0), torch.zeros(len(given.space)), 0
    for batch in given.batches:
        full = log_probs(given, batch, torch.ones(len(given.space), dtype=torch.float64))
        drawn = torch.multinomial(full.exp(), 1, generator=generator)
        slopes = [differences(given, batch, unit).gather(1, drawn) for unit in range(len(total))]
        total += torch.stack([slope.square().sum() for slope in slopes])
        rows += len(batch.rows)
    assert torch.allclose(found.float(), total / rows, rtol=1e-4)


def test_on_average_over_draws_it_is_the_curvature_of_the_kl():
    given = job()
    (batch, *_) = given.batches
    draws = [fisher(given, [batch], torch.Generator().manual_seed(seed)) for seed in range(200)]
    mean, ones = torch.stack(draws).mean(0), torch.ones(len(given.space), dtype=torch.float64)
    full = log_probs(given, batch, ones)
    for unit in range(len(given.space)):
        mask = ones.clone()
        mask[unit] -= 1e-3
        kl = (full.exp() * (full - log_probs(given, batch, mask))).sum(-1).mean()
        # KL is half the curvature times the squared change, to the leading order.
        assert mean[unit].item() == pytest.approx(2 * kl.item() / 1e-6, rel=0.25)


def test_a_loss_with_a_gradient_is_taken_itself():
    given = job("cross-entropy")
    found = fisher(given, given.batches, torch.Generator())
    total, rows = torch.zeros(len(given.space)), 0
    for batch in given.batches:
        labels = batch.labels[:, None]
        slopes = [differences(given, batch, unit).gather(1, labels) for unit in range(len(total))]
        total += torch.stack([slope.square().sum() for slope in slopes])
        rows += len(batch.rows)
    assert torch.allclose(found.float(), total / rows, rtol=1e-4)


def test_logs_are_standardised_and_a_unit_without_gradient_counts_as_the_least():
    # ln 1, ln 1, ln e^2 and ln e^2 have mean 1 and standard deviation 1.
    found = standard_logs(torch.tensor([0.0, 1.0, math.e**2, math.e**2]))
    assert found.tolist() == pytest.approx([-1, -1, 1, 1])
    assert standard_logs(torch.zeros(3)).tolist() == [0, 0, 0]
    assert standard_logs(torch.full((3,), 5.0)).tolist() == [0, 0, 0]


def test_gates_begin_as_far_apart_as_the_setting_says_and_kept_units_where_they_were():
    keep = ("L0.H1", "L1.MLP")
    cold, warm = job(keep=keep), job(keep=keep, warm_start=2.0)
    before = cold.gates.log_alpha.detach().clone()
    warm_start(warm, warm.batches, torch.Generator().manual_seed(0))
    moved, free = (warm.gates.log_alpha - before).detach(), warm.gates.free
    assert moved[~free].abs().max() == 0
    assert moved[free].mean().item() == pytest.approx(0, abs=1e-5)
    assert moved[free].std(correction=0).item() == pytest.approx(2, rel=1e-5)


def test_training_begins_with_a_warm_start_once_and_leaves_no_hook():
    first = {}
    for weight in (0.0, 1.0):
        training = GateTraining(job(warm_start=weight))
        run = training.run(lambda: 0.5)
        next(run)
        first[weight] = training.gates.log_alpha.detach().clone()
        next(run)
        # Adam moves a gate by about the learning rate a step.
        assert (training.gates.log_alpha - first[weight]).abs().max() < 0.3
        assert not has_user_hooks(training.job.model)
    assert first[1.0].std() > 5 * first[0.0].std()


def test_a_warm_start_below_zero_is_refused():
    with pytest.raises(hc.HcLensError, match="warm_start of 0 or more, got -1"):
        hc.PruneConfig(0.5, warm_start=-1)
