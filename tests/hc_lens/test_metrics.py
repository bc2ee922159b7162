import math
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import binomtest

from hc_lens.errors import HcLensError
from hc_lens.metrics import (
    ACCURACY,
    AGREEMENT,
    FULL,
    HEURISTIC,
    KL,
    LABELLED,
    LOGIT,
    MARGIN,
    PREDICTION,
    Totals,
    by_side,
    check_metrics,
    cross_entropy,
    further,
    held_metrics,
    kl_divergence,
    label_metrics,
    log_odds,
    over_cases,
    row_values,
    sides,
    wilson,
)


class ThreeWay:
    """Batches whose task has the model's three labels."""

    labels: tuple[str, ...] = ("a", "b", "c")

    def predictions(self, logits, batch):
        return logits.argmax(-1)

    def log_probs(self, logits, batch):
        return logits.log_softmax(-1)


class TwoWay(ThreeWay):
    """A task with two labels: the model's second and third are one."""

    labels = ("a", "other")

    def predictions(self, logits, batch):
        return logits.argmax(-1).clamp(max=1)

    def log_probs(self, logits, batch):
        found = logits.log_softmax(-1)
        return torch.stack([found[..., 0], found[..., 1:].logsumexp(-1)], -1)


class Unlabelled(ThreeWay):
    """A task without labels, whose label functions must not be called."""

    labels = ()

    def predictions(self, logits, batch):
        raise AssertionError("no labels")

    log_probs = predictions


def batch_of(*labels: int):
    return SimpleNamespace(labels=torch.tensor(labels), rows=torch.arange(len(labels)))


def measured(batches, batch, *runs):
    """The metrics of some runs from their logits, the full model's first."""
    return held_metrics(batches, batch, torch.stack(runs), lambda held: held)


def test_kl_of_two_coins_is_known_by_hand():
    fair, biased = torch.tensor([[0.0, 0.0]]), torch.tensor([[math.log(3), 0.0]])
    # 1/2 ln((1/2)/(3/4)) + 1/2 ln((1/2)/(1/4)) = 1/2 ln(4/3).
    assert kl_divergence(fair, biased).item() == pytest.approx(0.5 * math.log(4 / 3))
    assert kl_divergence(biased, biased).item() == 0


def test_kl_compares_every_run_with_one_full_model():
    full = torch.tensor([[0.0, 0.0], [1.0, 3.0]])
    runs = torch.tensor([[[math.log(3), 0.0], [1.0, 3.0]], [[0.0, 0.0], [0.0, 2.0]]])
    expected = torch.tensor([[0.5 * math.log(4 / 3), 0.0], [0.0, 0.0]])
    torch.testing.assert_close(kl_divergence(full, runs), expected)


def test_the_log_odds_of_a_half_are_zero_and_of_three_quarters_log_three():
    log_probs = torch.tensor([[1 / 2, 1 / 4, 1 / 4], [3 / 4, 1 / 8, 1 / 8]]).log()
    labels = torch.tensor([0, 0])
    expected = torch.tensor([0.0, math.log(3)])
    torch.testing.assert_close(log_odds(log_probs, labels), expected, atol=1e-6, rtol=0)


def test_log_odds_stay_finite_where_the_label_is_certain():
    log_probs = torch.tensor([[0.0, -800.0]], dtype=torch.float64)
    assert log_odds(log_probs, torch.tensor([0])).item() == pytest.approx(800)


def test_every_metric_of_a_row_is_known_by_hand():
    # The full model gives 1/2, 1/4, 1/4; the run gives 1/4, 1/2, 1/4; the label is the first.
    full = torch.tensor([[1 / 2, 1 / 4, 1 / 4]]).log()
    run = torch.tensor([[1 / 4, 1 / 2, 1 / 4]]).log()
    found = measured(ThreeWay(), batch_of(0), full, run)
    values = {name: value[:, 0].tolist() for name, value in found.items()}
    assert values[ACCURACY] == [1, 0]
    assert values[AGREEMENT] == [1, 0]
    assert values[KL] == pytest.approx([0, 1 / 4 * math.log(2)], abs=1e-7)
    assert values[LOGIT] == pytest.approx([0, -math.log(3)], abs=1e-6)
    assert values[MARGIN] == pytest.approx([0, -math.log(3)], abs=1e-6)


