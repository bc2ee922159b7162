"""Scans: their numbers against hand computation and full passes, their refusals, their store."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import jaxtyping
import numpy as np
import pytest
import torch
from safetensors.torch import load, save

import hc_lens as hc
from hc_lens.records import DamagedWarning
from hc_lens.scans.engine import SuffixEngine
from hc_lens.scans.scan import COLUMNS, parse_memory, scan, scan_rows
from hc_lens.units import as_units, set_label
from tests.damage import DAMAGES, swap
from tests.hc_lens.pairs import brute_force, deep_model, pair_batches, pair_task

TWO_WAY = ("entailment", "non-entailment")


@pytest.fixture(scope="module")
def bert():
    """A model, batches and means that no test changes."""
    model = deep_model("bert")
    batches = pair_batches(model)
    return model, batches, hc.collect_means(model, batches, progress=False)


def quiet(function, *args, **settings):
    return function(*args, progress=False, **settings)


def test_the_table_has_one_row_per_case_and_set_with_the_full_model_first(bert):
    model, batches, means = bert
    table = quiet(scan, model, {"pairs": batches}, means)
    assert tuple(table.columns) == COLUMNS
    assert len(table) == 2 * (1 + len(hc.UnitSpace.of(model)))
    assert list(table["set"][:3]) == ["full", "L0.H0", "L0.H1"]
    assert set(table["case"]) == {"left", "right"}
    assert table.groupby("case")["n"].first().sum() == 24
    full = table[table["set"] == "full"]
    assert (full[["accuracy_change", "kl", "logit_change"]] == 0).all(axis=None)
    assert (full["agreement"] == 1).all()


def test_the_numbers_are_those_of_a_full_pass_per_set(family: str):
    model = deep_model(family)
    batches = pair_batches(model)
    means = hc.collect_means(model, batches, progress=False)
    sets = [["L1.H2"], ["L0.H1", "L2.MLP"]]
    table = quiet(scan, model, batches, means, sets).set_index(["case", "set"])
    passes = [brute_force(model, batch, means, [[], *sets]) for batch in batches]
    cases = np.concatenate([np.asarray(batch.cases) for batch in batches])
    labels = torch.cat([batch.labels for batch in batches])
    full, joint = torch.cat([p[0] for p in passes]), torch.cat([p[2] for p in passes])
    here = torch.tensor(cases == "left")
    found = table.loc[("left", "L0.H1+L2.MLP")]
    # The model's three labels are the task's, so everything follows from the logits.
    right, was = (joint.argmax(-1) == labels)[here], (full.argmax(-1) == labels)[here]
    assert found["accuracy"] == pytest.approx(right.double().mean().item())
    assert found["accuracy_change"] == pytest.approx((right.double() - was.double()).mean().item())
    p, q = full.softmax(-1)[here], joint.softmax(-1)[here]
    assert found["kl"] == pytest.approx((p * (p / q).log()).sum(-1).mean().item(), rel=1e-6)
    same = (joint.argmax(-1) == full.argmax(-1))[here]
    assert found["agreement"] == pytest.approx(same.double().mean().item())
    gold = labels[here][:, None]
    odds = [(x.gather(1, gold) / (1 - x.gather(1, gold))).log() for x in (p, q)]
    assert found["logit_change"] == pytest.approx((odds[1] - odds[0]).mean().item(), rel=1e-6)


def test_the_full_model_and_a_subnetwork_have_the_numbers_of_evaluate(bert):
    from hc_lens.evaluation import evaluate

    model, batches, means = bert
    scanned = quiet(scan, model, {"d": batches}, means, ["L1.H1"])
    expected = quiet(evaluate, model, {"d": batches}).set_index("case")
    found = scanned[scanned["set"] == "full"].set_index("case").loc[expected.index]
    assert np.allclose(found["accuracy"], expected["accuracy"])
    assert (found["n"] == expected["n"]).all()


def test_two_way_tasks_count_neutral_and_contradiction_alike(bert):
    model, _, means = bert
    batches = pair_batches(model, labels=TWO_WAY)
    rows = quiet(scan_rows, model, batches, means, ["L0.H0"])
    predicted = (rows.logits.argmax(-1) != 0).astype(int)
    assert (rows.correct == (predicted == rows.rows["label"].to_numpy())).all()
    p = torch.tensor(rows.logits).softmax(-1)[..., 0].numpy()
    odds = np.log(p / (1 - p)) * np.where(rows.rows["label"] == 0, 1, -1)
    assert np.allclose(rows.logit, odds)


def test_rows_come_in_the_order_of_the_split_and_add_up_to_the_table(bert):
    model, batches, means = bert
    named = {"b": batches, "a": pair_batches(model, 10)}
    rows = quiet(scan_rows, model, named, means)
    assert list(rows.rows["dataset"]) == ["b"] * 24 + ["a"] * 10
    assert list(rows.rows["row"]) == [*range(24), *range(10)]
    table = quiet(scan, model, named, means)
    pd_equal = rows.table()
    assert list(pd_equal["set"]) == list(table["set"])
    assert list(pd_equal["dataset"].unique()) == ["b", "a"]
    numbers = list(COLUMNS[3:])
    assert np.allclose(pd_equal[numbers], table[numbers])


def test_some_of_the_rows_can_be_kept(bert):
    model, batches, means = bert
    rows = quiet(scan_rows, model, batches, means, ["L0.H0"])
    left = rows.where((rows.rows["case"] == "left").to_numpy())
    whole = rows.table()
    assert np.allclose(left.table()["kl"], whole.loc[whole["case"] == "left", "kl"])
    assert left.logits.shape == (2, len(left.rows), 3)


def test_rows_without_labels_still_have_kl_and_agreement(bert):
    model, _, means = bert
    table = pair_task().dataset("all").to_pandas()[["premise", "hypothesis"]]
    task = hc.Task.from_rows(table, columns=("premise", "hypothesis"), label=None)
    found = quiet(scan, model, task.batches(model), means, ["L0.H0"])
    assert found["accuracy"].isna().all()
    assert found["logit_change"].isna().all()
    assert (found["kl"] >= 0).all()
    assert found["agreement"].between(0, 1).all()


def test_pairs_are_all_pairs_of_the_units_after_the_units(bert):
    model, batches, means = bert
    units = ["L3.H1", "L0.H2", "L1.MLP"]
    rows = quiet(scan_rows, model, batches, means, hc.pairs(units))
    assert rows.sets == (
        *("full", "L3.H1", "L0.H2", "L1.MLP"),
        *("L0.H2+L3.H1", "L1.MLP+L3.H1", "L0.H2+L1.MLP"),
    )


def test_a_set_has_one_label_however_it_is_written():
    given = [["L3.H7", "L2.H5"], "L3.H7+L2.H5", (hc.Unit(2, 5), hc.Unit(3, 7)), "L2.H5+L3.H7"]
    assert {set_label(units) for units in given} == {"L2.H5+L3.H7"}
    assert as_units("L2.MLP+L2.H1") == (hc.Unit(2, 1), hc.Unit(2))


def test_index_finds_a_set_and_refuses_one_that_was_not_scanned(bert):
    model, batches, means = bert
    rows = quiet(scan_rows, model, batches, means, [["L1.H0", "L0.H1"]])
    assert rows.index("full") == 0
    assert rows.index(["L1.H0", "L0.H1"]) == 1
    with pytest.raises(hc.HcLensError, match=r"expected a set that was scanned, got L0.H0"):
        rows.index("L0.H0")


def test_limit_scans_a_sample_of_the_rows_that_is_always_the_same(bert):
    model, batches, means = bert
    rows = quiet(scan_rows, model, batches, means, ["L0.H0"], limit=7)
    again = quiet(scan_rows, model, pair_batches(model, seed=3), means, ["L0.H0"], limit=7)
    assert len(rows.rows) == 7
    assert list(rows.rows["row"]) == list(again.rows["row"])
    whole = quiet(scan_rows, model, batches, means, ["L0.H0"])
    assert np.allclose(rows.logits, whole.logits[:, rows.rows["row"]])
    assert len(quiet(scan_rows, model, batches, means, ["L0.H0"], limit=1000).rows) == 24


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sets": []}, r"expected at least one set to ablate, got none"),
        ({"sets": [["L0.H0"], []]}, r"set 1 is empty.*always in the results as 'full'"),
        ({"sets": [["L0.H0", "L0.H0"]]}, r"expected each unit once, got L0.H0 more than once"),
        ({"sets": ["L0.H0", ["L0.H0"]]}, r"each set once, got L0.H0 .* again at index 1"),
        ({"sets": [["L9.H0"]]}, r"4 layers, 16 heads and 4 MLPs, got L9.H0"),
        ({"sets": ["L0H0"]}, r"expected a unit label such as 'L4.H0'"),
        ({"sets": "L0.H0"}, r"expected a list of sets, got the one set L0.H0"),
        ({"limit": 0}, r"expected limit as a whole number of at least 1, got 0"),
        (
            {"memory": 100},
            r"for at least one row.*got 100 bytes; .* or cut the rows with max_length=",
        ),
        ({"memory": "lots"}, r"expected memory as a positive number of bytes.*got 'lots'"),
        ({"memory": -5}, r"expected memory as a positive number of bytes.*got -5"),
    ],
)
def test_input_that_cannot_be_scanned_is_refused(bert, settings, message):
    model, batches, means = bert
    with pytest.raises(hc.HcLensError, match=message):
        quiet(scan, model, {"pairs": batches}, means, **settings)


@pytest.mark.parametrize("sets", [[[0, 1]], [0]])
def test_numbers_are_not_units(bert, sets, monkeypatch):
    # A user's session has no type checks at run time.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    model, batches, means = bert
    with pytest.raises(hc.HcLensError, match=r"expected units such as 'L4.H0' .* got a int"):
        quiet(scan, model, batches, means, sets)


def test_means_of_another_model_are_refused(bert):
    _, batches, means = bert
    with pytest.raises(hc.HcLensError, match="expected means of this model"):
        quiet(scan, deep_model("bert", seed=1), batches, means)


def test_datasets_must_be_batches_by_name(bert):
    model, batches, means = bert
    for strange in (list(batches), {"pairs": list(batches)}, {"pairs": pair_task()}, batches.name):
        with pytest.raises(
            hc.HcLensError, match=r"expected batches by name.*got a (list|Task|str)"
        ):
            quiet(scan, model, strange, means)
    with pytest.raises(hc.HcLensError, match="expected rows in every dataset, got no dataset"):
        quiet(scan, model, {}, means)


def test_a_sample_of_rows_and_resampling_from_a_batch_do_not_go_together(bert):
    model, batches, _ = bert
    with pytest.raises(hc.HcLensError, match=r"no limit= with Resample.*task.batches"):
        quiet(scan, model, batches, hc.Resample(0), limit=3)


def test_half_precision_is_scanned(family: str):
    model = deep_model(family, torch.float16)
    batches = pair_batches(model)
    rows = quiet(scan_rows, model, batches, "zero", ["L0.H0", "L1.MLP+L3.H2"])
    exact = quiet(scan_rows, deep_model(family), batches, "zero", ["L0.H0", "L1.MLP+L3.H2"])
    assert rows.logits.dtype == np.float32
    assert np.abs(rows.logits - exact.logits).max() < 0.2


def test_memory_is_read_as_bytes_or_text():
    assert parse_memory(12) == 12
    assert parse_memory("1.5 GB") == 1_500_000_000
    assert parse_memory("20mb") == 20_000_000
    assert parse_memory("7B") == 7


class InterruptedByUserError(Exception):
    """Stands for the user's Ctrl-C."""


