"""A stand-in for the shell of a notebook, which tells its cells apart as ipykernel does."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest


class Notebook:
    """Runs cells that show figures, and gives back their outputs as HTML."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self._id: str | None = None
        self._texts: list[str] = [""]
        self.shell = SimpleNamespace(
            execution_count=0, get_parent=self._request, user_ns={"_ih": self._texts}
        )
        monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: self.shell))

    def cells(self, *ids: str | None) -> list[Callable[..., str]]:
        """Functions that run a cell with some figures; an id is None if no front end sends one."""
        return [self._cell(name, f"cell {number}") for number, name in enumerate(ids)]

    def _cell(self, name: str | None, text: str) -> Callable[..., str]:
        def run(*figures: Any) -> str:
            self._id = name
            self._texts.append(text)
            self.shell.execution_count += 1
            return "\n".join(figure._repr_html_() for figure in figures)

        return run

    def _request(self) -> dict[str, Any]:
        return {"metadata": {} if self._id is None else {"cellId": self._id}}
