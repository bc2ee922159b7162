"""The findings of a study: numbers from tables small enough to read, both wordings of each."""

from __future__ import annotations

import json
import math
from typing import Any

import pandas as pd
import pytest

from hc_lens.analyses.study import findings
from hc_lens.show.report import Fact

HEADS = ("L0.H0", "L1.H1")
GIVEN = {"accuracy": 0.5, "rows": 12, "case": "a {strange} name", "heads": ["L0.H1", "L2.H3"]}
FACTS: dict[str, Any] = {
    "cases": "adversarial",
    "id_rows": 600,
    "id_accuracy": 0.988,
    "adversarial_cases": 8,
    "adversarial_accuracy": 0.372,
    "worst_case": "relative",
    "worst_case_accuracy": 0.05,
    "best_case": "embedded_if",
    "best_case_accuracy": 0.81,
    "first_sparsity": 0.5,
    "first_seeds": 12,
    "first_id_mean": 0.986,
    "first_id_lowest": 0.98,
    "first_id_worst_drop": 0.008,
    "first_widest_case": "passive",
    "first_widest_low": 0.2,
    "first_widest_high": 0.41,
    "first_widest_spread": 0.21,
    "first_adversarial_mean": 0.36,
    "second_sparsity": 0.7,
    "second_adversarial_mean": 0.12,
    "core": ["L0.H6", "L1.H1"],
    "looked_at": ["L0.H6", "L1.H1"],
    "core_size": 2,
    "core_fraction": 1.0,
    "heads": 32,
    "subnetworks": 24,
    "core_expected": 0.004,
    "core_tail": 1e-5,
    "spearman": 0.8,
    "spearman_p": 1e-6,
    "jaccard": 0.6,
    "jaccard_expected": 0.3,
    "early_size": 3,
    "early_shared": 3,
    "early_expected": 0.06,
    "joint_case": "swap",
    "joint_drop": 0.5,
    "joint_sum": 0.3,
    "joint_excess": 0.2,
    "joint_low": 0.1,
    "joint_high": 0.3,
    "joint_id_drop": 0.02,
    "superadditive_cases": 1,
    "ablation_cases": 8,
    "overlap_core": 1,
    "overlap_least": 0.2,
    "overlap_heads": ["L0.H6"],
    "overlap_core_mass": 0.4,
    "overlap_other_mass": 0.1,
    "overlap_chance": 0.05,
    "size_first_checkpoint": "200",
    "size_last_checkpoint": "2000",
    "size_first_id": 20.0,
    "size_last_id": 25.0,
    "size_first_ood": 10.0,
    "size_last_ood": 50.0,
    "size_first_id_flags": [],
    "size_first_ood_flags": [],
    "size_last_id_flags": [],
    "size_last_ood_flags": [],
    "edge_sender": "L0.H6",
    "edge_receiver": "L1.H1",
    "edge_kind": "v",
    "edges_patched": 10,
    "edges_fewest": 20,
    "edges_most": 40,
    "edges_explained": 0.8,
    "dependent_head": "L1.H4",
    "dependent_change": -0.026,
}