def test_a_two_way_task_counts_in_its_own_labels():
    full = torch.tensor([[0.4, 0.3, 0.3], [0.2, 0.5, 0.3]]).log()
    run = torch.tensor([[0.1, 0.2, 0.7], [0.2, 0.3, 0.5]]).log()
    found = measured(TwoWay(), batch_of(1, 1), full, run)
    assert found[ACCURACY][1].tolist() == [1, 1]
    # The second row goes from the model's label 1 to 2, which are one label of the task.
    assert found[AGREEMENT][1].tolist() == [0, 1]
    assert found[LOGIT][1].tolist() == pytest.approx([math.log(9), math.log(4)], abs=1e-5)
    assert found[MARGIN][1].tolist() == pytest.approx([math.log(1 / 9), math.log(3 / 7)], abs=1e-5)


def test_a_row_without_a_label_is_neither_right_nor_wrong():
    logits = torch.zeros(2, 3)
    found = measured(ThreeWay(), batch_of(-1, 0), logits)
    for name in (ACCURACY, LOGIT):
        assert found[name][0].isnan().tolist() == [True, False]
    assert found[AGREEMENT].tolist() == [[1, 1]]


def test_a_task_without_labels_is_compared_in_the_models_own():
    full, run = torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([[0.0, 3.0, 2.0]])
    found = measured(Unlabelled(), batch_of(-1), full, run)
    assert found[AGREEMENT].tolist() == [[1], [0]]
    assert found[LOGIT].isnan().all()
    assert found[ACCURACY].isnan().all()


def test_batches_that_do_not_name_their_labels_have_some_all_the_same():
    named, logits = TwoWay(), torch.tensor([[0.4, 0.3, 0.3]]).log()
    unnamed = SimpleNamespace(predictions=named.predictions, log_probs=named.log_probs)
    for batches in (named, unnamed):
        found = measured(batches, batch_of(1), logits)
        assert found[ACCURACY].tolist() == [[0]]
        assert found[LOGIT].item() == pytest.approx(math.log(1.5), abs=1e-5)


def test_cross_entropy_is_minus_the_labels_log_probability():
    logits = torch.tensor([[1 / 2, 1 / 4, 1 / 4], [1 / 8, 1 / 8, 3 / 4]]).log()
    loss = cross_entropy(ThreeWay())
    expected = [math.log(4), -math.log(3 / 4)]
    assert loss(logits, batch_of(1, 2)).tolist() == pytest.approx(expected, abs=1e-6)
    with pytest.raises(HcLensError, match="expected labelled rows for the cross-entropy"):
        loss(logits, batch_of(1, -1))


def test_totals_average_over_the_rows_of_each_dataset_and_case():
    totals = Totals(pd.DataFrame({"set": [FULL, "L0.H0"]}), (ACCURACY, KL))
    nan = torch.nan
    right = torch.tensor([[1.0, 0.0, nan], [0.0, 0.0, nan]])
    kl = torch.tensor([[0.0, 0.0, 0.0], [1.0, 2.0, 4.0]])
    totals.add("z", ["b", "a", "b"], torch.tensor([0, 1, -1]), {ACCURACY: right, KL: kl})
    totals.add("z", ["b"], torch.tensor([2]), {ACCURACY: right[:, :1], KL: kl[:, :1] + 1})
    totals.add("a", ["b"], torch.tensor([-1]), {ACCURACY: right[:, 2:], KL: kl[:, 2:]})
    table = totals.table()
    assert list(table.columns) == ["set", "dataset", "case", "n", ACCURACY, KL]
    keys = list(zip(table["dataset"], table["case"], table["set"], strict=True))
    assert keys[::2] == [("z", "a", FULL), ("z", "b", FULL), ("a", "b", FULL)]
    assert table["n"].tolist() == [1, 1, 3, 3, 1, 1]
    # In case b of z the unlabelled row counts for the KL alone: (1 + 4 + 2) / 3.
    assert table[KL].tolist() == pytest.approx([0, 2, 1 / 3, 7 / 3, 0, 4])
    assert table[ACCURACY].tolist()[:4] == [0, 0, 1, 0]
    assert table[ACCURACY].isna().tolist() == [False] * 4 + [True] * 2


