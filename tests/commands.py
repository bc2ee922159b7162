"""Calls of ``hc-lens`` in this process."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass

from hc_lens.cli import main


@dataclass
class Result:
    """What a call printed, and how it ended."""

    exit_code: int
    stdout: str
    stderr: str
    exception: BaseException | None = None

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


def invoke(*arguments: object) -> Result:
    """Run ``hc-lens`` with some arguments."""
    out, err = io.StringIO(), io.StringIO()
    code, exception = 1, None
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main(list(map(str, arguments)))
        except SystemExit as stop:
            code = int(stop.code or 0)
        except Exception as error:
            exception = error
    return Result(code, out.getvalue(), err.getvalue(), exception)
