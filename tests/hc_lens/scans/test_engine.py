"""The suffix engine against one full hooked forward pass per set."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

import hc_lens as hc
from hc_lens.models.views import view
from hc_lens.scans import engine as engine_module
from hc_lens.scans.engine import SuffixEngine, children, parts_of
from hc_lens.scans.layers import FusedLayers, HookedLayers
from hc_lens.units import Unit, UnitSpace
from tests import tiny
from tests.batches import random_batches
from tests.hc_lens.pairs import brute_force, deep_model
from tests.lens import BRIDGES, exact, hooked_only, hooks_on
from tests.memory import peak_bytes

ENOUGH = 10**9
NEWER = [] if BRIDGES else ["deberta-v3", "modernbert", "modernbert-mean", "mpnet"]


def some_sets(model) -> list[list[Unit]]:
    """The model itself, every unit, pairs and triples across layers, and everything at once."""
    units = list(UnitSpace.of(model))
    sets = [[], *([unit] for unit in units)]
    sets += [list(pair) for pair in combinations(units[1::4], 2)]
    sets += [list(triple) for triple in combinations(units[::4], 3)]
    sets += [[Unit(1, 0), Unit(1, 3), Unit(1)], units]
    return sets


def sources_of(model, batches) -> dict[str, hc.Source]:
    return {
        "means": hc.collect_means(model, batches, progress=False),
        "means by position": hc.collect_means(model, batches, by="position", progress=False),
        "zero": hc.Zero(),
        "resample": hc.Resample(0),
        "counterfactual": hc.Counterfactual(model, batches, random_batches(model, seed=9)),
    }


def largest_difference(engine: SuffixEngine, model, batches, source, sets) -> float:
    differences = [
        (engine.logits(batch) - brute_force(model, batch, source, sets)).abs().max()
        for batch in batches
    ]
    return float(max(differences))


@pytest.mark.slow
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_unit_and_joint_sets_equal_full_forward_passes(family: str):
    model = deep_model(family)
    sets = some_sets(model)
    for side in ("right", "left") if family in tiny.DECODERS else ("right",):
        batches = random_batches(model, side=side)
        means = hc.collect_means(model, batches, progress=False)
        engine = SuffixEngine(model, sets, means, ENOUGH)
        assert isinstance(engine.layers, FusedLayers)
        assert largest_difference(engine, model, batches, means, sets) < 1e-11


def test_single_precision_stays_within_a_hundred_thousandth(family: str):
    model = deep_model(family, torch.float32)
    batches, sets = random_batches(model), some_sets(model)
    means = hc.collect_means(model, batches, progress=False)
    engine = SuffixEngine(model, sets, means, ENOUGH)
    assert largest_difference(engine, model, batches, means, sets) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["means", "means by position", "zero", "resample", "counterfactual"]
)
def test_every_source_equals_full_forward_passes(family: str, name: str):
    model = deep_model(family)
    batches, sets = random_batches(model), some_sets(model)
    source = sources_of(model, batches)[name]
    engine = SuffixEngine(model, sets, source, ENOUGH)
    assert largest_difference(engine, model, batches, source, sets) < 1e-11


def test_a_source_that_looks_at_the_activation_gets_the_real_one(family: str):
    class Negative(hc.Source):
        def value(self, name, activation):
            return -activation

    model = deep_model(family)
    batches, sets = random_batches(model), some_sets(model)
    engine = SuffixEngine(model, sets, Negative(), ENOUGH)
    assert largest_difference(engine, model, batches, Negative(), sets) < 1e-11


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 30, 100_000])
def test_stacking_does_not_change_the_logits(family: str, tokens: int, monkeypatch):
    monkeypatch.setattr(engine_module, "STACK_TOKENS", tokens)
    model = deep_model(family)
    batches, sets = random_batches(model), some_sets(model)
    means = hc.collect_means(model, batches, progress=False)
    engine = SuffixEngine(model, sets, means, ENOUGH)
    assert largest_difference(engine, model, batches, means, sets) < 1e-11


def test_a_sliding_window_is_kept():
    model = deep_model("mistral", sliding_window=3)
    assert view(model, 0).heads.window == 3
    batches, sets = random_batches(model, lengths=((12, 7), (9, 9))), some_sets(model)
    means = hc.collect_means(model, batches, progress=False)
    engine = SuffixEngine(model, sets, means, ENOUGH)
    assert isinstance(engine.layers, FusedLayers)
    bound = exact("mistral", 1e-11)
    assert largest_difference(engine, model, batches, means, sets) < bound


def test_hooks_of_the_user_are_honoured(family: str):
    model = deep_model(family)
    batches, sets = random_batches(model), some_sets(model)
    means = hc.collect_means(model, batches, progress=False)
    # The pattern of an encoder's bridge can only be read.
    inside = "hook_q" if BRIDGES else "hook_pattern"
    for name in ("blocks.0.hook_resid_post", f"blocks.2.attn.{inside}", "blocks.3.hook_mlp_out"):
        if name in model.hook_dict:
            model.add_hook(name, lambda x, hook: 0.7 * x)
    engine = SuffixEngine(model, sets, means, ENOUGH)
    assert isinstance(engine.layers, HookedLayers)
    assert largest_difference(engine, model, batches, means, sets) < 1e-11
    assert len(model.hook_dict[f"blocks.2.attn.{inside}"].fwd_hooks) == 1


def test_a_subnetwork_can_be_scanned_under_its_own_mask(family: str):
    model = deep_model(family)
    batches = random_batches(model)
    means = hc.collect_means(model, batches, progress=False)
    sets = [[], [Unit(1, 2)], [Unit(0, 1), Unit(3)]]
    with hc.ablate(model, ["L1.H0", "L2.MLP"], means):
        found = SuffixEngine(model, sets, means, ENOUGH).logits(batches[0])
    both = [["L1.H0", "L2.MLP", *map(str, units)] for units in sets]
    assert torch.allclose(found, brute_force(model, batches[0], means, both), atol=1e-11)


@hooked_only
def test_a_replaced_forward_is_honoured():
    model = deep_model("bert")
    batches, sets = random_batches(model), [[], [Unit(0, 0)], [Unit(1)]]
    means = hc.collect_means(model, batches, progress=False)
    theirs = model.blocks[2].mlp.forward
    model.blocks[2].mlp.forward = lambda x: 2 * theirs(x)
    engine = SuffixEngine(model, sets, means, ENOUGH)
    assert largest_difference(engine, model, batches, means, sets) < 1e-11


def test_a_hook_on_the_model_itself_is_refused():
    model = deep_model("bert")
    model.register_forward_hook(lambda module, args, output: 2 * output)
    with pytest.raises(hc.HcLensError, match=r"got a forward hook on the model itself.*remove it"):
        SuffixEngine(model, [[]], hc.Zero(), ENOUGH)


def test_a_model_without_blocks_is_refused():
    with pytest.raises(hc.HcLensError, match=r"expected a HookedEncoder .*got a Linear"):
        SuffixEngine(torch.nn.Linear(2, 2), [[]], hc.Zero(), ENOUGH)


def test_the_model_comes_back_as_it_was(family: str):
    model = deep_model(family)
    batches = random_batches(model)
    before, weights = model(**batches[0].inputs), model.fingerprint
    SuffixEngine(model, some_sets(model), hc.Zero(), ENOUGH).logits(batches[0])
    assert hooks_on(model) == []
    assert torch.equal(model(**batches[0].inputs), before)
    assert model.fingerprint == weights


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bert", "gpt2", "gpt_neox", "llama", *NEWER])
@pytest.mark.parametrize("share", [1.0, 0.4])
def test_peak_memory_stays_within_the_cap(family: str, share: float, monkeypatch):
    monkeypatch.setattr(engine_module, "STACK_TOKENS", 10**6)
    sizes = {"gpt2": {"n_embd": 64}}.get(family, {"hidden_size": 64, "intermediate_size": 256})
    model = deep_model(family, torch.float32, **sizes)
    (batch,) = random_batches(model, lengths=((30, 28, 25, 25, 30, 29, 30, 30),))
    means = hc.collect_means(model, [batch], progress=False)
    sets = some_sets(model)
    whole = SuffixEngine(model, sets, means, ENOUGH)
    row_bytes = whole._row_bytes(30)
    memory = whole.layers.held_bytes + int(share * 8 * row_bytes)
    engine = SuffixEngine(model, sets, means, memory)
    assert peak_bytes(lambda: engine.logits(batch)) < memory - whole.layers.held_bytes
    assert torch.allclose(engine.logits(batch), whole.logits(batch), atol=1e-5)


def test_a_cap_below_one_row_is_an_error_that_says_how_much_is_needed():
    model = deep_model("bert")
    engine = SuffixEngine(model, [[]], hc.Zero(), 1000)
    with pytest.raises(hc.HcLensError, match=r"one row of 9 tokens \(.* bytes\), got 1,000 bytes"):
        engine.logits(random_batches(model)[0])


def test_a_source_that_needs_its_rows_together_is_not_cut():
    model = deep_model("bert")
    batch = random_batches(model)[0]
    engine = SuffixEngine(model, [[]], hc.Resample(0), ENOUGH)
    engine.memory = engine.layers.held_bytes + 2 * engine._row_bytes(9)
    with pytest.raises(hc.HcLensError, match=r"a whole batch of 3 rows .* Resample needs its rows"):
        engine.logits(batch)


def test_a_set_is_what_it_removes_from_each_layer():
    parts = parts_of([Unit(2), Unit(0, 3), Unit(0, 1)], n_layers=3)
    assert parts == ((Unit(0, 1), Unit(0, 3)), (), (Unit(2),))


def test_sets_share_a_node_until_their_parts_differ():
    parts = [parts_of(units, 2) for units in ([Unit(0, 1)], [Unit(0, 1), Unit(1)], [Unit(1)], [])]
    first = children([[0, 1, 2, 3]], parts, layer=0)
    assert first == [(0, (Unit(0, 1),), [0, 1]), (0, (), [2, 3])]
    second = children([[0, 1], [2, 3]], parts, layer=1)
    assert second == [
        (0, (), [0]),
        (0, (Unit(1),), [1]),
        (1, (Unit(1),), [2]),
        (1, (), [3]),
    ]


def test_shared_prefixes_are_run_once(monkeypatch):
    model = deep_model("bert")
    batch = random_batches(model)[0]
    sets = [[Unit(0, 0), Unit(3, head)] for head in range(4)]
    engine = SuffixEngine(model, sets, hc.Zero(), ENOUGH)
    layers = []
    step = engine.layers.step
    monkeypatch.setattr(
        engine.layers, "step", lambda *args, **kw: layers.append(args[1]) or step(*args, **kw)
    )
    engine.logits(batch)
    assert layers == [0, 1, 2, 3]
