"""The instruments on language models, against plain forward passes with hooks in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import hc_lens as hc
from hc_lens.analyses.composition.engine import PathEngine
from hc_lens.analyses.composition.exact import edge_effects
from hc_lens.metrics import AT_ONCE, held_metrics
from hc_lens.models.quiet import quiet
from hc_lens.models.reading import Readout
from hc_lens.pruning.job import Job
from hc_lens.pruning.teacher import Teacher
from hc_lens.scans.engine import SuffixEngine
from hc_lens.scans.layers import FusedLayers, HookedLayers
from hc_lens.units import UnitSpace
from tests import tiny
from tests.lens import HookedEncoder, HookedTransformer, exact
from tests.memory import peak_bytes

FAMILIES = ("gpt2", "gpt_neox", "llama", "qwen2", "bert", "roberta")
MASKED = ("bert", "roberta")
ENOUGH = 10**9
SILENT = {"progress": False}


def rows(seed: int, masked: bool) -> list[dict]:
    """Prompts of 3 to 9 random tokens with counterfactuals; a masked one is read in its middle."""
    draw = torch.Generator().manual_seed(seed)
    made = []
    for number, length in enumerate((9, 5, 3, 7, 7, 4)):
        ids, other, answers = (
            torch.randint(6, tiny.VOCABULARY, (length,), generator=draw).tolist() for _ in range(3)
        )
        right, wrong = answers[0], [each for each in answers[1:] if each != answers[0]]
        row = {"prompt": ids, "counterfactual": other, "right": right, "wrong": wrong}
        made.append({**row, "case": "xy"[number % 2], "read": length // 2 if masked else -1})
    return made


def prompts(model, family: str, side: str | None = None, seed: int = 0):
    """Batches of such prompts, several rows in each."""
    made = hc.Prompts.from_rows(rows(seed, family in MASKED))
    return made.batches(model, token_budget=27, padding_side=side, prepend_bos=False)


def load(family: str, **settings):
    """A tiny language model in float64."""
    hf_model = tiny.tiny_language_model(family, num_hidden_layers=3, **settings)
    if family == "gpt2":
        hf_model = tiny.tiny_language_model(family, n_layer=3, **settings)
    return hc.load(hf_model.double(), dtype=torch.float64, device="cpu")


def own(**settings) -> HookedTransformer:
    """A causal language model that somebody made with TransformerLens."""
    sizes = {"n_layers": 2, "d_model": 16, "n_heads": 2, "d_head": 8, "n_ctx": 16, "d_mlp": 24}
    about = {"d_vocab": tiny.VOCABULARY, "act_fn": "gelu", "seed": 0, "dtype": torch.float64}
    with quiet():
        return HookedTransformer({**sizes, **about, "device": "cpu", **settings})


def by_hand(model, batch, units, source) -> torch.Tensor:
    """The logits at the read positions of one whole forward pass without some units."""
    with torch.no_grad(), hc.ablate(model, units, source.on(batch)):
        logits = model(**batch.inputs)
    return logits[torch.arange(len(batch)), batch.reads]


def sides(family: str) -> tuple[str | None, ...]:
    return (None,) if family in MASKED else ("left", "right")


@pytest.fixture(params=FAMILIES)
def family(request) -> str:
    return request.param


def test_the_readout_is_the_models_own_logits_where_each_row_is_read(family: str):
    model = load(family)
    for side in sides(family):
        for batch in prompts(model, family, side):
            expected = by_hand(model, batch, [], hc.Zero())
            assert Readout(model).split
            torch.testing.assert_close(Readout(model)(batch), expected, rtol=0, atol=exact(family))


@pytest.mark.parametrize("replaced", ["means", "by position", "zero", "counterfactual", "resample"])
def test_a_scan_equals_a_forward_pass_for_each_set(family: str, replaced: str):
    model = load(family)
    space = UnitSpace.of(model)
    sets = [[], *([unit] for unit in space), ["L0.H1", "L1.H2", "L2.MLP"], list(space)]
    for side in sides(family):
        batches = prompts(model, family, side)
        source = {
            "means": hc.collect_means(model, batches, **SILENT),
            "by position": hc.collect_means(model, batches, by="position", **SILENT),
            "zero": hc.Zero(),
            "counterfactual": hc.Counterfactual(model),
            "resample": hc.Resample(0),
        }[replaced]
        engine = SuffixEngine(model, [[*map(hc.Unit.parse, each)] for each in sets], source, ENOUGH)
        assert isinstance(engine.layers, FusedLayers)
        for batch in (batch for batch in batches if replaced != "resample" or len(batch) > 1):
            expected = torch.stack([by_hand(model, batch, units, source) for units in sets])
            torch.testing.assert_close(
                engine.logits(batch), expected, rtol=0, atol=exact(family, 1e-9)
            )


def test_the_counterfactual_is_read_at_the_same_position(family: str):
    model = load(family)
    for batch in prompts(model, family):
        _, there = model.run_with_cache(**batch.counterfactual)

        def patch(z, hook, there=there):
            z[:, :, 2] = there[hook.name][:, :, 2]
            return z

        inputs = dict(batch.inputs)
        patched = model.run_with_hooks(
            inputs.pop("input"), fwd_hooks=[("blocks.1.attn.hook_z", patch)], **inputs
        )
        expected = patched[torch.arange(len(batch)), batch.reads]
        with hc.ablate(model, ["L1.H2"], hc.Counterfactual(model).on(batch)):
            got = Readout(model)(batch)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)


def test_a_scans_table_is_what_the_logits_say(family: str):
    model = load(family)
    batches = prompts(model, family)
    table = hc.scan(
        model, batches, "zero", metrics=["logit_difference", "probability", "log_odds"], **SILENT
    )
    expected = []
    for batch in batches:
        logits = by_hand(model, batch, ["L1.H0"], hc.Zero())
        for row, case in enumerate(batch.cases):
            right, wrong = ([i for i in ids.tolist() if i >= 0] for ids in batch.answers[row])
            p = logits[row].softmax(-1)
            best = max(right + wrong, key=lambda token, row=row: float(logits[row, token]))
            difference = logits[row, right].logsumexp(-1) - logits[row, wrong].logsumexp(-1)
            p_right = float(p[right].sum())
            odds = np.log(p_right / (1 - p_right))
            expected.append((case, best in right, float(difference), p_right, odds))
    columns = ["accuracy", "logit_difference", "probability", "log_odds"]
    for case in "xy":
        of_case = np.array([each[1:] for each in expected if each[0] == case], dtype=float)
        found = table.loc[(table["set"] == "L1.H0") & (table["case"] == case), columns]
        np.testing.assert_allclose(found.to_numpy()[0], of_case.mean(0), atol=exact(family, 1e-9))
    full = table.loc[table["set"] == "full"]
    assert (full["probability_change"] == 0).all()
    assert (full["kl"].abs() < 1e-12).all()


def test_the_kl_is_that_of_the_whole_vocabulary_also_a_few_rows_at_a_time(monkeypatch):
    model = load("llama")
    batches = prompts(model, "llama")
    batch = max(batches, key=len)
    readout, zero = Readout(model), hc.Zero()
    with torch.no_grad():
        full = readout.held(batch)
        with hc.ablate(model, ["L0.MLP"], zero):
            without = readout.held(batch)
    held = torch.stack([full, without])
    p, q = (readout.logits(each).softmax(-1) for each in held)
    expected = (p * (p / q).log()).sum(-1)
    whole = held_metrics(batches, batch, held, readout.logits)
    torch.testing.assert_close(whole["kl"][1], expected, rtol=1e-9, atol=1e-12)
    monkeypatch.setattr("hc_lens.metrics.AT_ONCE", tiny.VOCABULARY)  # one row of one run
    pieces = held_metrics(batches, batch, held, readout.logits)
    for name, values in whole.items():
        torch.testing.assert_close(pieces[name], values, equal_nan=True)


def test_rows_of_a_scan_have_no_logits_of_a_vocabulary_and_add_up_to_the_table():
    model = load("gpt2")
    batches = prompts(model, "gpt2")
    found = hc.scan_rows(model, batches, "zero", metrics=["loss", "agreement"], **SILENT)
    assert found.logits is None
    assert (found.more["agreement"] == found.agreement).all()
    assert found.more["loss"].shape == found.kl.shape
    kept = found.where(np.arange(len(found.rows)) < 4)
    assert kept.more["loss"].shape == (len(found.sets), 4)
    table = hc.scan(model, batches, "zero", metrics=["loss", "agreement"], **SILENT)
    np.testing.assert_allclose(found.table()["loss"], table["loss"])
    assert list(found.table().columns) == list(table.columns)


def test_a_store_keeps_what_is_read_so_that_another_metric_can_be_had_later(tmp_path, monkeypatch):
    model = load("gpt2")
    batches = prompts(model, "gpt2")
    first = hc.scan(model, batches, hc.Counterfactual(model), store=tmp_path, **SILENT)
    monkeypatch.setattr(SuffixEngine, "held", None)

    def largest(logits, batch):
        return logits.amax(-1)

    again = hc.scan(
        model, batches, hc.Counterfactual(model), store=tmp_path, metrics={"top": largest}, **SILENT
    )
    assert again[list(first.columns)].equals(first)
    assert again["top"].notna().all()


def test_importance_is_the_derivative_of_the_metric_by_each_units_mask(family: str):
    if exact(family) > 1e-10:
        pytest.skip("its attention is rounded to float32, too coarse for these steps")
    model = load(family)
    batches = prompts(model, family)
    means = hc.collect_means(model, batches, **SILENT)
    table = hc.importance(model, batches, means, loss="logit_difference", **SILENT)
    space, small = UnitSpace.of(model), 1e-6
    for unit in ("L0.H1", "L1.H3", "L2.MLP"):
        slopes = []
        for batch in batches:
            values = []
            for entry in (1.0, 1.0 - small):
                mask = torch.ones(len(space), dtype=torch.float64)
                mask[space.index(unit)] = entry
                with torch.no_grad(), hc.masked(model, mask, means):
                    log_probs = batches.log_probs(Readout(model)(batch), batch)
                values.append(log_probs[:, 0] - log_probs[:, 1])
            slopes.append((values[0] - values[1]) / small)
        slope = torch.cat(slopes)
        found = table.set_index("unit").loc[unit]
        assert found["importance"] == pytest.approx(float(slope.abs().mean()), abs=1e-5)
        assert found["effect"] == pytest.approx(-float(slope.mean()), abs=1e-5)


@pytest.mark.parametrize("method", ["gates", "random", "importance", "greedy"])
def test_every_way_to_prune_takes_a_language_model(method: str):
    model = load("llama")
    batches = prompts(model, "llama")
    means = hc.collect_means(model, batches, **SILENT)
    config = hc.PruneConfig(0.4, method=method, steps=6)
    sub = hc.prune(model, batches, means, config, **SILENT)
    assert len(sub.removed) == 6  # of 12 heads and 3 MLPs
    table = hc.evaluate(model, batches, means=means, subnetwork=sub, **SILENT)
    assert table["subnetwork"].tolist() == ["full", "full", "subnetwork", "subnetwork"]
    again = hc.evaluate(
        model, batches, means=means, subnetwork=sub, metrics=["kl", "margin"], **SILENT
    )
    assert list(again.columns) == [*table.columns, "margin"]
    kept, n_rows, total = list(sub.removed), 0, 0.0
    for batch in batches:
        p, q = (by_hand(model, batch, units, means).softmax(-1) for units in ([], kept))
        total, n_rows = total + float((p * (p / q).log()).sum()), n_rows + len(batch)
    got = table.loc[table["subnetwork"] == "subnetwork"]
    bound = exact("llama", 1e-9)
    assert (got["kl"] * got["n"]).sum() / n_rows == pytest.approx(total / n_rows, abs=bound)


@pytest.mark.parametrize("loss", ["kl", "cross-entropy", "logit_difference", "probability"])
def test_the_losses_of_pruning_are_known_by_hand_and_train_gates(loss: str):
    model = load("gpt2")
    batches = prompts(model, "gpt2")
    means = hc.collect_means(model, batches, **SILENT)
    config, batch = hc.PruneConfig(0.4, steps=4, loss=loss), batches[0]
    job = Job(model, batches, means, config, Teacher(model))
    full, without = (by_hand(model, batch, units, means) for units in ([], ["L1.MLP"]))
    expected = []
    for row in range(len(batch)):
        right, wrong = ([i for i in ids.tolist() if i >= 0] for ids in batch.answers[row])
        p, q = full[row].softmax(-1), without[row].softmax(-1)
        expected.append({
            "kl": (p * (p / q).log()).sum(),
            "cross-entropy": -q[right].sum().log(),
            "logit_difference": ((q[right].sum() / q[wrong].sum()).log()
                                 - (p[right].sum() / p[wrong].sum()).log()) ** 2,
            "probability": (q[right].sum() - p[right].sum()) ** 2,
        }[loss])  # fmt: skip
    found = job.loss(without, batch, lambda: full)
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-9, atol=1e-12)
    assert len(hc.prune(model, batches, means, config, **SILENT).removed) == 6


def test_a_model_of_the_users_own_with_folded_weights_and_hooks_is_scanned_as_it_runs():
    model = own(normalization_type="LN", init_weights=True)
    with quiet():
        model.load_and_process_state_dict(model.state_dict())
    batches = prompts(model, "gpt2")
    expected = hc.scan(model, batches, "zero", **SILENT)
    model.add_hook("ln_final.hook_normalized", lambda x, hook: x * 1.0)
    assert not Readout(model).split
    hooked = hc.scan(model, batches, "zero", **SILENT)
    model.reset_hooks()
    np.testing.assert_allclose(hooked["kl"], expected["kl"], atol=1e-9)
    np.testing.assert_allclose(hooked["logit_change"], expected["logit_change"], atol=1e-9)


def test_a_plain_hooked_encoder_is_scanned_as_it_runs():
    cfg = own().cfg
    cfg.attention_dir, cfg.normalization_type = "bidirectional", "LN"
    with quiet():
        model = HookedEncoder(cfg)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(0))
    batches = prompts(model, "bert")
    sets = [[], [hc.Unit(0, 1)], [hc.Unit(1)]]
    engine = SuffixEngine(model, sets, hc.Zero(), ENOUGH)
    for batch in batches:
        expected = torch.stack([by_hand(model, batch, units, hc.Zero()) for units in sets])
        torch.testing.assert_close(engine.logits(batch), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", ["shortformer", "alibi", "rotary", "standard"])
def test_every_kind_of_positions_is_scanned_as_it_runs(kind: str):
    settings = {"rotary_dim": 8} if kind == "rotary" else {}
    model = own(positional_embedding_type=kind, **settings)
    batches = prompts(model, "gpt2", "right")
    sets = [[], [hc.Unit(0, 1)], [hc.Unit(1)]]
    engine = SuffixEngine(model, sets, hc.Zero(), ENOUGH)
    expected_kind = FusedLayers if kind in ("rotary", "standard") else HookedLayers
    assert isinstance(engine.layers, expected_kind)
    for batch in batches:
        expected = torch.stack([by_hand(model, batch, units, hc.Zero()) for units in sets])
        torch.testing.assert_close(engine.logits(batch), expected, rtol=0, atol=1e-10)


def test_a_metric_of_a_wrong_shape_or_with_nan_is_an_error():
    model = load("gpt2")
    batches = prompts(model, "gpt2")
    wrong = {"shape": lambda logits, batch: logits, "nan": lambda logits, batch: logits[:, 0] / 0.0}
    with pytest.raises(hc.HcLensError, match="expected one number for each of the"):
        hc.scan(model, batches, "zero", metrics={"mine": wrong["shape"]}, **SILENT)
    with pytest.raises(hc.HcLensError, match="finite numbers of the metric 'mine'"):
        hc.evaluate(model, batches, metrics={"mine": wrong["nan"]}, **SILENT)
    with pytest.raises(hc.HcLensError, match=r"the metric.*accuracy.*got 'acuracy'"):
        hc.scan(model, batches, "zero", metrics=["acuracy"], **SILENT)
    with pytest.raises(hc.HcLensError, match=r"yours under another, got 'kl'"):
        hc.scan(model, batches, "zero", metrics={"kl": wrong["shape"]}, **SILENT)
    with pytest.raises(hc.HcLensError, match="a metric with a derivative"):
        hc.importance(model, batches, "zero", loss="accuracy", **SILENT)


def test_a_metric_is_tried_on_a_few_rows_before_any_work(monkeypatch):
    model = load("gpt2")
    batches, seen = prompts(model, "gpt2"), []

    def stop(*arguments):
        raise AssertionError("work was done first")

    def wrong(logits, batch):
        seen.append(len(logits))
        return logits.numpy()[:, 0]

    monkeypatch.setattr(SuffixEngine, "held", stop)
    monkeypatch.setattr(Teacher, "held", stop)
    monkeypatch.setattr(PathEngine, "passes", stop)
    for work in (
        lambda data: hc.scan(model, data, "zero", metrics={"mine": wrong}, **SILENT),
        lambda data: hc.scan_rows(model, data, "zero", metrics={"mine": wrong}, **SILENT),
        lambda data: hc.evaluate(model, data, metrics={"mine": wrong}, **SILENT),
        lambda data: edge_effects(model, data, "zero", metrics={"mine": wrong}, **SILENT),
    ):
        with pytest.raises(hc.HcLensError, match=r"one number for each .* from the metric 'mine'"):
            work({"first": batches})
        assert seen.pop() <= 2
        assert not seen
    assert not any(point.fwd_hooks for point in model.hook_dict.values())


@pytest.mark.parametrize("name", ["n", "case", "dataset", "set"])
def test_a_metric_under_the_name_of_a_column_is_an_error(name):
    model = load("gpt2")
    batches = prompts(model, "gpt2")
    with pytest.raises(hc.HcLensError, match=f"no other column of the table has, got '{name}'"):
        hc.scan(model, batches, "zero", metrics={name: lambda x, _: x[:, 0]}, **SILENT)
    if name != "set":
        with pytest.raises(hc.HcLensError, match="no other column of the table has"):
            hc.evaluate(model, batches, metrics={name: lambda x, _: x[:, 0]}, **SILENT)


def test_a_task_with_labels_is_refused_on_a_language_model():
    model = load("gpt2")
    rows = [{"text": "the", "label": "a"}, {"text": "a", "label": "b"}]
    task = hc.Task.from_rows(rows, columns="text")
    model.tokenizer = tiny.byte_tokenizer()
    with pytest.raises(hc.HcLensError):
        hc.evaluate(model, task.batches(model), **SILENT)


def test_a_masked_language_model_without_read_positions_is_refused():
    model = load("bert")
    ids = torch.randint(6, tiny.VOCABULARY, (2, 4))
    batch = hc.Batch({"input": ids}, torch.zeros(2, dtype=torch.long), ("a", "a"), torch.arange(2))
    with pytest.raises(hc.HcLensError, match="where a masked language model is read"):
        Readout(model)(batch)


def test_counterfactuals_that_a_batch_does_not_have_are_an_error():
    model = load("gpt2")
    made = [{key: row[key] for key in ("prompt", "right", "wrong")} for row in rows(0, False)]
    batches = hc.Prompts.from_rows(made).batches(model, prepend_bos=False)
    with pytest.raises(hc.HcLensError, match="batches with counterfactuals, got rows without"):
        hc.scan(model, batches, hc.Counterfactual(model), **SILENT)
    with pytest.raises(hc.HcLensError, match="one side alone"):
        hc.Counterfactual(model, batches)


def test_an_unembedding_with_nan_is_found_out():
    model = load("gpt2")
    batches = prompts(model, "gpt2")
    with torch.no_grad():
        model.unembed.W_U[0, 0] = torch.nan
    with pytest.raises(hc.HcLensError, match="begin behind the last block"):
        hc.scan(model, batches, "zero", **SILENT)


@pytest.mark.slow
def test_a_vocabulary_of_50_000_needs_the_logits_of_one_run_alone():
    model = own(d_vocab=50_000, dtype=torch.float32)
    made = [{"prompt": [1, 2 + row, 3], "right": 4, "wrong": 5} for row in range(200)]
    batches = hc.Prompts.from_rows(made).batches(model, prepend_bos=False)
    (batch,) = batches
    of_one_run = 50_000 * len(batch) * 4
    sets = [*([unit] for unit in UnitSpace.of(model)), list(UnitSpace.of(model))]
    peak = peak_bytes(lambda: hc.scan(model, batches, "zero", sets, **SILENT))
    # Of the full model and of one other run, and some copies of a few rows of them.
    assert peak < 3 * of_one_run + 10 * AT_ONCE * 8
    assert (len(sets) + 1) * 2 * of_one_run > peak


@pytest.mark.slow
def test_a_real_language_model_is_scanned_pruned_and_measured_as_it_runs(stories):
    batches = hc.Prompts.named("ioi", n=12).batches(stories, "validation")
    means = hc.collect_means(stories, batches, **SILENT)
    units = ["L0.MLP", "L4.H4", "L5.H1"]
    sub = hc.prune(stories, batches, means, hc.PruneConfig(0.5, method="importance"), **SILENT)
    sets = [[], *([unit] for unit in units), units, [str(unit) for unit in sub.removed]]
    parsed = [[*map(hc.Unit.parse, each)] for each in sets]
    for source in (means, hc.Counterfactual(stories)):
        engine = SuffixEngine(stories, parsed, source, ENOUGH)
        for batch in batches:
            expected = torch.stack([by_hand(stories, batch, each, source) for each in sets])
            torch.testing.assert_close(engine.logits(batch), expected, rtol=0, atol=1e-4)
    table = hc.evaluate(stories, batches, means=means, subnetwork=sub, **SILENT)
    n_rows, total = 0, 0.0
    for batch in batches:
        p, q = (by_hand(stories, batch, each, means).double().softmax(-1) for each in sets[::5])
        total, n_rows = total + float((p * (p / q).log()).sum()), n_rows + len(batch)
    found = table.loc[table["subnetwork"] == "subnetwork"]
    assert (found["kl"] * found["n"]).sum() / n_rows == pytest.approx(total / n_rows, abs=1e-4)