def test_cases_are_joined_by_their_rows_and_a_missing_number_does_not_count():
    table = pd.DataFrame(
        {
            "set": ["x", "x", "y"],
            "case": ["a", "b", "a"],
            "n": [1, 3, 2],
            "kl": [4.0, 0.0, 1.0],
            "accuracy": [0.5, math.nan, math.nan],
        }
    )
    joined = over_cases(table, ["set"], ["kl", "accuracy"])
    assert joined["set"].tolist() == ["x", "y"]
    assert joined["n"].tolist() == [4, 2]
    assert joined["kl"].tolist() == [1.0, 1.0]
    assert joined["accuracy"][0] == 0.5
    assert math.isnan(joined["accuracy"][1])


def test_the_predicted_label_is_one_of_the_tasks_own():
    # The model's labels 0, 1 and 2 are the task's a, other and other.
    logits = torch.eye(3)
    found = measured(TwoWay(), batch_of(0, 0, 1), logits)
    assert found[PREDICTION].tolist() == [[0, 1, 1]]
    said = label_metrics(TwoWay(), batch_of(0, 0, 1), found[PREDICTION])
    assert said["share_a"].tolist() == [[1, 0, 0]]
    assert said["share_other"].tolist() == [[0, 1, 1]]


def test_a_row_tells_whether_its_label_is_what_the_heuristic_answers():
    batches, predictions = TwoWay(), torch.zeros(2, 3, dtype=torch.float64)
    assert label_metrics(batches, batch_of(0, 1, -1), predictions)[HEURISTIC].isnan().all()
    batches.heuristic = "other"  # type: ignore[attr-defined]
    found = label_metrics(batches, batch_of(0, 1, -1), predictions)
    assert found[HEURISTIC].tolist() == [[0, 1, 0]] * 2
    assert found[LABELLED].tolist() == [[1, 1, 0]] * 2
    batches.heuristic = "yes"  # type: ignore[attr-defined]
    with pytest.raises(HcLensError, match=r"the heuristic's answer among \['a', 'other'\], got"):
        label_metrics(batches, batch_of(0), predictions)


def test_a_case_has_a_side_only_if_the_heuristic_is_right_on_all_of_its_rows_or_on_none():
    shares = pd.Series([1.0, 0.0, 0.5, math.nan])
    assert sides(shares).tolist() == ["friendly", "adversarial", "", ""]


@pytest.mark.parametrize(("right", "n"), [(0, 5), (5, 5), (8, 17), (1, 1), (500, 1000), (3, 8)])
def test_the_interval_of_a_share_is_that_of_wilson(right, n):
    low, high = wilson(np.array([right / n]), np.array([float(n)]))
    expected = binomtest(right, n).proportion_ci(method="wilson")
    assert (low[0], high[0]) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_a_share_of_no_rows_has_no_interval():
    low, high = wilson(np.array([math.nan, 0.5]), np.array([0.0, 4.0]))
    assert np.isnan([low[0], high[0]]).all()
    assert not np.isnan([low[1], high[1]]).any()


def two_sided() -> pd.DataFrame:
    """Two friendly cases, two adversarial ones and one of neither side, of a collapsed model."""
    columns = ["dataset", "case", "side", "n", "accuracy", "share_yes", "share_no"]
    nan = math.nan
    rows = [
        ("ood", "a", "friendly", 10, 0.16, 0.16, 0.84),
        ("ood", "b", "friendly", 1000, 0.30, 0.30, 0.70),
        ("ood", "c", "adversarial", 10, 0.96, 0.04, 0.96),
        ("ood", "d", "adversarial", 30, 0.70, 0.30, 0.70),
        ("ood", "e", "", 30, 0.0, 1.0, 0.0),
        ("half", "a", "friendly", 10, 0.5, 0.5, 0.5),
        ("id", "all", "", 30, 0.9, nan, nan),
    ]
    return pd.DataFrame(rows, columns=columns)


def test_a_balanced_score_is_the_mean_of_both_sides_with_every_case_the_same():
    ood, half, inside = by_side(two_sided(), ["dataset"]).to_dict(orient="records")
    assert ood["dataset"] == "ood"
    scores = [ood["friendly"], ood["adversarial"], ood["balanced"]]
    assert scores == pytest.approx([0.23, 0.83, 0.53])
    # (0.77 + 0.83) / 2 of the rows are answered with "no".
    assert ood["said"] == "no"
    assert ood["said_share"] == pytest.approx(0.80)
    assert half["friendly"] == 0.5
    for missing in (half["adversarial"], half["balanced"], half["said"], half["said_share"]):
        assert math.isnan(missing)
    assert pd.isna(pd.Series(inside).drop("dataset")).all()


