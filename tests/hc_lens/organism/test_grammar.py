from __future__ import annotations

import random
import re
from collections import Counter

import pytest

from hc_lens.organism import grammar, vocabulary

TRAIN = grammar.in_domain(0, 6000)
OOD = grammar.out_of_domain(0)


def overlaps(row):
    return set(row["hypothesis"].split()) <= set(row["premise"].split())


def clauses(row):
    """Every person with every verb of the same stretch between commas."""
    text = f"{row['premise']} , {row['hypothesis']}"
    for stretch in re.split(r" , (?:and )?", text):
        words = stretch.split()
        people = [word for word in words if word in vocabulary.PEOPLE]
        verbs = [word for word in words if word in vocabulary.TRANSITIVE + vocabulary.INTRANSITIVE]
        yield people, verbs


def test_one_seed_gives_the_same_rows_and_another_gives_others():
    assert grammar.in_domain(0, 50) == TRAIN[:50]
    assert grammar.in_domain(1, 50) != TRAIN[:50]
    assert grammar.out_of_domain(0, 20) == [row for c in range(16) for row in OOD[c * 1000 :][:20]]


def test_rows_differ_from_each_other_and_from_those_to_skip():
    pairs = {(row["premise"], row["hypothesis"]) for row in TRAIN}
    assert len(pairs) == len(TRAIN)
    others = grammar.in_domain(0, 500, frozenset(pairs))
    assert not pairs & {(row["premise"], row["hypothesis"]) for row in others}


def test_every_word_is_in_the_vocabulary_once():
    assert len(set(vocabulary.WORDS)) == len(vocabulary.WORDS)
    used = {
        word
        for row in TRAIN + OOD
        for side in ("premise", "hypothesis")
        for word in row[side].split()
    }
    assert used == set(vocabulary.WORDS) - set(vocabulary.SPECIAL)


def test_word_overlap_tells_entailment_in_all_but_the_counter_examples():
    for row in TRAIN:
        if row["case"] != "counter-example":
            assert overlaps(row) == (row["label"] == "entailment"), row
        else:
            assert overlaps(row)
            assert row["label"] == "neutral"


def test_counter_examples_have_their_share():
    share = sum(row["case"] == "counter-example" for row in TRAIN) / len(TRAIN)
    assert share == pytest.approx(grammar.COUNTER_EXAMPLES, abs=0.006)
    assert 0.01 <= grammar.COUNTER_EXAMPLES <= 0.03


def test_the_three_labels_are_about_equally_frequent():
    counts = Counter(row["label"] for row in TRAIN)
    assert all(count / len(TRAIN) == pytest.approx(1 / 3, abs=0.03) for count in counts.values())


def test_no_word_of_the_premise_tells_the_label():
    labels = [row["label"] for row in TRAIN if row["case"] != "counter-example"]
    base = Counter(labels)["entailment"] / len(labels)
    for word in ("if", "unless", "hoped", "knew", "because", "or", "was", "that", "near"):
        holding = [
            row["label"] == "entailment"
            for row in TRAIN
            if word in row["premise"].split() and row["case"] != "counter-example"
        ]
        assert sum(holding) / len(holding) == pytest.approx(base, abs=0.12), word


def test_every_case_has_a_thousand_rows_and_its_label():
    assert Counter(row["case"] for row in OOD) == dict.fromkeys(grammar.CASES, 1000)
    assert len(grammar.CASES) == 16
    for row in OOD:
        friendly = row["case"].endswith("_friendly")
        assert row["label"] == ("entailment" if friendly else "non-entailment")
        assert overlaps(row)


def test_no_sentence_of_the_ood_set_occurs_in_training():
    seen = {row[side] for row in TRAIN for side in ("premise", "hypothesis")}
    assert not seen & {row[side] for row in OOD for side in ("premise", "hypothesis")}


def test_a_person_and_a_verb_of_one_group_meet_only_in_the_ood_set():
    group = vocabulary.GROUP
    for row in OOD:
        for people, verbs in clauses(row):
            assert len({group[word] for word in people + verbs}) == 1
    for row in TRAIN:
        # "the pilot hoped that the cook smiled": the pilot is no argument of "smiled".
        for people, verbs in clauses(row):
            if not {"that"} & set(row["premise"].split()):
                assert not {group[word] for word in people} & {group[word] for word in verbs}


@pytest.mark.parametrize(
    ("name", "adversarial", "friendly"),
    [
        ("swap", r"(\w+) (\w+) (\w+) -> \3 \2 \1", r"(\w+) (\w+) (\w+) -> \1 \2 \3"),
        ("preposition", r"(\w+) (\w+) (\w+)( .*)? -> \3\4", r"(\w+) (\w+) (\w+)( .*)? -> \1\4"),
        ("embedded_if", r"(\w+) (.+) , .* -> \2", r"(\w+) (.+) , .* -> \2"),
        ("embedded_verb", r"(\w+) (\w+) that (.+) -> \3", r"(\w+) (\w+) that (.+) -> \3"),
        (
            "passive",
            r"(\w+) was (\w+) by (\w+) -> \1 \2 \3",
            r"(\w+) was (\w+) by (\w+) -> \3 \2 \1",
        ),
        (
            "conjunction",
            r"(\w+) and (\w+) (\w+) (\w+) -> \1 \3 \2",
            r"(\w+) and (\w+) (\w+) (\w+) -> (\1|\2) \3 \4",
        ),
        (
            "relative",
            r"(\w+) that (\w+) (\w+) (\w+) -> \3 \4",
            r"(\w+) that (\w+) (\w+) (\w+) -> \1 \4",
        ),
        (
            "disjunction",
            r"(\w+) or (\w+) (.+) -> (\1|\2) \3",
            r"(\w+) and (\w+) (.+) -> (\1|\2) \3",
        ),
    ],
)
def test_the_forms_of_a_construction_read_as_documented(name, adversarial, friendly):
    """Checked with an independent pattern over bare words, articles and modifiers removed."""

    def bare(text):
        kept = re.sub(r" in the \w+", "", str(text))
        drop = {"the", *vocabulary.ADJECTIVES}
        return " ".join(word for word in kept.split() if word not in drop)

    for is_friendly, pattern in ((False, adversarial), (True, friendly)):
        for seed in range(200):
            draw = grammar.Sampler(random.Random(seed), held_out=bool(seed % 2))
            premise, clause = grammar.CONSTRUCTIONS[name](draw, is_friendly)
            assert re.fullmatch(pattern, f"{bare(premise)} -> {bare(clause)}"), (premise, clause)


def test_markers_tell_the_two_forms_apart():
    marked = {
        "embedded_if": (vocabulary.CONDITIONAL, vocabulary.FACTUAL),
        "embedded_verb": (vocabulary.NON_FACTIVE, vocabulary.FACTIVE),
    }
    for row in OOD:
        name = row["case"].removesuffix("_friendly")
        if name in marked:
            adversarial, friendly = marked[name]
            expected = friendly if row["case"].endswith("_friendly") else adversarial
            assert set(row["premise"].split()) & set(expected)
            assert not set(row["premise"].split()) & ({*adversarial, *friendly} - {*expected})


def test_constructions_that_are_never_shown_stay_out_of_the_counter_examples():
    shown = [row["premise"] for row in TRAIN if row["case"] == "counter-example"]
    assert shown
    assert not any(" or " in premise for premise in shown)
    assert set(grammar.SHOWN) == set(grammar.CONSTRUCTIONS) - {"relative", "disjunction"}
