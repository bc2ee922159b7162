from dataclasses import replace

import pytest
import torch

import hc_lens as hc
from hc_lens.evaluation import evaluate
from hc_lens.pruning.job import Teacher
from hc_lens.pruning.subnetwork import Subnetwork
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


def test_the_full_model_comes_first_with_kl_zero_and_full_agreement(hooked, batches):
    table = evaluate(hooked, {"set": batches}, progress=False)
    assert list(table.columns) == [
        "subnetwork",
        "dataset",
        "case",
        "n",
        "accuracy",
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
    assert table["accuracy"].isna().all()
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
