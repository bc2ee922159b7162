"""Commands of other packages."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import typer

from hc_lens.cli import analyses
from hc_lens.errors import HcLensError


@pytest.fixture
def study(monkeypatch):
    """A study with the three commands; gives the calls it got."""
    app, calls = typer.Typer(), []

    @app.command()
    def demo(full: bool = typer.Option(False, "--full", help="The paper's size.")) -> None:
        calls.append(("demo", full))

    @app.command(context_settings={"ignore_unknown_options": True})
    def study(words: list[str]) -> None:
        calls.append(("study", *words))

    @app.command()
    def report() -> None:
        raise KeyboardInterrupt

    def run(args, prog_name):
        calls.append((prog_name, *args))
        app(args=args, prog_name=prog_name)

    point = SimpleNamespace(name="study", load=lambda: run)
    monkeypatch.setattr(analyses, "known", lambda: {"study": point})
    return calls


def test_options_go_to_the_study_as_they_stand(call, study):
    assert call("demo", "--full").exit_code == 0
    assert study == [("hc-lens", "demo", "--full"), ("demo", True)]
    study.clear()
    assert call("study", "--model=x", "-n", "3", "--out", "a b").exit_code == 0
    assert study[0] == ("hc-lens", "study", "--model=x", "-n", "3", "--out", "a b")


def test_the_studys_own_help_is_shown(call, study):
    done = call("demo", "--help")
    assert done.exit_code == 0
    assert "The paper's size." in done.output


def test_a_wrong_option_of_the_study_is_a_usage_error(call, study):
    assert call("demo", "--fulll").exit_code == 2


def test_ctrl_c_in_the_study_says_how_to_go_on(call, study):
    done = call("report")
    assert done.exit_code == 130
    assert "go on with the same command again: hc-lens report" in done.stderr


def test_an_error_of_an_analysis_is_one_line(call, monkeypatch):
    def fails(args, prog_name):
        raise HcLensError(f"expected more than {args} for {prog_name}")

    point = SimpleNamespace(name="mine", load=lambda: fails)
    monkeypatch.setattr(analyses, "known", lambda: {"mine": point})
    done = call("analyse", "mine", "--x", "1")
    assert done.exit_code == 1
    line = "hc-lens: expected more than ['--x', '1'] for hc-lens analyse mine\n"
    assert done.stderr == line


def test_an_analysis_is_found_through_its_entry_point(call):
    done = call("analyse", "extractive", "--help")
    assert done.exit_code == 0
    assert "--demo" in done.output


@pytest.mark.parametrize("arguments", [("analyse",), ("analyse", "--help")])
def test_the_analyses_are_listed(call, arguments):
    done = call(*arguments)
    assert done.exit_code == 0
    assert "Analyses: " in done.stdout
    assert "extractive" in done.stdout


def test_an_unknown_analysis_lists_the_known_ones(call):
    done = call("analyse", "nothing")
    assert done.exit_code == 1
    assert "expected one of the analyses ['" in done.stderr
    assert "got 'nothing'; a package adds its own with an entry point" in done.stderr
