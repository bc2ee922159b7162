"""Composition in causal and masked language models, against hooks, ablation and derivatives."""

from __future__ import annotations

import jaxtyping
import numpy as np
import pandas as pd
import pytest
import torch

import hc_lens as hc
from hc_lens import metrics
from hc_lens.analyses import composition
from hc_lens.analyses.composition.engine import PathEngine
from hc_lens.analyses.composition.exact import EDGE
from hc_lens.analyses.composition.passes import PathView
from hc_lens.analyses.composition.receivers import Receiver, as_receivers, last_receiver
from hc_lens.errors import HcLensError
from hc_lens.metrics import over_cases
from hc_lens.models.quiet import quiet
from hc_lens.units import Unit
from tests import tiny
from tests.analyses.composition.by_hand import inputs_without, patched_logits
from tests.analyses.composition.test_gradient import KEYS, Partly
from tests.hc_lens.test_language_models import load, prompts, sides
from tests.lens import BRIDGES, HookedTransformer, HookedTransformerConfig, exact, hooked_only

FAMILIES = ("gpt2", "gpt_neox", "llama", "bert")
SENDERS = [(Unit(0, 1),), (Unit(1, 3),), (Unit(1),)]
SILENT = {"progress": False}


def folded(family: str, **settings):
    """A tiny model whose norms' weights TransformerLens folded into the weights behind them."""
    if BRIDGES:
        pytest.skip("a bridge in compatibility mode is not taken apart")
    model = load(family, **settings)
    with quiet():
        model.process_weights_(fold_ln=True, center_writing_weights=False, center_unembed=False)
    assert model.cfg.normalization_type.endswith("Pre")
    return model


def made(name: str):
    """A model by a name such as "gpt2" or "folded gpt2", and the family of its prompts."""
    family = name.removeprefix("folded ")
    return (load if family == name else folded)(family), family


@pytest.fixture(params=[*FAMILIES, "folded gpt2", "folded llama"])
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def gpt2():
    model = load("gpt2")
    batches = prompts(model, "gpt2")
    return model, batches, hc.collect_means(model, batches, **SILENT)


def at_reads(logits, batch):
    return logits[torch.arange(len(batch)), batch.reads]


@pytest.mark.slow
@pytest.mark.parametrize("norms", ["frozen", "recomputed"])
def test_every_edge_equals_a_forward_pass_with_the_receivers_input_rebuilt(name, norms):
    model, family = made(name)
    for side in sides(family):
        batches = prompts(model, family, side)
        means = hc.collect_means(model, batches, **SILENT)
        engine = PathEngine(model, means, norms)
        batch = max(batches, key=len)
        clean = engine.start(batch)
        for sender in SENDERS:
            receivers = [*as_receivers(model, sender), Receiver.parse("L2.H2")]
            held = engine.edges(clean, sender, receivers)
            assert held.shape == (len(receivers), len(batch), model.cfg.d_model)
            moved = inputs_without(model, batch.inputs, means, sender[0], norms)
            for receiver, logits in zip(receivers, engine.view.read_out(held), strict=True):
                slow = at_reads(patched_logits(model, batch.inputs, moved, receiver), batch)
                assert torch.allclose(logits, slow, rtol=0, atol=exact(family, 1e-9)), (
                    sender,
                    str(receiver),
                )


@pytest.mark.parametrize("units", [["L0.H1"], ["L1.MLP"], ["L0.H0", "L1.H3", "L1.MLP"]])
def test_all_paths_together_are_the_ablation_of_the_sender(name, units):
    model, family = made(name)
    for side in sides(family):
        batches = prompts(model, family, side)
        means = hc.collect_means(model, batches, **SILENT)
        engine = PathEngine(model, means, "recomputed")
        sender = tuple(map(Unit.parse, units))
        for batch in batches:
            clean = engine.start(batch)
            with torch.no_grad(), hc.ablate(model, units, means):
                ablated = at_reads(model(**batch.inputs), batch)
            joint = engine.joint(clean, sender, as_receivers(model, sender))
            for held in (joint, engine.ablated(clean, sender)):
                assert torch.allclose(
                    engine.view.read_out(held), ablated, rtol=0, atol=exact(family, 1e-9)
                )


