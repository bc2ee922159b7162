"""Estimates from samples: hand-known numbers, and the share of intervals that hold."""

from __future__ import annotations

import numpy as np
import pytest

from hc_lens.scans import intervals
from hc_lens.scans.intervals import Known, Looks, controlled, estimate, leverage

ONE_LOOK = Looks(0.95, most=1)


def known(rows: int, first=None) -> Known:
    """Nothing is shared; perhaps there is a first order."""
    return Known(first, np.zeros((rows, 0)))


def column(values) -> np.ndarray:
    return np.asarray(values, dtype=float)[:, None]


def test_the_half_width_is_student_s_with_the_end_of_the_population():
    # t of 9 degrees of freedom at 97.5% is 2.262157; sqrt(1 - 10 / 40) is 0.866025.
    found = ONE_LOOK.half_width(np.array([2.0]), np.zeros(1), n=10, total=40)
    assert found == pytest.approx(2.262157 * 2 / np.sqrt(10) * 0.866025, rel=1e-5)


def test_looks_and_sets_share_the_error_evenly():
    # 5% over 5 looks of 2 sets is 0.5%, of which each side has a half.
    shared = Looks(0.95, most=5, sets=2)
    assert shared.factor(10**6) == pytest.approx(2.807, abs=1e-3)
    assert ONE_LOOK.factor(10**6) == pytest.approx(1.960, abs=1e-3)


def test_without_any_spread_the_width_is_that_of_the_rule_of_three():
    # 5% over 5 looks is 1%. At that error 300 rows that are all alike may leave a share of
    # log(2 / 0.01) / 300 = 0.0177 that is unlike them.
    found = Looks(0.95, most=5).half_width(np.zeros(1), np.ones(1), n=300, total=10**9)
    assert np.log(2 / 0.01) / 300 < found < 1.1 * np.log(2 / 0.01) / 300


@pytest.mark.parametrize(("spread", "largest"), [(2.0, 0.0), (2.0, 9.0), (0.0, 9.0)])
def test_with_enough_rows_the_half_width_is_the_precision(spread, largest, monkeypatch):
    # The quantile itself falls as n grows; hold it fixed to compare.
    monkeypatch.setattr(Looks, "factor", lambda self, n: 2.0)
    given = np.array([spread]), np.array([largest])
    n = int(ONE_LOOK.enough(*given, n=10, total=5000, precision=0.1)[0])
    assert ONE_LOOK.half_width(*given, n=n, total=5000) == pytest.approx(0.1, rel=0.05)


def test_all_rows_leave_no_doubt():
    effects = column([1, 2, 6])
    found = estimate(effects, known(3), certain=1, total=3, looks=ONE_LOOK)
    assert (found.mean, found.half) == (3.0, 0.0)


def test_rows_measured_for_certain_count_as_themselves_and_the_others_for_the_rest():
    effects = column([100, 1, 2, 3])
    found = estimate(effects, known(4), certain=1, total=11, looks=ONE_LOOK)
    # The ten others are 2 on average: (100 + 10 * 2) / 11.
    assert found.mean == pytest.approx((100 + 20) / 11)


def test_a_row_that_stands_out_in_any_column_has_leverage():
    columns = np.zeros((5, 2))
    columns[3, 1], columns[1, 0], columns[2, 0] = 8.0, 1.0, -1.0
    assert leverage(columns).argmax() == 3
    assert list(np.argsort(-leverage(columns))[1:3]) == [1, 2]
    assert not leverage(np.ones((4, 2))).any()


def test_a_perfect_first_order_leaves_no_error():
    rng = np.random.default_rng(0)
    first = column(rng.normal(size=1000))
    first -= first.mean()
    effects, sample = 3 * first + 0.25, rng.permutation(1000)[:100]
    found = estimate(effects[sample], known(100, first[sample]), 0, 1000, ONE_LOOK)
    assert effects[sample].mean() != pytest.approx(0.25, abs=0.1)
    # A row's worth of zeros in the fit of c leaves about a hundredth.
    assert found.mean == pytest.approx(0.25, abs=0.01)
    assert found.half < 0.02


