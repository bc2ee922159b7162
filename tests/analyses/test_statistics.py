"""Statistics with known numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hc_lens.analyses.statistics import bootstrap_means, holm, poisson_weights, rank_correlation


def test_holm_multiplies_by_the_tests_that_are_left():
    assert np.allclose(holm(np.array([0.01, 0.04, 0.03])), [0.03, 0.06, 0.06])
    assert holm(np.array([0.9, 0.8])).max() == 1


def test_bootstrap_means_spread_as_the_mean_of_the_rows_does(monkeypatch):
    values = np.random.default_rng(0).normal(size=(2, 400))
    means = bootstrap_means(values, 4000, np.random.default_rng(1))
    assert means.shape == (4000, 2)
    assert means.mean(0) == pytest.approx(values.mean(1), abs=0.005)
    assert means.std(0) == pytest.approx(values.std(1) / math.sqrt(400), rel=0.05)
    # The same draws, however many of them are held at once.
    monkeypatch.setattr("hc_lens.analyses.statistics.BLOCK", 400 * 7)
    again = bootstrap_means(values, 4000, np.random.default_rng(1))
    np.testing.assert_allclose(again, means)


def test_the_weights_of_a_row_do_not_depend_on_the_others():
    together, alone = poisson_weights([3, 8], 50, seed=1), poisson_weights([8], 50, seed=1)
    assert together[1].tolist() == alone[0].tolist()
    assert together[0].tolist() != together[1].tolist()
    assert poisson_weights(range(200), 50, seed=1).mean() == pytest.approx(1, abs=0.05)


def test_a_rank_correlation_needs_two_sides_that_vary():
    found = rank_correlation(np.array([0.1, 0.2, 0.4]), np.array([1.0, 8.0, 9.0]))
    assert (found.rho, found.n) == (pytest.approx(1), 3)
    flat = rank_correlation(np.array([0.1, 0.2, 0.4]), np.ones(3))
    assert math.isnan(flat.rho)
    assert math.isnan(flat.p)