@pytest.mark.parametrize("replaced", ["counterfactual", "by position"])
def test_replacements_by_position_ablate_too(gpt2, replaced):
    model, batches, _ = gpt2
    source = hc.Counterfactual(model)
    if replaced == "by position":
        source = hc.collect_means(model, batches, by="position", **SILENT)
    table = composition.joint_effects(
        model, batches, source, [("L0.H1", "all")], norms="recomputed", **SILENT
    )
    wide = table.pivot_table(index="case", columns="receivers", values="kl")
    scanned = hc.scan(model, batches, source, ["L0.H1"], **SILENT)
    expected = scanned[scanned["set"] == "L0.H1"].set_index("case")["kl"]
    assert np.allclose(wide["all"], wide["ablated"])
    assert np.allclose(wide["ablated"], expected[wide.index])


def test_the_table_says_what_the_logits_say(gpt2):
    model, batches, means = gpt2
    table = composition.edge_effects(model, batches, means, ["L0.H1"], ["unembed"], **SILENT)
    assert list(table["receiver"].unique()) == list(table["kind"].unique()) == ["unembed"]
    expected = []
    for batch in batches:
        moved = inputs_without(model, batch.inputs, means, Unit(0, 1), "frozen")
        slow = patched_logits(model, batch.inputs, moved, Receiver.parse("unembed"))
        clean, patched = (at_reads(x, batch).detach() for x in (model(**batch.inputs), slow))
        for row, case in enumerate(batch.cases):
            p, q = clean[row].softmax(-1), patched[row].softmax(-1)
            best = int(p.argmax())
            margin = (q[best] / (1 - q[best])).log() - (p[best] / (1 - p[best])).log()
            right, wrong = (ids[ids >= 0] for ids in batch.answers[row])
            before, after = (
                x[row, right].logsumexp(0) - x[row, wrong].logsumexp(0) for x in (clean, patched)
            )
            numbers = ((p * (p / q).log()).sum(), margin, after - before)
            expected.append((case, *map(float, numbers)))
    columns = ["kl", "margin_change", "logit_change"]
    means_of = pd.DataFrame(expected, columns=["case", *columns]).groupby("case").mean()
    assert np.allclose(table.set_index("case")[columns], means_of.loc[table["case"]], atol=1e-9)


def test_further_metrics_are_the_changes_that_a_scan_finds(gpt2):
    model, batches, means = gpt2

    def largest(logits, batch):
        return logits.amax(-1)

    metrics = {"probability": "probability", "kl": "kl", "largest": largest}
    found = composition.joint_effects(
        model, batches, means, [("L0.H1", "all")], norms="recomputed", metrics=metrics, **SILENT
    )
    everything = found[found["receivers"] == "all"].set_index("case")
    del metrics["kl"]
    scanned = hc.scan(model, batches, means, ["L0.H1"], metrics=metrics, **SILENT)
    expected = scanned[scanned["set"] == "L0.H1"].set_index("case")
    for column in ("probability_change", "largest_change", "logit_change", "kl"):
        assert np.allclose(everything[column], expected.loc[everything.index, column], atol=1e-9)
    with pytest.raises(HcLensError, match="expected the metric among"):
        composition.edge_effects(model, batches, means, metrics=["magic"], **SILENT)


def test_measuring_a_few_runs_at_a_time_changes_nothing(gpt2, monkeypatch):
    model, batches, means = gpt2
    whole = composition.edge_effects(model, batches, means, ["L0.H1"], **SILENT)
    sizes, read_out = [], PathView.read_out

    def counted(view, held):
        logits = read_out(view, held)
        sizes.append(logits.numel())
        return logits

    monkeypatch.setattr(metrics, "AT_ONCE", 500)
    monkeypatch.setattr(PathView, "read_out", counted)
    pieces = composition.edge_effects(model, batches, means, ["L0.H1"], **SILENT)
    pd.testing.assert_frame_equal(whole, pieces, rtol=1e-12)
    assert max(sizes) <= 500


