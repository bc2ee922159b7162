"""Path patching against a slow reference, its identities, its tables and its refusals."""

from __future__ import annotations

import jaxtyping
import numpy as np
import pytest
import torch

import hc_lens as hc
from hc_lens.analyses.composition.engine import PathEngine
from hc_lens.analyses.composition.exact import edge_effects, joint_effects
from hc_lens.analyses.composition.receivers import Receiver, as_receivers
from hc_lens.errors import HcLensError
from hc_lens.units import Unit
from tests import tiny
from tests.analyses.composition.by_hand import inputs_without, patched_logits
from tests.hc_lens.pairs import deep_model, pair_batches
from tests.lens import BRIDGES, hooked_only

NORMS = ("frozen", "recomputed")
JOINT = ["bert", "roberta", "gpt2", "distilbert", "gpt_neox", "llama"]
JOINT += [] if BRIDGES else ["deberta-v2", "modernbert", "modernbert-mean", "albert", "mpnet"]
SENDERS = [(Unit(0, 1),), (Unit(2, 3),), (Unit(1),)]


def prepared(family: str, dtype: torch.dtype = torch.float64, n_rows: int = 24, **changes):
    model = deep_model(family, dtype, **changes)
    batches = pair_batches(model, n_rows)
    return model, batches, hc.collect_means(model, batches, progress=False)


@pytest.fixture(scope="module")
def bert():
    return prepared("bert")


def engine_edges(model, means, norms, batch, sender, receivers):
    engine = PathEngine(model, means, norms)
    clean = engine.start(batch)
    return engine.edges(clean, sender, receivers)


def check_edges(model, means, norms, batch, sender, receivers) -> None:
    """Every edge against one full forward pass with the receiver's input rebuilt."""
    found = engine_edges(model, means, norms, batch, sender, receivers)
    moved = inputs_without(model, batch.inputs, means, sender[0], norms)
    for receiver, logits in zip(receivers, found, strict=True):
        slow = patched_logits(model, batch.inputs, moved, receiver)
        assert torch.allclose(logits, slow, atol=1e-9), (sender, str(receiver))


@pytest.mark.slow
@pytest.mark.parametrize("norms", NORMS)
def test_every_edge_equals_a_forward_pass_with_the_receivers_input_rebuilt(family, norms):
    model, batches, means = prepared(family)
    batch = batches[0]
    for sender in SENDERS:
        receivers = as_receivers(model, sender)
        receivers += [Receiver.parse("L3.H2")]
        check_edges(model, means, norms, batch, sender, receivers)


@hooked_only
@pytest.mark.parametrize("norms", NORMS)
@pytest.mark.parametrize("name", ["deberta-v3", "modernbert-mean", "albert", "mpnet"])
def test_edges_of_encoders_with_attention_of_their_own_equal_forward_passes(name, norms):
    model, batches, means = prepared(name, n_rows=6)
    batch = batches[0]
    for sender in SENDERS[:2]:
        receivers = as_receivers(model, sender)[:: 3 if sender[0].layer else 7]
        receivers.append(Receiver.parse("classifier"))
        check_edges(model, means, norms, batch, sender, receivers)


@hooked_only
def test_a_convolution_between_layers_is_refused():
    model, batches, means = prepared("deberta-v2", n_rows=6, conv_kernel_size=3)
    with pytest.raises(HcLensError, match="with a convolution between its layers"):
        edge_effects(model, batches, means, progress=False)


@hooked_only
def test_in_single_precision_the_edges_agree_to_a_hundred_thousandth(family):
    model, batches, means = prepared(family, torch.float32)
    batch, sender = batches[1], (Unit(0, 1),)
    receivers = as_receivers(model, sender)
    found = engine_edges(model, means, "frozen", batch, sender, receivers)
    moved = inputs_without(model, batch.inputs, means, sender[0], "frozen")
    slow = torch.stack([patched_logits(model, batch.inputs, moved, r) for r in receivers])
    assert (found - slow).abs().max() < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", JOINT)
@pytest.mark.parametrize(
    "units", [["L0.H1"], ["L2.H3"], ["L1.MLP"], ["L0.H0", "L1.H3", "L1.MLP"]], ids="+".join
)
def test_all_paths_together_are_the_ablation_of_the_sender(name, units):
    model, batches, means = prepared(name)
    engine = PathEngine(model, means, "recomputed")
    sender = tuple(Unit.parse(unit) for unit in units)
    everything = as_receivers(model, sender)
    for batch in batches:
        clean = engine.start(batch)
        joint = engine.joint(clean, sender, everything)
        with torch.no_grad(), hc.ablate(model, units, means):
            ablated = model(**batch.inputs)
        assert torch.allclose(joint, ablated, atol=1e-10)
        assert torch.allclose(engine.ablated(clean, sender), ablated, atol=1e-10)


