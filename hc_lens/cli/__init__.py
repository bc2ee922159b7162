"""``hc-lens``: the pipeline from a terminal.

1. Each command is a file here, with the function ``command``; it imports what it needs when it
   runs, so that ``hc-lens --help`` is quick.
2. What commands share is in `options` (the options), `settings` (TOML files), `folder` (where
   results go), `screen` (what is printed where) and `run` (one call, from model to result).
3. `group` ends every command: exit codes, errors in one line, Ctrl-C.
"""

from __future__ import annotations

from typing import Annotated

import typer

from hc_lens.cli import (
    analyses,
    attention,
    evaluate,
    finetune,
    load_check,
    means,
    prune,
    scan,
    sweep,
)
from hc_lens.cli.group import Commands

app = typer.Typer(
    name="hc-lens",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # Plain text: it comes at once, and an error is one line.
    rich_markup_mode=None,
)


@app.callback()
def shared(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of errors; stands anywhere.")
    ] = False,
) -> None:
    """Find, ablate and explain the subnetworks of a fine-tuned language model."""


_OTHER = {"cls": analyses.PassedOn, "add_help_option": False}

app.command("demo", **_OTHER)(analyses.demo)
app.command("study", **_OTHER)(analyses.study)
app.command("report", **_OTHER)(analyses.report)
for _name, _module in (
    ("load-check", load_check),
    ("means", means),
    ("prune", prune),
    ("evaluate", evaluate),
    ("scan", scan),
    ("sweep", sweep),
    ("attention", attention),
    ("finetune", finetune),
):
    app.command(_name)(_module.command)
app.command("analyse", options_metavar="NAME [OPTIONS]", **_OTHER)(analyses.analyse)


def main() -> None:
    """Run the command line."""
    app(prog_name="hc-lens")
