import copy
import gc
import subprocess
import sys
import warnings
import weakref
from functools import partial

import pytest
import torch

import hc_lens as hc
from hc_lens.masks.attached import MaskedModelWarning
from tests import tiny
from tests.batches import random_batches


@pytest.fixture
def bert():
    """A model, its batches and their means."""
    model = hc.load(tiny.tiny_hf("bert"))
    batches = random_batches(model)
    return model, batches, hc.collect_means(model, batches, progress=False)


def test_a_handle_that_was_replaced_is_found_and_comes_off(bert):
    model, batches, means = bert
    full = model(**batches[0].inputs)
    handle = hc.attach(model, ["L0.H1"], means)
    handle = hc.attach(model, ["L0.H1"], means)  # the same cell of a notebook once more
    handle.detach()
    with pytest.warns(MaskedModelWarning):
        table = hc.evaluate(model, batches, progress=False)
    (left,) = hc.attached(model)
    assert left is not handle
    assert hc.detach_all(model) == [left]
    assert (hc.attached(model), left.attached) == ([], False)
    assert torch.equal(model(**batches[0].inputs), full)
    assert table["n"].tolist() == [5]


def test_handles_are_listed_in_the_order_in_which_they_were_put_on(bert):
    model, _, means = bert
    sub = hc.Subnetwork.from_units(model, [unit for unit in hc.UnitSpace.of(model) if unit.layer])
    handles = [hc.attach(model, [unit], means) for unit in ("L1.MLP", "L0.H0", "L1.H3", "L0.H1")]
    handles.append(sub.attach(model, means))
    assert hc.attached(model) == handles
    handles.pop(1).detach()
    assert hc.attached(model) == handles


def test_detaching_all_leaves_the_hooks_of_the_user(bert):
    model, batches, means = bert
    seen = []
    hc.attach(model, ["L0.H0"], means)
    model.add_hook("blocks.0.attn.hook_z", lambda value, hook: seen.append(len(value)))
    hc.attach(model, ["L0.H1"], means)
    assert len(hc.detach_all(model)) == 2
    model(**batches[0].inputs)
    assert seen == [3]


def test_what_reset_hooks_took_off_is_not_listed(bert):
    model, _, means = bert
    handle = hc.attach(model, ["L0.H0"], means)
    model.reset_hooks()
    assert (hc.attached(model), repr(handle)) == ([], "Handle(L0.H0 removed, off)")


def test_hooks_of_our_own_functions_are_no_masks(bert):
    model, batches, means = bert
    listed = []
    model.add_hook("blocks.0.hook_resid_pre", lambda value, hook: listed.append(hc.attached(model)))
    hc.collect_means(model, batches, progress=False)
    hc.prune(model, batches, means, hc.PruneConfig(0.5, steps=2), progress=False)
    assert len(listed) > 4
    assert not any(listed)


def test_a_copy_of_a_model_has_a_mask_of_its_own(bert):
    model, batches, means = bert
    full = model(**batches[0].inputs)
    mask = torch.full((10,), 0.5, requires_grad=True) * 1.0
    with hc.masked(model, mask, means) as handle:
        half = model(**batches[0].inputs)
        twin = copy.deepcopy(model)
        (other,) = hc.attached(twin)
        assert other is not handle
        torch.testing.assert_close(twin(**batches[0].inputs), half)
        hc.detach_all(twin)
        assert torch.equal(twin(**batches[0].inputs), full)
        assert hc.attached(model) == [handle]
        assert torch.equal(model(**batches[0].inputs), half)


SCRIPT = """
import pickle, cloudpickle, torch
import hc_lens as hc
model = hc.organism.load()
batches = hc.organism.task().batches(model, "validation", limit=4)
full = model(**batches[0].inputs)
hc.attach(model, ["L0.H1"], "zero")
hc.scan(model, batches, "zero", [["L1.H0"]], progress=False)
sent = pickle.loads(cloudpickle.dumps(model))
print(len(hc.attached(model)), len(hc.detach_all(sent)), hc.attached(sent))
print(torch.equal(sent(**batches[0].inputs), full))
with hc.ablate(model, ["L0.H0"], "zero"):
    model.reset_hooks()
"""


@pytest.fixture(scope="module")
def plain() -> subprocess.CompletedProcess[str]:
    """The script in a process of its own, where no type checker wraps our functions."""
    pytest.importorskip("cloudpickle")  # comes with Ray
    code = [sys.executable, "-c", SCRIPT]
    return subprocess.run(code, capture_output=True, text=True, check=True)


@pytest.mark.slow
def test_a_model_goes_to_another_process_with_its_mask_as_ray_sends_it(plain):
    assert plain.stdout.splitlines() == ["1 1 []", "True"]


@pytest.mark.slow
def test_the_warnings_point_at_the_lines_of_the_user(plain):
    assert "<string>:8: MaskedModelWarning: expected a model without masks" in plain.stderr
    assert "<string>:12: LostMaskWarning: expected the mask (L0.H0 removed)" in plain.stderr


def test_a_lost_handle_keeps_no_model_alive():
    model = hc.load(tiny.tiny_hf("bert"))
    hc.attach(model, ["L0.H0"], "zero")
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def pruned(model, batches, means, method="gates", **settings):
    return hc.prune(model, batches, means, hc.PruneConfig(0.5, method=method, steps=2), **settings)


CALLS = {
    "evaluate": lambda model, batches, means, **settings: hc.evaluate(model, batches, **settings),
    "means": lambda model, batches, means, **settings: hc.collect_means(model, batches, **settings),
    "scan": hc.scan,
    "scan_rows": hc.scan_rows,
    "importance": hc.importance,
    "prune": pruned,
    "prune by importance": partial(pruned, method="importance"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_function_that_speaks_of_the_full_model_warns_once_and_names_the_masks(bert, name):
    model, _, means = bert
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        CALLS[name](*bert, progress=False)
        assert told == []
        hc.attach(model, ["L0.H1"], means)
        hc.attach(model, ["L1.MLP", "L1.H2"], means)
        CALLS[name](*bert, progress=False)
    (warning,) = told
    assert warning.category is MaskedModelWarning
    assert "with 2 on: L0.H1 removed; L1.H2, L1.MLP removed." in str(warning.message)
    assert "hc.detach_all(model)" in str(warning.message)


@pytest.mark.parametrize(
    ("mask", "shown"),
    [
        (["L1.H0", "L0.H2"], "L0.H2, L1.H0 removed"),
        (torch.zeros(10), "L0.H0, L0.H1, L0.H2 and 7 more removed"),
        (torch.tensor([0, 0.5, 0.1] + [1] * 7), "L0.H0 removed, 2 partly"),
        (torch.full((10,), 0.5, requires_grad=True), "nothing removed, 10 partly"),
        (torch.zeros(3, 10), "a mask for each of 3 rows"),
    ],
)
def test_a_handle_shows_its_units_and_whether_it_is_on(bert, mask, shown):
    handle = hc.attach(bert[0], mask, "zero")
    assert repr(handle) == f"Handle({shown}, on)"
    handle.detach()
    assert repr(handle) == f"Handle({shown}, off)"
