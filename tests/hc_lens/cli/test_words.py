"""What the library says in Python, in the words of the command line."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import hc_lens
from hc_lens.cli.words import OPTIONS, in_options

ROOT = Path(hc_lens.__file__).parent
PYTHON = re.compile(r"\bhc\.\w+\(|\bTask\.\w+|\b[a-z_]+=(?=[\s.,;\[('\"]|$)")
"""A call or an argument of the library."""
READ = ("data/specs.py", "data/readers.py", "data/labels.py", "data/known.py", "models/loading.py")
"""Files whose every message can reach the command line."""


def messages(path: Path) -> list[str]:
    """The texts in a file that are not docstrings, with a sign for each value in them."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside = {
        part for node in ast.walk(tree) for part in ast.iter_child_nodes(node) if is_part(node)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value for part in node.values]  # type: ignore[attr-defined]
            found.append("".join(part if isinstance(part, str) else "\u2026" for part in parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in inside:
            found.append(node.value)
    return found


def is_part(node: ast.AST) -> bool:
    """Whether the texts below a node are docstrings, or parts of a text that is joined."""
    return isinstance(node, (ast.Expr, ast.JoinedStr))


@pytest.mark.parametrize("name", READ)
def test_messages_about_models_and_rows_name_options_in_the_command_line(name):
    said = [in_options(text) for text in messages(ROOT / name)]
    assert [text for text in said if PYTHON.search(text)] == []


def test_every_phrase_of_the_table_is_one_that_the_library_says():
    folders = (ROOT, ROOT / "analyses")
    files = {
        file for folder in folders for file in folder.rglob("*.py") if file.parent.name != "cli"
    }
    said = "\n".join(text for file in files for text in messages(file))
    assert [phrase for phrase in OPTIONS if phrase not in said] == []


def test_a_longer_phrase_wins_over_one_that_it_contains():
    said = in_options("give path= and columns= for rows of your own")
    assert said == "give --path and --columns for rows of your own"
    assert (
        in_options("cut them with max_length=64 or less") == "cut them with --max-length 64 or less"
    )


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (
            ("--task", "nope"),
            "got 'nope'; name one of these, or give --path and --columns for rows",
        ),
        (
            ("--task", "mine", "--columns", "x"),
            "name the columns of your rows with --columns, --la",
        ),
        (("--device", "cudaa"), "got 'cudaa'; choose one of these"),
        (("--subnetwork", "."), "pass a folder of hc-lens prune"),
        (("--token-budget", "1"), "or cut the rows with --max-length"),
    ],
)
def test_an_error_tells_which_option_helps(call, read, line, told):
    done = call("evaluate", *read, *line)
    assert done.exit_code == 1
    assert told in done.stderr.splitlines()[-1]
    assert not PYTHON.search(done.stderr)


def test_an_empty_text_is_refused(call, model, rows, tmp_path):
    done = call("attention", "--model", model, "--text", " ", "--out", "a")
    assert done.exit_code == 1
    assert "expected a first text, got ' '" in done.stderr
    first, *others = (rows / "train.jsonl").read_text().splitlines()
    empty = first.replace("the doctor ran .", "")
    (tmp_path / "own.jsonl").write_text("\n".join([*others, empty]))
    done = call("evaluate", "--model", model, "--task", "mnli", "--path", "own.jsonl")
    assert done.exit_code == 1
    assert "expected text in column 'premise' of mnli/all, got '' in row 3 (and 0" in done.stderr