@pytest.mark.slow
@pytest.mark.parametrize("norms", ["frozen", "recomputed"])
def test_the_attribution_is_the_derivative_of_the_exact_effect(name, norms):
    model, family = made(name)
    batches = prompts(model, family)
    means = hc.collect_means(model, batches, **SILENT)
    senders, share = ["L0.H1", "L1.MLP", "L0.H2+L1.H0"], 1e-6
    settings = {"norms": norms, **SILENT}
    small = composition.edge_effects(model, batches, Partly(means, share), senders, **settings)
    found = composition.edge_attribution(model, batches, means, senders, **settings)
    assert (small[KEYS] == found[KEYS]).all(axis=None)
    assert np.allclose(small["margin_change"] / share, found["attribution"], atol=2e-4, rtol=1e-3)


def first_logit(logits, batch):
    """A metric of one's own."""
    return logits[:, 0] * 2


@pytest.mark.parametrize(
    ("metric", "change"),
    [
        ("logit_difference", "logit_change"),
        ("probability", "probability_change"),
        (first_logit, "own_change"),
    ],
)
def test_the_attribution_of_another_metric_is_the_derivative_of_its_change(gpt2, metric, change):
    (model, batches, means), share = gpt2, 1e-6
    more = {"metrics": {"own": first_logit, "probability": "probability"}, **SILENT}
    small = composition.edge_effects(model, batches, Partly(means, share), ["L0.H1"], **more)
    found = composition.edge_attribution(*gpt2, ["L0.H1"], metric=metric, **SILENT)
    assert (small[KEYS] == found[KEYS]).all(axis=None)
    assert np.allclose(small[change] / share, found["attribution"], atol=2e-4, rtol=1e-3)


def test_a_metric_without_a_first_order_is_not_attributed(gpt2):
    said = "a metric with a derivative at the clean run"
    with pytest.raises(HcLensError, match=said):
        composition.edge_attribution(*gpt2, metric="kl", **SILENT)
    with pytest.raises(HcLensError, match=said):
        composition.trace(*gpt2, ["L0.H1"], composition.TraceConfig(metric="accuracy"), **SILENT)


def test_a_trace_attributes_the_metric_that_it_is_asked_for(gpt2):
    config = composition.TraceConfig(metric="logit_difference")
    found = composition.trace(*gpt2, ["L0.H1"], config, **SILENT)
    settings = {"metric": "logit", "norms": "recomputed", **SILENT}
    alone = composition.edge_attribution(*gpt2, ["L0.H1"], **settings)
    assert found.metric == "logit_difference"
    assert np.allclose(found.edges["attribution"], alone["attribution"])
    every = over_cases(found.edges, EDGE, ["logit_change", "attribution"])
    (row,) = found.agreement[found.agreement["edges"] == "all"].to_dict("records")
    expected = every["logit_change"].corr(every["attribution"], "spearman")
    assert row["spearman"] == pytest.approx(expected)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_integrated_attributions_add_up_to_the_ablation(family):
    model = load(family)
    batches = prompts(model, family)
    means = hc.collect_means(model, batches, **SILENT)
    settings = {"norms": "recomputed", **SILENT}
    total = composition.joint_effects(model, batches, means, [("L0.H1", "all")], **settings)
    total = total[total["receivers"] == "ablated"].set_index("case")["margin_change"]
    found = composition.edge_attribution(model, batches, means, ["L0.H1"], steps=64, **settings)
    summed = found.groupby("case")["attribution"].sum()
    assert np.allclose(summed[total.index], total, atol=1e-2)


