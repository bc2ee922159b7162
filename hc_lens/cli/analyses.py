"""``hc-lens analyse NAME``, ``demo``, ``study`` and ``report``: commands of other packages.

1. An analysis is found in the entry-point group ``hc_lens.analyses``. It is a Typer application, or
   anything that is called with ``args`` and ``prog_name``.
2. Everything after the name goes to it as it stands, ``--help`` too.
3. ``demo``, ``study`` and ``report`` are the commands of the analysis named ``study``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperCommand

from hc_lens.cli.settings import Context
from hc_lens.errors import HcLensError

GROUP = "hc_lens.analyses"


class PassedOn(TyperCommand):
    """A command that leaves its arguments to another application."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keep everything."""
        ctx.args = list(args)
        return []


def analyse(context: Context) -> None:
    """Run the analysis NAME; NAME --help shows its options."""
    if not context.args or context.args[0] == "--help":
        typer.echo(context.get_help())
        typer.echo(f"\nAnalyses: {', '.join(sorted(known()))}")
        return
    name, *arguments = context.args
    call(name, arguments, f"hc-lens analyse {name}")


def demo(context: Context) -> None:
    """The whole study on the bundled model, without a network."""
    call("study", ["demo", *context.args], "hc-lens")


def study(context: Context) -> None:
    """The whole study on a checkpoint of your own."""
    call("study", ["study", *context.args], "hc-lens")


def report(context: Context) -> None:
    """Write the report of a study's folder again."""
    call("study", ["report", *context.args], "hc-lens")


def known() -> dict[str, Any]:
    """The entry points of all installed analyses, by name."""
    from importlib.metadata import entry_points

    return {found.name: found for found in entry_points(group=GROUP)}


def call(name: str, arguments: Sequence[str], program: str) -> None:
    """Run an analysis; an unknown one is an HcLensError that lists the known ones."""
    analyses = known()
    if name not in analyses:
        raise HcLensError(
            f"expected one of the analyses {sorted(analyses)}, got {name!r}; a package adds its "
            f"own with an entry point in the group {GROUP}"
        )
    analyses[name].load()(args=list(arguments), prog_name=program)
