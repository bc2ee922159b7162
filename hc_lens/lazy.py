"""Public names of a package that are imported on first use.

1. A package lists its public names once, as imports below ``if TYPE_CHECKING:``, where editors and
   type checkers read them. Nothing there runs.
2. `exports` reads the same list from the source and imports a name when somebody asks for it, so
   that importing the package costs next to nothing.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def exports(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a package, from its ``__name__`` and its file.

    ``__all__`` is one of the names that ``__getattr__`` gives.
    """

    def get(name: str) -> Any:
        if name == "__all__":
            return list(_listed(file))
        # Python itself asks for names such as __path__, which are never exported.
        known = {} if name.startswith("__") else _listed(file)
        if name not in known:
            raise AttributeError(f"{package!r} has no attribute {name!r}; it has {list(known)}")
        from importlib import import_module

        module, attribute = known[name]
        found = import_module(module)
        value = getattr(found, attribute) if attribute else found
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *_listed(file)})

    return get, names


@cache
def _listed(file: str) -> dict[str, tuple[str, str]]:
    """Module and attribute of each name below ``if TYPE_CHECKING:``; no attribute for a module."""
    import ast
    from pathlib import Path

    homes: dict[str, tuple[str, str]] = {}
    for part in ast.parse(Path(file).read_text(encoding="utf-8")).body:
        if not (isinstance(part, ast.If) and ast.unparse(part.test) == "TYPE_CHECKING"):
            continue
        for line in part.body:
            if isinstance(line, ast.ImportFrom):
                homes |= {a.asname or a.name: (line.module or "", a.name) for a in line.names}
            elif isinstance(line, ast.Import):
                homes |= {a.asname or a.name: (a.name, "") for a in line.names}
    return homes
