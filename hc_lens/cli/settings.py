"""Settings of a command as a TOML file.

1. ``--config FILE`` gives values for the options of a command. What stands on the command line
   wins. A key that the command does not have is an error that names the nearest one.
2. A command that writes results writes the settings it ran with beside them, as ``command.toml``.
   ``hc-lens prune --config runs/x/command.toml`` reads them again.
3. Keys are the options' names with ``_`` for ``-``; ``command`` names the command they belong to.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hc_lens.errors import HcLensError
from hc_lens.spec import check_keys

if TYPE_CHECKING:
    from typer import Context
else:
    # What Typer hands over is an object of the class below its own Context.
    Context = typer.Context.__base__

FILE = "command.toml"
"""Name of the settings beside the results."""
COMMAND = "command"
"""Key of the command that the settings belong to."""
UNWRITTEN = ("config", "as_json", "force", "context")
"""Parameters that say how to call a command, not what it computes."""


def read_toml(path: Path) -> dict[str, Any]:
    """The values of a TOML file; one that cannot be read is an HcLensError."""
    toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        return toml.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise HcLensError(
            f"expected a readable TOML file of settings, got {path}: {error}; "
            "write lines such as limit = 1000"
        ) from error


def write_toml(values: Mapping[str, Any]) -> str:
    """TOML of text, numbers, booleans, lists and tables; tables come last, as TOML asks."""
    plain = {key: value for key, value in values.items() if not isinstance(value, Mapping)}
    lines = [f"{_key(key)} = {_value(value)}" for key, value in plain.items()]
    for key, value in values.items():
        if isinstance(value, Mapping):
            lines += ["", f"[{_key(key)}]", *(f"{_key(k)} = {_value(v)}" for k, v in value.items())]
    return "\n".join(lines) + "\n"


def _key(key: str) -> str:
    bare = key.isascii() and key.replace("_", "").replace("-", "").isalnum()
    return key if bare else _value(key)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items()) + "}"
    # JSON escapes text as TOML does, but for the one control character above 31.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


def settings_of(command: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """What a command ran with, as plain values that go through TOML unchanged."""
    written = {
        key: value
        for key, value in values.items()
        if key not in UNWRITTEN and value is not None and value not in ([], ())
    }
    return {COMMAND: command, **{key: _plain(value) for key, value in written.items()}}


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return str(value) if isinstance(value, Path) else value


def read_config(context: Context, path: Path | None) -> Path | None:
    """Take values for the options of a command from a file; runs before any other option."""
    if path is None or context.resilient_parsing:
        return path
    given = {key.replace("-", "_"): value for key, value in read_toml(path).items()}
    command = given.pop(COMMAND, None)
    if command is not None and command != command_of(context):
        raise HcLensError(
            f"expected settings of {command_of(context)!r} in {path}, got those of {command!r}; "
            f"run hc-lens {command} --config {path}"
        )
    names = [parameter.name for parameter in context.command.params if parameter.name]
    check_keys(given, [name for name in names if name not in (*UNWRITTEN, "help")], str(path))
    context.default_map = given
    return path


def command_of(context: Context) -> str:
    """The command's name without the program's, such as ``prune`` or ``analyse extractive``."""
    return (context.info_name or "").removeprefix("hc-lens ")
