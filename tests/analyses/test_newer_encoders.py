"""Every instrument on the encoders whose attention is not BERT's."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import hc_lens as hc
from hc_lens.analyses import lexical_overlap
from hc_lens.analyses.composition.weights import PositionsWarning, weight_scores
from hc_lens.analyses.self_repair import repair_rows
from hc_lens.attention.patterns import word_batches
from hc_lens.models.inputs import mask_of
from tests import tiny
from tests.hc_lens.pairs import pair_batches, pair_task
from tests.lens import hooked_only

pytestmark = hooked_only
SILENT: Any = {"progress": False}
each_family = pytest.mark.parametrize(
    "family", ["deberta", "deberta-v3", "modernbert", "modernbert-mean", "albert", "mpnet"]
)


def loaded(family: str, **changes) -> Any:
    original = tiny.tiny_hf(family, **changes)
    return hc.load(original, dtype=torch.float64, tokenizer=tiny.tokenizer_for(family))


@each_family
def test_means_are_those_of_tokens_without_pads(family: str):
    model = loaded(family)
    batches = pair_batches(model)
    means = hc.collect_means(model, batches, **SILENT)
    total, count = torch.zeros(4, 8, dtype=torch.float64), 0
    for batch in batches:
        _, cache = model.run_with_cache(**batch.inputs)
        real = mask_of(batch.inputs).bool()
        total += cache["blocks.1.attn.hook_z"][real].sum(0)
        count += int(real.sum())
    torch.testing.assert_close(means.at_token["blocks.1.attn.hook_z"], total / count)


@each_family
def test_a_pruned_subnetwork_has_the_size_asked_for_and_the_logits_of_the_hooks(family: str):
    model = loaded(family)
    batches = pair_batches(model)
    means = hc.collect_means(model, batches, **SILENT)
    config = hc.PruneConfig(0.4, seed=1, steps=3, warmup=1)
    sub = hc.prune(model, batches, means, config, **SILENT)
    assert len(sub.removed) == 2 * len(hc.UnitSpace.of(model)) // 5
    table = hc.evaluate(model, {"pairs": batches}, means=means, subnetwork=sub, **SILENT)
    divergence = 0.0
    for batch in batches:
        with torch.no_grad():
            full = model(**batch.inputs).log_softmax(-1)
            with hc.ablate(model, sub.removed, means):
                left = model(**batch.inputs).log_softmax(-1)
        divergence += float((full.exp() * (full - left)).sum())
    found = table[table["subnetwork"] != "full"]
    assert float((found["kl"] * found["n"]).sum()) == pytest.approx(divergence, rel=1e-6)
    assert divergence > 1e-3


def test_self_repair_wants_a_model_that_is_read_at_one_position():
    model = loaded("modernbert-mean")
    batches = pair_batches(model, 6)
    means = hc.collect_means(model, batches, **SILENT)
    with pytest.raises(hc.HcLensError, match="that is read at the mean of all tokens"):
        repair_rows(model, batches, means, **SILENT)


@pytest.mark.parametrize("family", ["deberta-v3", "modernbert", "albert", "mpnet"])
def test_parts_of_self_repair_add_up_to_the_effect_of_the_ablation(family: str):
    model = loaded(family)
    batches = pair_batches(model, 6)
    means = hc.collect_means(model, batches, **SILENT)
    found = repair_rows(model, batches, means, ["L0.H1"], measure="margin", **SILENT)
    table = hc.scan(model, batches, means, ["L0.H1"], metrics=("margin",), **SILENT)
    scanned = table[table["set"] == "L0.H1"]
    change = float((scanned["margin_change"] * scanned["n"]).sum())
    assert float(found.total.sum()) == pytest.approx(change, rel=1e-6)
    assert abs(change) > 1e-4


@each_family
def test_lexical_overlap_is_scored_for_every_head(family: str):
    model = loaded(family)
    rows = word_batches(model, pair_task(8))
    table = lexical_overlap.scores(model, rows, n_bootstrap=10, **SILENT)
    assert set(table["unit"]) == {str(unit) for unit in hc.UnitSpace.of(model).heads}
    assert table["value"].between(0, 1).all()


@each_family
def test_composition_by_weights_says_that_it_leaves_out_positions(family: str):
    model = loaded(family)
    batches = pair_batches(model, 6)
    if family == "albert":
        with warnings.catch_warnings():
            warnings.simplefilter("error", PositionsWarning)
            table = weight_scores(model, batches, ["L0.H1"], draws=4, **SILENT)
    else:
        with pytest.warns(PositionsWarning, match="leaves out what this model's attention scores"):
            table = weight_scores(model, batches, ["L0.H1"], draws=4, **SILENT)
    assert table["score"].between(0, 1).all()
    assert set(table["kind"]) == {"q", "k", "v", "mlp", "classifier"}