@pytest.mark.parametrize(
    ("make", "changes", "found", "words"),
    [
        (findings.say_model, {}, True, "generalises in part"),
        (findings.say_model, {"best_case_accuracy": 0.2}, False, "follows the heuristic"),
        (findings.say_model, {"adversarial_accuracy": 0.98}, False, "does about as well"),
        (findings.say_model, {"cases": "out-of-domain"}, None, "it does worse"),
        (findings.say_collapse, {}, True, "lose what goes beyond the heuristic"),
        (findings.say_collapse, {"second_adversarial_mean": 0.35}, False, "no clear loss"),
        (findings.say_collapse, {"cases": "out-of-domain"}, None, "do worse outside"),
        (findings.say_core, {}, True, "they share a core."),
        (findings.say_core, {"core_fraction": 0.9}, True, "in at least 90.0% of the 24"),
        (findings.say_core, {"core_size": 1}, True, "looks at the most frequent ones"),
        (findings.say_core, {"core_tail": 0.4}, False, "not more than chance"),
        (findings.say_core, {"core": [], "core_size": 0}, False, "No head is in all 24"),
        (findings.say_ranks, {}, True, "are often kept at 70.0% too"),
        (findings.say_ranks, {"spearman_p": 0.3}, False, "does not clearly tell"),
        (findings.say_ranks, {"spearman": math.nan}, False, "the same for all heads"),
        (findings.say_early, {}, True, "the early core survives whole"),
        (findings.say_early, {"early_shared": 1}, False, "survives in part"),
        (findings.say_early, {"early_shared": 0}, False, "none of it survives"),
        (findings.say_early, {"early_size": 0}, False, "has no core"),
        (findings.say_joint, {}, True, "super-additive on 1 of 8"),
        (findings.say_joint, {"superadditive_cases": 0}, False, "super-additive on none of 8"),
        (findings.say_attention, {}, True, "(L0.H6) look at the same content word"),
        (findings.say_attention, {"overlap_core_mass": math.nan}, None, "no word that stands in"),
        (findings.say_trace, {}, True, "to the v of L1.H1; the 10 strongest of the 20 to 40 edges"),
        (findings.say_trace, {"edges_explained": 0.2}, False, "spread over many wires"),
        (findings.say_trace, {"edge_kind": "classifier"}, True, "to the classifier;"),
        (findings.say_attention, {"overlap_core": 0}, False, "None of these heads"),
        (findings.say_sizes, {}, True, "stays about the same, outside it rises"),
        (findings.say_sizes, {"size_last_id": 60.0}, False, "in domain it moves too"),
        (findings.say_sizes, {"size_last_ood": 12.0}, False, "outside it does not rise"),
        (
            findings.say_sizes,
            {"size_first_ood_flags": ["floor"]},
            None,
            "outside at checkpoint 200",
        ),
    ],
)
def test_the_wording_follows_the_numbers(
    make, changes: dict, found: bool | None, words: str
) -> None:
    sentence = make(FACTS | changes)
    assert words in sentence.plain
    assert sentence.found is found


@pytest.mark.parametrize(
    ("drop", "spread", "words"),
    [
        (0.002, 0.21, "ranges from 20.0% to 41.0%: close in domain, they generalise differently"),
        (0.002, 0.05, "no adversarial case do their accuracies lie further apart than 5.0 points"),
        (0.2, 0.21, "(not all are faithful)"),
        (0.2, 0.05, "outside the seeds agree, in domain some are lost"),
    ],
)
def test_faithful_and_spread_are_told_apart(drop: float, spread: float, words: str) -> None:
    changes = {"first_id_worst_drop": drop, "first_widest_spread": spread}
    sentence = findings.say_spread(FACTS | changes, "first")
    assert words in sentence.plain
    assert sentence.found is (drop < 0.05 and spread > 0.15)


def test_one_seed_has_nothing_to_compare() -> None:
    sentence = findings.say_spread(FACTS | {"first_seeds": 1}, "first")
    assert "one subnetwork: nothing to compare" in sentence.plain
    assert sentence.found is None


def test_every_number_of_a_sentence_is_a_fact_with_its_name() -> None:
    sentence = findings.say_core(FACTS)
    facts = {part.name: part.value for part in sentence.parts if isinstance(part, Fact)}
    assert facts == {
        "core_size": 2,
        "heads": 32,
        "subnetworks": 24,
        "core_expected": 0.004,
        "core_tail": 1e-5,
    }
    assert sentence.plain.startswith("2 of 32 heads appear in all 24 subnetworks (L0.H6, L1.H1)")