@pytest.mark.parametrize("norms", NORMS)
def test_without_norms_on_the_way_both_variants_are_the_ablation(norms):
    from tests.analyses.composition.twins import rows, twin

    model, batches = twin("k"), rows("k")
    means = hc.collect_means(model, batches, progress=False)
    table = joint_effects(model, batches, means, [("L0.H0", "all")], norms=norms, progress=False)
    values = table.set_index("receivers")["kl"]
    assert values["all"] == pytest.approx(values["ablated"], abs=1e-12)


@pytest.mark.parametrize("norms", NORMS)
@pytest.mark.parametrize("name", ["bert", "gpt2", "gpt_neox"])
def test_a_joint_patch_of_one_receiver_is_the_edge(name, norms):
    model, batches, means = prepared(name)
    engine = PathEngine(model, means, norms)
    clean = engine.start(batches[0])
    sender = (Unit(0, 2), Unit(1))
    receivers = as_receivers(model, sender)[::4]
    found = engine.edges(clean, sender, receivers)
    for receiver, logits in zip(receivers, found, strict=True):
        assert torch.allclose(engine.joint(clean, sender, [receiver]), logits, atol=1e-10)


@hooked_only
def test_later_as_receivers_a_joint_patch_see_what_the_earlier_ones_changed():
    # In GPT-2 the stream itself has no norms: the later receiver reads its stream plus d.
    model, batches, means = prepared("gpt2")
    batch = batches[0]
    engine = PathEngine(model, means, "recomputed")
    clean = engine.start(batch)
    found = engine.joint(
        clean, (Unit(0, 1),), [Receiver.parse("L1.H2.v"), Receiver.parse("L3.H0.q")]
    )
    _, cache = model.run_with_cache(**batch.inputs)
    z = cache["blocks.0.attn.hook_z"][:, :, 1]
    d = (means.at_token["blocks.0.attn.hook_z"][1] - z) @ model.blocks[0].attn.W_O[1]
    kept = {}

    def keep(x, hook):
        kept[hook.name] = x

    def patch(index, head, kind):
        attn, norm = model.blocks[index].attn, model.blocks[index].ln1

        def write(x, hook):
            read = norm(kept[f"blocks.{index}.hook_resid_pre"] + d)
            weight, bias = getattr(attn, f"W_{kind}")[head], getattr(attn, f"b_{kind}")[head]
            x[:, :, head] = read @ weight + bias
            return x

        return write

    hooks = [
        ("blocks.1.hook_resid_pre", keep),
        ("blocks.3.hook_resid_pre", keep),
        ("blocks.1.attn.hook_v", patch(1, 2, "V")),
        ("blocks.3.attn.hook_q", patch(3, 0, "Q")),
    ]
    with torch.no_grad():
        slow = model.run_with_hooks(**batch.inputs, fwd_hooks=hooks)
    assert torch.allclose(found, slow, atol=1e-9)


@pytest.mark.slow
def test_padding_does_not_change_a_row(family):
    model, batches, means = prepared(family)
    one = pair_batches(model, token_budget=30)
    together = edge_effects(model, batches, means, ["L0.H1"], progress=False)
    alone = edge_effects(model, one, means, ["L0.H1"], progress=False)
    assert len(one) > len(batches)
    assert np.allclose(together["kl"], alone["kl"], atol=1e-10)
    assert np.allclose(together["margin_change"], alone["margin_change"], atol=1e-9)


@pytest.mark.parametrize("pieces", [8, 30])
def test_cutting_a_batch_along_its_rows_changes_nothing(bert, monkeypatch, pieces):
    model, batches, means = bert
    whole = edge_effects(model, batches, means, ["L1.H1"], progress=False)
    monkeypatch.setattr("hc_lens.analyses.composition.engine.PIECE_TOKENS", pieces)
    cut = edge_effects(model, batches, means, ["L1.H1"], progress=False)
    assert np.allclose(whole["kl"], cut["kl"], atol=1e-12)


def test_the_table_counts_what_the_logits_say(bert):
    model, batches, means = bert
    table = edge_effects(model, {"pairs": batches}, means, ["L0.H1"], ["L1.MLP"], progress=False)
    assert list(table.columns) == [
        *("sender", "receiver", "kind", "dataset", "case", "n"),
        *("kl", "accuracy_change", "agreement", "margin_change", "logit_change"),
    ]
    full, new, gold, cases = [], [], [], []
    for batch in batches:
        receivers = [Receiver.parse("L1.MLP")]
        new.append(engine_edges(model, means, "frozen", batch, (Unit(0, 1),), receivers)[0])
        full.append(model(**batch.inputs).detach())
        gold.append(batch.labels)
        cases += batch.cases
    p, q, y = torch.cat(full).softmax(-1), torch.cat(new).softmax(-1), torch.cat(gold)
    here = torch.tensor([case == "left" for case in cases])
    row = table[table["case"] == "left"].iloc[0]
    assert row["n"] == int(here.sum())
    assert row["kl"] == pytest.approx((p * (p / q).log()).sum(-1)[here].mean().item())
    right = (q.argmax(-1) == y).double() - (p.argmax(-1) == y).double()
    assert row["accuracy_change"] == pytest.approx(right[here].mean().item())

    def odds(x, label):
        chosen = x.gather(1, label[:, None])[:, 0]
        return (chosen / (1 - chosen)).log()

    guess = p.argmax(-1)
    margin = odds(q, guess) - odds(p, guess)
    assert row["margin_change"] == pytest.approx(margin[here].mean().item())
    logit = odds(q, y) - odds(p, y)
    assert row["logit_change"] == pytest.approx(logit[here].mean().item())


