"""Scans to a stated precision: against exact scans, their work, their refusals, their store."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import hc_lens as hc
from hc_lens.metrics import over_cases
from hc_lens.scans import intervals
from hc_lens.scans.engine import SuffixEngine
from hc_lens.scans.precise import WholeCaseWarning
from hc_lens.scans.runs import UnitRuns
from hc_lens.scans.sampler import Sampler
from hc_lens.scans.scan import COLUMNS, scan, scan_rows
from hc_lens.scans.target import NoGradientWarning
from tests.hc_lens.pairs import deep_model, pair_batches, pair_task
from tests.language_models import save_language_model

ROWS = 500
SETS = ["L0.H0", "L2.MLP", ["L1.H1", "L3.H2"], "L3.H1"]
NUMBERS = ["accuracy", "accuracy_change", "kl", "agreement", "logit_change"]


@pytest.fixture(scope="module")
def bert():
    """A model, batches of two cases with some hundred rows each, and means."""
    model = deep_model("bert")
    batches = pair_batches(model, ROWS, token_budget=2000)
    return model, batches, hc.collect_means(model, batches, progress=False)


def quiet(function, *args, **settings):
    return function(*args, progress=False, **settings)


@pytest.fixture(scope="module")
def exact(bert):
    return quiet(scan, *bert, SETS)


@pytest.mark.parametrize(
    ("of", "column", "asked"),
    [
        ("logit", "logit_change", 0.01),
        ("kl", "kl", 0.001),
        ("accuracy", "accuracy_change", 0.06),
        ("agreement", "agreement", 0.06),
    ],
)
def test_every_interval_is_as_narrow_as_asked_and_holds_the_exact_value(
    bert, exact, of, column, asked
):
    table = quiet(scan, *bert, SETS, precision=asked, precision_of=of)
    assert list(table.columns) == [*COLUMNS, "low", "high"]
    assert list(table["set"]) == list(exact["set"])
    assert list(table["case"]) == list(exact["case"])
    assert ((table["high"] - table["low"]) / 2 <= asked + 1e-12).all()
    assert (table["low"] <= exact[column] + 1e-9).all()
    assert (exact[column] <= table["high"] + 1e-9).all()
    assert np.allclose((table["low"] + table["high"]) / 2, table[column])
    ablated = table["set"] != "full"
    assert (table["n"] <= exact["n"]).all()
    assert table.loc[ablated, "n"].sum() < 0.8 * exact.loc[ablated, "n"].sum()
    full = table.loc[~ablated, NUMBERS].to_numpy()
    assert np.allclose(full, exact.loc[~ablated, NUMBERS])


def test_a_precision_that_takes_all_rows_gives_the_exact_scan(bert, exact):
    table = quiet(scan, *bert, SETS, precision=1e-9)
    assert (table["n"] == exact["n"]).all()
    assert np.allclose(table[NUMBERS], exact[NUMBERS], atol=1e-12)
    assert np.allclose(table["low"], table["high"])


def test_the_other_columns_are_those_of_the_same_rows(bert):
    model, batches, means = bert
    table = quiet(scan, model, batches, means, ["L2.MLP"], precision=0.02, metrics=["probability"])
    line = table[(table["case"] == "left") & (table["set"] == "L2.MLP")].iloc[0]
    rows = quiet(scan_rows, model, batches.of_cases("left"), means, ["L2.MLP"])
    assert 0 < line["n"] < len(rows.rows)
    # A mean of n rows is a whole number of rows that are right, and a sample is close to all.
    assert line["agreement"] * line["n"] == pytest.approx(round(line["agreement"] * line["n"]))
    assert line["kl"] == pytest.approx(rows.kl[1].mean(), rel=0.5)
    assert np.isfinite(line["probability_change"])


def test_one_seed_gives_one_table_and_another_seed_other_rows(bert):
    first, again, other = (
        quiet(scan, *bert, SETS, precision=0.01, seed=seed) for seed in (0, 0, 1)
    )
    assert first.equals(again)
    assert not np.allclose(first["logit_change"], other["logit_change"])


def test_rows_are_drawn_alike_however_they_are_batched(bert):
    model, batches, means = bert
    other = pair_batches(model, ROWS, token_budget=300, seed=5)
    first, second = (
        quiet(scan, model, {"d": each}, means, SETS, precision=0.01) for each in (batches, other)
    )
    assert list(first["n"]) == list(second["n"])
    assert np.allclose(first["logit_change"], second["logit_change"], atol=1e-9)


def test_intervals_that_are_to_hold_together_take_more_rows(bert):
    alone, together = (
        quiet(scan, *bert, SETS, precision=0.01, simultaneous=both) for both in (False, True)
    )
    assert together["n"].sum() > alone["n"].sum()


def test_a_dataset_can_have_one_estimate_for_all_its_rows(bert):
    rows = quiet(scan_rows, *bert, SETS)
    expected = (rows.logit[1:] - rows.logit[:1]).mean(1)
    table = quiet(scan, *bert, SETS, precision=0.01, by_case=False)
    assert list(table["case"].unique()) == ["all"]
    assert (np.abs(table["logit_change"][1:] - expected) <= 0.01).all()
    assert (table["n"][1:] < ROWS).all()


def test_control_variates_save_rows(bert, monkeypatch):
    with_them = quiet(scan, *bert, SETS, precision=0.01)
    monkeypatch.setattr(intervals, "controlled", lambda effects, known, certain: effects)
    without = quiet(scan, *bert, SETS, precision=0.01)
    assert with_them["n"].sum() < 0.8 * without["n"].sum()


def test_small_cases_are_measured_whole_and_said_so(bert):
    model, _, means = bert
    batches = pair_batches(model, 40)
    with pytest.warns(WholeCaseWarning, match=r"got 'left', 'right' with fewer: there the scan is"):
        table = quiet(scan, model, batches, means, SETS, precision=0.5)
    exact = quiet(scan, model, batches, means, SETS)
    assert np.allclose(table[NUMBERS], exact[NUMBERS], atol=1e-12)
    assert np.array_equal(table["low"], table["high"])


def rounded(logits, batch):
    return logits.detach().argmax(-1).double()


def confidence(logits, batch):
    return logits.softmax(-1).amax(-1)


def test_a_metric_without_a_gradient_works_and_says_so(bert):
    settings = {"metrics": {"choice": rounded}, "precision_of": "choice", "precision": 0.1}
    with pytest.warns(NoGradientWarning, match="'choice' without one"):
        table = quiet(scan, *bert, SETS, **settings)
    exact = quiet(scan, *bert, SETS, metrics={"choice": rounded})
    assert (table["low"] <= exact["choice_change"]).all()
    assert (exact["choice_change"] <= table["high"]).all()


def test_a_metric_of_the_user_s_own_with_a_gradient_has_control_variates(bert, recwarn):
    own = {"confidence": confidence}
    table = quiet(scan, *bert, SETS, metrics=own, precision_of="confidence", precision=0.002)
    exact = quiet(scan, *bert, SETS, metrics=own)
    assert not [each for each in recwarn if issubclass(each.category, NoGradientWarning)]
    assert (table["low"] <= exact["confidence_change"]).all()
    assert (exact["confidence_change"] <= table["high"]).all()
    assert table["n"].sum() < exact["n"].sum()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"precision": 0}, r"expected precision as a number above 0, such as 0.02, got 0"),
        ({"precision": -1.0}, r"expected precision as a number above 0.*got -1.0"),
        ({"precision": float("nan")}, r"expected precision as a number above 0.*got nan"),
        (
            {"precision": 0.1, "confidence": 95},
            r"expected confidence as a number between 0 and 1, such as 0.95, got 95",
        ),
        ({"precision": 0.1, "confidence": 1.0}, r"expected confidence as a number between 0 and 1"),
        ({"precision": 0.1, "seed": -1}, r"expected seed as a whole number of at least 0, got -1"),
        ({"precision": 0.1, "precision_of": "loss"}, r"expected the metric that is to be precise"),
        ({"confidence": 0.9}, r"expected precision= with confidence=, got confidence= alone"),
        ({"precision": 0.1, "memory": 1000}, r"expected memory for"),
    ],
)
def test_settings_that_make_no_sense_are_refused(bert, settings, message):
    with pytest.raises(hc.HcLensError, match=message):
        quiet(scan, *bert, SETS, **settings)


def test_rows_that_cannot_be_drawn_are_refused(bert):
    model, batches, means = bert

    class Own:
        name, labels = "own", batches.labels
        predictions, log_probs = batches.predictions, batches.log_probs

        def __len__(self):
            return len(batches)

        def __getitem__(self, index):
            return batches[index]

    with pytest.raises(hc.HcLensError, match=r"batches of task.batches\(...\) to draw.*got a Own"):
        quiet(scan, model, Own(), means, SETS, precision=0.1)
    with pytest.raises(hc.HcLensError, match="drawn one by one, got Resample"):
        quiet(scan, model, batches, hc.Resample(0), SETS, precision=0.1)


def test_rows_without_labels_have_a_precise_kl_but_no_log_odds(bert):
    model, _, means = bert
    texts = pair_task(ROWS).dataset("all").to_pandas()[["premise", "hypothesis"]]
    task = hc.Task.from_rows(texts, columns=("premise", "hypothesis"), label=None)
    unlabelled = task.batches(model)
    found = quiet(scan, model, unlabelled, means, SETS, precision=0.001, precision_of="kl")
    assert found["accuracy"].isna().all()
    exact = quiet(scan, model, unlabelled, means, SETS)
    assert (found["low"] <= exact["kl"] + 1e-9).all()
    assert (exact["kl"] <= found["high"] + 1e-9).all()
    with pytest.raises(hc.HcLensError, match="expected rows with labels to estimate 'logit' on"):
        quiet(scan, model, unlabelled, means, SETS, precision=0.1)


def test_a_user_s_hooks_run_and_the_result_is_the_same_without_kernels(bert):
    model, batches, means = bert
    expected = quiet(scan, model, batches, means, SETS, precision=0.01)
    seen = []
    model.hook_dict["blocks.0.hook_mlp_out"].add_hook(lambda x, hook: seen.append(len(x)))
    try:
        found = quiet(scan, model, batches, means, SETS, precision=0.01)
    finally:
        model.reset_hooks()
    assert seen
    assert list(found["n"]) == list(expected["n"])
    assert np.allclose(found["logit_change"], expected["logit_change"], atol=1e-9)


def test_little_memory_cuts_batches_and_changes_nothing(bert):
    expected = quiet(scan, *bert, SETS, precision=0.01)
    found = quiet(scan, *bert, SETS, precision=0.01, memory=1_200_000)
    assert np.allclose(found["logit_change"], expected["logit_change"], atol=1e-9)


class InterruptedByUserError(Exception):
    """Stands for the user's Ctrl-C."""


