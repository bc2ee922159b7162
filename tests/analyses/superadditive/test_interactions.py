"""The screen of pairs against finite differences and exact scans."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch

import hc_lens as hc
from hc_lens.analyses.superadditive import ScreenConfig, screen
from tests.hc_lens.pairs import deep_model, pair_batches
from tests.unchecked import checked_again

POOL = ["L0.H1", "L1.H3", "L1.MLP", "L2.H0", "L3.MLP"]
EVERY_PAIR = ScreenConfig(check=None, n_resamples=100)
TWO_WAY = ("entailment", "non-entailment")


@pytest.fixture(scope="module", params=["bert", "gpt2"])
def setting(request):
    model = deep_model(request.param)
    batches = pair_batches(model, 12, token_budget=240)
    return model, batches, hc.collect_means(model, batches, progress=False)


@torch.no_grad()
def mean_of(model, batches, means, measure: str, **entries: float) -> float:
    """The measure under a mask of ones with some other entries, one full pass per batch."""
    space = hc.UnitSpace.of(model)
    mask = torch.ones(len(space), dtype=torch.float64)
    for label, entry in entries.items():
        mask[space.index(label)] = entry
    total, n = 0.0, 0
    for batch in batches:
        with hc.masked(model, mask, means):
            log_probs = batches.log_probs(model(**batch.inputs), batch)
        p = log_probs.exp().gather(1, batch.labels[:, None])
        total += float((p if measure == "probability" else (p / (1 - p)).log()).sum())
        n += len(p)
    return total / n


def difference(model, batches, means, measure: str, label: str, **entries: float) -> float:
    """The derivative in one mask entry at one, by a one-sided difference of second order."""
    h = 1e-4
    f = [mean_of(model, batches, means, measure, **entries, **{label: 1 - k * h}) for k in range(3)]
    return (3 * f[0] - 4 * f[1] + f[2]) / (2 * h)


@pytest.mark.slow
@pytest.mark.parametrize("measure", ["probability", "logit"])
def test_the_gradient_estimate_is_the_change_of_the_gradient(setting, measure):
    model, batches, means = setting
    config = ScreenConfig(measure=measure, check=None, n_resamples=100)
    found = screen(model, batches, means, POOL, config, progress=False)
    estimates = found.estimates.set_index("set")["estimate"]
    for i, j in (("L0.H1", "L2.H0"), ("L1.H3", "L1.MLP"), ("L1.MLP", "L3.MLP")):
        both = [
            difference(model, batches, means, measure, second, **{first: 0.0})
            - difference(model, batches, means, measure, second)
            for first, second in ((i, j), (j, i))
        ]
        assert estimates[f"{i}+{j}"] == pytest.approx(np.mean(both), rel=1e-4, abs=1e-8)


def test_the_hessian_estimate_is_minus_the_mixed_second_difference(setting):
    model, batches, means = setting
    config = ScreenConfig(method="hessian", check=None, n_resamples=100)
    found = screen(model, batches, means, POOL, config, progress=False)
    estimates = found.estimates.set_index("set")["estimate"]
    h = 1e-3
    for i, j in (("L0.H1", "L2.H0"), ("L1.MLP", "L3.MLP")):
        slopes = [
            difference(model, batches, means, "probability", j, **{i: 1 - k * h}) for k in range(3)
        ]
        mixed = (3 * slopes[0] - 4 * slopes[1] + slopes[2]) / (2 * h)
        assert estimates[f"{i}+{j}"] == pytest.approx(-mixed, rel=1e-2, abs=1e-6)


def test_measured_interactions_are_exact(setting):
    model, batches, means = setting
    found = screen(model, batches, means, POOL, EVERY_PAIR, progress=False)
    assert len(found.measured) == len(list(combinations(POOL, 2)))
    f = mean_of(model, batches, means, "probability")
    for row in found.measured.to_dict("records"):
        i, j = row["set"].split("+")
        alone = [mean_of(model, batches, means, "probability", **{unit: 0.0}) for unit in (i, j)]
        both = mean_of(model, batches, means, "probability", **{i: 0.0, j: 0.0})
        drops = [f - value for value in alone]
        assert row["interaction"] == pytest.approx((f - both) - sum(drops))
        assert row["excess"] == pytest.approx((f - both) - sum(max(0, drop) for drop in drops))
        assert row["low"] <= row["excess"] <= row["high"]
    # Equal interactions are equal to the last digit: their ranks are tied.
    wholes = np.round(np.arange(-40, 41) / batches.n_rows, 10)
    assert found.measured["accuracy_interaction"].isin(wholes).all()


def test_the_rank_correlation_is_always_part_of_the_result(setting):
    model, batches, means = setting
    config = ScreenConfig(top=2, check=5, n_resamples=100)
    found = screen(model, batches, means, POOL, config, progress=False)
    table = found.correlations
    assert list(table["pairs"]) == ["random", "random", "top", "top"]
    assert list(table["against"]) == ["probability", "accuracy"] * 2
    assert list(table["n"]) == [5, 5, 2, 2]
    assert -1 <= table["spearman"][0] <= 1
    assert found.measured["top"].sum() == 2
    assert found.measured["random"].sum() == 5
    with pytest.raises(hc.HcLensError, match=r"not given without its rank correlation"):
        ScreenConfig(check=0)


def test_a_seed_draws_the_same_pairs(setting):
    model, batches, means = setting
    configs = [ScreenConfig(top=0, check=4, n_resamples=100, seed=seed) for seed in (0, 0, 1)]
    one, again, other = (
        screen(model, batches, means, POOL, config, progress=False).measured for config in configs
    )
    assert one.equals(again)
    assert list(one["set"]) != list(other["set"])


def test_one_case_alone_can_be_screened(setting):
    model, batches, means = setting
    part = batches.of_cases("left")
    assert part.n_rows == sum(batch.cases.count("left") for batch in batches)
    found = screen(model, part, means, POOL, EVERY_PAIR, progress=False)
    expected = mean_of(model, part, means, "probability")
    alone = mean_of(model, part, means, "probability", **{"L0.H1": 0.0})
    other = mean_of(model, part, means, "probability", **{"L3.MLP": 0.0})
    both = mean_of(model, part, means, "probability", **{"L0.H1": 0.0, "L3.MLP": 0.0})
    row = found.measured.set_index("set").loc["L0.H1+L3.MLP"]
    assert row["interaction"] == pytest.approx(alone + other - both - expected)


def test_two_way_labels_are_screened_in_the_labels_of_the_task():
    model = deep_model("bert")
    batches = pair_batches(model, 12, labels=TWO_WAY)
    means = hc.collect_means(model, batches, progress=False)
    found = screen(model, batches, means, POOL[:3], EVERY_PAIR, progress=False)
    f = mean_of(model, batches, means, "probability")
    alone = [mean_of(model, batches, means, "probability", **{u: 0.0}) for u in POOL[:2]]
    both = mean_of(model, batches, means, "probability", **dict.fromkeys(POOL[:2], 0.0))
    row = found.measured.set_index("set").loc["+".join(POOL[:2])]
    assert row["interaction"] == pytest.approx(sum(alone) - both - f)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "magic"}, "expected a method among"),
        ({"measure": "accuracy"}, "a measure among"),
        ({"top": -1}, "expected top of at least 0"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(hc.HcLensError, match=message):
        checked_again(ScreenConfig(), **settings)


@pytest.mark.parametrize(
    ("units", "message"),
    [
        (["L0.H0"], "expected at least two units in the pool, got 1"),
        (["L0.H0", "L9.H0"], "got L9.H0"),
    ],
)
def test_a_pool_needs_two_units_of_the_model(setting, units, message):
    model, batches, means = setting
    with pytest.raises(hc.HcLensError, match=message):
        screen(model, batches, means, units, progress=False)


def test_labels_are_needed():
    model = deep_model("bert")
    rows = [{"text": "the doctor saw"}, {"text": "a lawyer"}]
    task = hc.Task.from_rows(rows, columns="text", label=None)
    batches = task.batches(model)
    means = hc.collect_means(model, batches, progress=False)
    with pytest.raises(hc.HcLensError, match="expected rows with labels"):
        screen(model, batches, means, POOL, progress=False)
