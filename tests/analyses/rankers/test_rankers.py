"""Rankers on planted circuits, and integrated gradients against finite differences."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

import hc_lens as hc
from hc_lens.analyses import rankers, scorecard
from hc_lens.analyses.rankers import RankConfig, integrated, rank
from hc_lens.analyses.statistics import auroc
from hc_lens.errors import HcLensError
from hc_lens.masks.hooks import mlp_name, z_name
from hc_lens.models.inputs import mask_of
from hc_lens.models.reading import read_units
from tests import tiny
from tests.batches import random_batches
from tests.lens import hooked_only


def log_odds(batches, batch, logits) -> torch.Tensor:
    own = batches.log_probs(logits, batch)[torch.arange(len(batch.labels)), batch.labels]
    return own - torch.log(-torch.expm1(own))


def mean_log_odds(model, batches) -> float:
    return torch.cat([log_odds(batches, b, model(**b.inputs)) for b in batches]).mean().item()


def test_integrated_over_activations_the_effects_add_up_to_all_minus_none(family) -> None:
    model = hc.load(tiny.tiny_hf(family), dtype=torch.float64)
    batches = random_batches(model)
    means = hc.collect_means(model, batches, progress=False)
    table = integrated(model, batches, means, steps=60, progress=False)
    with hc.ablate(model, list(hc.UnitSpace.of(model)), means):
        none = mean_log_odds(model, batches)
    assert table["effect"].sum() == pytest.approx(mean_log_odds(model, batches) - none, rel=5e-3)
    assert (table["importance"] >= table["effect"].abs() - 1e-12).all()


@hooked_only
@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_integrated_over_inputs_an_effect_is_a_finite_difference_on_the_path(kind) -> None:
    model = hc.load(tiny.tiny_hf(kind), dtype=torch.float64)
    batches = random_batches(model, ((6, 4),))
    (batch,) = batches
    table = integrated(model, batches, "zero", "inputs", steps=1, progress=False).set_index("unit")
    clean, real = {}, mask_of(batch.inputs).bool()
    read_units(model, batch.inputs, lambda name, x: clean.update({name: x}))

    def half_way(stream, hook):
        middle = stream[real].mean(0)
        return middle + 0.5 * (stream - middle)

    def run(unit, size) -> float:
        def edit(x, hook):
            moved = x.clone()
            at = (slice(None), slice(None), unit.head) if unit.is_head else ...
            moved[at] += size * clean[hook.name][at]
            return moved

        name = z_name(unit.layer) if unit.is_head else mlp_name(unit.layer)
        hooks = [("blocks.0.hook_resid_pre", half_way), (name, edit)]
        return (
            log_odds(batches, batch, model.run_with_hooks(**batch.inputs, fwd_hooks=hooks))
            .mean()
            .item()
        )

    for label in ("L0.H1", "L0.MLP", "L1.H3"):
        unit = hc.Unit.parse(label)
        slope = (run(unit, 1e-4) - run(unit, -1e-4)) / 2e-4
        assert table.loc[label, "effect"] == pytest.approx(slope, rel=1e-4, abs=1e-8)


def test_every_ranker_but_chance_finds_a_planted_circuit() -> None:
    config = hc.circuits.PlantedConfig(
        "bert", n_layers=2, n_heads=3, n_true=3, noise=0.5, n_rows=30
    )
    known = hc.circuits.planted(config, "train")
    settings = RankConfig(steps=60, path_steps=2)
    table = rank(known.model, known.batches, "zero", config=settings, progress=False)
    assert list(table["ranker"].unique()) == list(rankers.RANKERS)
    assert table["score"].notna().all()
    found = rankers.aurocs(table, known.units).set_index("ranker")["auroc"]
    assert (found.drop(["random", "top-k"]) == 1.0).all(), found
    # Top-k has no gradient that orders the units which it never tries.
    assert found["top-k"] > 0.8
    again = rank(known.model, known.batches, "zero", ["random"], settings, progress=False)
    assert again["score"].tolist() == table.loc[table["ranker"] == "random", "score"].tolist()
    # The same scores are rankings for the scorecard.
    chosen = {name: rankers.rankings(table)[name] for name in ("ablation", "random")}
    measure = scorecard.Measured(known.model, known.batches, "zero", progress=False)
    areas = scorecard.curves(measure, chosen).drop_duplicates("ranker").set_index("ranker")
    assert areas.loc["ablation", "cpr"] > areas.loc["random", "cpr"]


@hooked_only
@pytest.mark.parametrize("name", ["reverse", "sort", "pair-balance"])
def test_ablation_finds_the_circuit_of_a_compiled_program(name) -> None:
    known = hc.circuits.compiled(name, spare_heads=1, limit=12)
    table = rank(known.model, known.batches, "zero", ["ablation"], progress=False)
    assert rankers.aurocs(table, known.units)["auroc"].tolist() == [1.0]


def test_the_area_under_the_roc_curve_by_hand() -> None:
    positive = np.array([True, False, True, False])
    assert auroc(np.array([3.0, 2.0, 1.0, 0.0]), positive) == 0.75
    assert auroc(np.ones(4), positive) == 0.5
    assert np.isnan(auroc(np.ones(4), np.ones(4, dtype=bool)))


def test_bad_input_is_named() -> None:
    model = hc.load(tiny.tiny_hf("bert"))
    batches = random_batches(model)
    with pytest.raises(HcLensError, match="a ranker"):
        rank(model, batches, "zero", ["luck"])
    with pytest.raises(HcLensError, match="path_steps"):
        RankConfig(path_steps=0)
    table = pd.DataFrame({"ranker": "random", "unit": ["L0.H0"], "score": [1.0]})
    with pytest.raises(HcLensError, match="the true units among those"):
        rankers.aurocs(table, ["L9.H0"])
