from __future__ import annotations

import json

import pytest

from hc_lens.data.specs import DataSpec
from hc_lens.errors import HcLensError
from hc_lens.pruning.config import PruneConfig
from hc_lens.sweeps.config import SweepConfig
from tests.hc_lens.test_settings import BAD_FILES

TOML = """
sparsities = [0.5, 0.7]
seeds = [0, 1, 2]

[checkpoints]
late = "organism"
early = "organism:400"

[train]
task = "organism"
split = "train"
limit = 500

[evaluation.id]
task = "organism"
split = "validation"

[evaluation.ood]
task = "organism-ood"

[prune]
steps = 30
keep = ["L0.MLP"]
"""
YAML = """
checkpoints: {late: organism, early: "organism:400"}
train: {task: organism, split: train, limit: 500}
evaluation:
  id: {task: organism, split: validation}
  ood: {task: organism-ood}
sparsities: [0.5, 0.7]
seeds: [0, 1, 2]
prune: {steps: 30, keep: [L0.MLP]}
"""
DESCRIBED = {
    "checkpoints": {"late": "organism"},
    "train": {"task": "organism"},
    "evaluation": {"id": {"task": "organism"}},
    "sparsities": [0.5],
    "seeds": [0],
}


def test_toml_and_yaml_give_the_same_sweep(tmp_path):
    (tmp_path / "sweep.toml").write_text(TOML)
    (tmp_path / "sweep.yaml").write_text(YAML)
    toml = SweepConfig.from_file(tmp_path / "sweep.toml")
    assert toml == SweepConfig.from_file(tmp_path / "sweep.yaml")
    assert list(toml.checkpoints) == ["late", "early"]  # the file's order, not the alphabet's
    assert toml.train == DataSpec("organism", split="train", limit=500)
    assert toml.n_runs == 12
    assert toml.prune_config(0.7, 2) == PruneConfig(0.7, 2, steps=30, keep=("L0.MLP",))


def test_a_description_goes_through_json_and_back(tmp_path):
    (tmp_path / "sweep.toml").write_text(TOML)
    config = SweepConfig.from_file(tmp_path / "sweep.toml")
    again = SweepConfig.from_dict(json.loads(json.dumps(config.describe())))
    assert again.describe() == config.describe()
    assert again.prune_config(0.5, 0) == config.prune_config(0.5, 0)
    means = SweepConfig.from_dict({**DESCRIBED, "means": {"task": "organism-ood"}})
    assert means.means == DataSpec("organism-ood")
    assert SweepConfig.from_dict(means.describe()) == means


def test_labels_of_the_checkpoints_come_from_a_file(tmp_path):
    named = 'model_labels = ["entailment", "neutral", "contradiction"]\n'
    (tmp_path / "sweep.toml").write_text(named + TOML)
    config = SweepConfig.from_file(tmp_path / "sweep.toml")
    assert config.model_labels == ("entailment", "neutral", "contradiction")
    assert SweepConfig.from_dict(json.loads(json.dumps(config.describe()))) == config


def test_the_reference_preset_is_that_of_the_public_code():
    prune = {"preset": "reference", "steps": 50}
    config = SweepConfig.from_dict({**DESCRIBED, "prune": prune})
    assert config.prune_config(0.5, 3) == PruneConfig.reference(0.5, 3, steps=50)


def test_the_callers_dicts_do_not_change_a_sweep():
    checkpoints = {"late": "organism"}
    spec = DataSpec("organism")
    config = SweepConfig(checkpoints, spec, {"id": spec}, (0.5,), (0,))
    checkpoints["more"] = "organism:400"
    assert list(config.checkpoints) == ["late"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seeds": [0, 1, 0]}, r"each of seeds once, got \[0\] more than once"),
        ({"sparsities": [0.5, 0.5]}, r"each of sparsities once, got \[0.5\]"),
        ({"seeds": []}, "at least one entry in seeds, got none"),
        ({"seeds": 3}, "a list for seeds in the sweep, got 3"),
        ({"seeds": [0.5]}, "a whole number for seeds in the sweep, got 0.5"),
        ({"seeds": [True]}, "a whole number for seeds in the sweep, got True"),
        ({"sparsities": []}, "at least one entry in sparsities"),
        (
            {"sparsities": ["half"]},
            "number such as 0.001 for sparsities .*got 'half'",
        ),
        ({"sparsities": [0.5, 50]}, r"sparsity between 0 and 1 .*got 50.0"),
        ({"checkpoints": {}}, "at least one entry in checkpoints"),
        (
            {"checkpoints": "organism"},
            "a table of settings for checkpoints of the sweep",
        ),
        ({"checkpoints": {"late": 3}}, "text for checkpoints.late in the sweep, got 3"),
        ({"checkpoints": {400: "organism"}}, "names as text in checkpoints of the sweep, got 400"),
        ({"evaluation": {}}, "at least one entry in evaluation"),
        (
            {"evaluation": {"id": "organism"}},
            "settings for evaluation.id of the sweep, got",
        ),
        ({"train": "organism"}, "a table of settings for train of the sweep, got 'organism'"),
        ({"train": {"task": "organism", "splitt": "x"}}, "train of .*'splitt'; did you mean"),
        ({"sparsity": [0.5]}, "'sparsity'; did you mean 'sparsities'"),
        ({"prune": {"step": 3}}, "prune settings, got 'step'; did you mean 'steps'"),
        ({"prune": {"seed": 3}}, r"got it in the prune settings; write seeds = \[...\]"),
        ({"prune": {"sparsity": 0.5}}, r"write sparsities = \[...\]"),
        ({"prune": {"preset": "paper"}}, r"a preset among \['reference'\], got 'paper'"),
        (
            {"prune": {"steps": "many"}},
            "a whole number for steps .*got 'many'",
        ),
        ({"prune": {"steps": 2.5}}, "a whole number for steps .*got 2.5"),
        ({"prune": {"lr": "1e-3"}}, "a number such as 0.001 for lr .*got '1e-3'"),
        ({"prune": {"clip": "no"}}, "a number such as 0.001 for clip"),
        ({"prune": {"per_row": 1}}, "true or false for per_row"),
        ({"prune": {"keep": "L0.MLP"}}, "a list for keep"),
        ({"prune": {"method": 3}}, r"one of \['gates', .*for method in the prune settings, got 3"),
    ],
)
def test_a_wrong_setting_is_named(change, message):
    with pytest.raises(HcLensError, match=message):
        SweepConfig.from_dict({**DESCRIBED, **change})


def test_a_setting_that_is_left_out_is_named():
    with pytest.raises(HcLensError, match="missing train, seeds; add them"):
        SweepConfig.from_dict(
            {key: value for key, value in DESCRIBED.items() if key not in ("train", "seeds")}
        )


def test_a_loss_function_is_refused_as_no_other_process_could_read_it():
    spec = DataSpec("organism")
    with pytest.raises(HcLensError, match="a loss with a name"):
        SweepConfig({"a": "organism"}, spec, {"id": spec}, (0.5,), (0,), {"loss": max})


@pytest.mark.parametrize(("name", "text", "message"), BAD_FILES)
def test_a_file_that_is_not_a_sweep_is_an_error(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(HcLensError, match=message):
        SweepConfig.from_file(tmp_path / name)


def test_a_file_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(HcLensError, match="a readable file of settings"):
        SweepConfig.from_file(tmp_path / "none.toml")
