from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hc_lens.errors import HcLensError
from hc_lens.settings import _PARSERS, check, check_keys, make, plain, read_settings, write_toml


@dataclass(frozen=True)
class Rows:
    task: str
    limit: int | None = None
    columns: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Work:
    rows: Rows
    sparsities: tuple[float, ...]
    name: str = "work"
    lr: float = 0.1
    fast: bool = False
    pair: tuple[float, int] = (0.5, 1)
    words: list[str] = field(default_factory=list)
    method: Literal["gates", "random"] = "gates"
    loss: Literal["kl"] | Callable[..., Any] = "kl"
    out: Path | None = None
    data: Mapping[str, Rows] = field(default_factory=dict)
    free: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check(self, "the work")


GIVEN = {"rows": {"task": "mnli", "columns": ["a", "b"]}, "sparsities": [0.5, 1]}
FULL = {
    **GIVEN,
    "name": "other",
    "lr": 1,
    "fast": True,
    "pair": [1, 2],
    "words": ["x"],
    "method": "random",
    "out": "folder/file",
    "data": {"id": {"task": "qqp", "limit": 3}},
    "free": {"steps": 3, "keep": ["L0.MLP"]},
}


def test_settings_are_made_of_plain_values_of_every_kind():
    work = make(Work, FULL, "a file")
    assert work.rows == Rows("mnli", columns=("a", "b"))
    assert work.sparsities == (0.5, 1.0)
    assert isinstance(work.lr, float)
    assert work.pair == (1.0, 2)
    assert work.words == ["x"]
    assert work.out == Path("folder/file")
    assert work.data == {"id": Rows("qqp", limit=3)}
    assert work.free == {"steps": 3, "keep": ["L0.MLP"]}


@pytest.mark.parametrize("values", [GIVEN, FULL])
def test_settings_go_through_json_and_toml_and_back(tmp_path, values):
    work = make(Work, values, "a file")
    assert make(Work, json.loads(json.dumps(plain(work))), "a file") == work
    (tmp_path / "work.toml").write_text(write_toml(plain(work)))
    assert make(Work, read_settings(tmp_path / "work.toml"), "a file") == work


def test_plain_values_leave_defaults_out_and_give_functions_by_name():
    work = make(Work, GIVEN, "a file")
    assert plain(work) == {
        "rows": {"task": "mnli", "columns": ["a", "b"]},
        "sparsities": [0.5, 1.0],
    }
    assert plain(Work(Rows("mnli"), (0.5,), loss=max))["loss"] == "max"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sparsity": 0.5}, "known settings in a file, got 'sparsity'; did you mean 'sparsities'?"),
        ({"zzz": 1}, "got 'zzz'; known are rows, sparsities, name"),
        ({"rows": {"limit": 3}}, "expected task in rows of a file, missing task; add them"),
        ({"rows": {"task": "a", "limits": 3}}, "in rows of a file, got 'limits'; did you mean 'li"),
        ({"rows": "mnli"}, r"settings for rows of a file, got 'mnli'; .* below a heading \[rows\]"),
        ({"data": {"id": "mnli"}}, "settings for data.id of a file, got 'mnli'"),
        ({"data": {"id": {"task": 3}}}, "expected text for task in data.id of a file, got 3"),
        (
            {"data": {3: {"task": "a"}}},
            "expected names as text in data of a file, got 3; put it in quotes",
        ),
        ({"data": ["mnli"]}, "settings for data of a file"),
        ({"sparsities": 0.5}, "expected a list for sparsities in a file, got 0.5"),
        ({"sparsities": ["half"]}, "a number such as 0.001 for sparsities in a file, got 'half'"),
        ({"lr": "1e-3"}, "a number such as 0.001 for lr in a file, got '1e-3'"),
        ({"lr": True}, "a number such as 0.001 for lr in a file, got True"),
        ({"fast": 1}, "true or false for fast in a file, got 1"),
        ({"pair": [1, 2, 3]}, "a list of 2 for pair"),
        ({"pair": [1, 2.5]}, "a whole number for pair in a file, got 2.5"),
        ({"method": "best"}, r"one of \['gates', 'random'\] for method in a file, got 'best'"),
        ({"out": 3}, "a path for out in a file, got 3"),
        ({"rows": {"task": "a", "limit": "3"}}, "a whole number for limit in rows of a file"),
    ],
)
def test_a_wrong_setting_is_named(change, message):
    with pytest.raises(HcLensError, match=message):
        make(Work, {**GIVEN, **change}, "a file")