def test_an_interrupted_scan_goes_on_where_it_stopped(bert, tmp_path, monkeypatch):
    expected = quiet(scan, *bert, SETS, precision=0.01)
    real, calls = SuffixEngine.held, []

    def counted(self, batch, *args):
        if len(calls) == 3:
            raise InterruptedByUserError
        calls.append(batch.rows.tolist())
        return real(self, batch, *args)

    monkeypatch.setattr(SuffixEngine, "held", counted)
    with pytest.raises(InterruptedByUserError):
        quiet(scan, *bert, SETS, precision=0.01, store=tmp_path)
    monkeypatch.setattr(SuffixEngine, "held", real)
    gradients = []
    monkeypatch.setattr(UnitRuns, "gradients", lambda *args: gradients.append(args))
    assert quiet(scan, *bert, SETS, precision=0.01, store=tmp_path).equals(expected)
    assert not gradients
    monkeypatch.setattr(SuffixEngine, "held", None)
    assert quiet(scan, *bert, SETS, precision=0.01, store=tmp_path).equals(expected)


def test_the_work_is_what_the_table_says(bert, monkeypatch):
    real, counted = Sampler._measure, []

    def watched(self, sets, parts):
        counted.append(len(sets) * sum(stop - start for _, start, stop in parts))
        return real(self, sets, parts)

    monkeypatch.setattr(Sampler, "_measure", watched)
    table = quiet(scan, *bert, SETS, precision=0.01)
    assert sum(counted) == table.loc[table["set"] != "full", "n"].sum()


