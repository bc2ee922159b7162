"""The tests of a circuit on numbers: p-values that are uniform under the null, and known cases."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binomtest, kstest

from hc_lens.analyses.scorecard.hypotheses import (
    equivalence_p,
    expected_jaccard,
    independence_p,
    jaccard,
    minimality_p,
    rank_p,
)

N = 300


def uniform(p: list[float]) -> float:
    """p-value of the hypothesis that these p-values are uniform."""
    return float(kstest(p, "uniform").pvalue)


def test_a_rank_is_uniform_if_the_circuit_is_one_of_the_random_ones() -> None:
    rng = np.random.default_rng(0)
    p = [rank_p(float(draws[0]), draws[1:]) for draws in rng.normal(size=(N, 200))]
    assert uniform(p) > 0.01
    assert rank_p(9.0, np.arange(9.0)) == pytest.approx(0.1)
    assert rank_p(0.0, np.zeros(9)) == 1.0


def test_minimality_is_uniform_for_units_that_change_what_random_ones_change() -> None:
    rng = np.random.default_rng(1)
    p = [float(minimality_p(draws[:1], draws[1:])[0]) for draws in rng.exponential(size=(N, 200))]
    assert uniform(p) > 0.01
    assert minimality_p(np.array([5.0, 0.0]), np.ones(19)).tolist() == [0.05, 1.0]


def test_independence_is_uniform_for_independent_numbers_and_small_for_related_ones() -> None:
    rng = np.random.default_rng(2)
    p = []
    for _ in range(120):
        first, second = rng.normal(size=(2, 25))
        p.append(independence_p(first, second, rng, 99))
    assert uniform(p) > 0.01
    x = rng.normal(size=60)
    # Related, without a correlation.
    assert independence_p(x**2, x, rng, 199) < 0.02
    assert independence_p(np.zeros(60), x, rng, 99) == 1.0


def test_without_tolerance_equivalence_is_the_sign_test() -> None:
    rng = np.random.default_rng(3)
    model = np.zeros(40)
    for shift in (0.0, 0.3):
        circuit = rng.normal(shift, size=40)
        better = int((circuit > 0).sum())
        theirs = binomtest(better, 40, 0.5).pvalue
        assert equivalence_p(circuit, model, 0.0) == pytest.approx(min(1.0, theirs))


def test_equivalence_is_not_rejected_too_often_and_is_uniform_but_for_its_steps() -> None:
    rng = np.random.default_rng(4)
    p = np.array([equivalence_p(rng.normal(size=2001), np.zeros(2001), 0.0) for _ in range(N)])
    assert uniform(p.tolist()) > 0.01
    # At the edge of what is tolerated no more than the level is rejected.
    edge = [equivalence_p(rng.random(200) - 0.4, np.zeros(200), 0.1) for _ in range(N)]
    for level in (0.05, 0.2):
        assert np.mean(np.array(edge) <= level) < level + 3 * np.sqrt(level * (1 - level) / N)
    assert equivalence_p(np.ones(100), np.zeros(100)) < 1e-10
    assert equivalence_p(np.ones(5), np.ones(5)) == 1.0


def test_the_expected_jaccard_index_is_that_of_drawn_sets() -> None:
    # Of 2 units, two sets of one each are equal or disjoint.
    assert expected_jaccard(1, 1, 2) == 0.5
    assert expected_jaccard(0, 0, 3) == 1.0
    rng = np.random.default_rng(5)
    drawn = []
    for _ in range(4000):
        first, second = (rng.permutation(10) < size for size in (3, 5))
        drawn.append(jaccard(first, second))
    assert np.mean(drawn) == pytest.approx(expected_jaccard(3, 5, 10), abs=0.01)
