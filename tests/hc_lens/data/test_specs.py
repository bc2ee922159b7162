"""Models and rows named by text."""

from __future__ import annotations

import json

import pytest

from hc_lens import organism
from hc_lens.data.known import PROMPTS, WITH_ADVERSARIAL
from hc_lens.data.prompts import GENERATED, Prompts
from hc_lens.data.specs import DataSpec, read_model
from hc_lens.errors import HcLensError
from hc_lens.settings import check_keys, make, plain
from tests.language_models import save_language_model


def test_the_organism_is_read_by_its_name_and_step() -> None:
    assert read_model("organism").fingerprint == organism.load().fingerprint
    assert read_model("organism:400").fingerprint == organism.load(400).fingerprint


@pytest.mark.parametrize("name", ["organism:last", "organism:7"])
def test_a_step_that_is_not_shipped_is_an_error_with_the_steps(name: str) -> None:
    with pytest.raises(HcLensError, match=r"expected .*100, 200.*got"):
        read_model(name)


def test_a_spec_reads_the_same_rows_after_a_way_through_json() -> None:
    model = read_model("organism")
    spec = DataSpec("organism-ood", limit=40, seed=3)
    again = make(DataSpec, json.loads(json.dumps(plain(spec))), "the rows")
    assert again == spec
    assert again.batches(model).fingerprint == spec.batches(model).fingerprint


def test_rows_of_your_own_are_read_by_their_columns(tmp_path) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [{"a": "the pilot smiled", "b": "the cook yawned", "y": 1, "kind": "plain"}] * 3
    file.write_text("\n".join(map(json.dumps, rows)))
    labels = ("entailment", "neutral", "contradiction")
    spec = DataSpec("own", str(file), columns=("a", "b"), label="y", labels=labels, case="kind")
    batch = spec.batches(read_model("organism"))[0]
    assert batch.labels.tolist() == [1, 1, 1]
    assert batch.cases == ("plain",) * 3


def test_an_unknown_setting_names_the_nearest_known_one() -> None:
    with pytest.raises(HcLensError, match="'splitt'; did you mean 'split'"):
        make(DataSpec, {"task": "mnli", "splitt": "train"}, "a data entry")
    with pytest.raises(HcLensError, match="got 'zzz'; known are seeds, steps"):
        check_keys(["zzz"], ["seeds", "steps"], "sweep.toml")


def test_a_description_without_a_task_is_an_error() -> None:
    with pytest.raises(HcLensError, match="expected task in a data entry"):
        make(DataSpec, {"split": "train"}, "a data entry")


def test_columns_without_a_path_are_an_error() -> None:
    with pytest.raises(HcLensError, match=r"for the rows of 'own', got columns.*with path="):
        DataSpec("own", columns=("a", "b")).read()


def test_a_spec_may_limit_each_case_and_name_a_heuristic() -> None:
    spec = DataSpec("organism-ood", limit_per_case=2)
    batches = spec.batches(read_model("organism"))
    assert batches.n_rows == 2 * 16
    assert batches.heuristic == "entailment"
    assert DataSpec("organism").read().heuristic is None
    assert DataSpec("organism", heuristic="neutral").read().heuristic == "neutral"


def test_an_unknown_task_lists_the_known_ones_and_says_how_to_read_other_rows() -> None:
    known = "mnli, snli, qqp, hans, paws-qqp, organism, organism-ood"
    prompts = "ioi, agreement, agreement-ood, induction"
    told = rf"tasks {known}, or of the prompts {prompts}, got 'nope'.*path= and columns="
    with pytest.raises(HcLensError, match=told):
        DataSpec("nope").read()


def test_a_description_knows_its_training_and_its_held_out_rows() -> None:
    spec = DataSpec("organism", limit=5)
    assert spec.held_out() == DataSpec("organism", split="validation", limit=5)
    assert spec.held_out().training() == DataSpec("organism", split="train", limit=5)
    assert DataSpec("organism", split="train").held_out().split == "train"


def test_rows_with_adversarial_cases_belong_to_rows_of_their_kind() -> None:
    for task, harder in WITH_ADVERSARIAL.items():
        assert DataSpec(task).read().splits
        assert DataSpec(harder).is_prompts == DataSpec(task).is_prompts


@pytest.fixture(scope="module")
def language_model(tmp_path_factory):
    """A tiny language model that knows the words of the prompts that are made."""
    return read_model(str(save_language_model(tmp_path_factory.mktemp("language") / "model")))


def test_every_kind_of_prompts_that_is_made_can_be_named() -> None:
    assert tuple(GENERATED) == PROMPTS
    assert all(DataSpec(name).is_prompts for name in PROMPTS)


def test_named_prompts_are_made_as_many_as_the_limit_evenly_over_the_cases(language_model) -> None:
    spec = DataSpec("agreement-ood", split="validation", limit=28, seed=3)
    again = make(DataSpec, json.loads(json.dumps(plain(spec))), "the rows")
    batches = again.batches(language_model)
    own = Prompts.named("agreement-ood", n=28, seed=3).batches(language_model, "validation", seed=3)
    assert batches.fingerprint == spec.batches(language_model).fingerprint
    tokens = [batch.tokens.tolist() for batch in batches]
    assert tokens == [batch.tokens.tolist() for batch in own]
    cases = [case for batch in batches for case in batch.cases]
    assert sorted(map(cases.count, set(cases))) == [2] * 14


def test_prompts_know_their_training_and_their_held_out_rows() -> None:
    assert DataSpec("ioi").held_out().split == "validation"
    assert DataSpec("ioi").training().split == "train"


OWN = [
    {"prompt": "Now, the dog", "right": "is", "wrong": "are", "kind": "one"},
    {"prompt": "Now, the dogs", "right": "are", "wrong": "is", "kind": "many"},
]


def test_rows_of_your_own_without_columns_are_prompts(language_model, tmp_path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, OWN)))
    spec = DataSpec("own", str(file), case="kind")
    assert spec.is_prompts
    batch = spec.batches(language_model)[0]
    words = language_model.tokenizer.convert_ids_to_tokens(batch.answers[:, 0, 0].tolist())
    assert dict(zip(batch.cases, words, strict=True)) == {"one": "is", "many": "are"}
    assert not DataSpec("own", str(file), columns=("prompt",), label="right").is_prompts


def test_files_that_are_neither_a_known_task_nor_prompts_are_told(tmp_path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"premise": "a", "hypothesis": "b", "label": 1}))
    with pytest.raises(HcLensError, match=r"got 'mlni'.*path= alone for prompts with columns pro"):
        DataSpec("mlni", str(file)).read()


@pytest.mark.parametrize("given", [{"labels": ("a", "b")}, {"heuristic": "a"}, {"columns": ("a",)}])
def test_prompts_have_no_labels(given) -> None:
    with pytest.raises(HcLensError, match=f"expected prompts without {next(iter(given))}, which"):
        DataSpec("ioi", **given).read()


def test_a_model_of_the_wrong_kind_is_told_before_anything_is_run(language_model) -> None:
    told = r"expected a classifier for the task 'organism', got a language model.*ioi, agreement"
    with pytest.raises(HcLensError, match=told):
        DataSpec("organism", limit=4).batches(language_model)
    with pytest.raises(HcLensError, match="expected a language model for prompts, got a classif"):
        DataSpec("ioi", limit=4).batches(read_model("organism"))


def test_prompts_are_no_task_of_texts_with_labels() -> None:
    with pytest.raises(HcLensError, match="expected a task of texts with labels, got the prompts"):
        DataSpec("ioi").read_task()