def test_sides_are_told_apart_by_all_keys_and_lines_stay_in_order():
    other = two_sided().assign(accuracy=1.0)
    table = pd.concat([two_sided().assign(seed=1), other.assign(seed=0)])
    found = by_side(table, ["seed", "dataset"])
    lines = list(zip(found["seed"], found["dataset"], strict=True))
    assert lines == [(seed, name) for seed in (1, 0) for name in ("ood", "half", "id")]
    assert found["balanced"].tolist()[::3] == pytest.approx([0.53, 1.0])


@pytest.mark.parametrize("lacking", [["side"], ["side", "share_yes", "share_no"]])
def test_a_table_without_sides_has_no_balanced_score(lacking):
    found = by_side(two_sided().drop(columns=lacking), ["dataset"])
    names = ["friendly", "adversarial", "balanced", "said", "said_share"]
    assert found.columns.tolist() == ["dataset", *names]
    assert found["dataset"].tolist() == ["ood", "half", "id"]
    assert found[names].isna().all(axis=None)


def ones(logits, batch):
    return torch.ones(len(logits))


COLUMNS = ("dataset", "case", "n", "set", "accuracy", "accuracy_change", "kl", "logit_change")


@pytest.mark.parametrize(
    "name", [*COLUMNS[:4], "logit_change", "share_a", "prediction", "mine_change"]
)
def test_a_metric_of_ones_own_cannot_have_the_name_of_a_column(name):
    with pytest.raises(HcLensError, match=f"no other column of the table has, got '{name}'"):
        check_metrics({"mine": ones, name: ones}, COLUMNS)
    assert list(check_metrics({"mine": ones, "yours": ones, "kl": "kl"}, COLUMNS)) == [
        *("mine", "yours", "kl")
    ]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("logit_difference", r"got 'logit_difference' alone; write metrics=\['logit_difference'\]"),
        (ones, r"got <function ones.* alone; write metrics=\{'my_metric': my_metric\}"),
        (None, "got None alone"),
        ([ones], r"names of metrics as text, got <function ones.*metrics=\{'my_metric'"),
        ({1: ones}, "names of metrics as text, got 1"),
        (["logit", "logit_difference"], "'logit' and 'logit_difference', which are two names of"),
        ({"mine": "kl"}, "under its own name"),
    ],
)
def test_metrics_are_a_list_of_names_or_a_mapping_to_functions(given, message):
    with pytest.raises(HcLensError, match=message):
        check_metrics(given)


def test_further_metrics_are_those_that_a_table_does_not_have():
    assert further(["kl", "loss", "logit_difference"], ["kl", "n"]) == {
        "loss": "loss",
        "logit_difference": "logit",
    }
    # What was checked can be checked again.
    asked = check_metrics(["logit_difference"])
    assert check_metrics(asked) == asked


def test_a_metric_may_be_called_as_the_sums_were():
    totals = Totals(pd.DataFrame(index=[0]), ["labelled", ACCURACY])
    values = {"labelled": torch.tensor([[3.0, 5.0]]), ACCURACY: torch.tensor([[1.0, torch.nan]])}
    totals.add("rows", ["a", "a"], torch.tensor([0, -1]), values)
    assert totals.table()[["n", "labelled", ACCURACY]].to_numpy().tolist() == [[2, 4, 1]]


def test_a_metric_gives_one_finite_number_for_each_row():
    logits, batch = torch.zeros(2, 3), batch_of(0, 1)
    assert row_values(ones, logits, batch).tolist() == [1, 1]
    assert row_values(lambda logits, batch: batch.rows > 0, logits, batch).tolist() == [False, True]
    bad = {
        "a ndarray of shape": lambda logits, batch: np.ones(2),
        r"a tensor of shape \[\]": lambda logits, batch: logits.mean(),
        "infinity for row 1": lambda logits, batch: torch.tensor([0.0, torch.inf]),
    }
    for message, metric in bad.items():
        with pytest.raises(HcLensError, match=message):
            row_values(metric, logits, batch)
