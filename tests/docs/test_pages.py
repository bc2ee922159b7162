"""The pages say what is there: links, names, files and code blocks."""

from __future__ import annotations

import ast
import pkgutil
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RESULTS = sorted((ROOT / "docs" / "benchmarks" / "results").glob("*.md"))
METHODS = sorted((ROOT / "docs" / "method").glob("*.md"))

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
MATHS = re.compile(r"\\\(.*?\\\)|\$\$.*?\$\$", re.DOTALL)
CODE = re.compile(r"`([^`\n]+)`")
DOTTED = re.compile(r"(?<![\w./-])(?:hc|hc_lens|analyses)(?:\.[A-Za-z_]\w*)+(?![\w/])")
PYTHON_FILE = re.compile(r"(?<![\w./-])(?:hc_lens|analyses|docs|tests)/[\w./-]*\.py(?!\w)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
ENTRY_POINTS = "hc_lens.analyses"
"""Looks like a module and is the name of the entry-point group."""

each_page = pytest.mark.parametrize(
    "page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES]
)


def prose(page: Path) -> str:
    """The text of a page without its code blocks and formulas."""
    return MATHS.sub("", FENCE.sub("", page.read_text(encoding="utf-8")))


def blocks(page: Path, language: str) -> list[str]:
    """The code blocks of a page in one language."""
    found = FENCE.findall(page.read_text(encoding="utf-8"))
    return [text for name, text in found if name == language]


def anchors(page: Path) -> set[str]:
    """The anchors that the headings of a page give, as GitHub makes them."""
    plain = (re.sub(r"[^\w\s-]", "", title.lower()) for title in HEADING.findall(prose(page)))
    return {title.strip().replace(" ", "-") for title in plain}


def exists(name: str) -> bool:
    """Whether a dotted name leads to a module, an attribute or a field of a dataclass."""
    name = re.sub(r"^hc\.", "hc_lens.", name)
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        owner, _, field = name.rpartition(".")
        try:
            return field in getattr(pkgutil.resolve_name(owner), "__annotations__", {})
        except (ImportError, AttributeError, ValueError):
            return False
    return True


def missing(names: Iterable[str]) -> list[str]:
    """The names that lead to nothing."""
    return [name for name in sorted(set(names) - {ENTRY_POINTS}) if not exists(name)]


def imported(code: str) -> Iterator[str]:
    """The dotted names that a block of code imports from this project."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@each_page
def test_every_relative_link_leads_to_a_file_and_its_heading(page: Path) -> None:
    for target in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.is_file(), f"{target} on {page.name} leads nowhere"
        assert not anchor or anchor in anchors(there), f"{target} on {page.name} has no heading"


@each_page
def test_every_dotted_name_on_a_page_can_be_imported(page: Path) -> None:
    assert missing(DOTTED.findall(" ".join(CODE.findall(prose(page))))) == []


@each_page
def test_every_python_file_named_on_a_page_exists(page: Path) -> None:
    named = set(PYTHON_FILE.findall(page.read_text(encoding="utf-8")))
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []


@each_page
def test_code_blocks_are_python_whose_names_exist(page: Path) -> None:
    for text in blocks(page, "python"):
        used = (name for name in DOTTED.findall(text) if name.startswith("hc."))
        assert missing([*imported(text), *used]) == []


def test_every_method_page_is_in_the_index() -> None:
    targets = LINK.findall(prose(ROOT / "docs" / "index.md"))
    assert {f"method/{page.name}" for page in METHODS} <= set(targets)
    assert {f"benchmarks/results/{page.name}" for page in RESULTS} <= set(targets)


@pytest.mark.parametrize("page", RESULTS, ids=[page.stem for page in RESULTS])
def test_a_page_of_results_begins_with_the_command_that_printed_them(page: Path) -> None:
    first, text = FENCE.findall(page.read_text(encoding="utf-8"))[0]
    assert first == "bash"
    assert text.startswith(("python docs/benchmarks/", "hc-lens "))


def test_the_test_command_of_the_readme_can_be_found_by_the_continuous_integration() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    after = readme.split("<!-- test command -->\n", 1)[1]
    assert after.startswith("```bash\n")
    assert "-m pytest" in after.splitlines()[1]
    assert after.splitlines()[2] == "```"
