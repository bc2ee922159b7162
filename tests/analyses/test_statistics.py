"""Statistics with known numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from hc_lens.analyses.statistics import (
    Interval,
    bootstrap_means,
    difference_interval,
    holm,
    mean_interval,
    poisson_weights,
    rank_correlation,
    t_interval,
)
from hc_lens.metrics import wilson


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


def test_the_interval_of_a_mean_and_of_a_difference_follow_from_those_of_its_parts() -> None:
    first, second = Interval(0.6, 0.5, 0.8), Interval(0.2, 0.1, 0.4)
    # The arms below are 0.1 and 0.1, those above 0.2 and 0.2; of the difference 0.1 and 0.2 each.
    mean = mean_interval([first, second])
    assert mean == pytest.approx((0.4, 0.4 - math.sqrt(0.02) / 2, 0.4 + math.sqrt(0.08) / 2))
    difference = difference_interval(first, second)
    assert difference == pytest.approx(
        (0.4, 0.4 - math.hypot(0.1, 0.2), 0.4 + math.hypot(0.2, 0.1))
    )


def test_the_interval_of_a_mean_of_shares_holds_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    truth, rows, held = np.array([0.05, 0.5, 0.9]), np.array([40.0, 60.0, 30.0]), 0
    for _ in range(1000):
        share = rng.binomial(rows.astype(int), truth) / rows
        low, high = wilson(share, rows)
        found = mean_interval([Interval(*each) for each in zip(share, low, high, strict=True)])
        held += found.low <= truth.mean() <= found.high
    assert held / 1000 == pytest.approx(0.95, abs=0.02)


def test_students_interval_is_scipys_and_needs_two_values() -> None:
    values = [0.1, 0.4, 0.2, 0.5]
    expected = stats.t.interval(0.95, 3, loc=np.mean(values), scale=stats.sem(values))
    assert t_interval(values)[1:] == pytest.approx(expected)
    assert math.isnan(t_interval([0.3]).low)
