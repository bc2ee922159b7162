import math
import random
from dataclasses import replace

import pandas as pd
import pytest
import torch
from scipy.stats import binomtest

import hc_lens as hc
from hc_lens.evaluation import OtherMeansWarning, evaluate
from hc_lens.organism.grammar import CONSTRUCTIONS
from hc_lens.pruning.subnetwork import Subnetwork
from hc_lens.pruning.teacher import Teacher
from tests.batches import Batches, random_batches


@pytest.fixture
def batches(hooked):
    made = random_batches(hooked)
    made[0] = replace(made[0], cases=("easy", "hard", "easy"))
    made[1] = replace(made[1], cases=("hard", "hard"))
    return made


def half(model, first: bool = True) -> Subnetwork:
    keep = torch.arange(10) < 5
    return Subnetwork(hc.UnitSpace.of(model), keep if first else ~keep, model.fingerprint)


def test_every_number_equals_a_slow_loop_over_rows(hooked, batches, means):
    sub = half(hooked)
    table = evaluate(hooked, {"set": batches}, means=means, subnetwork=sub, progress=False)
    seen: dict[tuple[str, str], list] = {}
    for batch in batches:
        full = hooked(**batch.inputs)
        with hc.ablate(hooked, sub.removed, means):
            masked = hooked(**batch.inputs)
        for row, case in enumerate(batch.cases):
            for name, logits in (("full", full), ("subnetwork", masked)):
                p, q = full[row].softmax(-1), logits[row].softmax(-1)
                seen.setdefault((name, case), []).append(
                    (
                        float(logits[row].argmax() == batch.labels[row]),
                        (p * (p / q).log()).sum().item(),
                        float(logits[row].argmax() == full[row].argmax()),
                    )
                )
    assert len(table) == 4
    for line in table.itertuples():
        rows = seen[line.subnetwork, line.case]
        assert line.n == len(rows)
        expected = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
        assert [line.accuracy, line.kl, line.agreement] == pytest.approx(expected, abs=1e-9)


def test_other_means_than_those_a_subnetwork_was_found_with_give_a_warning(
    hooked, batches, means, recwarn
):
    data, found = {"set": batches}, replace(half(hooked), means=means.fingerprint)
    evaluate(hooked, data, means=means, subnetwork={"mine": found}, progress=False)
    evaluate(hooked, data, means="zero", subnetwork=half(hooked), progress=False)
    assert not [said for said in recwarn if said.category is OtherMeansWarning]
    with pytest.warns(OtherMeansWarning, match="mine was found with other means than those used"):
        evaluate(hooked, data, means="zero", subnetwork={"mine": found}, progress=False)


def test_the_full_model_comes_first_with_kl_zero_and_full_agreement(hooked, batches):
    table = evaluate(hooked, {"set": batches}, progress=False)
    assert list(table.columns) == [
        "subnetwork",
        "dataset",
        "case",
        "side",
        "n",
        "accuracy",
        "low",
        "high",
        "kl",
        "agreement",
    ]
    assert table["subnetwork"].unique().tolist() == ["full"]
    assert (table["kl"] == 0).all()
    assert (table["agreement"] == 1).all()


def test_many_subnetworks_and_datasets_go_in_one_call(hooked, batches, means):
    subs = {"first": half(hooked), "second": half(hooked, first=False)}
    data = {"one": batches, "two": Batches(batches[:1])}
    table = evaluate(hooked, data, means=means, subnetwork=subs, progress=False)
    alone = evaluate(hooked, data, means=means, subnetwork=subs["second"], progress=False)
    second = table[table["subnetwork"] == "second"].reset_index(drop=True)
    expected = alone[alone["subnetwork"] == "subnetwork"].reset_index(drop=True)
    assert second.drop(columns="subnetwork").equals(expected.drop(columns="subnetwork"))
    assert set(table["subnetwork"]) == {"full", "first", "second"}
    assert set(table["dataset"]) == {"one", "two"}


def test_rows_without_labels_have_no_accuracy(hooked, batches):
    batches[0].labels.fill_(-1)
    table = evaluate(hooked, {"set": Batches(batches[:1])}, progress=False)
    assert table[["accuracy", "low", "high"]].isna().all(axis=None)
    assert (table["agreement"] == 1).all()


def test_a_subnetwork_without_means_is_an_error(hooked, batches):
    with pytest.raises(hc.HcLensError, match="expected means to replace"):
        evaluate(hooked, {"set": batches}, subnetwork=half(hooked), progress=False)


def test_a_subnetwork_named_full_is_an_error(hooked, batches, means):
    with pytest.raises(hc.HcLensError, match="names other than 'full'"):
        evaluate(hooked, {"s": batches}, means=means, subnetwork={"full": half(hooked)})


def test_no_data_is_an_error(hooked):
    with pytest.raises(hc.HcLensError, match="rows in every dataset, got no dataset"):
        evaluate(hooked, {}, progress=False)


