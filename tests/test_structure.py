"""The shape of the code: what a reader relies on wherever they open a file."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("hc_lens", "analyses")
ANALYSES = "hc_lens.analyses"
LONGEST = 60
"""Most lines of a function, its docstring included."""
MOST_PARAMETERS = 8
"""Most parameters of a function, self and cls aside; more belong into a settings dataclass."""
ONE_HOME = {
    "os.replace": "hc_lens/records.py",
    "os.rename": "hc_lens/records.py",
    "hashlib": "hc_lens/records.py",
    "shutil.rmtree": "hc_lens/records.py",
    "pickle": None,
}
"""Names that one file may use, because the idea behind them lives there; None for no file."""


@cache
def sources() -> dict[str, ast.Module]:
    """The parsed files of the packages by path."""
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return {
        path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in paths
    }


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function with its place in the code."""
    for path, tree in sources().items():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield f"{path}:{node.lineno} {node.name}", node


def module_of(path: str) -> str:
    """The dotted name of a file; the analyses are imported as a part of the instrument."""
    name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return f"hc_lens.{name}" if name.split(".")[0] == "analyses" else name


def is_type_checking(node: ast.AST) -> bool:
    """Whether a statement is run by type checkers alone."""
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imports(tree: ast.AST) -> Iterator[str]:
    """What a file imports when it runs, at its top or inside a function."""
    for node in ast.iter_child_nodes(tree):
        if is_type_checking(node):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        else:
            yield from imports(node)


def graph() -> dict[str, set[str]]:
    """Which modules of the packages each module imports."""
    known = {module_of(path) for path in sources()}
    edges: dict[str, set[str]] = {}
    for path, tree in sources().items():
        name = module_of(path)
        targets = set()
        for found in imports(tree):
            while found not in known and "." in found:
                found = found.rpartition(".")[0]
            if found in known and found != name:
                targets.add(found)
        edges[name] = targets
    return edges


def test_no_module_imports_itself_by_way_of_others():
    edges, done, path = graph(), set(), []

    def visit(name: str) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        path.append(name)
        found = next((cycle for target in sorted(edges[name]) if (cycle := visit(target))), [])
        path.pop()
        done.add(name)
        return found

    cycles = [cycle for name in sorted(edges) if (cycle := visit(name))]
    assert cycles == []


def test_the_instrument_never_imports_the_analyses():
    wrong = {
        name: found
        for name, targets in graph().items()
        if not name.startswith(ANALYSES)
        if (found := [target for target in targets if target.startswith(ANALYSES)])
    }
    assert wrong == {}


def test_every_function_fits_a_screen():
    long = [
        f"{where}: {node.end_lineno - node.lineno + 1} lines"
        for where, node in functions()
        if (node.end_lineno or 0) - node.lineno + 1 > LONGEST
    ]
    assert long == []


def test_no_function_takes_more_than_eight_parameters():
    wide = []
    for where, node in functions():
        given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        names = [argument.arg for argument in given if argument.arg not in ("self", "cls")]
        if len(names) > MOST_PARAMETERS:
            wide.append(f"{where}: {len(names)}")
    assert wide == []


@pytest.mark.parametrize("name", sorted(ONE_HOME))
def test_an_idea_with_one_home_is_used_there_alone(name):
    used = [
        path
        for path, tree in sources().items()
        if any(
            isinstance(node, (ast.Attribute, ast.Name, ast.alias))
            and name in (ast.unparse(node), getattr(node, "name", ""))
            for node in ast.walk(tree)
        )
    ]
    assert [path for path in used if path != ONE_HOME[name]] == []


def test_nothing_that_reads_a_checkpoint_or_a_data_set_runs_its_code():
    readers = ("from_pretrained", "from_config", "load_dataset")
    calls = [
        (f"{path}:{node.lineno}", node)
        for path, tree in sources().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in readers
    ]
    assert len(calls) > 4
    trusting = [
        where
        for where, node in calls
        if "trust_remote_code=False" not in map(ast.unparse, node.keywords)
    ]
    assert trusting == []


def test_what_is_imported_is_declared():
    tomllib = pytest.importorskip("tomllib", reason="the standard library has it from 3.11 on")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    declared = {
        re.match(r"[\w.-]+", each)[0].lower().replace("_", "-")
        for each in (*project["dependencies"], *extras["ray"])
    }
    modules = {name.split(".")[0] for tree in sources().values() for name in imports(tree)}
    modules -= {*sys.stdlib_module_names, *PACKAGES}
    owners = packages_distributions()
    missing = {
        module
        for module in modules
        if declared.isdisjoint(
            name.lower().replace("_", "-") for name in owners.get(module, [module])
        )
    }
    assert len(modules) > 15
    assert missing == set()
