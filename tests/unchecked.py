"""Settings as an untyped caller makes them, past the type checker of the test suite."""

from __future__ import annotations

from typing import Any


def checked_again(config: Any, **values: Any) -> None:
    """Put values into settings and run their own checks."""
    for name, value in values.items():
        object.__setattr__(config, name, value)
    config.__post_init__()
