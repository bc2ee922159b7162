"""Settings as TOML."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hc_lens.cli.settings import read_toml, settings_of, write_toml

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
SCALARS = TEXT | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False)
VALUES = SCALARS | st.lists(SCALARS, max_size=3) | st.dictionaries(TEXT, SCALARS, max_size=3)


@given(values=st.dictionaries(TEXT, VALUES, max_size=4))
@settings(max_examples=200, deadline=None)
def test_what_is_written_is_read_again(tmp_path_factory, values):
    path = tmp_path_factory.getbasetemp() / "settings.toml"
    path.write_bytes(write_toml(values).encode())
    assert read_toml(path) == values


def test_settings_leave_out_how_a_command_is_called():
    given = {"limit": 3, "config": "x", "as_json": True, "force": True, "split": None, "keep": []}
    assert settings_of("prune", given) == {"command": "prune", "limit": 3}


def test_a_file_gives_values_and_the_command_line_wins(call, read, tmp_path):
    model, task, path = map(str, read[1::2])
    (tmp_path / "s.toml").write_text(
        f'model = "{model}"\ntask = "{task}"\npath = "{path}"\nlimit = 2\nmax-length = 30\n'
    )
    done = call("means", "--config", "s.toml", "--limit", 3, "--out", "m")
    assert done.exit_code == 0, done.output
    assert "mnli/train: 3 rows" in done.stderr
    assert read_toml(tmp_path / "m" / "command.toml")["max_length"] == 30


def test_the_settings_beside_results_repeat_them(call, pruned, tmp_path):
    done = call("prune", "--config", pruned / "command.toml", "--out", "again")
    assert done.exit_code == 0, done.output
    first, second = (folder / "subnetwork.safetensors" for folder in (pruned, tmp_path / "again"))
    assert first.read_bytes() == second.read_bytes()
    settings = [read_toml(folder / "command.toml") for folder in (pruned, tmp_path / "again")]
    assert [found.pop("out") for found in settings] == ["pruned", "again"]
    assert settings[0] == settings[1]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("limt = 3", "only known settings in s.toml, got 'limt'; did you mean 'limit'?"),
        ("force = true", "only known settings in s.toml, got 'force'"),
        ('command = "scan"', "expected settings of 'prune' in s.toml, got those of 'scan'; run"),
        ("limit = ", "expected a readable TOML file of settings, got s.toml: "),
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
    assert "expected a readable TOML file of settings, got nowhere.toml" in done.stderr


def test_a_value_of_the_wrong_kind_is_a_usage_error(call, tmp_path):
    (tmp_path / "s.toml").write_text('limit = "many"')
    done = call("means", "--config", "s.toml", "--model", "m", "--task", "t", "--out", "o")
    assert done.exit_code == 2
    assert "--limit" in done.stderr
