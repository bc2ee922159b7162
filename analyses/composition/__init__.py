"""Head composition: who reads a head, through which input, and what hangs on it.

1. `weight_scores` compares what heads write with what later heads read, by weights alone.
2. `edge_effects` and `joint_effects` patch edges exactly: path patching, one by one or together.
3. `edge_attribution` is its first-order version for all edges; `agreement` compares the two.
4. `trace` does all of it for some core heads; `figure` draws what it found.
Names are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from analyses.composition.exact import edge_effects, joint_effects
    from analyses.composition.figures import figure
    from analyses.composition.gradient import agreement, edge_attribution
    from analyses.composition.receivers import Receiver
    from analyses.composition.tracing import Trace, trace
    from analyses.composition.weights import weight_scores

_HOME = {
    "trace": "tracing",
    "Trace": "tracing",
    "figure": "figures",
    "edge_effects": "exact",
    "joint_effects": "exact",
    "edge_attribution": "gradient",
    "agreement": "gradient",
    "weight_scores": "weights",
    "Receiver": "receivers",
}

__all__ = [
    "Receiver",
    "Trace",
    "agreement",
    "edge_attribution",
    "edge_effects",
    "figure",
    "joint_effects",
    "trace",
    "weight_scores",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {__all__}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
