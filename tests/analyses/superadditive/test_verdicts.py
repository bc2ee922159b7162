"""Every verdict on rows written out, and its tests against brute force."""

from __future__ import annotations

import zlib
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import ttest_1samp

from hc_lens.analyses.superadditive import ExcessConfig, excess, minimal
from hc_lens.analyses.superadditive.verdicts import FEWEST_ROWS, MOST_IN_DOUBT
from hc_lens.scans.scan import ScanRows

QUICK = ExcessConfig(n_resamples=100)


def scanned(correct: np.ndarray, case: Any = "swap") -> ScanRows:
    """A scan of the full model, of some heads alone and, in the last row, of all together."""
    heads = [f"L0.H{head}" for head in range(len(correct) - 2)]
    rows = {"dataset": "hans", "case": case, "row": range(correct.shape[1]), "label": 0}
    zeros, logit = np.zeros(correct.shape), np.where(correct, 2.0, -1.0)
    sets = ("full", *heads, "+".join(heads))
    return ScanRows(sets, pd.DataFrame(rows), zeros[..., None], correct, correct, zeros, logit)


def written(*lines: str) -> ScanRows:
    """A scan from lines of 1 (right) and 0 (wrong): the full model, each head alone, together."""
    return scanned(np.array([list(line.replace(" ", "")) for line in lines]) == "1")


def only(rows: ScanRows, config: ExcessConfig = QUICK) -> dict[str, Any]:
    (found,) = excess(rows, config=config).to_dict("records")
    return found


def test_more_than_the_sum_of_the_losses_is_super_additive():
    found = only(
        written(
            "11111 11111 11111 11111",
            "01111 11111 11111 11111",
            "10011 11111 11111 11111",
            "00000 00000 00000 01111",
        )
    )
    assert (found["full"], found["joint"]) == (1.0, 0.2)
    assert (found["drop"], found["sum_of_losses"], found["excess"]) == (0.8, 0.15, 0.65)
    assert found["verdict"] == "super-additive"


def test_the_sum_of_the_losses_is_additive():
    found = only(
        written(
            "11111 11111 11111 11111",
            "01111 11111 11111 11111",
            "10011 11111 11111 11111",
            "00011 11111 11111 11111",
        )
    )
    assert (found["drop"], found["excess"], found["p"]) == (0.15, 0, 1)
    assert found["verdict"] == "additive or less"


def test_a_gain_does_not_make_up_for_a_loss():
    # One head costs 8 of 20 rows, the other gives 5, together they cost 9: 6 more than the sum of
    # the drops, but 1 more than what the first costs alone.
    found = only(
        written(
            "11111 11111 00000 00000",
            "00000 00011 00000 00000",
            "11111 11111 11111 00000",
            "00000 00001 00000 00000",
        )
    )
    assert (found["drop"], found["sum_of_drops"], found["sum_of_losses"]) == (0.45, 0.15, 0.4)
    assert found["excess"] == 0.05
    assert found["p_interaction"] < 0.01 < 0.025 < found["p_holm"]
    assert found["verdict"] == "cannot tell"


def test_where_nothing_is_lost_together_an_interaction_is_not_a_loss():
    found = only(
        written(
            "00000 00000 00000 00000",
            "11111 11111 11110 00000",
            "00000 00111 11111 11111",
            "00000 00000 00000 00000",
        )
    )
    assert (found["drop"], found["sum_of_drops"], found["sum_of_losses"]) == (0, -1.35, 0)
    assert found["verdict"] == "interaction, not a loss"


def test_no_drop_beside_a_sum_of_minus_67_points_is_not_super_additive():
    # 53 of 79 rows are gained in sum, and the joint ablation leaves all 79 wrong, as they were.
    right = np.array([0, 30, 23, 0])[:, None]
    found = excess(scanned(np.arange(79) < right))
    assert found["sum_of_drops"][0] == pytest.approx(-0.671, abs=5e-4)
    assert (found["full"][0], found["joint"][0], found["drop"][0]) == (0, 0, 0)
    assert found["verdict"][0] == "interaction, not a loss"
    assert found["p_holm"][0] == 1
    assert minimal(found).empty


