"""Sentences of the report: both wordings of every finding."""

from __future__ import annotations

import math
from typing import Any

import pytest

from analyses.study import sentences
from hc_lens.show.report import Fact

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
        (sentences.of_model, {}, True, "generalises in part"),
        (sentences.of_model, {"best_case_accuracy": 0.2}, False, "follows the heuristic"),
        (sentences.of_model, {"adversarial_accuracy": 0.98}, False, "does about as well"),
        (sentences.of_model, {"cases": "out-of-domain"}, None, "it does worse"),
        (sentences.of_collapse, {}, True, "lose what goes beyond the heuristic"),
        (sentences.of_collapse, {"second_adversarial_mean": 0.35}, False, "no clear loss"),
        (sentences.of_collapse, {"cases": "out-of-domain"}, None, "do worse outside"),
        (sentences.of_core, {}, True, "they share a core."),
        (sentences.of_core, {"core_fraction": 0.9}, True, "in at least 90.0% of the 24"),
        (sentences.of_core, {"core_size": 1}, True, "looks at the most frequent ones"),
        (sentences.of_core, {"core_tail": 0.4}, False, "not more than chance"),
        (sentences.of_core, {"core": [], "core_size": 0}, False, "No head is in all 24"),
        (sentences.of_ranks, {}, True, "are often kept at 70.0% too"),
        (sentences.of_ranks, {"spearman_p": 0.3}, False, "does not clearly tell"),
        (sentences.of_ranks, {"spearman": math.nan}, False, "the same for all heads"),
        (sentences.of_early, {}, True, "the early core survives whole"),
        (sentences.of_early, {"early_shared": 1}, False, "survives in part"),
        (sentences.of_early, {"early_shared": 0}, False, "none of it survives"),
        (sentences.of_early, {"early_size": 0}, False, "has no core"),
        (sentences.of_joint, {}, True, "super-additive on 1 of 8"),
        (sentences.of_joint, {"superadditive_cases": 0}, False, "super-additive on none of 8"),
        (sentences.of_attention, {}, True, "(L0.H6) look at the same content word"),
        (sentences.of_attention, {"overlap_core_mass": math.nan}, None, "no word that stands in"),
        (sentences.of_trace, {}, True, "to the v of L1.H1; the 10 strongest of the 20 to 40 edges"),
        (sentences.of_trace, {"edges_explained": 0.2}, False, "spread over many wires"),
        (sentences.of_trace, {"edge_kind": "classifier"}, True, "to the classifier;"),
        (sentences.of_attention, {"overlap_core": 0}, False, "None of these heads"),
        (sentences.of_sizes, {}, True, "stays about the same, outside it rises"),
        (sentences.of_sizes, {"size_last_id": 60.0}, False, "in domain it moves too"),
        (sentences.of_sizes, {"size_last_ood": 12.0}, False, "outside it does not rise"),
        (
            sentences.of_sizes,
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
    sentence = sentences.of_spread(FACTS | changes, "first")
    assert words in sentence.plain
    assert sentence.found is (drop < 0.05 and spread > 0.15)


def test_one_seed_has_nothing_to_compare() -> None:
    sentence = sentences.of_spread(FACTS | {"first_seeds": 1}, "first")
    assert "one subnetwork: nothing to compare" in sentence.plain
    assert sentence.found is None


def test_every_number_of_a_sentence_is_a_fact_with_its_name() -> None:
    sentence = sentences.of_core(FACTS)
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
def test_the_end_of_a_name_decides_its_style(name: str, style: str) -> None:
    assert sentences.style_of(name) == style
