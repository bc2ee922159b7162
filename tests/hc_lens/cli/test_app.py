"""What ``hc-lens`` is made of, and what it costs to ask it for help."""

from __future__ import annotations

import subprocess
import sys

import pytest
import typer.main

from hc_lens.cli import app

COMMANDS = (
    *("demo", "study", "load-check", "means", "prune", "evaluate", "scan", "sweep"),
    *("attention", "finetune", "analyse", "report"),
)
HEAVY = {"torch", "transformers", "transformer_lens", "datasets", "pandas", "numpy", "matplotlib"}


@pytest.mark.parametrize("arguments", [["--help"], ["prune", "--help"], ["sweep", "--help"]])
def test_help_imports_no_heavy_package(arguments):
    code = (
        "import sys\n"
        "from hc_lens.cli import main\n"
        f"sys.argv = ['hc-lens', *{arguments}]\n"
        "try: main()\n"
        "except SystemExit as stop: assert not stop.code\n"
        f"print({HEAVY} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("Usage: hc-lens")
    assert done.stdout.strip().endswith("set()")


def test_python_m_is_the_same_program():
    line = [sys.executable, "-m", "hc_lens.cli", "--help"]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("Usage: hc-lens [OPTIONS] COMMAND")


def test_help_lists_every_command_with_a_whole_sentence(call):
    shown = call("--help").stdout
    for name in COMMANDS:
        assert f"\n  {name} " in shown
    assert "..." not in shown.split("Commands:")[1]


def test_every_option_is_explained():
    for name, command in typer.main.get_command(app).commands.items():
        unexplained = [option.name for option in command.params if not option.help]
        assert not unexplained, f"{name}: {unexplained}"


def test_no_arguments_show_the_help(call):
    done = call()
    assert done.exit_code == 2
    assert "Commands:" in done.output


def test_a_missing_option_is_a_usage_error(call):
    done = call("prune", "--model", "organism")
    assert done.exit_code == 2
    assert "Missing option '--task'" in done.stderr
