"""The model under masks by kernels, against the same masks as hooks."""

from __future__ import annotations

import pytest
import torch

import hc_lens as hc
from hc_lens.masks import run as run_module
from hc_lens.masks.ablate import mask_edits
from hc_lens.masks.hooks import Handle, z_name
from hc_lens.masks.run import MaskedRun
from hc_lens.models.reading import Readout
from tests import tiny
from tests.batches import random_batches
from tests.hc_lens.pairs import deep_model
from tests.lens import exact, hooks_on


def soft_masks(model, batch, seed: int = 0, first: int = 0):
    """A mask for each row, with entries of 0 and 1 among them; ones below the layer `first`."""
    space = hc.UnitSpace.of(model)
    noise = torch.rand(len(batch.rows), len(space), generator=torch.Generator().manual_seed(seed))
    mask = (1.4 * noise.double() - 0.2).clamp(0, 1)
    mask[:, [unit.layer < first for unit in space]] = 1.0
    return mask.requires_grad_()


def by_hooks(model, batch, mask, source):
    with Handle(model, mask_edits(hc.UnitSpace.of(model), mask, source.on(batch))):
        return Readout(model).held(batch)


def gradient(held, mask):
    return torch.autograd.grad(held.square().sum(), mask)[0]


@pytest.mark.parametrize("first", [0, 2, 3])
@pytest.mark.parametrize("side", ["right", "left"])
def test_logits_and_gradients_are_those_of_the_hooks(family: str, side: str, first: int):
    model = deep_model(family)
    if side == "left" and family not in tiny.DECODERS:
        pytest.skip("encoders are padded on the right")
    batches = random_batches(model, side=side)
    means = hc.collect_means(model, batches, progress=False)
    run, bound = MaskedRun(model, means, first=first), exact(family)
    assert run.view is not None
    for batch in [*batches, *batches]:  # the second time from what was kept
        mask = soft_masks(model, batch, first=first)
        ours, theirs = run.held(batch, mask), by_hooks(model, batch, mask, means)
        assert (ours - theirs).abs().max() < bound
        touched = [unit.layer >= first for unit in hc.UnitSpace.of(model)]
        gap = gradient(ours, mask) - gradient(theirs, mask)
        assert gap[:, touched].abs().max() < bound


@pytest.mark.parametrize("source", ["zero", "resample", "position"])
def test_a_replacement_that_needs_every_position_gets_it(family: str, source: str):
    model = deep_model(family)
    batches = random_batches(model)
    given = {
        "zero": hc.Zero(),
        "resample": hc.Resample(0),
        "position": hc.collect_means(model, batches, by="position", progress=False),
    }[source]
    for batch in batches:
        mask = soft_masks(model, batch)
        ours = MaskedRun(model, given).held(batch, mask)
        assert (ours - by_hooks(model, batch, mask, given)).abs().max() < exact(family)


def test_hooks_of_the_user_run_and_stay(family: str):
    model = deep_model(family)
    (batch, _), seen = random_batches(model), []
    model.add_hook(z_name(1), lambda z, hook: seen.append(z.shape))
    before = hooks_on(model)
    mask = soft_masks(model, batch)
    run = MaskedRun(model, hc.Zero(), first=0)
    assert run.view is None
    run.held(batch, mask)
    assert len(seen) == 1
    assert hooks_on(model) == before


def test_what_no_mask_touches_is_computed_once_and_only_as_far_as_the_memory_allows(monkeypatch):
    model = deep_model("bert")
    batches = random_batches(model)
    starts = []
    for room, expected in ((10**9, 2), (0, 4)):
        monkeypatch.setattr(run_module, "KEPT_BYTES", room)
        run = MaskedRun(model, hc.Zero(), first=1)
        start = run.view.start
        starts.clear()
        monkeypatch.setattr(run.view, "start", lambda b, s=start: (starts.append(1), s(b))[1])
        for batch in [*batches, *batches]:
            run.held(batch, soft_masks(model, batch, first=1))
        assert len(starts) == expected


def test_logits_that_are_not_finite_are_found_with_their_layer():
    model = deep_model("bert")
    (batch, *_), mask = random_batches(model), torch.ones(len(hc.UnitSpace.of(model)))
    with torch.no_grad():
        model.blocks[2].mlp.W_out.fill_(float("nan"))
    with pytest.raises(hc.HcLensError, match=r"blocks\.2"):
        MaskedRun(model, hc.Zero()).held(batch, mask)
    assert hooks_on(model) == []


def test_bfloat16_stays_near_single_precision_and_keeps_its_type(family: str):
    model = deep_model(family, torch.float32)
    (batch, *_), source = random_batches(model), hc.Zero()
    mask = soft_masks(model, batch).detach().float()
    exactly = MaskedRun(model, source).held(batch, mask)
    roughly = MaskedRun(model, source, bfloat16=True).held(batch, mask)
    assert roughly.dtype == torch.float32
    assert not torch.equal(exactly, roughly)
    assert (exactly - roughly).abs().max() < 0.05 * exactly.abs().max()
