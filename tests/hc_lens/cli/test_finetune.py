from __future__ import annotations

import json
from pathlib import Path

from hc_lens.cli import finetune
from hc_lens.cli.parse import parse
from hc_lens.settings import read_settings
from tests.damage import flip


def test_checkpoints_are_written_and_the_last_accuracies_printed(call, model, rows, tmp_path):
    line = ("finetune", model, "--path", rows, "--steps", 2, "--batch-size", 2, "--out", "run")
    done = call(*line, "--checkpoint-every", 1)
    assert done.exit_code == 0, done.output
    assert "accuracy" in done.stdout
    assert "checkpoints  0 1 2" in done.stdout
    assert (tmp_path / "run" / "step-00002" / "model.safetensors").is_file()
    assert read_settings(tmp_path / "run" / "command.toml")["batch_size"] == 2
    settings = (tmp_path / "run" / "command.toml").read_bytes()
    flip(tmp_path / "run" / "command.toml")
    assert call(*line, "--checkpoint-every", 1).stdout == done.stdout
    assert (tmp_path / "run" / "command.toml").read_bytes() == settings
    again = call("finetune", "--config", "run/command.toml", "--json")
    assert again.exit_code == 0, again.output
    document = json.loads(again.stdout)
    assert document["checkpoints"] == [0, 1, 2]
    assert [row["dataset"] for row in document["table"]] == ["id"]


def test_a_folder_of_another_run_is_refused(call, model, rows):
    line = ("finetune", model, "--path", rows, "--steps", 1, "--batch-size", 2, "--out", "run")
    assert call(*line).exit_code == 0
    done = call(*line, "--learning-rate", 0.1)
    assert done.exit_code == 1
    assert "expected to continue the work in" in done.stderr
    assert "learning_rate" not in read_settings(Path("run/command.toml"))
    again = call(*line, "--learning-rate", 0.1, "--force")
    assert again.exit_code == 0, again.output
    assert read_settings(Path("run/command.toml"))["learning_rate"] == 0.1


def test_the_papers_settings_can_be_changed_one_by_one():
    line = "m --paper --task qqp --seed 3 --out o"
    called = parse("finetune", finetune.run, line.split())
    assert called is not None
    config = called.settings.config()
    assert (config.steps, config.batch_size, config.seed) == (40_000, 128, 3)
