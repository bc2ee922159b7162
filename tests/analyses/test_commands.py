"""``hc-lens analyse superadditive`` and ``hc-lens analyse lexical-overlap``."""

from __future__ import annotations

import json

import pandas as pd
import pytest

from hc_lens.settings import read_settings
from tests import tiny
from tests.commands import invoke

ROWS = [
    {"premise": "the doctor ran .", "hypothesis": "the doctor slept .", "label": 1},
    {"premise": "the judge saw a lawyer .", "hypothesis": "a lawyer ran .", "label": 0},
    {"premise": "a lawyer saw the judge", "hypothesis": "a judge ran", "label": 2},
]


@pytest.fixture
def call(tmp_path, monkeypatch):
    """A function that runs the command of an analysis on a tiny checkpoint and three rows."""
    monkeypatch.chdir(tmp_path)
    model = tiny.save_checkpoint(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))

    def run(name, *more):
        line = ("--model", model, "--task", "mnli", "--path", "rows.jsonl", *more)
        return invoke("analyse", name, *line)

    return run


def test_super_additivity_writes_its_tables_and_figure(call, tmp_path):
    heads = ("--core", "L0.H0,L1.H2", "--pool", "L0.H0,L1.H2", "--n-resamples", 100)
    done = call("superadditive", *heads, "--means", "zero", "--out", "s")
    assert done.exit_code == 0, done.output
    table = pd.read_csv(tmp_path / "s" / "table.csv")
    assert table["set"].tolist() == ["L0.H0+L1.H2"]
    assert (tmp_path / "s" / "set-0.png").is_file()
    assert {"layout.csv", "minimal.csv"} <= {path.name for path in (tmp_path / "s").iterdir()}
    assert read_settings(tmp_path / "s" / "command.toml")["command"] == "analyse superadditive"


def test_one_head_alone_is_an_error(call):
    heads = ("--core", "L0.H0", "--means", "zero")
    done = call("superadditive", *heads)
    assert done.exit_code == 1
    assert "expected at least two units in a joint set" in done.stderr


def test_self_repair_writes_its_tables_and_figure(call, tmp_path):
    more = ("--units", "L0.H0+L1.H2,L0.MLP", "--measure", "margin", "--n-resamples", 100)
    done = call("self-repair", *more, "--means", "zero", "--out", "r")
    assert done.exit_code == 0, done.output
    table = pd.read_csv(tmp_path / "r" / "table.csv")
    assert table["set"].tolist() == ["L0.H0+L1.H2", "L0.MLP", "L0.H0", "L1.H2"]
    assert pd.read_csv(tmp_path / "r" / "backup.csv")["set"].tolist() == ["L0.H0+L1.H2"]
    assert {"givers.csv", "self-repair.png"} <= {path.name for path in (tmp_path / "r").iterdir()}


def test_lexical_overlap_shows_the_highest_heads_and_writes_all(call, tmp_path):
    more = ("--n-bootstrap", 20, "--mark", "L0.H0", "--out", "l", "--format", "parquet")
    done = call("lexical-overlap", *more)
    assert done.exit_code == 0, done.output
    table = pd.read_parquet(tmp_path / "l" / "table.parquet")
    overlap = table.loc[table["score"] == "overlap"].sort_values("value", ascending=False)
    shown = [line.split()[0] for line in done.stdout.splitlines()[1:9]]
    assert shown == overlap["unit"].tolist()
    assert {"heads.png", "maps.png"} <= {path.name for path in (tmp_path / "l").iterdir()}


def test_lexical_overlap_of_other_rows_under_the_same_name_is_refused(call, tmp_path):
    line = ("lexical-overlap", "--n-bootstrap", 0, "--out", "l")
    assert call(*line).exit_code == 0
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS[::-1])))
    done = call(*line)
    assert done.exit_code == 1
    assert "has changed since" in done.stderr
