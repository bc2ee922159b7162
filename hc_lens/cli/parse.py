"""Arguments of a command into its settings.

1. The options of a command are the fields of the class that annotates ``settings`` in its function.
2. Values of a ``--config`` file become arguments that stand before those of the command line, for
   every option that the command line does not have. Keys are the options' names with ``_`` for
   ``-``; ``command`` names the command that they belong to.
3. The help lists the options under the titles of their sections.
"""

from __future__ import annotations

import dataclasses
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, get_args, get_type_hints

from cyclopts import App, Argument, CycloptsError, MissingArgumentError, Parameter

from hc_lens.cli.options import TITLES
from hc_lens.errors import HcLensError
from hc_lens.settings import check_keys, read_settings

HELP = "--help"
COMMAND = "command"
"""Key of the command that settings belong to."""
UNWRITTEN = ("config", "json", "force")
"""Options that say how to call a command, not what it computes."""


class UsageError(HcLensError):
    """A command line that cannot be read."""

    exit_code = 2


@dataclass(frozen=True)
class Call:
    """One call of a command."""

    command: str
    """Name of the command, such as ``prune`` or ``analyse extractive``."""
    line: str
    """The whole command line."""
    settings: Any
    """The settings that the command's function takes."""
    values: Mapping[str, Any]
    """The value of every option, by its key in a settings file."""
    given: tuple[str, ...] = ()
    """Keys of the options that the command line or the settings file has."""


def parse(command: str, run: Callable[..., None], arguments: Sequence[str]) -> Call | None:
    """What arguments ask of a command; None after --help, which is shown."""
    app = _app(run)
    assembled = app.assemble_argument_collection(parse_docstring=HELP in arguments)
    options = [each for each in assembled if _is_option(each)]
    if HELP in arguments:
        sys.stdout.write(help_text(command, run.__doc__ or "", options))
        return None
    keys = {_key(option.name): option.keys for option in options}
    main = {
        _key(name): _key(option.name)
        for option in options
        for name in option.names
        if name not in option.negatives
    }
    tokens = [*from_config(command, main, arguments), *arguments]
    try:
        settings = app(
            tokens,
            result_action="return_value",
            exit_on_error=False,
            print_error=False,
        )
    except MissingArgumentError as error:
        raise UsageError(f"{_missing(error)}; see hc-lens {command} {HELP}") from error
    except CycloptsError as error:
        raise UsageError(f"{' '.join(str(error).split())} See hc-lens {command} {HELP}") from error
    values = {key: reduce(getattr, path, settings) for key, path in keys.items()}
    named = named_in(tokens, main)
    line = shlex.join(["hc-lens", *command.split(), *arguments])
    return Call(command, line, settings, values, tuple(key for key in keys if key in named))


def named_in(arguments: Sequence[str], main: Mapping[str, str]) -> list[str]:
    """The options among arguments, each by the key of its main name."""
    names = [each.partition("=")[0].replace("--no-", "--") for each in arguments]
    keys = [_key(name) for name in names if name.startswith("--")]
    return [main[key] for key in keys if key in main]


def from_config(command: str, main: Mapping[str, str], arguments: Sequence[str]) -> list[str]:
    """The arguments that the file of --config stands for; none without such a file.

    `main` has the key of an option's main name by those of all its names.
    """
    named = [argument.partition("=")[0] for argument in arguments]
    if "--config" not in named:
        return []
    index = named.index("--config")
    _, equals, path = arguments[index].partition("=")
    path = path if equals else "".join(arguments[index + 1 : index + 2])
    values = {key.replace("-", "_"): value for key, value in read_settings(Path(path)).items()}
    written_by = values.pop(COMMAND, command)
    if written_by != command:
        raise HcLensError(
            f"expected settings of {command!r} in {path}, got those of {written_by!r}; "
            f"run hc-lens {written_by} --config {path}"
        )
    check_keys(values, [key for key in main if key not in UNWRITTEN], path)
    there = named_in(arguments, main)
    found: list[str] = []
    for key, value in values.items():
        option = f"--{key.replace('_', '-')}"
        if main[key] not in there:
            found += [
                f"{option}={each}" for each in (value if isinstance(value, list) else [value])
            ]
    return found


def help_text(command: str, sentence: str, options: Sequence[Argument]) -> str:
    """The options of a command, each with its docstring."""
    width = min(shutil.get_terminal_size().columns, 100)
    required = [f"{each.name} {_kind(each)}" for each in options if each.required]
    usage = textwrap.wrap(
        f"Usage: {' '.join(['hc-lens', command, *required, '[OPTIONS]'])}",
        width,
        subsequent_indent="    ",
        break_on_hyphens=False,
    )
    lines = [*usage, "", sentence.strip()]
    for title in TITLES:
        listed = [each for each in options if _title(each) == title]
        lines += ["", f"{title}:"] if listed else []
        for option in listed:
            lines.append(f"  {' / '.join(option.names)} {_kind(option)}".rstrip())
            lines += textwrap.wrap(
                _explained(option), width, initial_indent=" " * 6, subsequent_indent=" " * 6
            )
    return "\n".join(lines) + "\n"


def _title(option: Argument) -> str:
    groups: Any = option.parameter.group
    return groups[0].name


def _kind(option: Argument) -> str:
    """What stands after an option: nothing after a flag."""
    hint = option.resolved_hint
    if option.parameter.metavar or hint is bool:
        return option.parameter.metavar or ""
    choices = "|".join(map(str, get_args(hint)))
    return choices or {str: "TEXT", Path: "PATH"}.get(hint, "NUMBER")


def _explained(option: Argument) -> str:
    default, shown = option.field_info.default, option.parameter.show_default
    if shown is None and default not in (None, (), "", option.field_info.empty):
        shown = "" if default is False else f"{default}"
    more = " [required]" if option.required else f" [default: {shown}]" if shown else ""
    return f"{' '.join((option.parameter.help or '').split())}{more}"


def _app(run: Callable[..., None]) -> App:
    """An application with one command, which gives back the settings it reads."""
    kind = get_type_hints(run)["settings"]

    needed = any(_is_required(each) for each in dataclasses.fields(kind))
    # Cyclopts wants a default value for settings that are all optional, and only for those.
    default = None if needed else kind()
    read: Any = (lambda settings: settings) if needed else (lambda settings=default: settings)
    read.__annotations__ = {"settings": kind}
    app = App(
        help_flags=[],
        version_flags=[],
        verbose=False,
        default_parameter=Parameter(allow_repeating=True, negative_bool=(), negative_iterable=()),
    )
    app.default(read)
    return app


def _is_required(described: dataclasses.Field[Any]) -> bool:
    return described.default is described.default_factory is dataclasses.MISSING


def _is_option(option: Argument) -> bool:
    return bool(option.parse) and not option.children


def _key(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


def _missing(error: MissingArgumentError) -> str:
    """Which options are missing, or which one lacks its value."""
    option = error.argument
    assert option is not None
    if error.keyword is not None:
        return f"expected a value for {error.keyword}, got none"
    below = [each for each in option.children_recursive if _is_option(each)]
    names = [each.name for each in below if each.required and not each.has_tokens]
    strange = [token for token in error.unused_tokens or () if token.startswith("--")]
    got = f"the unknown option {strange[0]}" if strange else "none"
    return f"expected {', '.join(names or [option.name])}, got {got}"