@hooked_only
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_meet_the_whole_unembedding_or_the_dense_layer_of_the_masked_head(family):
    model = load(family)
    table = composition.weight_scores(model, senders=["L2.H1"], **SILENT)
    attn, block = model.blocks[2].attn, model.blocks[2]
    sent = attn.W_V[1] @ attn.W_O[1]
    if family == "bert":
        norms, reads = (block.ln1, block.ln2), model.mlm_head.W
    else:
        norms, reads = (model.ln_final,), model.unembed.W_U
    for norm in norms:
        centred = sent if family == "llama" else sent - sent.mean(-1, keepdim=True)
        sent = centred * norm.w
    (found,) = table[table["receiver"] == "unembed"].to_dict("records")
    assert found["kind"] == "unembed"
    strength, sizes = float((sent @ reads).norm()), float(sent.norm() * reads.norm())
    assert found["strength"] == pytest.approx(strength)
    assert found["score"] == pytest.approx(strength / sizes)


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_a_trace_of_a_language_model_goes_to_disk_and_back_and_draws(family, tmp_path):
    model = load(family)
    batches = prompts(model, family)
    means = hc.collect_means(model, batches, **SILENT)
    found = composition.trace(model, batches, means, ["L0.H1", "L1.H2"], **SILENT)
    assert "unembed" in set(found.edges["receiver"])
    assert found.edges.notna().all(axis=None)
    every = found.explained[found.explained["patched"] == "all"]
    assert np.allclose(every["share"], 1)
    again = composition.Trace.load(found.save(tmp_path))
    pd.testing.assert_frame_equal(again.edges, found.edges)
    texts = [text.get_text() for text in again.figure(n_edges=200).axes[0].texts]
    assert "unembed" in texts


def test_the_last_receiver_has_the_name_of_its_kind_of_model(gpt2):
    model, batches, means = gpt2
    assert str(last_receiver(model)) == "unembed"
    with pytest.raises(
        HcLensError, match=r"expected 'unembed' as the last receiver .*'classifier'"
    ):
        composition.edge_effects(model, batches, means, ["L0.H1"], ["classifier"], **SILENT)
    classifier = hc.load(tiny.tiny_hf("gpt2"), tokenizer=tiny.tokenizer_for("gpt2"))
    with pytest.raises(
        HcLensError, match=r"expected 'classifier' as the last receiver .*'unembed'"
    ):
        composition.edge_effects(classifier, batches, "zero", ["L0.H1"], ["unembed"], **SILENT)


def plain(**settings) -> HookedTransformer:
    sizes = {"n_layers": 2, "d_model": 8, "n_ctx": 16, "d_head": 4, "n_heads": 2, "d_vocab": 60}
    cfg = HookedTransformerConfig(
        **sizes, device="cpu", seed=0, dtype=torch.float64, **{"act_fn": "gelu", **settings}
    )
    with quiet():
        return HookedTransformer(cfg)


@pytest.mark.parametrize(
    "settings", [{}, {"attn_only": True, "act_fn": None, "normalization_type": None}]
)
def test_a_model_of_ones_own_is_patched(settings):
    model = plain(**settings)
    batches = prompts(model, "gpt2")
    table = composition.joint_effects(
        model, batches, "zero", [("L0.H1", "all")], norms="recomputed", **SILENT
    )
    wide = table.pivot_table(index="case", columns="receivers", values="kl")
    assert np.allclose(wide["all"], wide["ablated"])
    assert (wide["ablated"] > 0).all()


def test_models_that_the_kernels_do_not_know_are_refused(gpt2, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    _, batches, _ = gpt2
    capped = plain(output_logits_soft_cap=30.0)
    with pytest.raises(HcLensError, match=r"HookedTransformer with a soft cap on its logits"):
        composition.edge_effects(capped, batches, "zero", **SILENT)
    alibi = plain(positional_embedding_type="alibi")
    with pytest.raises(HcLensError, match=r"HookedTransformer with other blocks; supported are"):
        composition.edge_effects(alibi, batches, "zero", **SILENT)