def test_losses_that_use_up_all_accuracy_cannot_tell():
    # Half of the rows are right; the heads take 6 and 5 of these 10 alone, and all together.
    rows = written(
        "11111 11111 00000 00000",
        "00000 01111 00000 00000",
        "11111 00000 00000 00000",
        "00000 00000 00000 00000",
    )
    found = only(rows)
    assert (found["full"], found["sum_of_losses"], found["drop"]) == (0.5, 0.55, 0.5)
    assert found["verdict"] == "cannot tell"
    # Log-odds have no floor: 1.65 lost in sum is more than the mean of 0.5, and more could be lost.
    odds = only(rows, ExcessConfig("logit", n_resamples=100))
    assert (odds["full"], odds["sum_of_losses"], odds["drop"]) == (0.5, 1.65, 1.5)
    assert odds["verdict"] == "additive or less"


def test_a_probability_has_a_floor_too():
    # 0.5 of probability is there; the heads take 0.3 and 0.2 alone, and 0.4 together.
    rows = scanned(np.ones((4, 30), dtype=bool))
    share = np.array([0.5, 0.2, 0.3, 0.1])
    rows.logit[:] = np.log(share / (1 - share))[:, None]
    found = only(rows, ExcessConfig("probability", n_resamples=100))
    assert (found["full"], found["sum_of_losses"], found["drop"]) == (0.5, 0.5, 0.4)
    assert found["verdict"] == "cannot tell"


def test_an_excess_that_is_not_beyond_doubt_cannot_tell():
    found = only(
        written(
            "11111 11111 11111 11111",
            "00111 11111 11111 11111",
            "11111 11111 11111 11111",
            "11111 11111 11111 11000",
        )
    )
    assert found["excess"] == 0.05
    assert found["low"] < 0 < found["high"]
    assert found["verdict"] == "cannot tell"


def test_a_case_with_few_rows_is_not_tested_and_does_not_count_in_the_correction():
    # 19 rows of one case, 20 of the other, and both lose everything, but only together.
    correct = np.ones((4, FEWEST_ROWS - 1 + FEWEST_ROWS), dtype=bool)
    correct[-1] = False
    correct[-1, -1] = True
    cases = ["few"] * (FEWEST_ROWS - 1) + ["enough"] * FEWEST_ROWS
    found = excess(scanned(correct, cases)).set_index("case")
    assert found["verdict"].to_dict() == {"few": "cannot tell", "enough": "super-additive"}
    assert np.isnan(found.loc["few", ["p", "p_holm", "p_interaction"]].astype(float)).all()
    assert found.loc["enough", "p_holm"] == found.loc["enough", "p"]


def test_a_verdict_is_corrected_over_all_rows_of_the_table():
    # On its own a loss of 6 rows of 100 is beyond doubt (p = 0.007); among ten of them it is not.
    one = np.ones((4, 100), dtype=bool)
    one[-1, :6] = False
    assert excess(scanned(one))["verdict"].tolist() == ["super-additive"]
    ten = excess(scanned(np.tile(one, 10), np.repeat(np.arange(10).astype(str), 100)))
    assert ten["p_holm"].tolist() == pytest.approx(list(10 * ten["p"]))
    assert (ten["low"] > 0).any()
    assert set(ten["verdict"]) == {"cannot tell"}


def random_rows(seed: int, n_heads: int, n: int) -> np.ndarray:
    """Right answers, each with a chance of its own: by set and row."""
    rng = np.random.default_rng(seed)
    return rng.random((n_heads + 2, n)) < rng.random((n_heads + 2, 1))


def p_above_zero(values: np.ndarray) -> float:
    found: Any = ttest_1samp(values, 0, alternative="greater")
    return found.pvalue


