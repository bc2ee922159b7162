"""The findings of a study: numbers from tables small enough to read, both wordings of each."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.stats import fisher_exact

from hc_lens.analyses import superadditive
from hc_lens.analyses.study import findings
from hc_lens.scans.scan import ScanRows
from hc_lens.show.report import Fact

HEADS = ("L0.H0", "L1.H1")
SURE, NOT, DOUBT = "super-additive", "additive or less", "cannot tell"
GIVEN = {"accuracy": 0.5, "rows": 12, "case": "a {strange} name", "heads": ["L0.H1", "L2.H3"]}
FACTS: dict[str, Any] = {
    "cases": "adversarial",
    "rows": "texts",
    "id_rows": 600,
    "id_accuracy": 0.988,
    "adversarial_cases": 8,
    "fewest_rows": 80,
    "adversarial_accuracy": 0.372,
    "adversarial_accuracy_low": 0.34,
    "adversarial_accuracy_high": 0.41,
    "gap": 0.616,
    "gap_low": 0.58,
    "gap_high": 0.65,
    "worst_case": "relative",
    "worst_case_accuracy": 0.05,
    "best_case": "embedded_if",
    "best_case_accuracy": 0.81,
    "best_case_accuracy_low": 0.7,
    "best_case_accuracy_high": 0.9,
    "friendly_cases": 8,
    "full_friendly": 0.93,
    "full_balanced": 0.651,
    "full_said": "entailment",
    "full_said_share": 0.78,
    "first_sparsity": 0.5,
    "first_seeds": 12,
    "first_id_mean": 0.986,
    "first_id_lowest": 0.98,
    "first_id_worst_drop": 0.008,
    "first_id_worst_drop_low": -0.01,
    "first_id_worst_drop_high": 0.03,
    "first_widest_case": "passive",
    "first_widest_rows": 400,
    "first_widest_least": 0.2,
    "first_widest_most": 0.51,
    "first_widest_spread": 0.31,
    "first_widest_spread_low": 0.2,
    "first_widest_spread_high": 0.42,
    "first_balanced_least": 0.55,
    "first_balanced_most": 0.72,
    "first_friendly_change": -0.02,
    "first_friendly_change_low": -0.04,
    "first_friendly_change_high": 0.0,
    "first_said": "entailment",
    "first_said_seeds": 12,
    "first_said_share": 0.8,
    "first_adversarial_mean": 0.36,
    "first_friendly_side": 0.91,
    "first_balanced_side": 0.635,
    "second_sparsity": 0.7,
    "second_seeds": 12,
    "second_adversarial_mean": 0.12,
    "second_friendly_side": 0.9,
    "second_balanced_side": 0.51,
    "second_said": "non-entailment",
    "second_said_seeds": 11,
    "second_said_share": 0.8,
    "adversarial_change": -0.24,
    "adversarial_change_low": -0.28,
    "adversarial_change_high": -0.2,
    "balanced_change": -0.125,
    "balanced_change_low": -0.15,
    "balanced_change_high": -0.1,
    "friendly_change": -0.01,
    "friendly_change_low": -0.04,
    "friendly_change_high": 0.02,
    "core": ["L0.H6", "L1.H1"],
    "looked_at": ["L0.H6", "L1.H1"],
    "core_size": 2,
    "core_fraction": 1.0,
    "heads": 32,
    "subnetworks": 24,
    "distinct": 24,
    "core_expected": 0.004,
    "core_tail": 1e-5,
    "spearman": 0.8,
    "spearman_p": 1e-6,
    "jaccard": 0.6,
    "jaccard_expected": 0.3,
    "early_size": 3,
    "early_shared": 3,
    "early_expected": 0.06,
    "early_core": ["L0.H6", "L1.H1", "L1.H2"],
    "early_tail": 0.002,
    "joint_case": "swap",
    "joint_drop": 0.5,
    "joint_losses": 0.3,
    "joint_excess": 0.2,
    "joint_low": 0.1,
    "joint_high": 0.3,
    "joint_id_drop": 0.02,
    "superadditive_cases": 1,
    "untold_cases": 0,
    "spent_cases": 0,
    "ablation_cases": 8,
    "overlap_core": 1,
    "overlap_others": 0,
    "other_heads": 30,
    "overlap_p": 0.01,
    "overlap_least": 0.2,
    "overlap_heads": ["L0.H6"],
    "overlap_core_mass": 0.4,
    "overlap_other_mass": 0.1,
    "overlap_chance": 0.05,
    "size_checkpoints": ["200", "2000"],
    "size_seeds": 3,
    "size_step": 5.0,
    "size_id": ["20%", "25%"],
    "size_id_range": 5.0,
    "size_ood": ["10%", "50%"],
    "size_ood_rise": 40.0,
    "size_ood_doubts": [],
    "edge_sender": "L0.H6",
    "edge_receiver": "L1.H1",
    "edge_kind": "v",
    "edges_heads": ["L0.H6"],
    "edges_patched": 10,
    "edges_fewest": 20,
    "edges_most": 40,
    "edges_explained": 0.8,
    "dependent_head": "L1.H4",
    "dependent_change": -0.026,
    "dependent_kl": 0.044,
    "dependent_rows": 400,
}


LOW_BEST = {"best_case_accuracy_low": 0.3, "best_case_accuracy_high": 0.45}
NO_LOSS = {"adversarial_change_low": 0.2, "adversarial_change_high": 0.3}
FRIENDLY_LOST = {"friendly_change_low": -0.66, "friendly_change_high": -0.5}
ONE_LABEL = NO_LOSS | FRIENDLY_LOST
UNTOLD = {
    "adversarial_change_high": -0.05,
    "balanced_change_low": -0.05,
    "balanced_change_high": 0.05,
}
NO_SIDES = {"full_balanced": math.nan}


@pytest.mark.parametrize(
    ("make", "changes", "found", "words"),
    [
        (findings.say_model, {}, True, "generalises in part"),
        (findings.say_model, LOW_BEST, False, "follows the heuristic"),
        (findings.say_model, {"best_case_accuracy_low": 0.4}, None, "Too few rows to tell whether"),
        (findings.say_model, {"gap_low": -0.02, "gap_high": 0.03}, False, "does about as well"),
        (findings.say_model, {"gap_low": 0.01, "gap_high": 0.2}, None, "Too few rows to tell how"),
        (findings.say_model, {"cases": "out-of-domain"}, None, "does worse"),
        (findings.say_model, {"full_balanced": 0.5}, False, "Answering one label alone would do"),
        (findings.say_collapse, {}, True, "lose what goes beyond the heuristic"),
        (findings.say_collapse, NO_LOSS, False, "no clear loss on either side"),
        (findings.say_collapse, ONE_LABEL, False, "11 of 12 answer non-entailment most, on 80.0%"),
        (findings.say_collapse, FRIENDLY_LOST, False, "lose both sides"),
        (
            findings.say_collapse,
            {"adversarial_change_high": -0.05},
            None,
            "balanced score falls",
        ),
        (findings.say_collapse, UNTOLD, None, "(-5.0 to +5.0): too few seeds to tell."),
        (findings.say_collapse, {"full_balanced": math.nan}, None, "do worse outside. No friendly"),
        (findings.say_collapse, NO_LOSS | NO_SIDES, False, "no clear loss. No friendly cases"),
        (findings.say_core, {}, True, "they share a core."),
        (findings.say_core, {"distinct": 20}, True, "all 24 subnetworks, 20 of them distinct (L0"),
        (findings.say_core, {"core_fraction": 0.9}, True, "in at least 90.0% of the 24"),
        (findings.say_core, {"core_size": 1}, True, "looks at the most frequent ones"),
        (findings.say_core, {"core_tail": 0.4}, False, "not more than chance"),
        (findings.say_core, {"core": [], "core_size": 0}, False, "No head is in all 24"),
        (findings.say_ranks, {}, True, "are kept more often at 70.0% too"),
        (findings.say_ranks, {"spearman_p": 0.3}, False, "does not clearly tell"),
        (findings.say_ranks, {"spearman": math.nan}, False, "the same for all heads"),
        (findings.say_early, {}, True, "the early core survives whole"),
        (findings.say_early, {"early_tail": 0.2}, None, "survives whole, which chance may do"),
        (findings.say_early, {"early_shared": 1}, False, "survives in part"),
        (findings.say_early, {"early_shared": 0}, False, "none of it survives"),
        (findings.say_early, {"early_size": 0}, False, "has no core"),
        (findings.say_joint, {}, True, "super-additive on 1 of 8"),
        (findings.say_joint, {"superadditive_cases": 0}, False, "super-additive on none of 8"),
        (
            findings.say_joint,
            {"untold_cases": 3},
            True,
            "1 of 8 adversarial cases (3 cannot tell; in 0",
        ),
        (
            findings.say_joint,
            {"superadditive_cases": 0, "untold_cases": 8},
            None,
            "on none of 8 adversarial cases (8 cannot tell; in",
        ),
        (findings.say_attention, {}, True, "(L0.H6) look at the same content word"),
        (findings.say_attention, {"overlap_core_mass": math.nan}, None, "no word that stands in"),
        (findings.say_trace, {}, True, "to the v of L1.H1; of L0.H6, with 20 to 40 edges"),
        (findings.say_trace, {}, True, "the 10 strongest together do 80.0% of what removing the"),
        (findings.say_trace, {}, True, "(KL 0.04): cutting it off from them alone changes"),
        (findings.say_trace, {"edges_explained": 0.2}, False, "spread over many wires"),
        (findings.say_trace, {"edge_kind": "classifier"}, True, "to the classifier;"),
        (findings.say_attention, {"overlap_core": 0, "overlap_p": 1.0}, False, "none of these"),
        (findings.say_attention, {"overlap_p": 0.3}, None, "0 of the 30 other heads (they do so"),
        (findings.say_sizes, {}, True, "stays about the same, outside it rises"),
        (findings.say_sizes, {"size_id_range": 60.0}, False, "in domain it moves too"),
        (findings.say_sizes, {"size_ood_rise": 2.0}, False, "outside it does not rise"),
        (
            findings.say_sizes,
            {"size_ood_doubts": ["outside at checkpoint 200 the model is at its floor"]},
            None,
            "To be read with care: outside at checkpoint 200",
        ),
    ],
)
def test_the_wording_follows_the_numbers(
    make, changes: dict, found: bool | None, words: str
) -> None:
    sentence = make(FACTS | changes)
    assert words in sentence.plain
    assert sentence.found is found


ABOVE, ACROSS, BELOW = (0.3, 0.4), (0.0, 0.4), (-0.1, 0.01)


@pytest.mark.parametrize(
    ("drop", "spread", "found", "words"),
    [
        (BELOW, ABOVE, True, "Close in domain, they generalise differently."),
        (BELOW, BELOW, False, "Close in domain, they also generalise alike."),
        (ABOVE, ABOVE, False, "They differ, but not at equal in-domain accuracy."),
        (ABOVE, BELOW, False, "Outside the seeds agree, in domain some are lost."),
        (ACROSS, ABOVE, None, "(too few rows to tell whether all are faithful). Their"),
        (BELOW, ACROSS, None, "Too few rows to tell whether they generalise differently."),
    ],
)
def test_faithful_and_spread_are_judged_by_their_intervals(
    drop: tuple, spread: tuple, found: bool | None, words: str
) -> None:
    changes = dict(zip(("first_id_worst_drop_low", "first_id_worst_drop_high"), drop, strict=True))
    changes |= dict(
        zip(("first_widest_spread_low", "first_widest_spread_high"), spread, strict=True)
    )
    sentence = findings.say_spread(FACTS | changes, "first")
    assert words in sentence.plain
    assert sentence.found is found
    assert "score 55.0% to 72.0%, the full model 65.1%" in sentence.plain


def test_subnetworks_that_answer_one_label_are_not_said_to_generalise() -> None:
    # As seen at a high sparsity: friendly cases fall from 81% to 23%, adversarial ones rise.
    changes = {
        "full_friendly": 0.81,
        "first_friendly_side": 0.23,
        "first_friendly_change_low": -0.66,
        "first_friendly_change_high": -0.5,
    }
    sentence = findings.say_spread(FACTS | changes, "first")
    assert "On the friendly cases they fall from 81.0% to 23.0%" in sentence.plain
    assert "Answering one label is not generalising." in sentence.plain
    assert "generalise differently" not in sentence.plain
    assert sentence.found is None


def test_a_balanced_score_of_one_half_is_said_to_be_that_of_one_answer() -> None:
    words = "on average no more than one answer alone would score"
    assert words in findings.say_spread(FACTS | {"first_balanced_side": 0.489}, "first").plain
    assert words not in findings.say_spread(FACTS, "first").plain


def test_a_spread_over_eight_rows_is_too_few() -> None:
    # Two seeds, one case: 2 of 8 rows against 6 of 8. The interval reaches below 15 points.
    spread = pd.DataFrame(
        {"sparsity": [0.5, 0.5], "dataset": ["id", "ood"], "case": ["all", "swap"],
         "full": [0.98, 0.5], "min": [0.97, 0.25], "max": [0.98, 0.75], "mean": [0.975, 0.5],
         "seeds": [2, 2], "n": [1000, 8]}
    )  # fmt: skip
    few = findings.spread_facts(spread, ["swap"], [0.5])
    assert few["first_widest_spread"] == 0.5
    assert few["first_widest_rows"] == 8
    assert findings.judge(findings.of(few, "first_widest_spread"), findings.WIDE) is None
    many = findings.spread_facts(spread.assign(n=[1000, 800]), ["swap"], [0.5])
    assert findings.judge(findings.of(many, "first_widest_spread"), findings.WIDE) is True


def sides(friendly: tuple[float, ...], adversarial: tuple[float, ...]) -> pd.DataFrame:
    """Three seeds at two sparsities, the second as given; the first is 81% and 53%."""
    rows = [(0.5, seed, 0.81, 0.53, "entailment", 0.64) for seed in range(3)]
    for seed, (right, other) in enumerate(zip(friendly, adversarial, strict=True)):
        rows.append((0.7, seed, right, other, "non-entailment", (1 - right + other) / 2))
    names = ["sparsity", "seed", "friendly", "adversarial", "said", "said_share"]
    table = pd.DataFrame(rows, columns=names)
    return table.assign(balanced=table[["friendly", "adversarial"]].mean(axis=1))


def test_a_collapse_into_one_label_is_found_in_the_sides() -> None:
    table = sides((0.20, 0.23, 0.26), (0.80, 0.83, 0.86))
    found = findings.side_facts(table, [0.5, 0.7], 0.81)
    assert found["second_friendly_side"] == pytest.approx(0.23)
    assert found["second_balanced_side"] == pytest.approx(0.53)
    assert (found["second_said"], found["second_said_seeds"]) == ("non-entailment", 3)
    assert found["second_said_share"] == pytest.approx(0.8)
    # Student's interval of -0.61, -0.58, -0.55: -0.58 -+ 4.303 * 0.03 / sqrt(3).
    assert found["friendly_change_high"] == pytest.approx(-0.58 + 0.0745, abs=1e-4)
    sentence = findings.say_collapse(FACTS | found)
    assert "fall into answering one label (3 of 12 answer non-entailment most" in sentence.plain
    assert sentence.found is False


def test_the_full_model_is_told_with_its_rows_and_both_sides() -> None:
    table = pd.DataFrame(
        {"dataset": ["id", "ood", "ood", "ood"], "case": ["all", "swap", "passive", "plain"],
         "kind": ["in domain", "adversarial", "adversarial", "friendly"],
         "n": [1000, 200, 100, 50], "accuracy": [0.98, 0.6, 0.2, 0.9],
         "share_yes": [0.5, 0.4, 0.8, 0.9], "share_no": [0.5, 0.6, 0.2, 0.1]}
    )  # fmt: skip
    found = findings.evaluation_facts(table)
    assert found["adversarial_accuracy"] == pytest.approx(0.4)
    assert (found["full_friendly"], found["full_balanced"]) == pytest.approx((0.9, 0.65))
    # (0.4 + 0.8) / 2 on the one side, 0.9 on the other.
    assert (found["full_said"], found["full_said_share"]) == ("yes", pytest.approx(0.75))
    assert (found["fewest_rows"], found["friendly_rows"]) == (100, 50)
    # Two Wilson intervals, 0.531 to 0.665 and 0.133 to 0.289, of which the mean is taken.
    assert found["adversarial_accuracy_low"] == pytest.approx(0.352, abs=1e-3)
    assert found["adversarial_accuracy_high"] == pytest.approx(0.455, abs=1e-3)


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
     ("first_widest_least", "percent")],
)  # fmt: skip
def test_each_number_is_shown_in_its_style(name: str, style: str) -> None:
    second = {key.replace("first", "second"): FACTS[key] for key in FACTS if "first_" in key}
    said = findings.say(second | FACTS)
    assert said[-1].plain.startswith("At the checkpoints 200, 2000 the effective size is")
    parts = [part for sentence in said for part in sentence.parts if isinstance(part, Fact)]
    assert {part.style for part in parts if part.name == name} == {style}


def excess(**cases: tuple[float, float, str]) -> pd.DataFrame:
    """Rows of joint ablation: drop, sum of the losses, verdict by case; 5 points in domain."""
    rows = [
        {
            "dataset": "id" if case == "all" else "ood",
            "case": case,
            "size": 2,
            "full": 0.95,
            "drop": drop,
            "sum_of_losses": alone,
            "excess": drop - alone,
            "low": drop - alone - 0.05,
            "high": drop - alone + 0.05,
            "p": 0.5,
            "verdict": verdict,
        }
        for case, (drop, alone, verdict) in {"all": (0.05, 0.0, SURE), **cases}.items()
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


def test_the_super_additive_case_with_the_largest_excess_is_shown() -> None:
    # The largest excess of all is on a case that cannot tell, and the row in domain does not count.
    table = excess(swap=(0.6, 0.2, SURE), passive=(0.5, 0.4, SURE), relative=(0.9, 0.1, DOUBT))
    found = findings.ablation_facts(table, scan(), HEADS)
    assert (found["joint_case"], found["superadditive_cases"]) == ("swap", 2)
    assert (found["untold_cases"], found["spent_cases"], found["ablation_cases"]) == (1, 0, 3)
    assert found["joint_excess"] == pytest.approx(0.4)
    assert found["joint_losses"] == pytest.approx(0.2)
    assert found["joint_id_drop"] == pytest.approx(0.05)
    assert found["core_head_change"] == pytest.approx(-0.3)
    assert found["other_head_change"] == pytest.approx(-0.1)


def test_without_a_super_additive_case_the_nearest_is_one_that_was_tested() -> None:
    table = excess(swap=(0.3, 0.2, DOUBT), passive=(0.1, 0.4, NOT), relative=(0.9, 0.1, DOUBT))
    table.loc[table["case"] == "relative", "p"] = math.nan
    found = findings.ablation_facts(table, scan(), HEADS)
    assert (found["joint_case"], found["superadditive_cases"]) == ("swap", 0)
    assert found["untold_cases"] == 2


def test_the_sentence_counts_the_verdicts_of_the_table() -> None:
    # Right answers of 100: the full model's, without each head, without both. On `relative` the
    # model has nothing to lose, and it gains 67 points in sum when one head is removed.
    right = {"swap": (90, 80, 80, 20), "passive": (90, 60, 60, 50), "relative": (0, 40, 27, 0)}
    correct = np.concatenate(
        [np.arange(100) < np.array(counts)[:, None] for counts in right.values()], axis=1
    )
    rows = {"dataset": "ood", "case": np.repeat(list(right), 100), "row": range(300), "label": 0}
    zeros = np.zeros(correct.shape)
    sets = ("full", *HEADS, "+".join(HEADS))
    table = superadditive.excess(
        ScanRows(sets, pd.DataFrame(rows), zeros[..., None], correct, correct, zeros, zeros)
    )
    verdicts = dict(zip(table["case"], table["verdict"], strict=True))
    assert verdicts == {"swap": SURE, "passive": NOT, "relative": "interaction, not a loss"}
    found = findings.ablation_facts(table, scan(), HEADS)
    assert found["superadditive_cases"] == (table["verdict"] == SURE).sum() == 1
    assert "super-additive on 1 of 3" in findings.say_joint(FACTS | found).plain


def test_the_size_of_every_checkpoint_is_told_with_what_makes_it_doubtful() -> None:
    table = pd.DataFrame(
        {"checkpoint": ["1", "1", "2", "2"], "target": ["id", "ood", "id", "ood"],
         "effective_size": [40.0, 20.0, 60.0, 80.0], "seeds": [2, 2, 2, 2],
         "floor": [False, True, False, False], "ceiling": [False, True, False, False],
         "none_passes": [False, False, False, False]}
    )  # fmt: skip
    found = findings.size_facts(table, (0.2, 0.4, 0.6, 0.8))
    assert found["size_step"] == pytest.approx(20)
    assert (found["size_id"], found["size_ood"]) == (["40%", "60%"], ["20%", "80%"])
    sentence = findings.say_sizes(FACTS | found)
    assert "is 40%, 60% of the units in domain and 20%, 80% on the" in sentence.plain
    assert "outside at checkpoint 1 the largest sparsity of the grid still passes" in sentence.plain
    # One step of the grid is no move.
    assert "in domain it stays about the same, outside it rises" in sentence.plain
    assert sentence.found is None


def test_heads_that_look_at_a_word_are_counted_against_the_others() -> None:
    # 3 of 6 against 6 of 26.
    _, expected = fisher_exact([[3, 3], [6, 20]], "greater")
    assert findings.more_often(3, 6, 9, 32) == pytest.approx(expected)


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
