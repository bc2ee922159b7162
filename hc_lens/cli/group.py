"""How every command ends: exit codes, one line for an error, what to do after Ctrl-C.

| code | meaning |
|---|---|
| 0 | done |
| 1 | input that hc_lens cannot use, a failed check, a full disk, or an unexpected error |
| 2 | a command line that cannot be read |
| 130 | Ctrl-C |

``--debug``, before or after the command, shows the traceback instead of the line.
"""

from __future__ import annotations

import errno
import shlex
import sys
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from hc_lens.errors import HcLensError

DEBUG = "--debug"
INTERRUPTED = 130


class Commands(TyperGroup):
    """The commands of ``hc-lens``, with what they share."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take --debug out of the arguments, wherever it stands."""
        ctx.meta["hc_lens.debug"] = DEBUG in args
        ctx.meta["hc_lens.arguments"] = args
        return super().parse_args(ctx, [argument for argument in args if argument != DEBUG])

    def invoke(self, ctx: Any) -> Any:
        """Run the command and end as the table above says."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            _interrupted(ctx)
        except SystemExit as stop:
            # An analysis is an application of its own, which ends by itself.
            if stop.code == INTERRUPTED:
                _interrupted(ctx)
            raise
        except Exception as error:
            # Typer's own exceptions bring their exit code, a closed pipe is Typer's to handle.
            passed = hasattr(error, "exit_code") or isinstance(
                error, (typer.Abort, BrokenPipeError)
            )
            if passed or ctx.meta["hc_lens.debug"]:
                raise
            typer.echo(f"hc-lens: {line_of(error)}", err=True)
            raise typer.Exit(1) from None


def line_of(error: BaseException) -> str:
    """One line that says what went wrong."""
    if is_full(error):
        return (
            "expected room on the disk, got none left; free some and run the same command again, "
            "finished work is kept"
        )
    text = " ".join(str(error).split())
    if isinstance(error, HcLensError):
        return text
    return f"unexpected {type(error).__name__}: {text}; run again with {DEBUG} to see where"


def is_full(error: BaseException) -> bool:
    """Whether a full disk is behind an error; safetensors tells it only in the text."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    cause = error.__cause__ or error.__context__
    return "No space left on device" in str(error) or (cause is not None and is_full(cause))


def _interrupted(ctx: Any) -> NoReturn:
    # A terminal has written ^C on the line of the progress bar.
    before = "\n" if sys.stderr.isatty() else ""
    again = shlex.join(["hc-lens", *ctx.meta["hc_lens.arguments"]])
    text = "stopped; what is finished stays, go on with the same command again"
    typer.echo(f"{before}hc-lens: {text}: {again}", err=True)
    raise typer.Exit(INTERRUPTED)
