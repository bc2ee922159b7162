"""Paths: exact counts, one run, determinism, and going on from the middle."""

from __future__ import annotations

import itertools

import pytest
import torch

import hc_lens as hc
from hc_lens.pruning.path import SameCountWarning, walk
from hc_lens.pruning.train import prune

SPARSITIES = (0.1, 0.3, 0.5, 0.8)


@pytest.fixture(scope="module")
def setting():
    model = hc.organism.load()
    batches = hc.organism.task().batches(model, "train", limit=48, token_budget=256)
    return model, batches, hc.collect_means(model, batches, progress=False)


def config(**changes) -> hc.PathConfig:
    return hc.PathConfig(changes.pop("sparsities", SPARSITIES), **{"steps": 20, **changes})


def test_each_subnetwork_has_exactly_its_sparsity_and_says_it(setting):
    path = hc.prune_path(*setting, config(), progress=False)
    assert [len(found.removed) for found in path] == [4, 11, 18, 29]  # of 36 units
    assert [found.config["sparsity"] for found in path] == list(SPARSITIES)


def test_the_target_rises_a_lead_beyond_the_highest_sparsity_and_masks_are_read_in_between():
    settings = config(steps=100, warmup=0.9, lead=0.1)
    assert settings.target(45) == pytest.approx(0.45)
    assert settings.target(90) == settings.target(100) == pytest.approx(0.9)
    read = {each: [settings.passed(each, step) for step in range(101)] for each in SPARSITIES}
    # The target is step / 100: 0.1 is read at 0.2, 0.3 at 0.4, 0.5 at 0.6, the highest at the end.
    assert [list(passed).index(True) for passed in read.values()] == [20, 40, 60, 100]


def test_the_target_never_asks_for_more_than_all_units():
    assert config(sparsities=(0.5, 0.99), lead=0.1).top == 1.0


def test_each_mask_removes_the_lowest_gates_of_its_own_step(setting):
    for found in hc.prune_path(*setting, config(), progress=False):
        scores = found.scores
        assert scores[found.keep].min() >= scores[~found.keep].max()
    steps = [
        found.history["step"].iloc[-1]
        for found in hc.prune_path(*setting, config(), progress=False)
    ]
    assert steps == sorted(steps)
    assert steps[-1] == 20


def test_a_path_of_one_sparsity_trains_as_prune_does_with_the_same_schedule(setting):
    path = hc.prune_path(*setting, config(sparsities=(0.4,), seed=3, lead=0.0), progress=False)
    alone = prune(*setting, hc.PruneConfig(0.4, 3, steps=20, warmup=0.9), progress=False)
    assert torch.equal(path[0].scores, alone.scores)
    assert torch.equal(path[0].keep, alone.keep)


def test_the_same_seed_gives_the_same_path_and_another_seed_another(setting):
    one, again, other = (
        hc.prune_path(*setting, config(seed=seed), progress=False) for seed in (1, 1, 2)
    )
    assert one == again
    assert not torch.equal(one[-1].scores, other[-1].scores)


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_a_path_goes_on_from_any_mask_as_if_it_had_not_stopped(setting, stop):
    settings = config(accumulate=2)
    whole = hc.prune_path(*setting, settings, progress=False)
    begun = list(itertools.islice(walk(*setting, settings, progress=False), stop))
    rest = walk(*setting, settings, state=begun[-1][1], progress=False)
    assert [found for found, _ in begun] + [found for found, _ in rest] == whole


def test_a_path_goes_on_between_two_masks_that_are_read_after_one_step(setting):
    settings = config(sparsities=(0.1, 0.12, 0.5), steps=10)  # the target rises by 0.06 a step
    whole = list(walk(*setting, settings, progress=False))
    assert whole[0][1]["records"].equal(whole[1][1]["records"])
    rest = walk(*setting, settings, state=whole[0][1], progress=False)
    assert [found for found, _ in rest] == [found for found, _ in whole[1:]]


def test_the_model_gets_no_gradients_and_its_own_setting_is_put_back(setting):
    model = setting[0]
    before = [parameter.requires_grad for parameter in model.parameters()]
    walked = walk(*setting, config(), progress=False)
    next(walked)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    walked.close()
    assert [parameter.requires_grad for parameter in model.parameters()] == before


def test_neighbours_that_remove_the_same_number_are_said(setting):
    with pytest.warns(SameCountWarning, match=r"0\.5 and 0\.51, which both remove 18 of 36"):
        hc.prune_path(*setting, config(sparsities=(0.5, 0.51), steps=4), progress=False)


def test_frozen_units_that_leave_no_room_at_the_top_are_refused_before_any_step(setting):
    heads = tuple(label for label in hc.UnitSpace.of(setting[0]).labels if "H" in label)[:12]
    seen = []
    with pytest.raises(
        hc.HcLensError, match=r"between 0 and 24 of 36 units.*0\.8, which removes 29"
    ):
        hc.prune_path(*setting, config(keep=heads), callback=seen.append, progress=False)
    assert seen == []


@pytest.mark.parametrize(
    ("sparsities", "said"),
    [
        ((0.5, 0.3), r"from the lowest to the highest and each once, got \[0\.5, 0\.3\]"),
        ((0.3, 0.3), "each once"),
        ((), "at least one sparsity"),
        ((0.3, 1.2), "between 0 and 1"),
    ],
)
def test_sparsities_out_of_order_or_twice_are_refused(sparsities, said):
    with pytest.raises(hc.HcLensError, match=said):
        hc.PathConfig(sparsities)


@pytest.mark.parametrize("changes", [{"lead": -0.1}, {"lead": 1.0}, {"warmup": 0.0}])
def test_a_target_that_cannot_rise_is_refused(changes):
    with pytest.raises(hc.HcLensError, match="has to rise"):
        hc.PathConfig((0.5,), **changes)


def test_the_error_of_a_loss_that_is_not_finite_holds_the_last_good_subnetwork(setting):
    calls = []

    def loss(logits, batch):
        calls.append(1)
        return logits.sum(1) * (float("nan") if len(calls) > 12 else 1.0)

    with pytest.raises(hc.HcLensError, match="finite") as caught:
        hc.prune_path(*setting, config(loss=loss), progress=False)
    assert caught.value.finished.config["sparsity"] in SPARSITIES


def test_bfloat16_changes_the_gates_a_little_and_keeps_the_counts(setting):
    exact = hc.prune_path(*setting, config(), progress=False)
    lower = hc.prune_path(*setting, config(bfloat16=True), progress=False)
    assert [len(found.removed) for found in lower] == [4, 11, 18, 29]
    differences = (exact[-1].scores - lower[-1].scores).abs()
    assert 0 < differences.max() < 0.5
