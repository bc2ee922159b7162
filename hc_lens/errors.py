"""The one exception that hc_lens raises for input it cannot use."""

from __future__ import annotations

from typing import Any


class HcLensError(ValueError):
    """Input that hc_lens cannot use: says what was expected, what was given and what to do."""

    finished: Any = None
    """What had been finished before the error, where there is something worth keeping."""
