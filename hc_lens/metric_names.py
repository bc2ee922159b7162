"""The names of metrics with a derivative; settings read them here without torch."""

from __future__ import annotations

from typing import Literal

SmoothName = Literal["kl", "logit_difference", "logit", "log_odds", "probability", "loss", "margin"]
"""What can be a loss of pruning and importance (`hc_lens.metrics` computes them)."""