def test_settings_that_are_left_out_are_named():
    with pytest.raises(HcLensError, match="rows, sparsities in a file, missing rows, sparsities;"):
        make(Work, {}, "a file")
    with pytest.raises(HcLensError, match="a table of settings for a file, got None"):
        make(Work, None, "a file")  # type: ignore[arg-type]


def test_settings_written_in_python_are_checked_and_copied():
    with pytest.raises(HcLensError, match="a whole number for limit in rows of the work, got 'x'"):
        Work({"task": "a", "limit": "x"}, (0.5,))  # type: ignore[arg-type]
    numbers, data = [0.5], {"id": Rows("mnli")}
    work = Work(Rows("mnli"), numbers, data=data)  # type: ignore[arg-type]
    numbers.append(0.7)
    data["ood"] = Rows("hans")
    assert work.sparsities == (0.5,)
    assert list(work.data) == ["id"]


def test_only_known_names_pass():
    check_keys(["a"], ["a", "b"], "here")
    with pytest.raises(HcLensError, match=r"known settings in here, got 3; known are a"):
        check_keys([3], ["a"], "here")  # type: ignore[list-item]


BAD_FILES = [
    ("work.json", "{}", r"a .toml, .yaml or .yml file of settings, got .*work.json; rename"),
    ("work.toml", "seeds = [0", "a readable file of settings, got .*work.toml"),
    ("work.yaml", "seeds: [0", "a readable file of settings, got .*work.yaml"),
    ("work.yaml", "- organism", r"a table of settings for work.yaml, got \['organism'\]"),
    ("work.yaml", "", "a table of settings for work.yaml, got None"),
    ("work.toml", "x = " + 21 * "[" + 21 * "]", "more than 20 tables or lists inside each other"),
    ("work.toml", "x = " + 90_000 * "[", "more than 20 tables or lists inside each other"),
    ("work.toml", "x = " + 30_000 * "{a=", "more than 20 tables or lists inside each other"),
    ("work.toml", ".".join(21 * "a") + " = 1", "more than 20 tables or lists inside each other"),
    ("work.toml", ".".join(40_000 * ['"a"']) + " = 1", "more than 20 tables or lists inside"),
    ("work.toml", "[" + ".".join(40_000 * "a") + "]", "more than 20 tables or lists inside"),
    ("work.toml", "x = [" + 21 * "{a." + "b = 1", "more than 20 tables or lists inside"),
    ("work.toml", "x = " + 2000 * ("[" * 20 + "#" + "]" * 20 + "\n"), "more than 20 tables or"),
    ("work.toml", 'x = """' + 60_000 * '\\"""', "a readable file of settings"),
    ("work.yaml", "x: " + 21 * "[" + 21 * "]", "more than 20 tables or lists inside each other"),
    ("work.yaml", 90_000 * "- " + "x", "more than 20 tables or lists inside each other"),
    ("work.yaml", "a: &a [1, 2]\nb: [*a, *a, *a]", r"the alias \*a; write the value itself"),
    ("work.yaml", "a: &a {b: *a}", r"the alias \*a"),
    ("work.yaml", "# " + 200_000 * "x", "more than 200000 bytes"),
    ("work.toml", "# " + 200_000 * "x", "more than 200000 bytes"),
]
"""Name, content and message of settings files that cannot be read."""


