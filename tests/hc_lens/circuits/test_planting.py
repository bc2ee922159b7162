"""Planted circuits: the heads that were planted carry the label, and nothing else does."""

from __future__ import annotations

import pytest
import torch

import hc_lens as hc
from hc_lens.circuits.planting import PlantedConfig, planted, planted_checkpoint, true_heads
from hc_lens.errors import HcLensError

SMALL = {"n_layers": 2, "n_heads": 4, "n_true": 3, "n_rows": 40}
each_family = pytest.mark.parametrize("family", ["bert", "gpt2"])


@pytest.fixture(scope="module", params=["bert", "gpt2"])
def clean(request):
    return planted(PlantedConfig(request.param, noise=0.0, **SMALL))


def logits(known) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([known.model(**batch.inputs) for batch in known.batches])


def test_without_noise_every_row_is_right(clean) -> None:
    table = hc.evaluate(clean.model, clean.batches, progress=False)
    assert (table["accuracy"] == 1.0).all()
    assert set(table["case"]) <= {"margin-1", "margin-3"}


def test_without_noise_the_other_units_write_exactly_nothing(clean) -> None:
    others = [unit for unit in clean.space if unit not in clean.units]
    before = logits(clean)
    with hc.ablate(clean.model, others, "zero"):
        assert torch.equal(logits(clean), before)


def test_without_noise_each_planted_head_moves_the_answer_and_all_decide_it(clean) -> None:
    table = hc.scan(clean.model, clean.batches, "zero", progress=False)
    moved = table.groupby("set")["logit_change"].mean()
    planted_heads = [str(unit) for unit in clean.units]
    assert (moved[planted_heads] < -0.2).all()
    assert moved.drop(["full", *planted_heads]).abs().max() < 1e-6
    with hc.ablate(clean.model, clean.units, "zero"):
        left = logits(clean)
    # Without evidence both labels are alike.
    assert (left[:, 0] - left[:, 1]).abs().max() < 1e-4


@each_family
def test_noise_is_about_as_long_as_it_is_said_to_be(family) -> None:
    known = planted(PlantedConfig(family, noise=1.0, n_layers=2, n_true=2, n_rows=20))
    batch, other = known.batches[0], next(u for u in known.space.heads if u not in known.units)
    true = next(unit for unit in known.units)
    lengths = {}
    seen = {}
    for unit in (true, other):
        name = f"blocks.{unit.layer}.attn.hook_z"
        with torch.no_grad():
            known.model.run_with_hooks(
                **{
                    "input": batch.tokens,
                    **{k: v for k, v in batch.inputs.items() if k != "input"},
                },
                fwd_hooks=[(name, lambda z, hook, unit=unit: seen.update({unit: z}))],
            )
        W_O = known.model.blocks[unit.layer].attn.W_O[unit.head]
        at = (
            torch.zeros(len(batch), dtype=torch.long) if family == "bert" else batch.mask.sum(1) - 1
        )
        lengths[unit] = (seen[unit][torch.arange(len(batch)), at, unit.head] @ W_O).norm(dim=-1)
    ratio = lengths[other].mean() / lengths[true].mean()
    assert 0.2 < ratio < 1.5


@each_family
def test_the_same_seed_makes_the_same_model_and_rows_and_another_seed_another(family) -> None:
    config = PlantedConfig(family, **SMALL)
    first, again = planted(config), planted(config)
    state = torch.get_rng_state()
    planted_checkpoint(config)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(logits(first), logits(again))
    assert first.batches.fingerprint == again.batches.fingerprint
    other = PlantedConfig(family, **SMALL, seed=1)
    assert true_heads(other) != true_heads(config)


def test_the_checkpoint_is_read_back_from_disk(tmp_path) -> None:
    config = PlantedConfig("gpt2", **SMALL)
    known = planted(config)
    for part in planted_checkpoint(config):
        part.save_pretrained(tmp_path)
    model = hc.load(tmp_path)
    batch = known.batches[0]
    assert torch.equal(model(**batch.inputs), known.model(**batch.inputs))
    assert known.truth.sum() == 3
    assert known.truth.shape == (len(known.space),)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"n_true": 13}, "at most 12 true heads"),
        ({"noise": -1.0}, "noise of 0 or more"),
        ({"n_layers": 0}, "n_layers"),
    ],
)
def test_what_cannot_be_planted_is_refused(wrong, said) -> None:
    with pytest.raises(HcLensError, match=said):
        PlantedConfig(**wrong)
