from __future__ import annotations

import importlib
import json

import pandas as pd
import pytest

from hc_lens.cli import sweep as command
from hc_lens.cli.options import seeds_of
from hc_lens.cli.parse import parse
from hc_lens.cli.sweep import by_seed, named_models
from hc_lens.data.specs import DataSpec
from hc_lens.errors import HcLensError
from tests import tiny


@pytest.fixture
def sweep(call, model, rows):
    def run(*more):
        line = ("sweep", "--checkpoints", f"one={model}", "--task", "mnli", "--path", rows)
        line = (*line, "--sparsity", 0.5, "--seeds", "0,1", "--method", "random", "--workers", 1)
        return call(*line, "--out", "s", *more)

    return run


@pytest.fixture
def fake(monkeypatch):
    """A sweep that runs nothing; gives the settings that it got. One of its two runs failed."""
    module, configs = importlib.import_module("hc_lens.sweeps.sweep"), []
    failed = pd.DataFrame([{"checkpoint": "one", "sparsity": 0.5, "seed": 1, "why": "no luck"}])
    columns = ["checkpoint", "sparsity", "seed", "dataset", "n", "accuracy", "kl", "agreement"]
    table = pd.DataFrame([["one", 0.5, 0, "id", 4, 1.0, 0.0, 1.0]], columns=columns)

    def run(config, **_):
        configs.append(config)
        return module.Runs(table, table, {}, failed, ("one",))

    monkeypatch.setattr(module, "sweep", run)
    return configs


def test_a_sweep_of_options_runs(sweep, tmp_path):
    done = sweep("--json")
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert (document["runs"], document["failed"]) == (2, 0)
    table = pd.read_csv(tmp_path / "s" / "table.csv")
    assert set(table["dataset"]) == {"id"}
    assert (tmp_path / "s" / "runs").is_dir()


def test_the_settings_beside_a_sweep_repeat_it(sweep, call, fake):
    sweep()
    call("sweep", "--config", "s/command.toml")
    assert len(fake) == 2
    assert fake[0] == fake[1]


def test_seeds_in_a_settings_file_may_be_numbers(call, fake, tmp_path):
    (tmp_path / "s.toml").write_text(
        'checkpoints = ["organism"]\ntask = "organism"\nheld_out = "validation"\nseeds = [0, 1]\n'
        "sparsity = [0.5]\n"
    )
    call("sweep", "--config", "s.toml", "--out", "s")
    assert (fake[0].seeds, fake[0].sparsities) == ((0, 1), (0.5,))


def test_a_sweep_comes_from_a_file(call, fake, tmp_path):
    data = '{ task = "mnli", limit = 3 }'
    (tmp_path / "sweep.toml").write_text(
        f'sparsities = [0.5]\nseeds = [0]\ntrain = {data}\nprune = {{ method = "random" }}\n'
        f'checkpoints = {{ one = "organism" }}\nevaluation = {{ id = {data} }}\n'
    )
    call("sweep", "sweep.toml", "--out", "s")
    assert (fake[0].n_runs, fake[0].train) == (1, DataSpec("mnli", limit=3))


def test_a_sweep_of_options_has_the_settings_of_pruning():
    line = (
        "--checkpoints m --task organism --sparsity 0.5,0.7 --seeds 0-2 --reference --lr 0.05 "
        "--evaluation-limit 7 --held-out validation --ood organism-ood --rows-seed 4 --limit 9 "
        "--out s"
    )
    called = parse("sweep", command.run, line.split())
    assert called is not None
    config = called.settings.config()
    assert config.prune == {"preset": "reference", "lr": 0.05}
    assert (config.sparsities, config.seeds) == ((0.5, 0.7), (0, 1, 2))
    assert config.train == DataSpec("organism", limit=9, seed=4)
    assert config.evaluation == {
        "id": DataSpec("organism", split="validation", limit=7, seed=4),
        "ood": DataSpec("organism-ood", split="validation", limit=7, seed=4),
    }


def test_a_failed_run_is_exit_code_1_after_the_table(sweep, fake):
    done = sweep()
    assert done.exit_code == 1
    assert "failed       1" in done.stdout
    told = "expected every run to finish, 1 failed, the first (one, sparsity 0.5, seed 1) with: no"
    assert told in done.stderr


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("x.toml --task mnli --steps 3", "from x.toml or from options, got both (task, steps)"),
        ("--task mnli --checkpoints m", "missing --sparsity, --seeds"),
    ],
)
def test_a_file_or_all_options_are_needed(call, line, told):
    done = call("sweep", *line.split(), "--out", "s")
    assert done.exit_code == 1
    assert told in done.stderr


def test_checkpoints_have_names_where_they_are_given(tmp_path):
    (tmp_path / "a=b").mkdir()
    odd = str(tmp_path / "a=b")
    assert named_models(["organism:400", "last=organism", odd]) == {
        "organism:400": "organism:400",
        "last": "organism",
        odd: odd,
    }
    assert named_models([f"{300 * 'x'}=organism"]) == {300 * "x": "organism"}