def scans_in(store: Path) -> list[Path]:
    """The folders of the scans in a store."""
    return sorted(path for path in store.iterdir() if (path / "about").is_dir())


def test_an_interrupted_scan_goes_on_where_it_stopped(bert, tmp_path, monkeypatch):
    model, batches, means = bert
    expected = quiet(scan, model, batches, means)
    real, computed = SuffixEngine.held, []

    def counted(self, batch, report):
        if len(computed) == 2:
            raise InterruptedByUserError
        computed.append(batch.rows.tolist())
        return real(self, batch, report)

    monkeypatch.setattr(SuffixEngine, "held", counted)
    with pytest.raises(InterruptedByUserError):
        quiet(scan, model, batches, means, store=tmp_path)
    (folder,) = scans_in(tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == [
        *("about", "batch-000000", "batch-000001")
    ]
    computed.clear()
    monkeypatch.setattr(
        SuffixEngine,
        "logits",
        lambda self, batch, report: computed.append(batch) or real(self, batch, report),
    )
    found = quiet(scan, model, batches, means, store=tmp_path)
    assert len(computed) == len(batches) - 2
    assert found.equals(expected)
    computed.clear()
    assert quiet(scan, model, batches, means, store=tmp_path).equals(expected)
    assert not computed


def zero(path: Path) -> None:
    """Make every logit 0, in a file that can be read."""
    path.write_bytes(save({name: value * 0 for name, value in load(path.read_bytes()).items()}))


@pytest.mark.parametrize("damage", [*DAMAGES, zero])
def test_a_damaged_file_of_a_store_is_computed_again(bert, tmp_path, damage):
    model, batches, means = bert
    expected = quiet(scan, model, batches, means, ["L0.H0"], store=tmp_path)
    (folder,) = scans_in(tmp_path)
    damage(folder / "batch-000000" / "logits.safetensors")
    with pytest.warns(DamagedWarning, match=r"batch-000000/logits\.safetensors is damaged"):
        assert quiet(scan, model, batches, means, ["L0.H0"], store=tmp_path).equals(expected)


@pytest.mark.parametrize("what", ["", "logits.safetensors"])
def test_batches_of_a_store_that_changed_places_are_computed_again(bert, tmp_path, what):
    model, batches, means = bert
    expected = quiet(scan, model, batches, means, ["L0.H0"], store=tmp_path)
    (folder,) = scans_in(tmp_path)
    swap(folder / "batch-000000" / what, folder / "batch-000001" / what)
    with pytest.warns(DamagedWarning, match="batch-000001"):
        assert quiet(scan, model, batches, means, ["L0.H0"], store=tmp_path).equals(expected)


def test_a_store_keeps_different_scans_apart(bert, tmp_path):
    model, batches, means = bert
    for settings in ({"sets": ["L0.H0"]}, {"sets": ["L0.H1"]}, {"sets": ["L0.H0"], "limit": 5}):
        quiet(scan, model, batches, means, store=tmp_path, **settings)
    quiet(scan, model, batches, "zero", ["L0.H0"], store=tmp_path)
    quiet(scan, model, pair_batches(model, 9), means, ["L0.H0"], store=tmp_path)
    assert len(scans_in(tmp_path)) == 5
    about = [json.loads((path / "about/scan.json").read_text()) for path in scans_in(tmp_path)]
    assert {one["model"] for one in about} == {model.fingerprint}


def test_a_store_refuses_what_it_cannot_name(bert, tmp_path):
    model, batches, means = bert
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(hc.HcLensError, match="expected a folder, got the file"):
        quiet(scan, model, batches, means, store=tmp_path / "file")
    source = hc.Counterfactual(model, batches, batches)
    with pytest.raises(hc.HcLensError, match="got Counterfactual, which has no fingerprint"):
        quiet(scan, model, batches, source, store=tmp_path)
    refused = pytest.raises(hc.HcLensError, match="expected a model without hooks to keep results")
    with hc.ablate(model, ["L0.H0"], means), refused:
        quiet(scan, model, batches, means, store=tmp_path)


class Halved(hc.Source):
    """A user's own replacement: half of the activation."""

    def value(self, name, activation):
        return activation / 2


class NamedHalved(Halved):
    """The same with a name on disk."""

    row_wise, fingerprint = True, "halved"


def test_a_users_own_source_is_scanned_stored_and_resumed(bert, tmp_path, monkeypatch):
    model, batches, _ = bert
    sets = [["L0.H0"], ["L1.MLP", "L3.H2"]]
    rows = quiet(scan_rows, model, batches, NamedHalved(), sets, store=tmp_path)
    slow = torch.cat([brute_force(model, b, Halved(), [[], *sets]) for b in batches], dim=1)
    order = torch.cat([batch.rows for batch in batches]).argsort()
    assert np.allclose(rows.logits, slow[:, order].detach().numpy(), atol=1e-11)
    about = json.loads((scans_in(tmp_path)[0] / "about/scan.json").read_text())
    assert about["source"] == "halved"
    monkeypatch.setattr(SuffixEngine, "held", None)
    again = quiet(scan_rows, model, batches, NamedHalved(), sets, store=tmp_path)
    assert np.array_equal(again.logits, rows.logits)


def test_a_source_without_a_name_on_disk_is_scanned_but_not_stored(bert, tmp_path):
    model, batches, _ = bert
    assert len(quiet(scan, model, batches, Halved(), ["L0.H0"])) == 4
    with pytest.raises(hc.HcLensError, match="got Halved, which has no fingerprint; scan without"):
        quiet(scan, model, batches, Halved(), ["L0.H0"], store=tmp_path)


def test_a_progress_bar_counts_rows_times_sets(bert, monkeypatch):
    model, batches, means = bert
    module = importlib.import_module("hc_lens.scans.scan")
    bars = []
    real = module.tqdm

    def recorded(*args, **settings):
        bars.append(real(*args, **{**settings, "disable": False}))
        return bars[-1]

    monkeypatch.setattr(module, "tqdm", recorded)
    scan(model, batches, means, ["L0.H0", "L1.H0"], progress=True)
    assert bars[0].total == bars[0].n == 24 * 3


def test_a_store_is_not_asked_again_after_an_edit_that_torch_does_not_count(tmp_path):
    model = deep_model("bert")
    batches = pair_batches(model)
    first = quiet(scan, model, batches, "zero", store=tmp_path)
    model.blocks[0].attn.W_O.data.neg_()
    second = quiet(scan, model, batches, "zero", store=tmp_path)
    assert second.equals(quiet(scan, model, batches, "zero"))
    assert not second.equals(first)