@pytest.mark.parametrize(
    ("name", "style"),
    [("id_accuracy", "percent"), ("joint_drop", "span"), ("spearman_p", "probability"),
     ("spearman", "two"), ("core_size", "number"), ("joint_low", "span"),
     ("first_widest_low", "percent")],
)  # fmt: skip
def test_each_number_is_shown_in_its_style(name: str, style: str) -> None:
    second = {key.replace("first", "second"): FACTS[key] for key in FACTS if "first_" in key}
    said = findings.say(second | FACTS)
    parts = [part for sentence in said for part in sentence.parts if isinstance(part, Fact)]
    assert {part.style for part in parts if part.name == name} == {style}


def excess(**cases: tuple[float, float, float]) -> pd.DataFrame:
    """Rows of joint ablation: drop, sum of the single drops and p by case; 5 points in domain."""
    rows = [
        {
            "dataset": "id" if case == "all" else "ood",
            "case": case,
            "size": 2,
            "n": 500,
            "drop": drop,
            "sum_of_drops": alone,
            "excess": drop - alone,
            "low": drop - alone - 0.05,
            "high": drop - alone + 0.05,
            "p": p,
        }
        for case, (drop, alone, p) in {"all": (0.05, 0.05, 1.0), **cases}.items()
    ]
    return pd.DataFrame(rows)


def scan() -> pd.DataFrame:
    """Change of accuracy by head."""
    changes = {"L0.H0": -0.2, "L1.H1": -0.4, "L1.H0": -0.1, "L0.H0+L1.H1": -0.9}
    rows = [
        {"dataset": "ood", "set": name, "accuracy_change": change}
        for name, change in changes.items()
    ]
    return pd.DataFrame(rows)


def test_the_case_with_the_largest_sure_excess_is_shown() -> None:
    table = excess(swap=(0.6, 0.2, 0.0), passive=(0.5, 0.4, 0.001), relative=(0.9, 0.1, 0.5))
    found = findings.ablation_facts(table, scan(), HEADS)
    assert (found["joint_case"], found["superadditive_cases"]) == ("swap", 2)
    assert found["joint_excess"] == pytest.approx(0.4)
    assert found["joint_id_drop"] == pytest.approx(0.05)
    assert found["core_head_change"] == pytest.approx(-0.3)
    assert found["other_head_change"] == pytest.approx(-0.1)


def test_an_excess_does_not_count_where_removing_the_heads_together_costs_nothing() -> None:
    # Alone the two heads gain 67 points in sum, together they change nothing: an excess of 67.
    table = excess(relative=(0.0, -0.67, 0.0), swap=(0.6, 0.2, 0.0))
    found = findings.ablation_facts(table, scan(), HEADS)
    assert (found["joint_case"], found["superadditive_cases"]) == ("swap", 1)
    table = excess(relative=(0.0, -0.67, 0.0), swap=(0.6, 0.7, 1.0))
    assert findings.ablation_facts(table, scan(), HEADS)["superadditive_cases"] == 0


def test_a_number_is_shown_in_the_style_after_its_name() -> None:
    sentence = findings.write(GIVEN, "{accuracy:percent} of {rows} rows.", True)
    assert sentence.plain == "50.0% of 12 rows."
    assert sentence.parts[:2] == (Fact("accuracy", 0.5, "percent"), " of ")
    assert sentence.parts[2] == Fact("rows", 12, "number")
    assert sentence.found is True


def test_texts_and_lists_are_written_as_they_are() -> None:
    assert (
        findings.write(GIVEN, "{heads} on {case}", None).plain == "L0.H1, L2.H3 on a {strange} name"
    )


def test_a_name_that_is_no_fact_is_an_error() -> None:
    with pytest.raises(KeyError, match="acuracy"):
        findings.write(GIVEN, "{acuracy:percent}", None)


def test_a_number_that_is_not_defined_is_null() -> None:
    facts = json.loads(findings.facts_json(GIVEN | {"accuracy": math.nan}))
    assert facts == GIVEN | {"accuracy": None}
