"""The one exception of hc_lens, for input it cannot use; other errors in its words; warnings."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from typing import Any

MOST_SHOWN = 20
"""Most known names that a message lists."""


class HcLensError(ValueError):
    """Input that hc_lens cannot use: says what was expected, what was given and what to do."""

    finished: Any = None
    """What had been finished before the error, where there is something worth keeping."""


class HcLensWarning(UserWarning):
    """What a user should know of a result that is computed all the same."""


def first_line(error: BaseException) -> str:
    """What an error of another package says, in one line: its type and its first line."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def check_choice(name: str, given: object, known: Iterable[object]) -> None:
    """Refuse anything but one of the known choices; `name` says what is chosen."""
    choices = list(known)
    if given not in choices:
        more = f" and {len(choices) - MOST_SHOWN} more" if len(choices) > MOST_SHOWN else ""
        raise HcLensError(
            f"expected {name} among {choices[:MOST_SHOWN]}{more}, got {given!r}; choose one"
        )


def check_count(what: str, given: object, least: int = 1) -> None:
    """Refuse anything but a whole number of at least `least`; `what` names the setting."""
    if isinstance(given, bool) or not isinstance(given, int) or given < least:
        raise HcLensError(
            f"expected {what} as a whole number of at least {least}, got {given!r}; correct it"
        )


def warn(message: str, category: type[HcLensWarning]) -> None:
    """Warn at the line of the first caller outside hc_lens."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").startswith("hc_lens"):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
