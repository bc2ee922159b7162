from dataclasses import replace

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import hc_lens as hc
from hc_lens.models.inputs import mask_of
from tests import tiny
from tests.batches import random_batches


@pytest.fixture
def batches(hooked):
    return random_batches(hooked)


def test_resampling_takes_the_kth_token_of_another_row(hooked, batches):
    batch = batches[0]
    mask = mask_of(batch.inputs).bool()
    source = hc.Resample(seed=3).on(batch)
    # An activation that says where it comes from: 100 x row + position.
    places = 100.0 * torch.arange(3)[:, None] + torch.arange(9)[None]
    taken = source.value("blocks.0.hook_mlp_out", places[..., None])[..., 0]
    donors = (taken // 100).long()
    lengths = mask.sum(1)
    for row in range(3):
        donor = donors[row, 0].item()
        assert donor != row
        for place in range(int(lengths[row])):
            assert taken[row, place] == 100 * donor + place % lengths[donor]
    assert sorted(donors[:, 0].tolist()) == [0, 1, 2]


def test_resampling_skips_pads_on_the_left():
    model = hc.load(tiny.tiny_hf("gpt2"))
    batch = random_batches(model, side="left")[0]
    places = 100.0 * torch.arange(3)[:, None] + torch.arange(9)[None]
    taken = hc.Resample(seed=0).on(batch).value("any", places[..., None])[..., 0]
    mask = mask_of(batch.inputs).bool()
    donors, positions = (taken // 100).long(), (taken % 100).long()
    assert mask[donors[mask], positions[mask]].all()


def test_a_seed_gives_the_same_donors_and_another_seed_others(hooked):
    batch = random_batches(hooked, ((5,) * 30,))[0]
    values = torch.arange(30.0)[:, None, None].expand(30, 5, 1)

    def draw(seed: int) -> torch.Tensor:
        return hc.Resample(seed).on(batch).value("any", values)

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))


def test_resample_ablation_of_everything_gives_the_donors_logits(hooked):
    batch = random_batches(hooked, ((6, 6),))[0]
    with hc.ablate(hooked, hc.UnitSpace.of(hooked), hc.Resample(0).on(batch)):
        _, cache = hooked.run_with_cache(**batch.inputs)
    # With two rows each is the other's donor, at every unit.
    _, clean = hooked.run_with_cache(**batch.inputs)
    assert torch.equal(cache["blocks.0.attn.hook_z"], clean["blocks.0.attn.hook_z"].flip(0))


def test_counterfactual_ablation_puts_in_the_paired_rows_activations(hooked, batches):
    others = random_batches(hooked, seed=50)
    source = hc.Counterfactual(hooked, batches, others)
    _, expected = hooked.run_with_cache(**others[1].inputs)
    with hc.ablate(hooked, ["L0.H1", "L1.MLP"], source.on(batches[1])):
        _, cache = hooked.run_with_cache(**batches[1].inputs)
    z, mlp = "blocks.0.attn.hook_z", "blocks.1.hook_mlp_out"
    assert torch.equal(cache[z][:, :, 1], expected[z][:, :, 1])
    assert torch.equal(cache[mlp], expected[mlp])
    assert not torch.equal(cache[z][:, :, 0], expected[z][:, :, 0])


def test_a_counterfactual_equal_to_the_row_changes_nothing(hooked, batches):
    source = hc.Counterfactual(hooked, batches, batches).on(batches[0])
    full = hooked(**batches[0].inputs)
    with hc.ablate(hooked, hc.UnitSpace.of(hooked), source):
        assert torch.equal(hooked(**batches[0].inputs), full)


def test_counterfactuals_of_another_shape_are_an_error(hooked, batches):
    others = random_batches(hooked, ((9, 5, 3), (7, 7)))
    with pytest.raises(hc.HcLensError, match="expected aligned batches, got batch 0"):
        hc.Counterfactual(hooked, batches, others)
    with pytest.raises(hc.HcLensError, match="one counterfactual batch per batch, got 1 for 2"):
        hc.Counterfactual(hooked, batches, batches[:1])


