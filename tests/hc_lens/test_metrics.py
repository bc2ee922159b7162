import math
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from hc_lens.errors import HcLensError
from hc_lens.metrics import (
    ACCURACY,
    AGREEMENT,
    FULL,
    KL,
    LOGIT,
    MARGIN,
    Totals,
    cross_entropy,
    kl_divergence,
    log_odds,
    over_cases,
    row_metrics,
)


class ThreeWay:
    """Batches whose task has the model's three labels."""

    labels: tuple[str, ...] = ("a", "b", "c")

    def predictions(self, logits):
        return logits.argmax(-1)

    def log_probs(self, logits):
        return logits.log_softmax(-1)


class TwoWay(ThreeWay):
    """A task with two labels: the model's second and third are one."""

    labels = ("a", "other")

    def predictions(self, logits):
        return logits.argmax(-1).clamp(max=1)

    def log_probs(self, logits):
        found = logits.log_softmax(-1)
        return torch.stack([found[:, 0], found[:, 1:].logsumexp(-1)], -1)


class Unlabelled(ThreeWay):
    """A task without labels, whose label functions must not be called."""

    labels = ()

    def predictions(self, logits):
        raise AssertionError("no labels")

    log_probs = predictions


def batch_of(*labels: int):
    return SimpleNamespace(labels=torch.tensor(labels))


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
    found = row_metrics(ThreeWay(), batch_of(0), full, torch.stack([full, run]))
    values = {name: value[:, 0].tolist() for name, value in found.items()}
    assert values[ACCURACY] == [1, 0]
    assert values[AGREEMENT] == [1, 0]
    assert values[KL] == pytest.approx([0, 1 / 4 * math.log(2)], abs=1e-7)
    assert values[LOGIT] == pytest.approx([0, -math.log(3)], abs=1e-6)
    assert values[MARGIN] == pytest.approx([0, -math.log(3)], abs=1e-6)


def test_a_two_way_task_counts_in_its_own_labels():
    full = torch.tensor([[0.4, 0.3, 0.3], [0.2, 0.5, 0.3]]).log()
    run = torch.tensor([[0.1, 0.2, 0.7], [0.2, 0.3, 0.5]]).log()
    found = row_metrics(TwoWay(), batch_of(1, 1), full, run[None])
    assert found[ACCURACY].tolist() == [[1, 1]]
    # The second row goes from the model's label 1 to 2, which are one label of the task.
    assert found[AGREEMENT].tolist() == [[0, 1]]
    assert found[LOGIT][0].tolist() == pytest.approx([math.log(9), math.log(4)], abs=1e-5)
    assert found[MARGIN][0].tolist() == pytest.approx([math.log(1 / 9), math.log(3 / 7)], abs=1e-5)


def test_a_row_without_a_label_is_neither_right_nor_wrong():
    logits = torch.zeros(2, 3)
    found = row_metrics(ThreeWay(), batch_of(-1, 0), logits, logits[None])
    for name in (ACCURACY, LOGIT):
        assert found[name][0].isnan().tolist() == [True, False]
    assert found[AGREEMENT].tolist() == [[1, 1]]


def test_a_task_without_labels_is_compared_in_the_models_own():
    full, run = torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([[0.0, 3.0, 2.0]])
    found = row_metrics(Unlabelled(), batch_of(-1), full, torch.stack([full, run]))
    assert found[AGREEMENT].tolist() == [[1], [0]]
    assert found[LOGIT].isnan().all()
    assert found[ACCURACY].isnan().all()


def test_batches_that_do_not_name_their_labels_have_some_all_the_same():
    named, logits = TwoWay(), torch.tensor([[0.4, 0.3, 0.3]]).log()
    unnamed = SimpleNamespace(predictions=named.predictions, log_probs=named.log_probs)
    for batches in (named, unnamed):
        found = row_metrics(batches, batch_of(1), logits, logits[None])  # type: ignore[arg-type]
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