def test_by_default_every_edge_from_every_head_is_there(bert):
    model, batches, means = bert
    table = edge_effects(model, batches, means, limit=4, progress=False)
    # Four layers of four heads: 12 inputs a later layer, the MLPs from the own layer on, and one.
    per_layer = [12 * later + later + 1 + 1 for later in (3, 2, 1, 0)]
    assert len(table) == 4 * sum(per_layer) * table["case"].nunique()
    assert not table[["sender", "receiver", "kind", "case"]].duplicated().any()


def test_a_source_that_needs_its_batch_works(bert):
    model, batches, _ = bert
    source = hc.Resample(seed=0)
    table = joint_effects(
        model, batches, source, [("L0.H1", "all")], norms="recomputed", progress=False
    )
    wide = table.pivot_table(index="case", columns="receivers", values="kl")
    assert np.allclose(wide["all"], wide["ablated"])


@pytest.mark.parametrize(
    ("senders", "receivers", "message"),
    [
        (["L2.H1"], ["L1.H0.q"], "reads after the sender L2.H1 writes, got L1.H0.q"),
        (["L2.H1"], ["L2.H0.v"], "reads after the sender L2.H1 writes, got L2.H0.v"),
        (["L2.MLP"], ["L2.MLP"], "reads after the sender L2.MLP writes, got L2.MLP"),
        (["L9.H1"], None, "expected a unit of a model with 4 layers"),
        (["L0.X1"], None, "expected a unit label such as"),
        ([], None, "expected at least one sender"),
        (["L0.H1", "L0.H1"], None, "each once"),
        (["L0.H1"], ["L1.H0.w"], "expected a receiver such as 'L2.H4.q'"),
        (["L0.H1"], ["L1.H77.q"], "expected a unit of a model with 4 layers"),
        (["L0.H1"], ["L1.H0.q", "L1.H0.q"], r"each once, got \['L1.H0.q', 'L1.H0.q'\]"),
        (["L0.H1"], [], "expected receivers such as 'L2.H4.q', .* each once, got none"),
    ],
)
def test_edges_that_are_not_there_are_refused(bert, senders, receivers, message):
    model, batches, means = bert
    with pytest.raises(HcLensError, match=message):
        edge_effects(model, batches, means, senders, receivers, progress=False)


def test_a_model_of_unknown_structure_is_refused_with_a_list_of_the_known(bert):
    _, batches, means = bert
    normed = hc.load(tiny.tiny_hf("qwen3"), tokenizer=tiny.tokenizer_for("qwen3"))
    with pytest.raises(HcLensError, match=r"with other blocks; supported are .*GPT-2"):
        edge_effects(normed, batches, means, progress=False)


def test_a_model_with_hooks_is_refused(bert):
    model, batches, means = bert
    refused = pytest.raises(HcLensError, match="expected a model without hooks")
    with hc.ablate(model, ["L3.H0"], means), refused:
        edge_effects(model, batches, means, progress=False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"norms": "warm"}, "expected norms among"),
        ({"limit": 0}, "expected limit as a whole number"),
    ],
)
def test_wrong_settings_are_refused(bert, settings, message, monkeypatch):
    # A user's session has no type checks at run time.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    model, batches, means = bert
    with pytest.raises(HcLensError, match=message):
        edge_effects(model, batches, means, progress=False, **settings)


def test_batches_that_are_none_are_refused(bert, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    model, _, means = bert
    with pytest.raises(HcLensError, match="expected batches by name"):
        edge_effects(model, [1, 2], means, progress=False)
    with pytest.raises(HcLensError, match="expected rows in every dataset"):
        edge_effects(model, {}, means, progress=False)
    for paths in ([], ["L0.H1"], [("L0.H1",)]):
        with pytest.raises(HcLensError, match="expected pairs of a sender and its receivers"):
            joint_effects(model, pair_batches(model), means, paths, progress=False)


def test_paths_may_be_a_mapping(bert):
    model, batches, means = bert
    wanted = {"L0.H1": ["L1.H0.q", "classifier"], "L1.H2": "all"}
    table = joint_effects(model, batches, means, wanted, limit=5, progress=False)
    named = table[["sender", "receivers", "n_edges"]].drop_duplicates()
    assert list(map(tuple, named.to_numpy())) == [
        ("L0.H1", "ablated", 41),
        ("L0.H1", "L1.H0.q+classifier", 2),
        ("L1.H2", "ablated", 28),
        ("L1.H2", "all", 28),
    ]
