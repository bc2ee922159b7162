"""The sets with the largest effects: the elimination by hand, and against exact scans."""

from __future__ import annotations

import numpy as np
import pytest

import hc_lens as hc
from hc_lens.scans.scan import scan_rows
from hc_lens.scans.top import decide
from tests.hc_lens.pairs import deep_model, pair_batches


@pytest.fixture(scope="module")
def bert():
    """A model, some hundred rows, and means."""
    model = deep_model("bert")
    batches = pair_batches(model, 500, token_budget=2000)
    return model, batches, hc.collect_means(model, batches, progress=False)


def top(*args, **settings):
    return hc.top(*args, progress=False, **settings)


def exact_effects(bert, sets=None) -> dict[str, float]:
    rows = scan_rows(*bert, sets, progress=False)
    effects = (rows.logit[1:] - rows.logit[:1]).mean(1)
    return dict(zip(rows.sets[1:], effects.tolist(), strict=True))


def largest(effects: dict[str, float], k: int) -> set[str]:
    return set(sorted(effects, key=lambda name: -abs(effects[name]))[:k])


def test_sets_are_decided_where_intervals_do_not_touch():
    # 5 ± 1 is above all, 1 ± 0.5 below two; 3 ± 1 and 2.5 ± 1 are still open for the second place.
    size, half = np.array([5.0, 3.0, 2.5, 1.0]), np.array([1.0, 1.0, 1.0, 0.4])
    inside, outside = decide(size, half, k=2)
    assert inside.tolist() == [True, False, False, False]
    assert outside.tolist() == [False, False, False, True]


def test_an_interval_of_a_size_does_not_reach_below_zero():
    # The second may be anything from 0 to 3, the first is at least 4.
    inside, outside = decide(np.array([5.0, 1.0]), np.array([1.0, 2.0]), k=1)
    assert inside.tolist() == [True, False]
    assert outside.tolist() == [False, True]


def test_of_equal_exact_sizes_the_first_wins():
    inside, outside = decide(np.array([1.0, 2.0, 2.0, 2.0]), np.zeros(4), k=2, exact=True)
    assert inside.tolist() == [False, True, True, False]
    assert (inside ^ outside).all()


def test_all_sets_are_among_as_many_as_there_are():
    inside, _ = decide(np.array([1.0, 1.0]), np.array([9.0, 9.0]), k=5)
    assert inside.all()


def test_the_largest_effects_are_those_of_the_exact_scan(bert):
    found = top(*bert, k=5)
    assert list(found.columns) == ["rank", "set", "n", "logit_change", "low", "high"]
    assert list(found["rank"]) == [1, 2, 3, 4, 5]
    effects = exact_effects(bert)
    assert set(found["set"]) == largest(effects, 5)
    truth = found["set"].map(effects)
    assert (found["low"] <= truth + 1e-9).all()
    assert (truth <= found["high"] + 1e-9).all()
    assert found["logit_change"].abs().is_monotonic_decreasing


def test_pairs_within_a_pool_compete_too(bert):
    pool = hc.pairs(["L0.H0", "L1.H2", "L2.MLP", "L3.H1"])
    found = top(*bert, k=3, sets=pool)
    assert set(found["set"]) == largest(exact_effects(bert, pool), 3)


def test_other_metrics_rank_by_their_distance_from_no_change(bert):
    rows = scan_rows(*bert, progress=False)
    for by, size in (("kl", rows.kl), ("agreement", 1.0 - rows.agreement)):
        found = top(*bert, k=2, by=by)
        means = size[1:].mean(1)
        # Steps of 1 in 500 rows tie easily: as large, whichever set it is.
        chosen = [rows.sets[1:].index(name) for name in found["set"]]
        assert np.allclose(np.sort(means[chosen]), np.sort(means)[-2:])


def test_more_than_there_are_gives_all(bert):
    found = top(*bert, k=100, sets=["L0.H0", "L1.H1"])
    assert set(found["set"]) == {"L0.H0", "L1.H1"}
    assert (found["n"] < 500).all()


def test_sets_with_equal_effects_are_told_apart_by_their_order():
    model = deep_model("bert")
    batches = pair_batches(model, 200)
    for block in model.blocks[1:3]:
        block.attn.W_O.data[0] = 0.0
    # Both heads write nothing, so their removal changes nothing.
    found = top(model, batches, "zero", k=1, sets=["L1.H0", "L2.H0"])
    assert list(found["set"]) == ["L1.H0"]
    assert (found["low"] == found["high"]).all()


def test_one_seed_gives_one_answer(bert):
    assert top(*bert, k=3).equals(top(*bert, k=3))
    assert not top(*bert, k=3).equals(top(*bert, k=3, seed=1))


def test_a_store_is_read_back(bert, tmp_path, monkeypatch):
    from hc_lens.scans.engine import SuffixEngine

    expected = top(*bert, k=3, store=tmp_path)
    monkeypatch.setattr(SuffixEngine, "held", None)
    assert top(*bert, k=3, store=tmp_path).equals(expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"k": 0}, "expected k as a whole number of at least 1, got 0"),
        ({"delta": 0.0}, "expected delta as a number between 0 and 1, such as 0.05, got 0.0"),
        ({"delta": 2}, "expected delta as a number between 0 and 1, such as 0.05, got 2"),
        ({"by": "loss"}, "expected the metric that is to be precise among"),
        ({"sets": []}, "expected at least one set to ablate, got none"),
    ],
)
def test_settings_that_make_no_sense_are_refused(bert, settings, message):
    with pytest.raises(hc.HcLensError, match=message):
        top(*bert, **settings)


def test_two_datasets_cannot_be_ranked_as_one(bert):
    model, batches, means = bert
    with pytest.raises(hc.HcLensError, match=r"the batches of one dataset .* got 2: a, b"):
        top(model, {"a": batches, "b": batches}, means)