def test_seeds_are_numbers_and_ranges():
    assert seeds_of(["3", "0-2"]) == (3, 0, 1, 2)
    with pytest.raises(HcLensError, match="expected a seed or a range such as 0-11 as a number"):
        seeds_of(["x"])


def test_the_shown_table_is_over_seeds():
    about = {"checkpoint": "c", "sparsity": 0.5, "dataset": "d", "kl": 0.0, "agreement": 1.0}
    table = pd.DataFrame(
        [
            {**about, "seed": 0, "case": "a", "n": 1, "accuracy": 1.0},
            {**about, "seed": 0, "case": "b", "n": 3, "accuracy": 0.0},
            {**about, "seed": 1, "case": "a", "n": 1, "accuracy": 1.0},
            {**about, "seed": 1, "case": "b", "n": 3, "accuracy": 1.0},
        ]
    )
    line = by_seed(table).iloc[0]
    assert (line["seeds"], line["accuracy"]) == (2, 0.625)
    assert (line["lowest"], line["highest"]) == (0.25, 1.0)
    assert "balanced" not in line


def test_friendly_and_adversarial_cases_stand_beside_the_mean_over_rows():
    columns = ["seed", "dataset", "case", "side", "n", "accuracy", "share_yes", "share_no"]
    rows = [
        (0, "id", "all", "", 9, 0.9, 0.5, 0.5),
        *((seed, "ood", "a", "friendly", 10, 0.13 + seed / 5, 0.2, 0.8) for seed in (0, 1)),
        *((seed, "ood", "b", "adversarial", 30, 0.73 + seed / 5, 0.2, 0.8) for seed in (0, 1)),
    ]
    table = pd.DataFrame(rows, columns=columns)
    table = table.assign(checkpoint="one", sparsity=0.5, kl=0.0, agreement=1.0)
    inside, outside = by_seed(table).to_dict(orient="records")
    assert (inside["n"], outside["n"], outside["seeds"]) == (9, 40, 2)
    # Over rows (10 x 0.23 + 30 x 0.83) / 40.
    assert outside["accuracy"] == pytest.approx(0.68)
    scores = [outside[name] for name in ("friendly", "adversarial", "balanced", "said_share")]
    assert scores == pytest.approx([0.23, 0.83, 0.53, 0.8])
    assert outside["said"] == "no"
    assert pd.isna(inside["balanced"])


def test_evaluation_rows_have_limits_of_their_own(sweep, fake, rows):
    sweep("--limit-per-case", 2, "--ood", "snli", "--ood-path", rows, "--ood-limit-per-case", 1)
    (config,) = fake
    limits = [
        (spec.limit, spec.limit_per_case) for spec in (config.train, *config.evaluation.values())
    ]
    assert limits == [(None, 2), (None, None), (None, 1)]


@pytest.mark.parametrize("device", ["cudaa", "cuda:99"])
def test_an_unknown_device_is_refused_before_anything_is_read(call, device, tmp_path):
    done = call("sweep", "nowhere.toml", "--device", device, "--out", "s")
    assert done.exit_code == 1
    assert "expected a device that is there (cpu" in done.stderr
    assert f"got '{device}'; choose one of these" in done.stderr
    assert not (tmp_path / "s").exists()


def test_a_sweep_without_workers_is_refused(sweep, tmp_path):
    done = sweep("--workers", 0)
    assert done.exit_code == 2
    assert 'Invalid value "0" for --workers. Must be >= 1.' in done.stderr
    assert not (tmp_path / "s").exists()


def test_device_and_labels_reach_the_sweep():
    line = "--checkpoints m --task organism --sparsity 0.5 --seeds 0 --out s --device cpu"
    labels = "--model-labels entailment,neutral,contradiction"
    called = parse("sweep", command.run, f"{line} {labels}".split())
    assert called is not None
    assert called.settings.config().model_labels == ("entailment", "neutral", "contradiction")
    assert called.settings.placed().device == "cpu"
    ray = parse("sweep", command.run, f"{line} --engine ray --gpus 1".split())
    assert ray is not None
    assert (ray.settings.placed().device, ray.settings.placed().gpus) == ("cpu", 1)


def test_failed_runs_are_told_in_the_words_of_the_command_line(sweep, tmp_path):
    unnamed = tiny.save_checkpoint(
        tmp_path / "unnamed", labels={index: f"LABEL_{index}" for index in range(3)}
    )
    more = ("--checkpoints", f"one={unnamed}")
    done = sweep(*more)
    assert done.exit_code == 1
    assert done.stderr.count("in order, with --model-labels A,B,...") == 2
    assert "hc.load" not in done.stderr
    done = sweep("--model-labels", "entailment,neutral,contradiction", "--out", "t", *more)
    assert done.exit_code == 0, done.output