def test_a_causal_classifier_and_half_precision_are_scanned():
    model = deep_model("gpt2", torch.float32)
    batches = pair_batches(model, 300, token_budget=2000)
    means = hc.collect_means(model, batches, progress=False)
    exact = quiet(scan, model, batches, means, SETS)
    found = quiet(scan, model, batches, means, SETS, precision=0.01)
    assert (found["low"] <= exact["logit_change"] + 1e-6).all()
    assert (exact["logit_change"] <= found["high"] + 1e-6).all()


def test_prompts_of_a_language_model_are_drawn_with_their_answers(tmp_path):
    model = hc.load(save_language_model(tmp_path), dtype=torch.float64)
    prompts = hc.Prompts.named("agreement", n=600).batches(model, "validation")
    means = hc.collect_means(model, prompts, progress=False)
    for of, column, asked in (("logit_difference", "logit_change", 0.005), ("kl", "kl", 0.001)):
        exact = quiet(scan, model, prompts, means)
        settings = {"precision": asked, "precision_of": of, "by_case": False}
        found = quiet(scan, model, prompts, means, **settings)
        truth = over_cases(exact, ["set"], [column]).set_index("set")[column]
        held = found.set_index("set")
        assert (held["low"] <= truth.loc[held.index] + 1e-9).all()
        assert (truth.loc[held.index] <= held["high"] + 1e-9).all()
        assert (held["n"][1:] < prompts.n_rows).any()
