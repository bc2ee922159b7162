from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hc_lens.data.labels import NO_LABEL, align, check_names, fold, label_id, name_labels
from hc_lens.errors import HcLensError

NLI = ("entailment", "neutral", "contradiction")
TWO_WAY = ("entailment", "non-entailment")
DUPLICATE = ("not_duplicate", "duplicate")


@pytest.mark.parametrize("name", ["non-entailment", "NON_ENTAILMENT", "not entailment"])
def test_case_and_separators_and_synonyms_do_not_matter(name):
    assert fold(name) == "nonentailment"


def test_a_sign_is_not_a_separator():
    assert fold("-1") != fold("1")
    assert check_names(["-1", "1"]) == ("-1", "1")


def test_names_that_fold_to_one_form_are_an_error():
    with pytest.raises(HcLensError, match=r"differ by more than case.*'Yes', 'yes'"):
        check_names(["Yes", "yes"])


@pytest.mark.parametrize(
    ("value", "expected"),
    [("Neutral", 1), (2, 2), ("2", 2), (2.0, 2), (False, 0), ("contradiction ", 2)],
)
def test_a_label_is_a_name_or_an_index(value, expected):
    assert label_id(value, NLI) == expected


@pytest.mark.parametrize("value", [None, float("nan"), "-", -1, "-1", -1.0, ""])
def test_a_row_without_gold_label_is_known_by_its_mark(value):
    assert label_id(value, NLI) == NO_LABEL


def test_a_name_wins_over_an_index():
    assert label_id("0", ("1", "0")) == 1
    assert label_id(-1, ("-1", "1")) == 0


@pytest.mark.parametrize("value", ["maybe", 3, 0.5, ["neutral"]])
def test_an_unknown_label_is_an_error_with_both_sides(value):
    with pytest.raises(HcLensError, match=r"among \['entailment'.*\(or its index\), got "):
        label_id(value, NLI)


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_model_labels_are_matched_by_name_in_any_order(order):
    model = {place: NLI[label].upper() for place, label in enumerate(order)}
    assert align(model, NLI) == list(order)


def test_neutral_and_contradiction_are_non_entailment_on_a_two_way_task():
    assert align({0: "contradiction", 1: "neutral", 2: "entailment"}, TWO_WAY) == [1, 1, 0]
    assert align({0: "entailment", 1: "not_entailment"}, TWO_WAY) == [0, 1]


def test_paws_words_match_qqp_words():
    assert align({0: "paraphrase", 1: "not_paraphrase"}, DUPLICATE) == [1, 0]


@pytest.mark.parametrize("model", [{0: "LABEL_0", 1: "LABEL_1", 2: "LABEL_2"}, {0: "0", 1: "1"}])
def test_placeholder_names_ask_for_labels(model):
    with pytest.raises(HcLensError, match=r"placeholders.*hc\.load\(\.\.\., labels=\[\.\.\.\]"):
        align(model, NLI)


def test_a_model_without_names_asks_for_labels():
    with pytest.raises(HcLensError, match="a model without label names"):
        align({}, NLI)
    assert align({0: "duplicate", 1: "not_duplicate"}, DUPLICATE) == [1, 0]


@pytest.mark.parametrize(
    ("model", "task", "strange", "absent"),
    [
        ({0: "positive", 1: "negative"}, DUPLICATE, "positive", "not_duplicate"),
        ({0: "entailment", 1: "not_entailment"}, NLI, "not_entailment", "contradiction"),
        ({0: "duplicate"}, DUPLICATE, r"\[\]", "not_duplicate"),
        ({0: "neutral", 1: "contradiction"}, TWO_WAY, r"\[\]", "entailment"),
    ],
)
def test_a_label_of_one_side_only_is_an_error_with_both_sides(model, task, strange, absent):
    with pytest.raises(
        HcLensError, match=f"the task has no .*{strange}.*the model has no .*{absent}"
    ):
        align(model, task)


@given(st.permutations(["entailment", "neutral", "contradiction", "other"]))
def test_alignment_is_the_inverse_of_any_order_of_names(names):
    task = ["other", *NLI]
    aligned = align(dict(enumerate(names)), task)
    assert [task[place] for place in aligned] == names


def test_placeholders_get_the_names_that_are_given():
    assert name_labels({0: "LABEL_0", 1: "LABEL_1", 2: "2"}, NLI) == dict(enumerate(NLI))


def test_names_that_agree_with_a_models_own_leave_them_as_they_are_spelt():
    assert name_labels({0: "ENTAILMENT", 1: "Not_Entailment"}, TWO_WAY) == {
        0: "ENTAILMENT",
        1: "Not_Entailment",
    }


@pytest.mark.parametrize(
    "given", [("neutral", "entailment", "contradiction"), ("entailment", "neutral", "other")]
)
def test_names_that_contradict_a_models_own_are_refused(given):
    with pytest.raises(HcLensError, match=r"agree with the checkpoint's own, \['entailment', 'n"):
        name_labels(dict(enumerate(NLI)), given)
    with pytest.raises(HcLensError, match="agree with the checkpoint's own"):
        name_labels({0: "LABEL_0", 1: "neutral", 2: "contradiction"}, given)


@pytest.mark.parametrize("given", [("a", "b"), ("a", "b", "c", "d")])
def test_a_wrong_number_of_names_is_refused(given):
    with pytest.raises(HcLensError, match="one name for each of the model's 3 labels, got"):
        name_labels({0: "LABEL_0", 1: "LABEL_1", 2: "LABEL_2"}, given)
