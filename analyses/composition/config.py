"""Settings of the analysis of head composition."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hc_lens.errors import HcLensError, check_choice

FROZEN, RECOMPUTED = "frozen", "recomputed"
NORMS = (FROZEN, RECOMPUTED)
Norms = Literal["frozen", "recomputed"]
"""How a sender's direct contribution passes layer norms, as a user chooses it."""


@dataclass(frozen=True)
class TraceConfig:
    """How `trace` follows the edges of the core heads."""

    top: int = 10
    """How many edges of each core unit are patched together."""
    norms: Norms = RECOMPUTED
    """How contributions pass layer norms: "recomputed", with which all edges of a unit together are
    its ablation, or "frozen", with the scales of the clean run."""
    steps: int = 0
    """Integration steps of the gradient attribution; 0 is the plain gradient."""
    limit: int | None = None
    """At most so many rows of each dataset; None for all."""

    def __post_init__(self) -> None:
        check_choice("norms", self.norms, NORMS)
        check_count("steps as a number", self.steps, 0)
        check_count("top as a number of edges", self.top, 1)


def check_count(what: str, given: object, least: int) -> None:
    """Refuse anything but a whole number of at least `least`."""
    if isinstance(given, bool) or not isinstance(given, int) or given < least:
        raise HcLensError(f"expected {what} of at least {least}, got {given!r}; raise it")