@pytest.mark.parametrize("n_heads", [2, 4])
def test_p_is_the_largest_of_the_tests_of_every_choice_of_members(n_heads):
    for seed in range(8):
        correct = random_rows(seed, n_heads, 60).astype(float)
        drops = correct[0] - correct[1:]
        choices = [np.array(choice) for choice in product((0, 1), repeat=n_heads)]
        expected = [p_above_zero(drops[-1] - choice @ drops[:-1]) for choice in choices]
        found = only(scanned(correct == 1))
        assert found["p"] == pytest.approx(max(expected), rel=1e-9)
        assert found["p_interaction"] == pytest.approx(expected[-1], rel=1e-9)


def test_members_of_a_large_set_that_clearly_lose_or_gain_go_by_their_sign():
    n_heads = MOST_IN_DOUBT + 2
    rng = np.random.default_rng(0)
    correct = rng.random((n_heads + 2, 200)) < 0.6
    correct[1], correct[2], correct[-1] = False, True, rng.random(200) < 0.05
    drops = correct[0].astype(float) - correct[1:]
    choices = product((0, 1), repeat=n_heads)
    each = np.array([drops[-1] - np.array(choice) @ drops[:-1] for choice in choices])
    t = each.mean(1) / (each.std(1, ddof=1) / np.sqrt(200))
    largest = p_above_zero(each[t.argmin()])
    assert only(scanned(correct))["p"] == pytest.approx(largest, rel=1e-9)


def test_the_lower_end_clips_the_drops_of_each_resample():
    correct = random_rows(3, 3, 50).astype(float)
    drops = correct[0] - correct[1:]
    rng = np.random.default_rng([0, zlib.crc32(b"hans\nswap")])
    clipped, linear, joint = [], [], []
    for weights in rng.multinomial(50, np.full(50, 1 / 50), size=100):
        *alone, together = (weights * drops).sum(1) / 50
        losing = [drop for drop, own in zip(alone, drops, strict=False) if own.mean() > 0]
        clipped.append(together - sum(max(0.0, drop) for drop in alone))
        linear.append(together - sum(losing))
        joint.append(together)
    found = only(scanned(correct == 1))
    assert found["low"] == pytest.approx(np.quantile(clipped, 0.025))
    assert found["high"] == pytest.approx(np.quantile(linear, 0.975))
    # An excess above zero is a drop above zero: in no resample is the drop the smaller of the two.
    assert found["low"] <= np.quantile(joint, 0.025)


def test_units_that_do_nothing_are_seldom_taken_for_super_additive():
    # 300 cases whose every ablation changes as many rows for the better as for the worse.
    rng = np.random.default_rng(1)
    correct = rng.random((5, 300 * 80)) < 0.5
    table = excess(scanned(correct, np.repeat(np.arange(300), 80).astype(str)), config=QUICK)
    assert (table["p"] < 0.025).mean() <= 0.025
    assert not (table["verdict"] == "super-additive").any()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 4), st.integers(5, 120), st.booleans())
def test_no_verdict_contradicts_the_numbers_beside_it(seed, n_heads, n, loses_nothing):
    correct = random_rows(seed, n_heads, n)
    if loses_nothing:
        correct[-1] |= correct[0]
    found = only(scanned(correct))
    assert found["drop"] == pytest.approx(found["full"] - found["joint"])
    assert found["excess"] == pytest.approx(found["drop"] - found["sum_of_losses"])
    assert found["low"] - 1e-9 <= found["excess"] <= found["high"] + 1e-9
    beyond_doubt = min(found["drop"], found["excess"], found["low"]) > 0 and found["p_holm"] < 0.025
    match found["verdict"]:
        case "super-additive":
            assert beyond_doubt
            assert not loses_nothing
        case "additive or less":
            assert found["excess"] <= 0
        case "interaction, not a loss":
            assert found["drop"] <= 0
            assert found["drop"] > found["sum_of_drops"]
        case "cannot tell":
            assert not (beyond_doubt and n >= FEWEST_ROWS)
        case _:
            raise AssertionError(found["verdict"])
