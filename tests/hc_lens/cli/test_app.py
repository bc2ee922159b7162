"""What ``hc-lens`` is made of, and what it costs to ask it for help."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from hc_lens.cli import analyses, analysis
from hc_lens.cli.parse import parse
from hc_lens.version import __version__

COMMANDS = (
    *("demo", "study", "load-check", "means", "prune", "evaluate", "scan", "sweep"),
    *("attention", "finetune", "analyse", "report"),
)
HEAVY = {"torch", "transformers", "transformer_lens", "datasets", "pandas", "numpy", "matplotlib"}


@pytest.mark.parametrize(
    "arguments",
    [
        *([name, "--help"] for name in COMMANDS),
        *(["analyse", name, "--help"] for name in ("composition", "extractive")),
        *(["--help"], ["prune", "-h"], ["--version"]),
    ],
    ids=" ".join,
)
def test_help_and_version_import_no_heavy_package(arguments):
    code = (
        "import sys\n"
        "from hc_lens.cli import main\n"
        f"sys.argv = ['hc-lens', *{arguments}]\n"
        "try: main()\n"
        "except SystemExit as stop: assert not stop.code\n"
        f"print({HEAVY} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(("Usage: hc-lens", f"hc-lens {__version__}\n"))
    assert done.stdout.strip().endswith("set()")


@pytest.mark.parametrize("level", [(), ("means",), ("analyse",), ("analyse", "composition")])
def test_h_is_help_at_every_level(call, level):
    short, long = call(*level, "-h"), call(*level, "--help")
    assert (short.exit_code, short.stdout) == (0, long.stdout)
    assert short.stdout.startswith("Usage: hc-lens")


def test_version_is_that_of_the_package(call):
    assert call("--version").stdout == f"hc-lens {__version__}\n"


def test_python_m_is_the_same_program():
    line = [sys.executable, "-m", "hc_lens.cli", "--help"]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("Usage: hc-lens [OPTIONS] COMMAND")


def test_help_lists_every_command_with_a_whole_sentence(call):
    shown = call("--help").stdout
    for name in COMMANDS:
        assert f"\n  {name} " in shown
    assert "..." not in shown.split("Commands:")[1]


def functions():
    """The function of every command and of every analysis, by the name in a command line."""
    own = [name for name in COMMANDS if name not in ("analyse", "demo", "study", "report")]
    found = {name: importlib.import_module(f"hc_lens.cli.{name.replace('-', '_')}") for name in own}
    named = {name: module.run for name, module in found.items()}
    return named | {f"analyse {name}": analysis(name) for name in analyses()}


def help_of(name, capsys):
    """The options of a command with what the help says of each."""
    assert parse(name, functions()[name], ["--help"]) is None
    shown, found = capsys.readouterr().out, {}
    for line in shown.splitlines():
        if line.startswith("  --"):
            found[line.split()[0]] = ""
        elif line.startswith("      ") and found:
            found[list(found)[-1]] += " " + line.strip()
    return found


@pytest.mark.parametrize("name", functions())
def test_every_option_is_explained(name, capsys):
    options = help_of(name, capsys)
    assert not [option for option, text in options.items() if len(text) < 10]
    assert {"--out", "--json", "--config", "--force"} <= set(options)


LOADING = (
    *("load-check", "means", "prune", "evaluate", "scan", "sweep", "attention"),
    *("analyse superadditive", "analyse lexical-overlap", "analyse composition"),
)
"""Commands that load classifiers."""


@pytest.mark.parametrize("name", LOADING)
def test_a_command_that_loads_a_model_asks_where_it_runs_and_what_its_logits_mean(name, capsys):
    assert {"--device", "--model-labels"} <= set(help_of(name, capsys))


@pytest.mark.parametrize("name", ["finetune", "analyse extractive"])
def test_a_command_that_needs_no_label_names_still_asks_where_a_model_runs(name, capsys):
    assert "--device" in help_of(name, capsys)


def test_an_option_has_one_meaning_over_all_commands(capsys):
    meanings = {}
    for name in functions():
        for option, text in help_of(name, capsys).items():
            plain = text.split(" [")[0].split("; by default")[0].split(", such as")[0].strip()
            meanings.setdefault(option, set()).add(plain)
    shared = (
        "--device",
        "--model-labels",
        "--limit",
        "--json",
        "--config",
        "--force",
        "--case",
        "--labels",
    )
    for option in shared:
        assert len(meanings[option]) == 1, (option, meanings[option])
    assert all(text.startswith("File") for text in meanings["--path"])
    assert all("older for the results" in text for text in meanings["--out"])
    assert all(text.startswith("Seed") for text in meanings["--seeds"])
    # A text that is typed for hc-lens attention has no counterfactual.
    assert all(text.startswith("What replaces removed units: a") for text in meanings["--means"])


def test_no_arguments_show_the_help(call):
    done = call()
    assert done.exit_code == 2
    assert "Commands:" in done.output


def test_a_missing_option_is_a_usage_error(call):
    done = call("prune", "--model", "organism")
    assert done.exit_code == 2
    assert done.stderr == "hc-lens: expected --task, got none; see hc-lens prune --help\n"


def test_an_unknown_command_names_the_nearest(call):
    done = call("prun")
    assert done.exit_code == 2
    assert done.stderr == "hc-lens: expected a command, got 'prun'; did you mean prune?\n"