def test_a_batch_that_was_not_paired_is_an_error(hooked, batches):
    source = hc.Counterfactual(hooked, batches, batches)
    stranger = replace(batches[0], rows=batches[0].rows + 90)
    with pytest.raises(hc.HcLensError, match=r"expected a batch that was paired, got rows \[90"):
        source.on(stranger)


def test_a_counterfactual_of_another_model_is_an_error(hooked, batches):
    other = hc.load(tiny.tiny_hf("bert"))
    source = hc.Counterfactual(other, batches, batches)
    with pytest.raises(hc.HcLensError, match="got another one"):
        hc.ablate(hooked, ["L0.H0"], source)


@pytest.mark.parametrize(
    "make", [lambda m, b: hc.Resample(0), lambda m, b: hc.Counterfactual(m, b, b)]
)
def test_a_source_that_needs_its_batch_says_so(hooked, batches, make):
    with (
        hc.ablate(hooked, ["L0.H0"], make(hooked, batches)),
        pytest.raises(hc.HcLensError, match=r"pass source\.on\(batch\)"),
    ):
        hooked(**batches[0].inputs)


def test_resampling_a_single_row_is_an_error(hooked):
    with pytest.raises(hc.HcLensError, match="at least 2 rows"):
        hc.Resample(0).on(random_batches(hooked, ((5,),))[0])


class Halved(hc.Source):
    """A source as a user writes it: the unit's own activation, halved."""

    def value(self, name: str, activation: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Half of the activation."""
        return activation / 2


def test_a_source_of_your_own_is_one_method(hooked, batches):
    with hc.ablate(hooked, ["L1.MLP"], Halved()):
        _, cache = hooked.run_with_cache(**batches[0].inputs)
    _, clean = hooked.run_with_cache(**batches[0].inputs)
    name = "blocks.1.hook_mlp_out"
    assert torch.equal(cache[name], clean[name] / 2)
    table = hc.importance(hooked, batches, Halved(), progress=False)
    assert len(table) == len(hc.UnitSpace.of(hooked))


def test_a_source_that_says_nothing_of_itself_is_taken_for_the_harder_case(hooked):
    source = Halved()
    assert (source.constant, source.row_wise, source.fingerprint) == (False, False, None)
    assert source.bytes_per_token(hooked.cfg) == 3 * 32 * 8


def test_every_source_says_what_it_is(hooked, batches):
    by_token = hc.collect_means(hooked, batches, progress=False)
    by_position = hc.collect_means(hooked, batches, by="position", progress=False)
    paired = hc.Counterfactual(hooked, batches, batches)
    sources = [hc.Zero(), by_token, by_position, hc.Resample(4), paired]
    assert [source.constant for source in sources] == [True, True, False, False, False]
    assert [source.row_wise for source in sources] == [True, True, True, False, False]
    # Float64: 8 bytes a number, d_model 32, 2 layers.
    expected = [0, 0, 3 * 32 * 8, 3 * 32 * 8, (3 + 2 * 2) * 32 * 8]
    assert [source.bytes_per_token(hooked.cfg) for source in sources] == expected


def test_fingerprints_tell_sources_apart(hooked, batches):
    by_token = hc.collect_means(hooked, batches, progress=False)
    by_position = hc.collect_means(hooked, batches, by="position", progress=False)
    names = [source.fingerprint for source in (hc.Zero(), hc.Resample(1), hc.Resample(2))]
    names += [by_token.fingerprint, by_position.fingerprint]
    assert None not in names
    assert len(set(names)) == 5
    assert hc.Zero().fingerprint == hc.Zero().fingerprint
    assert hc.Counterfactual(hooked, batches, batches).fingerprint is None


def test_every_source_is_shown_in_one_short_line(hooked, batches):
    assert repr(hc.Zero()) == "Zero()"
    assert repr(hc.Resample(3)) == "Resample(seed 3)"
    assert repr(hc.Resample(3).on(batches[0])) == "Resample(seed 3, bound to a batch)"
    assert repr(hc.Counterfactual(hooked, batches, batches)) == "Counterfactual(2 paired batches)"
