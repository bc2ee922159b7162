"""Arguments and settings files."""

from __future__ import annotations

import pytest

from hc_lens.cli import means
from hc_lens.cli.parse import parse
from hc_lens.cli.work import Work
from hc_lens.settings import read_settings


def test_settings_leave_out_how_a_command_is_called():
    line = "--model m --task t --limit 3 --json --force --out o"
    called = parse("means", means.run, line.split())
    assert called is not None
    assert called.given == ("model", "task", "limit", "out", "force", "json")
    written = Work(called).settings
    assert written == {
        **{"model": "m", "task": "t", "limit": 3, "token_budget": 4096, "rows_seed": 0},
        **{"label": "label", "by": "token", "out": "o"},
    }


def test_a_file_gives_values_and_the_command_line_wins(call, read, tmp_path):
    model, task, path = map(str, read[1::2])
    (tmp_path / "s.toml").write_text(
        f'model = "{model}"\ntask = "{task}"\npath = "{path}"\nlimit = 2\nmax-length = 30\n'
    )
    done = call("means", "--config", "s.toml", "--limit", 3, "--out", "m")
    assert done.exit_code == 0, done.output
    assert "mnli/train: 3 rows" in done.stderr
    assert read_settings(tmp_path / "m" / "command.toml")["max_length"] == 30


def test_the_settings_beside_results_repeat_them(call, pruned, tmp_path):
    done = call("prune", "--config", pruned / "command.toml", "--out", "again")
    assert done.exit_code == 0, done.output
    first, second = (folder / "subnetwork.safetensors" for folder in (pruned, tmp_path / "again"))
    assert first.read_bytes() == second.read_bytes()
    settings = [read_settings(folder / "command.toml") for folder in (pruned, tmp_path / "again")]
    assert [found.pop("out") for found in settings] == ["pruned", "again"]
    assert settings[0] == settings[1]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("limt = 3", "only known settings in s.toml, got 'limt'; did you mean 'limit'?"),
        ("force = true", "only known settings in s.toml, got 'force'"),
        ('command = "scan"', "expected settings of 'prune' in s.toml, got those of 'scan'; run"),
        ("limit = ", "expected a readable file of settings, got s.toml: "),
    ],
)
def test_a_file_that_cannot_be_used_is_one_line(call, tmp_path, text, told):
    (tmp_path / "s.toml").write_text(text)
    done = call("prune", "--config", "s.toml")
    assert done.exit_code == 1
    assert told in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_file_that_is_not_there_is_one_line(call):
    done = call("prune", "--config", "nowhere.toml")
    assert done.exit_code == 1
    assert "expected a readable file of settings, got nowhere.toml" in done.stderr


def test_a_value_of_the_wrong_kind_is_a_usage_error(call, tmp_path):
    (tmp_path / "s.toml").write_text('limit = "many"')
    done = call("means", "--config", "s.toml", "--model", "m", "--task", "t", "--out", "o")
    assert done.exit_code == 2
    assert "--limit" in done.stderr
