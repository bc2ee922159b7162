"""Commands of other packages."""

from __future__ import annotations

from dataclasses import field
from types import SimpleNamespace

import pytest

from hc_lens import cli
from hc_lens.cli.options import Output, section
from hc_lens.cli.work import Work
from hc_lens.errors import HcLensError


@section()
class Settings:
    words: str = field(default="", kw_only=False)
    """Some words."""
    full: bool = False
    """The paper's size."""
    output: Output = field(default_factory=Output)


@pytest.fixture
def study(monkeypatch):
    """A study with the three commands; gives the calls it got."""
    calls = []

    def demo(settings: Settings, work: Work) -> None:
        calls.append((work.command, settings.full, str(work.out)))

    def study(settings: Settings, work: Work) -> None:
        calls.append((work.command, work.call.line, settings.words))

    def report(settings: Settings, work: Work) -> None:
        raise KeyboardInterrupt

    known = {"demo": demo, "study": study, "report": report}
    points = {name: SimpleNamespace(load=lambda run=run: run) for name, run in known.items()}
    monkeypatch.setattr(cli, "analyses", lambda: points)
    return calls


def test_options_go_to_the_study(call, study):
    assert call("demo", "--full").exit_code == 0
    assert study == [("demo", True, "None")]
    study.clear()
    assert call("study", "three words here", "--full", "--out", "a b").exit_code == 0
    line = "hc-lens study 'three words here' --full --out 'a b'"
    assert study == [("study", line, "three words here")]


def test_the_studys_own_help_is_shown(call, study):
    done = call("demo", "--help")
    assert done.exit_code == 0
    assert "The paper's size." in done.output


def test_a_wrong_option_of_the_study_is_a_usage_error(call, study):
    assert call("demo", "--fulll").exit_code == 2


def test_ctrl_c_in_the_study_says_how_to_go_on(call, study):
    done = call("report")
    assert done.exit_code == 130
    assert "run the same command again to continue: hc-lens report" in done.stderr


def test_an_error_of_an_analysis_is_one_line(call, monkeypatch):
    def fails(settings: Settings, work: Work) -> None:
        raise HcLensError(f"expected more than {settings.words} for {work.command}")

    monkeypatch.setattr(cli, "analyses", lambda: {"mine": SimpleNamespace(load=lambda: fails)})
    done = call("analyse", "mine", "1")
    assert done.exit_code == 1
    assert done.stderr == "hc-lens: expected more than 1 for analyse mine\n"


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
