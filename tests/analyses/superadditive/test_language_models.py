"""Super-additivity and the screen on language models, against forward passes with hooks."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pandas as pd
import pytest
import torch

import hc_lens as hc
from hc_lens.analyses.superadditive import (
    ExcessConfig,
    ScreenConfig,
    SuperAdditiveConfig,
    analyse,
    excess,
    screen,
)
from hc_lens.analyses.superadditive.drops import ALWAYS
from hc_lens.metrics import NAMED, SMOOTH
from hc_lens.scans.scan import scan_rows
from tests.commands import invoke
from tests.hc_lens.test_language_models import load, prompts, sides
from tests.lens import exact

FAMILIES = ("gpt2", "gpt_neox", "llama", "bert")
POOL = ("L0.H1", "L1.H3", "L1.MLP")
PAIR = ("L0.H1", "L1.MLP")
SILENT = {"progress": False}


def first_logit(logits, batch):
    """A metric of one's own: the logit of each row's first right answer."""
    return logits.gather(1, batch.answers[:, 0, :1])[:, 0]


def by_hand(full, logits, right, wrong) -> dict[str, float]:
    """Every measure of one row, from the logits of the full model and of a run."""
    p, q = full.softmax(-1), logits.softmax(-1)
    label = int(full.argmax())
    p_right, p_label = float(q[right].sum()), float(q[label])
    ratio = float(logits[right].logsumexp(0) - logits[wrong].logsumexp(0))
    best_right, best_wrong = logits[right].max(), logits[wrong].max()
    same = (full[right].max() > full[wrong].max()) == (best_right > best_wrong)
    return {
        "accuracy": float(best_right > best_wrong),
        "agreement": float(same),
        "kl": float((p * (p / q).log()).sum()),
        "logit": ratio,
        "logit_difference": ratio,
        "log_odds": float(np.log(p_right / (1 - p_right))),
        "probability": p_right,
        "loss": -float(np.log(p_right)),
        "margin": float(np.log(p_label / (1 - p_label))),
        "first": float(logits[right[0]]),
    }


@torch.no_grad()
def means_by_hand(model, batches, source, units=(), shares=None) -> pd.DataFrame:
    """The mean of every measure by case under a mask, one full pass per batch."""
    space = hc.UnitSpace.of(model)
    mask = torch.ones(len(space), dtype=torch.float64)
    mask[space.indices(units)] = 0.0
    for unit, share in (shares or {}).items():
        mask[space.index(unit)] = share
    records = []
    for batch in batches:
        at = (torch.arange(len(batch)), batch.reads)
        full = model(**batch.inputs)[at]
        with hc.masked(model, mask, source.on(batch)):
            logits = model(**batch.inputs)[at]
        for row, case in enumerate(batch.cases):
            right, wrong = (ids[ids >= 0] for ids in batch.answers[row])
            records.append({"case": case, **by_hand(full[row], logits[row], right, wrong)})
    return pd.DataFrame(records)


def prepared(family: str, side: str | None = None):
    model = load(family)
    batches = prompts(model, family, side)
    return model, batches, hc.collect_means(model, batches, **SILENT)


@pytest.fixture(scope="module")
def llama():
    return prepared("llama")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_drop_of_every_measure_is_that_of_forward_passes(family):
    for side in sides(family):
        (model, batches, means), close = prepared(family, side), exact(family, 1e-9)
        sets = [[], *([unit] for unit in PAIR), PAIR]
        full, *alone, both = (
            means_by_hand(model, batches, means, units).groupby("case").mean() for units in sets
        )
        scanned = scan_rows(
            model,
            batches,
            means,
            sets[1:],
            metrics={name: name for name in NAMED if name not in ALWAYS} | {"first": first_logit},
            **SILENT,
        )
        for measure in (*NAMED, "first"):
            config = ExcessConfig(measure=measure, n_resamples=100)
            found = excess(scanned, config=config).set_index("case")
            sign = -1 if measure in ("kl", "loss") else 1
            drops = [sign * (full - each)[measure] for each in (*alone, both)]
            losses = sum(drop.clip(lower=0) for drop in drops[:-1])
            assert np.allclose(found["full"], full[measure], atol=close), measure
            assert np.allclose(found["joint"], both[measure], atol=close), measure
            assert np.allclose(found["drop"], drops[-1], atol=close), measure
            assert np.allclose(found["sum_of_drops"], sum(drops[:-1]), atol=close), measure
            assert np.allclose(found["excess"], drops[-1] - losses, atol=close), measure


@pytest.mark.parametrize("measure", ["probability", "loss", "first"])
def test_analyse_scans_the_measure_that_it_needs(llama, measure):
    model, batches, means = llama
    config = SuperAdditiveConfig(measure=measure, pool=POOL, max_size=2, n_resamples=100)
    metrics = {"first": first_logit} if measure == "first" else ()
    found = analyse(model, batches, means, PAIR, config, metrics=metrics, **SILENT)
    expected = means_by_hand(model, batches, means, PAIR).groupby("case")[measure].mean()
    joint = found.excess[found.excess["set"] == "+".join(PAIR)].set_index("case")["joint"]
    assert np.allclose(joint, expected[joint.index], atol=1e-9)
    assert list(found.layout.index)[-1] == "+".join(PAIR)


def test_only_a_measure_that_cannot_fall_below_zero_can_be_used_up():
    rows = pd.DataFrame({"dataset": "d", "case": "c", "row": range(40), "label": 0})
    # Each head alone takes all of it away, and both take no more.
    sets = ("full", "L0.H0", "L0.H1", "L0.H0+L0.H1")
    values = np.repeat([[0.5], [0.0], [0.0], [0.0]], 40, axis=1)
    right = values > 0
    more = {"probability": values, "log_odds": values}
    scanned = hc.ScanRows(sets, rows, None, right, right, values, values, more)
    verdicts = {
        measure: excess(scanned, config=ExcessConfig(measure=measure))["verdict"][0]
        for measure in ("accuracy", "probability", "logit_difference", "log_odds")
    }
    assert verdicts == {
        "accuracy": "cannot tell",
        "probability": "cannot tell",
        "logit_difference": "additive or less",
        "log_odds": "additive or less",
    }


def test_a_rise_of_the_divergence_is_a_drop_and_needs_no_label():
    rows = pd.DataFrame({"dataset": "d", "case": "c", "row": range(40), "label": -1})
    sets = ("full", "L0.H0", "L0.H1", "L0.H0+L0.H1")
    kl = np.repeat([[0.0], [0.1], [0.2], [0.9]], 40, axis=1)
    scanned = hc.ScanRows(sets, rows, None, kl > 9, kl > 9, kl, np.full_like(kl, np.nan))
    (found,) = excess(scanned, config=ExcessConfig(measure="kl")).to_dict("records")
    assert (found["n"], found["full"], found["joint"]) == (40, 0.0, 0.9)
    assert (found["drop"], found["sum_of_losses"]) == pytest.approx((0.9, 0.3))
    assert found["verdict"] == "super-additive"
    with pytest.raises(hc.HcLensError, match="expected rows with labels, got none"):
        excess(scanned, config=ExcessConfig(measure="logit_difference"))


def test_a_measure_that_was_not_scanned_is_refused(llama):
    model, batches, means = llama
    scanned = scan_rows(model, batches, means, [*POOL, PAIR], **SILENT)
    with pytest.raises(hc.HcLensError, match=r"among those of the scan, accuracy, .*'probability'"):
        excess(scanned, config=ExcessConfig(measure="probability"))
    with pytest.raises(hc.HcLensError, match=r"expected a measure among .*got 'first'"):
        analyse(model, batches, means, PAIR, SuperAdditiveConfig(measure="first"), **SILENT)
    with pytest.raises(hc.HcLensError, match=r"expected a measure among .*got 'first'"):
        screen(model, batches, means, POOL, ScreenConfig(measure="first"), **SILENT)


def test_the_command_refuses_an_unknown_measure_at_once():
    given = ("--model", "none", "--task", "none", "--core", "L0.H0,L0.H1", "--measure", "magic")
    result = invoke("analyse", "superadditive", *given)
    assert result.exit_code != 0
    assert "expected a measure among" in result.output


def slope(model, batches, means, measure: str, unit: str, removed=()) -> float:
    """The derivative in one entry of the mask at one, by a one-sided difference."""
    h = 1e-4
    f = [
        means_by_hand(model, batches, means, removed, {unit: 1 - k * h})[measure].mean()
        for k in range(3)
    ]
    return (3 * f[0] - 4 * f[1] + f[2]) / (2 * h)


@pytest.mark.slow
@pytest.mark.parametrize("measure", [*SMOOTH, "first"])
def test_the_gradient_estimate_is_the_change_of_the_gradient(llama, measure):
    check_estimates(*llama, measure)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "bert"])
def test_the_estimate_is_right_in_every_kind_of_language_model(family):
    for side in sides(family):
        check_estimates(*prepared(family, side), "logit_difference")


def check_estimates(model, batches, means, measure: str) -> None:
    """The estimates against differences, the measured interactions against forward passes."""
    config = ScreenConfig(measure=measure, check=None, n_resamples=100)
    found = screen(
        model, batches, means, POOL, config, metrics={"first": first_logit}, **SILENT
    ).measured.set_index("set")
    sign = -1 if measure in ("kl", "loss") else 1
    for i, j in combinations(POOL, 2):
        both = [
            slope(model, batches, means, measure, second, [first])
            - slope(model, batches, means, measure, second)
            for first, second in ((i, j), (j, i))
        ]
        row = found.loc[f"{i}+{j}"]
        assert row["estimate"] == pytest.approx(sign * np.mean(both), rel=1e-4, abs=1e-6)
        f, f_i, f_j, f_ij = (
            means_by_hand(model, batches, means, units)[measure].mean()
            for units in ([], [i], [j], [i, j])
        )
        assert row["interaction"] == pytest.approx(-sign * (f_ij - f_i - f_j + f), abs=1e-9)


def test_the_hessian_of_a_prompts_probability_is_its_second_difference():
    model, batches, means = prepared("gpt2")
    config = replace(ScreenConfig(check=None, n_resamples=100), method="hessian")
    found = screen(model, batches, means, PAIR, config, **SILENT).estimates["estimate"][0]
    h, mixed = 1e-3, 0.0
    for (i, a), (j, b) in product(enumerate((3, -4, 1)), repeat=2):
        shares = dict(zip(PAIR, (1 - i * h, 1 - j * h), strict=True))
        f = means_by_hand(model, batches, means, (), shares)["probability"].mean()
        mixed += a * b * f / (2 * h) ** 2
    assert found == pytest.approx(-mixed, rel=1e-3, abs=1e-6)
