"""Settings as frozen dataclasses, and as the plain values of a file.

1. `plain` gives the fields of a settings object that differ from their defaults, as values that
   TOML, YAML and JSON hold.
2. `make` reads them back: every name must be a field, and every value of the kind that the field's
   annotation names. Anything else is an HcLensError that names the setting and, for an unknown
   name, the nearest one. `check` makes the same demands of settings that are written in Python.
3. `read_settings` reads a ``.toml``, ``.yaml`` or ``.yml`` file; `write_toml` makes TOML. A file
   may come from anybody: its size and its depth are bounded, and YAML's aliases, by which a small
   file becomes a large value, are refused.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import itertools
import json
import re
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from hc_lens.errors import HcLensError

T = TypeVar("T")
MOST_BYTES = 200_000
"""Largest file of settings that is read."""
MOST_DEPTH = 20
"""Most tables and lists inside each other in a file of settings."""


def plain(settings: Any) -> dict[str, Any]:
    """The fields of a settings object that differ from their defaults, as plain values."""
    return {
        field.name: plain_value(value)
        for field in dataclasses.fields(settings)
        if (value := getattr(settings, field.name)) != _default(field)
    }


def plain_value(value: Any) -> Any:
    """A setting as a value that TOML, YAML and JSON hold; a function goes by its name."""
    if dataclasses.is_dataclass(value):
        return plain(value)
    if isinstance(value, Mapping):
        return {key: plain_value(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_value(inner) for inner in value]
    if isinstance(value, Path):
        return str(value)
    if callable(value):
        return getattr(value, "__qualname__", type(value).__name__)
    return value


def _default(field: dataclasses.Field[Any]) -> Any:
    """The default of a field; ``dataclasses.MISSING`` for a field that must be given."""
    factory = field.default_factory
    return field.default if factory is dataclasses.MISSING else factory()


def make(kind: type[T], values: object, where: str) -> T:
    """A settings object from plain values; `where` names them in messages."""
    table = check_table(values, where)
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    check_keys(table, [field.name for field in fields], where)
    needed = [field.name for field in fields if _default(field) is dataclasses.MISSING]
    missing = [name for name in needed if name not in table]
    if missing:
        raise HcLensError(
            f"expected {', '.join(needed)} in {where}, missing {', '.join(missing)}; add them"
        )
    hints = get_type_hints(kind)
    return kind(**{name: _read(value, hints[name], name, where) for name, value in table.items()})


def check(settings: Any, where: str) -> None:
    """Check the fields of a frozen settings object, and put copies of lists and tables there.

    For ``__post_init__``: settings that are in use must not change with the caller's own list.
    """
    hints = get_type_hints(type(settings))
    for field in dataclasses.fields(settings):
        value = _read(getattr(settings, field.name), hints[field.name], field.name, where)
        object.__setattr__(settings, field.name, value)


def check_keys(given: Iterable[object], known: Iterable[str], where: str) -> None:
    """Refuse a setting that nobody reads, and name the nearest one that is known."""
    known = list(known)
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
            raise HcLensError(f"expected only known settings in {where}, got {key!r}; {hint}")


def check_table(values: object, where: str) -> Mapping[str, Any]:
    """Settings with names, as they are; anything else is refused."""
    if not isinstance(values, Mapping):
        raise HcLensError(
            f"expected a table of settings for {where}, got {values!r}; write its entries below "
            f"a heading [{where.split(' ')[0]}]"
        )
    for name in values:
        if not isinstance(name, str) or not name:
            raise HcLensError(f"expected names as text in {where}, got {name!r}; put it in quotes")
    return values


_PLAIN: dict[Any, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number such as 0.001"),
    str: ((str, Path), "text"),
    Path: ((str, Path), "a path"),
}
"""What may be given for a plain kind of value, and how a message calls it."""


def _read(value: Any, hint: Any, name: str, where: str) -> Any:
    """A plain value as the kind of value that an annotation asks for."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _read_any_of(value, inner, name, where)
    if origin in (tuple, list, Sequence):
        return _read_list(value, hint, name, where)
    if origin in (dict, Mapping):
        table = check_table(value, f"{name} of {where}")
        return {key: _read(entry, inner[1], f"{name}.{key}", where) for key, entry in table.items()}
    if origin is Literal and value not in inner:
        raise _refuse(f"one of {list(inner)}", value, name, where)
    if hint in _PLAIN:
        kinds, what = _PLAIN[hint]
        if not isinstance(value, kinds) or (isinstance(value, bool) and hint is not bool):
            raise _refuse(what, value, name, where)
        if isinstance(value, int) and abs(value) >= 2**63:
            raise HcLensError(
                f"expected a number of at most 64 bits for {name} in {where}, got one of "
                f"{value.bit_length()} bits; correct it"
            )
        return hint(value)
    if dataclasses.is_dataclass(hint) and not isinstance(value, hint):  # type: ignore[arg-type]
        return make(hint, value, f"{name} of {where}")  # type: ignore[arg-type]
    return value


def _refuse(what: str, value: Any, name: str, where: str) -> HcLensError:
    return HcLensError(f"expected {what} for {name} in {where}, got {value!r}; correct it")