def test_a_useless_first_order_changes_nothing():
    rng = np.random.default_rng(0)
    effects, first = column(rng.normal(size=60)), column(np.where(np.arange(60) % 2, 1e6, -1e6))
    worse = first * rng.permutation(np.where(np.arange(60) % 3, 1, -1))[:, None]
    found = controlled(effects, known(60, worse), certain=0)
    assert found.std() <= effects.std()


def test_each_set_has_its_own_choice():
    rng = np.random.default_rng(0)
    first = rng.normal(size=(200, 2))
    effects = np.column_stack([first[:, 0], rng.normal(size=200)])
    found = controlled(effects, known(200, first), certain=0)
    assert found[:, 0].std() < 0.05
    assert found[:, 1].std() == pytest.approx(effects[:, 1].std(), rel=0.05)


def test_what_is_known_of_all_sets_is_taken_off_too():
    rng = np.random.default_rng(0)
    shared = rng.normal(size=(200, 2))
    effects = shared @ np.array([[1.0, -2.0], [3.0, 0.5]])
    found = controlled(effects, Known(None, shared), certain=0)
    assert (found.std(0) < 0.1).all()


def test_a_row_is_corrected_with_what_other_rows_say():
    rng = np.random.default_rng(0)
    effects, first = column(rng.normal(size=50)), column(rng.normal(size=50))
    effects += 2 * first
    changed = effects.copy()
    changed[10] += 5.0
    before, after = (controlled(x, known(50, first), 0) for x in (effects, changed))
    fold = np.arange(50) % intervals.FOLDS == 10 % intervals.FOLDS
    # In its own fold only the row itself has changed, by as much.
    assert np.allclose((after - before)[fold].sum(), 5.0)
    assert np.count_nonzero(np.abs(after - before)[fold] > 1e-9) == 1
    assert (np.abs(after - before)[~fold] > 1e-9).any()


def test_too_few_rows_fit_no_coefficients():
    effects, first = column([1.0, 2.0, 4.0]), column([1.0, 2.0, 4.0])
    assert np.array_equal(controlled(effects, known(3, first), 0), effects)


def heavy_tailed(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Effects of which ten rows of two thousand hold nearly all variance, and their first order."""
    first = rng.normal(scale=0.05, size=2000)
    first[:10] = -6.0
    return column(first + rng.normal(scale=0.02, size=2000)), column(first)


def share_that_holds(effects, first, certain: int, reps: int = 300) -> float:
    """The share of intervals after a look at 60 rows that hold the mean of all."""
    order = np.argsort(-leverage(first), kind="stable")
    rest = order[certain:]
    centred, held = first - first[rest].mean(0), 0
    for seed in range(reps):
        drawn = np.random.default_rng(seed).permutation(rest)[:60]
        rows = np.concatenate([order[:certain], drawn])
        found = estimate(
            effects[rows], known(len(rows), centred[rows]), certain, len(effects), ONE_LOOK
        )
        held += bool(abs(found.mean - effects.mean(0)) <= found.half)
    return held / reps


def test_intervals_hold_for_effects_with_heavy_tails_as_rows_that_stand_out_are_taken():
    effects, first = heavy_tailed(np.random.default_rng(0))
    assert share_that_holds(effects, first, certain=40) >= 0.95
    # Without these rows and without a first order a sample hardly ever sees the tail.
    assert share_that_holds(effects, np.zeros_like(first), certain=0) < 0.6


def test_intervals_of_steps_hold_though_most_samples_show_no_change(monkeypatch):
    rng = np.random.default_rng(0)
    effects = column(rng.random(2000) < 0.02)
    looks = Looks(0.95, most=1, largest=1.0)

    def held(looks: Looks) -> float:
        hits = 0
        for seed in range(300):
            rows = np.random.default_rng(seed).permutation(2000)[:60]
            found = estimate(effects[rows], known(60), 0, 2000, looks)
            hits += bool(abs(found.mean - effects.mean()) <= found.half)
        return hits / 300

    assert held(looks) >= 0.95
    monkeypatch.setattr(intervals, "HIDDEN", 0)
    assert held(ONE_LOOK) < 0.8
