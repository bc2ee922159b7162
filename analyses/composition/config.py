"""Settings of the analysis of head composition; nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from hc_lens.errors import check_choice, check_count

Norms = Literal["frozen", "recomputed"]
"""How a sender's direct contribution passes layer norms; `passes` has the formulas."""


@dataclass(frozen=True)
class TraceConfig:
    """How `trace` follows the edges of the core heads."""

    top: int = 10
    """How many edges of each core unit are patched together."""
    norms: Norms = "recomputed"
    """How contributions pass layer norms: "recomputed", with which all edges of a unit together are
    its ablation, or "frozen", with the scales of the clean run."""
    metric: str = "margin"
    """Metric whose change is attributed by gradient: margin (of what the model predicts),
    logit_difference or log_odds of the right answer, probability or loss."""
    steps: int = 0
    """Integration steps of the gradient attribution; 0 is the plain gradient."""
    limit: int | None = None
    """At most so many rows of each dataset; None for all."""

    def __post_init__(self) -> None:
        check_choice("norms", self.norms, get_args(Norms))
        check_count("steps", self.steps, 0)
        check_count("top", self.top)