@pytest.mark.parametrize(
    ("name", "text", "message"), BAD_FILES, ids=[str(index) for index in range(len(BAD_FILES))]
)
def test_a_file_that_holds_no_settings_is_an_error(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(HcLensError, match=message):
        read_settings(tmp_path / name)


def test_a_file_that_is_missing_or_not_text_is_an_error(tmp_path):
    with pytest.raises(HcLensError, match="a readable file of settings"):
        read_settings(tmp_path / "none.toml")
    (tmp_path / "work.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(HcLensError, match="a readable file of settings"):
        read_settings(tmp_path / "work.toml")


@pytest.mark.parametrize("name", ["work.toml", "work.yaml"])
def test_settings_as_deep_as_any_are_read(tmp_path, name):
    lists = 18 * "[" + 18 * "]"
    (tmp_path / name).write_text(f"x = {lists}" if name == "work.toml" else f"x: {lists}")
    assert str(read_settings(tmp_path / name)["x"]) == lists


def test_long_keys_are_refused_before_a_parser_reads_them(tmp_path, monkeypatch):
    monkeypatch.setitem(_PARSERS, ".toml", ("json", "loads"))  # it tells another error
    (tmp_path / "work.toml").write_text(".".join(30_000 * ["'a='"]) + " = 1")
    with pytest.raises(HcLensError, match="more than 20 tables or lists inside each other"):
        read_settings(tmp_path / "work.toml")


def test_marks_in_texts_and_comments_of_toml_open_nothing(tmp_path):
    path = tmp_path / "work.toml"
    marks = 30 * "[{." + 30 * "a."
    path.write_text(
        f'# {marks}\na = "{marks}\\"{marks}"\nb = \'{marks}\'\n'
        f"c = \"\"\"\n{marks}\"{marks}\"\"\"\nd = '''\n{marks}'{marks}'''\ne = {30 * [0.5]}\n"
    )
    assert read_settings(path) == {
        "a": f'{marks}"{marks}',
        "b": marks,
        "c": f'{marks}"{marks}',
        "d": f"{marks}'{marks}",
        "e": 30 * [0.5],
    }


def test_toml_and_yaml_give_the_same_values(tmp_path):
    (tmp_path / "a.toml").write_text('x = [1, 2]\n[t]\ny = "z"\n')
    (tmp_path / "a.yml").write_text("x: [1, 2]\nt: {y: z}\n")
    assert read_settings(tmp_path / "a.toml") == read_settings(tmp_path / "a.yml")


def test_toml_holds_every_kind_of_value(tmp_path):
    values = {
        "table": {"odd key": 1, "inner": {"a": [1, 2]}},
        "text": 'quotes " and \\ and \n and \x7f and é',
        "float": 1e-17,
        "large": 1e16,
        "numpy": np.float64(0.25),
        "int": 3,
        "yes": True,
        "list": ["a", 0.5],
        "\u00e9": "a key beyond ASCII",
        "path": Path("a/b"),
    }
    (tmp_path / "a.toml").write_text(write_toml(values), encoding="utf-8")
    assert read_settings(tmp_path / "a.toml") == {**values, "path": "a/b"}


CHARACTERS = st.characters(exclude_categories=["Cs"])
TEXT = st.text(CHARACTERS, max_size=8)
NAMES = st.text(CHARACTERS, min_size=1, max_size=8)
SCALARS = TEXT | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False)
VALUES = SCALARS | st.lists(SCALARS, max_size=3) | st.dictionaries(TEXT, SCALARS, max_size=3)


@given(values=st.dictionaries(NAMES, VALUES, max_size=4))
@settings(max_examples=200, deadline=None)
def test_what_is_written_as_toml_is_read_again(tmp_path_factory, values):
    path = tmp_path_factory.getbasetemp() / "settings.toml"
    path.write_bytes(write_toml(values).encode())
    assert read_settings(path) == values


def test_brackets_that_a_comment_closes_do_not_hide_those_that_are_opened(tmp_path):
    path = tmp_path / "deep.toml"
    path.write_text("# " + "]" * 100 + "\na = " + "[" * 60 + "]" * 60)
    with pytest.raises(HcLensError, match="more than 20 tables or lists"):
        read_settings(path)
