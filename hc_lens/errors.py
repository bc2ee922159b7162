"""The one exception that hc_lens raises for input it cannot use, and other errors in its words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

MOST_SHOWN = 20
"""Most known names that a message lists."""


class HcLensError(ValueError):
    """Input that hc_lens cannot use: says what was expected, what was given and what to do."""

    finished: Any = None
    """What had been finished before the error, where there is something worth keeping."""


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