def test_batches_alone_go_by_their_own_name_and_join_with_a_scan(hooked, batches):
    batches.name = "mine"
    table = evaluate(hooked, batches, progress=False)
    assert table.equals(evaluate(hooked, {"mine": batches}, progress=False))
    assert set(zip(table["dataset"], table["case"], strict=True)) == {
        ("mine", "easy"),
        ("mine", "hard"),
    }


def test_teachers_spare_the_full_models_runs_and_change_nothing(hooked, batches, means):
    teacher = Teacher(hooked)
    for batch in batches:
        teacher.logits(batch)
    settings = {"means": means, "subnetwork": half(hooked), "progress": False}
    expected = evaluate(hooked, {"set": batches}, **settings)
    with hc.ablate(hooked, ["L0.H0"], "zero"):
        kept = evaluate(hooked, {"set": batches}, teachers={"set": teacher}, progress=False)
    full = expected[expected["subnetwork"] == "full"].reset_index(drop=True)
    assert kept.equals(full)


def organism_cases(model, **settings):
    return hc.organism.task("ood").batches(model, limit_per_case=3, **settings)


@pytest.fixture(scope="module")
def organism():
    return hc.organism.load()


def test_the_table_is_in_the_order_of_the_split_however_it_is_batched(organism):
    cases = [f"{name}{form}" for name in CONSTRUCTIONS for form in ("", "_friendly")]
    inside = hc.organism.task().batches(organism, "validation", limit=4)
    rows = organism_cases(organism)
    network = half_of_organism(organism)
    tables = []
    for seed in (1, 2):
        shuffled = replace(rows, _plan=tuple(random.Random(seed).sample(rows._plan, len(rows))))
        data = {"z": shuffled, "a": inside}
        settings = {"means": "zero", "subnetwork": network, "progress": False}
        tables.append(evaluate(organism, data, **settings))
    order = [("z", case) for case in cases] + [("a", "all")]
    for table in tables:
        assert list(zip(table["dataset"], table["case"], strict=True)) == order * 2
        assert table["subnetwork"].tolist() == ["full"] * 17 + ["subnetwork"] * 17
    pd.testing.assert_frame_equal(*tables)


def half_of_organism(model) -> Subnetwork:
    space = hc.UnitSpace.of(model)
    return Subnetwork(space, torch.arange(len(space)) % 2 == 0, model.fingerprint)


def test_each_case_has_its_side_its_interval_and_the_shares_of_the_tasks_labels(organism):
    batches = organism_cases(organism)
    inside = hc.organism.task().batches(organism, "validation", limit=12)
    table = evaluate(organism, {"ood": batches, "id": inside}, progress=False)
    ood = table[table["dataset"] == "ood"]
    for line in ood.to_dict(orient="records"):
        friendly = line["case"].endswith("_friendly")
        assert line["side"] == ("friendly" if friendly else "adversarial")
        # Where entailment is right, accuracy is how often it is said.
        says = line["share_entailment" if friendly else "share_non-entailment"]
        assert says == line["accuracy"]
        assert line["share_entailment"] + line["share_non-entailment"] == pytest.approx(1)
        expected = binomtest(round(3 * line["accuracy"]), 3).proportion_ci(method="wilson")
        assert (line["low"], line["high"]) == pytest.approx((expected.low, expected.high))
    assert ood[["share_neutral", "share_contradiction"]].isna().all(axis=None)
    (line,) = table[table["dataset"] == "id"].to_dict(orient="records")
    assert line["side"] == ""
    names = ("share_entailment", "share_neutral", "share_contradiction")
    assert sum(line[name] for name in names) == pytest.approx(1)
    assert math.isnan(line["share_non-entailment"])


def test_a_row_without_a_label_counts_neither_for_the_interval_nor_for_the_side(hooked, batches):
    batches.labels, batches.heuristic = ("a", "b", "c"), "b"
    batches[0] = replace(batches[0], labels=torch.tensor([1, 1, -1]))
    batches[1] = replace(batches[1], labels=torch.tensor([-1, 1]))
    easy, hard = evaluate(hooked, batches, progress=False).to_dict(orient="records")
    assert (easy["case"], easy["n"], easy["side"]) == ("easy", 2, "friendly")
    assert (hard["case"], hard["n"], hard["side"]) == ("hard", 3, "friendly")
    for line, labelled in ((easy, 1), (hard, 2)):
        right = round(line["accuracy"] * labelled)
        expected = binomtest(right, labelled).proportion_ci(method="wilson")
        assert (line["low"], line["high"]) == pytest.approx((expected.low, expected.high))
        assert line["share_a"] + line["share_b"] + line["share_c"] == pytest.approx(1)


def test_batches_of_ones_own_need_neither_a_heuristic_nor_names_of_labels(hooked, batches):
    table = evaluate(hooked, batches, progress=False)
    assert (table["side"] == "").all()
    assert not any(name.startswith("share_") for name in table)
    batches.labels = ("a", "b", "c")
    named = evaluate(hooked, batches, progress=False)
    assert (named["side"] == "").all()
    assert named.columns.tolist()[-3:] == ["share_a", "share_b", "share_c"]
    assert named[["share_a", "share_b", "share_c"]].sum(axis=1).tolist() == pytest.approx([1, 1])
