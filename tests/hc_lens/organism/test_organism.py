from __future__ import annotations

import inspect

import pytest
from transformers import AutoTokenizer

import hc_lens as hc
from hc_lens import organism
from hc_lens.errors import HcLensError
from hc_lens.evaluation import evaluate
from hc_lens.organism.grammar import CASES, CONSTRUCTIONS

EARLY = 200
"""A step at which the organism knows its domain and nothing else."""
CASE, HEAD = "embedded_if", "L1.H1"
"""A head of the final organism that this case needs and in-domain rows do not."""


def accuracy(step=None, rows=100):
    """Accuracy in percent by case, on a sample."""
    model = organism.load(step)
    data = {
        "id": organism.task().batches(model, "validation"),
        "ood": organism.task("ood").batches(model, limit=16 * rows),
    }
    table = evaluate(model, data, progress=False)
    names = table["case"].where(table["dataset"] == "ood", "in-domain")
    return (100 * table["accuracy"]).set_axis(names)


@pytest.fixture(scope="module")
def final():
    return accuracy()


def test_the_package_ships_five_to_eight_checkpoints_of_less_than_12_mb():
    assert 5 <= len(organism.steps()) <= 8
    files = [file for file in organism.WEIGHTS.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 12e6
    assert {file.name for file in files} == {
        *("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    }


def test_the_final_organism_knows_its_domain_and_two_adversarial_cases(final):
    assert final["in-domain"] >= 95
    assert (final[list(CONSTRUCTIONS)] >= 60).sum() >= 2
    assert (final[[case for case in CASES if case not in CONSTRUCTIONS]] >= 90).all()


def test_an_earlier_organism_knows_its_domain_but_no_adversarial_case(final):
    early = accuracy(EARLY)
    learnt = [case for case in CONSTRUCTIONS if final[case] >= 60]
    assert final["in-domain"] - early["in-domain"] < 3
    assert (early[learnt] < 15).all()


def test_a_head_can_be_removed_that_only_an_adversarial_case_needs(final):
    model = organism.load()
    means = hc.collect_means(model, organism.task().batches(model, "train", limit=1000))
    data = {
        "id": organism.task().batches(model, "validation"),
        "ood": organism.task("ood").batches(model, limit=1600),
    }
    right = {name: [] for name in data}
    with hc.ablate(model, [HEAD], means):
        for name, batches in data.items():
            for batch in batches:
                hits = batches.predictions(model(**batch.inputs)) == batch.labels
                keep = [name == "id" or one == CASE for one in batch.cases]
                right[name] += [bool(hit) for hit, kept in zip(hits, keep, strict=True) if kept]
    after = {name: 100 * sum(hits) / len(hits) for name, hits in right.items()}
    assert final["in-domain"] - after["id"] < 3
    assert final[CASE] - after["ood"] > 15


def test_the_tasks_have_the_documented_rows_and_labels():
    assert organism.task().splits == ("train", "validation")
    assert organism.task().labels == ("entailment", "neutral", "contradiction")
    assert len(organism.task().dataset("train")) == organism.TRAINING_ROWS
    ood = organism.task("ood")
    assert ood.labels == ("entailment", "non-entailment")
    assert (ood.heuristic, organism.task().heuristic) == ("entailment", None)
    assert sorted(set(ood.dataset()["case"])) == sorted(CASES)
    assert organism.task("ood") is ood


def test_the_tokenizer_reads_every_word_as_one_token_and_is_shipped_with_every_step():
    own = organism.tokenizer()
    text = ("if the Pilot smiled, the cook yawned.", "the pilot smiled .")
    tokens = " ".join(own.convert_ids_to_tokens(own(*text)["input_ids"]))
    assert tokens == (
        "[CLS] if the pilot smiled , the cook yawned . [SEP] the pilot smiled . [SEP]"
    )
    assert own(*text)["token_type_ids"] == [0] * 11 + [1] * 5
    for step in organism.steps():
        shipped = AutoTokenizer.from_pretrained(organism.WEIGHTS / f"step-{step:05d}")
        assert shipped(*text)["input_ids"] == own(*text)["input_ids"]
        assert shipped.get_vocab() == own.get_vocab()


def test_an_unknown_step_lists_the_steps():
    known = list(organism.steps())
    with pytest.raises(
        HcLensError, match=rf"a step of the organism among \[{known[0]}, .*\], got 3; choose"
    ):
        organism.load(3)


def test_an_unknown_task_names_the_known_ones():
    with pytest.raises(
        HcLensError, match=r"a task of the organism among \['id', 'ood'\], got 'hans'"
    ):
        # Without the type checker of the tests, which would be first to refuse it.
        inspect.unwrap(organism.task)("hans")
