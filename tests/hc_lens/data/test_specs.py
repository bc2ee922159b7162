"""Models and rows named by text."""

from __future__ import annotations

import json

import pytest

from hc_lens import organism
from hc_lens.data.specs import DataSpec, read_model
from hc_lens.errors import HcLensError
from hc_lens.settings import check_keys, make, plain


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
    with pytest.raises(HcLensError, match=rf"tasks {known}, got 'nope'.*path= and columns="):
        DataSpec("nope").read()


def test_a_description_knows_its_training_and_its_held_out_rows() -> None:
    spec = DataSpec("organism", limit=5)
    assert spec.held_out() == DataSpec("organism", split="validation", limit=5)
    assert spec.held_out().training() == DataSpec("organism", split="train", limit=5)
    assert DataSpec("organism", split="train").held_out().split == "train"