def _read_any_of(value: Any, options: tuple[Any, ...], name: str, where: str) -> Any:
    if value is None and type(None) in options:
        return None
    errors: list[HcLensError] = []
    for option in options:
        if option is not type(None):
            try:
                return _read(value, option, name, where)
            except HcLensError as error:
                errors.append(error)
    raise errors[0]


def _read_list(value: Any, hint: Any, name: str, where: str) -> Any:
    if not isinstance(value, (list, tuple)):
        raise _refuse("a list", value, name, where)
    kinds = list(get_args(hint))
    if get_origin(hint) is not tuple or kinds[1:] == [Ellipsis]:
        kinds = kinds[:1] * len(value)
    if len(kinds) != len(value):
        raise _refuse(f"a list of {len(kinds)}", value, name, where)
    found = [_read(each, kind, name, where) for each, kind in zip(value, kinds, strict=True)]
    return tuple(found) if get_origin(hint) is tuple else found


_PARSERS = {
    # Python 3.10 has no tomllib; tomli is the same under another name.
    ".toml": ("tomllib" if sys.version_info >= (3, 11) else "tomli", "loads"),
    ".yaml": ("yaml", "safe_load"),
    ".yml": ("yaml", "safe_load"),
}
"""Module and function that read each kind of file."""
_TOML_MARKS = re.compile(
    # Texts, also one that nothing ends: a search that fails would begin again at every quote.
    r'"""(?:[^\\]|\\.?)*?(?:"""|\Z)|"(?:[^"\\\n]|\\.?)*"?'
    r"|'''.*?(?:'''|\Z)|'[^'\n]*'?"
    r"|#[^\n]*|[][{}=,.\n]",
    re.DOTALL,
)
"""What gives TOML its structure, and the texts and comments in which such marks mean nothing."""


def read_settings(path: Path) -> dict[str, Any]:
    """The values of a ``.toml``, ``.yaml`` or ``.yml`` file."""
    if path.suffix not in _PARSERS:
        raise HcLensError(
            f"expected a .toml, .yaml or .yml file of settings, got {path}; rename it"
        )
    module, function = _PARSERS[path.suffix]
    parser = importlib.import_module(module)
    try:
        with open(path, "rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise ValueError(f"more than {MOST_BYTES} bytes")
        text = content.decode("utf-8")
        # Before it is parsed: parsers call themselves for what is inside, and TOML's keeps every
        # beginning of a dotted key.
        _check_depth(_nesting_of_yaml(text) if module == "yaml" else _nesting_of_toml(text))
        values = getattr(parser, function)(text)
        _check_depth(_levels([values]))
    except Exception as error:  # each parser has errors of its own
        raise HcLensError(
            f"expected a readable file of settings, got {path}: {error}; write lines such as "
            "limit = 1000"
        ) from error
    return dict(check_table(values, path.name))


def _check_depth(changes: Iterable[int]) -> None:
    """Refuse what opens more tables and lists inside each other than settings have."""
    # What is no TOML may close more than was opened.
    depths = itertools.accumulate(changes, lambda depth, change: max(depth + change, 0))
    if any(depth > MOST_DEPTH for depth in depths):
        raise ValueError(f"more than {MOST_DEPTH} tables or lists inside each other")


def _nesting_of_toml(text: str) -> Iterator[int]:
    """What each bracket of TOML opens (1) or closes (-1), and each dot of a key until it ends."""
    dots = 0
    for mark in (found[0] for found in _TOML_MARKS.finditer(text)):
        if mark == ".":
            dots += 1
            yield 1
        elif mark in "[]{}=,\n":
            yield -dots
            dots = 0
            yield (mark in "[{") - (mark in "]}")


def _nesting_of_yaml(text: str) -> Iterator[int]:
    """What each part of YAML opens (1) or closes (-1); an alias is a ValueError."""
    import yaml

    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            raise ValueError(f"the alias *{event.anchor}; write the value itself")
        yield isinstance(event, yaml.CollectionStartEvent)
        yield -isinstance(event, yaml.CollectionEndEvent)


def _levels(values: Any) -> Iterator[int]:
    """1 for each level of tables and lists, also of those that dotted keys of TOML make."""
    level = [values]
    while level:
        yield 1
        inside = (each.values() if isinstance(each, Mapping) else each for each in level)
        level = [each for some in inside for each in some if isinstance(each, (Mapping, list))]


def write_toml(values: Mapping[str, Any]) -> str:
    """TOML of text, numbers, booleans, lists and tables; tables come last, as TOML asks."""
    tables = {key: value for key, value in values.items() if isinstance(value, Mapping)}
    lines = _entries({key: value for key, value in values.items() if key not in tables})
    for key, table in tables.items():
        lines += ["", f"[{_key(key)}]", *_entries(table)]
    return "\n".join(lines) + "\n"


def _entries(table: Mapping[str, Any]) -> list[str]:
    return [f"{_key(key)} = {_value(value)}" for key, value in table.items()]


def _key(key: str) -> str:
    bare = key.isascii() and key.replace("_", "").replace("-", "").isalnum()
    return key if bare else _value(key)


def _value(value: Any) -> str:
    if isinstance(value, float):
        return repr(float(value))
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(_entries(value)) + "}"
    # JSON writes whole numbers, booleans and text as TOML does, but for one control character.
    return json.dumps(value, default=str, ensure_ascii=False).replace("\x7f", "\\u007f")
