"""``hc-lens``: the pipeline from a terminal.

1. A command is a function ``run(settings, work)``. Its options are the fields of the settings
   (`hc_lens.cli.options`); `work` reads models and rows, and keeps and shows the result
   (`hc_lens.cli.work`).
2. The commands below are imported when they are called, so that ``hc-lens --help`` is quick. An
   analysis of another package is found in the entry-point group ``hc_lens.analyses``, which names
   such a function.
3. ``--config FILE`` gives values for the options of a command. What stands on the command line
   wins. A key that the command does not have is an error that names the nearest one.
4. Every command ends in the same way:

| code | meaning |
|---|---|
| 0 | done |
| 1 | input that hc_lens cannot use, a failed check, a full disk, or an unexpected error |
| 2 | a command line that cannot be read |
| 130 | Ctrl-C |

``--debug``, before or after the command, shows the traceback of an error instead of one line. The
message of an error names options where the library names arguments (`hc_lens.cli.words`).
"""

from __future__ import annotations

import difflib
import errno
import importlib
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

from hc_lens.errors import HcLensError
from hc_lens.version import __version__

COMMANDS = {
    "demo": "The whole study on the bundled model, without a network.",
    "study": "The whole study on a checkpoint of your own.",
    "report": "Write the report of a study's folder again.",
    "load-check": "Does a checkpoint load, with Hugging Face's logits?",
    "means": "Collect the mean activations of all heads and MLPs.",
    "prune": "Find a subnetwork that does what the model does.",
    "evaluate": "Score a model, and subnetworks of it, case by case.",
    "scan": "Ablate every unit, or sets of units, and tell what changes.",
    "sweep": "Find subnetworks for many checkpoints, sparsities and seeds.",
    "attention": "Draw attention patterns as one HTML file.",
    "finetune": "Fine-tune a classifier, with a series of checkpoints.",
    "analyse": "Run the analysis NAME; NAME --help shows its options.",
}
"""Every command with a sentence for the help, so that nothing is imported to list them."""
STUDY = ("demo", "study", "report")
"""The commands that are analyses, under a shorter name."""
GROUP = "hc_lens.analyses"
"""Entry-point group of the analyses."""
DEBUG = "--debug"
HELP = "--help"
SHORT_HELP = "-h"
VERSION = "--version"
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line, and end as the table above says."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    code = 1
    try:
        code = dispatch([argument for argument in given if argument != DEBUG])
    except KeyboardInterrupt:
        # A terminal has written ^C on the line of the progress bar.
        before = "\n" if sys.stderr.isatty() else ""
        text = "stopped; finished work is kept, run the same command again to continue"
        _say(f"{before}hc-lens: {text}: {shlex.join(['hc-lens', *given])}")
        code = INTERRUPTED
    except BrokenPipeError:
        # The reader of the output has gone; Python would complain once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except Exception as error:
        if DEBUG in given:
            raise
        _say(f"hc-lens: {line_of(error)}")
        code = getattr(error, "exit_code", code)
    sys.exit(code)


def dispatch(arguments: list[str]) -> int:
    """Run a command; gives the exit code where the command itself did not fail."""
    arguments = [HELP if argument == SHORT_HELP else argument for argument in arguments]
    name, *rest = arguments or [""]
    if name == VERSION:
        sys.stdout.write(f"hc-lens {__version__}\n")
        return 0
    if name in ("", HELP):
        sys.stdout.write(_help())
        return 0 if name else 2
    if name not in COMMANDS:
        from hc_lens.cli.parse import UsageError

        near = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f"did you mean {near[0]}?" if near else f"see hc-lens {HELP}"
        raise UsageError(f"expected a command, got {name!r}; {hint}")
    if name == "analyse":
        if not rest or rest[0] == HELP:
            sys.stdout.write(
                f"Usage: hc-lens analyse NAME [OPTIONS]\n\n{COMMANDS[name]}\n\n"
                f"Analyses: {', '.join(sorted(analyses()))}\n"
            )
            return 0
        call(f"analyse {rest[0]}", analysis(rest[0]), rest[1:])
    elif name in STUDY:
        call(name, analysis(name), rest)
    else:
        module = importlib.import_module(f"hc_lens.cli.{name.replace('-', '_')}")
        call(name, module.run, rest)
    return 0


def call(command: str, run: Callable[..., None], arguments: Sequence[str]) -> None:
    """Read the settings of a command and run it; with --help show its options instead."""
    from hc_lens.cli.parse import parse

    called = parse(command, run, arguments)
    if called is not None:
        from hc_lens.cli.work import Work, noted_warnings, quiet_reading

        work = Work(called)
        with quiet_reading(work.progress), noted_warnings(work.note), closing(work):
            run(called.settings, work)


def analyses() -> dict[str, Any]:
    """The entry points of all installed analyses, by name."""
    from importlib.metadata import entry_points

    return {found.name: found for found in entry_points(group=GROUP)}


def analysis(name: str) -> Callable[..., None]:
    """The function of an analysis; an unknown one is an HcLensError that lists the known ones."""
    known = analyses()
    if name not in known:
        raise HcLensError(
            f"expected one of the analyses {sorted(known)}, got {name!r}; a package adds its own "
            f"with an entry point in the group {GROUP}"
        )
    return known[name].load()


def line_of(error: BaseException) -> str:
    """One line that says what went wrong."""
    from hc_lens.cli.words import in_options
    from hc_lens.records import RecordsError, is_broken, is_full

    text = " ".join(str(error).split())
    if isinstance(error, RecordsError):  # it names the folder
        return in_options(text)
    file = getattr(error, "filename", None)
    where = f" at {file}" if file else ""
    again = "run the same command again, finished work is kept"
    if is_full(error):
        return f"expected room on the disk, got none left{where}; free some and {again}"
    if isinstance(error, HcLensError):
        return in_options(text)
    told = getattr(error, "strerror", None) or text
    if isinstance(error, PermissionError):
        return f"expected access{where}, got {told!r}; give access, or name another folder"
    if getattr(error, "errno", None) == errno.ENAMETOOLONG:
        return (
            f"expected a name that the file system takes{where}, got {told!r}; give a shorter one"
        )
    if is_broken(error):
        return f"expected a disk that works{where}, got {told!r}; check it and {again}"
    return f"unexpected {type(error).__name__}: {text}; run again with {DEBUG} to see where"


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {sentence}" for name, sentence in COMMANDS.items()]
    return (
        "Usage: hc-lens [OPTIONS] COMMAND [ARGS]...\n\n"
        "Find, ablate and explain the subnetworks of a fine-tuned language model.\n\n"
        f"Options:\n  {DEBUG}     Show the traceback of errors; stands anywhere.\n"
        f"  {HELP}, {SHORT_HELP}  Show this help, or with a command its options.\n"
        f"  {VERSION}   Show the version.\n\n"
        "Commands:\n" + "\n".join(lines) + "\n"
    )


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
