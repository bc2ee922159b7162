"""Head composition: who reads a head, through which input, and what hangs on it.

1. `weight_scores` compares what heads write with what later heads read, by weights alone.
2. `edge_effects` and `joint_effects` patch edges exactly: path patching, one by one or together.
3. `edge_attribution` is its first-order version for all edges; `agreement` compares the two.
4. `trace` does all of it for some core heads; `figure` draws what it found.
Names are imported on first use.
"""

# ruff: noqa: F401 (the names are listed for `exports`)

from __future__ import annotations

from typing import TYPE_CHECKING

from hc_lens.lazy import exports

if TYPE_CHECKING:
    from analyses.composition.config import TraceConfig
    from analyses.composition.exact import edge_effects, joint_effects
    from analyses.composition.figures import figure
    from analyses.composition.gradient import agreement, edge_attribution
    from analyses.composition.receivers import Receiver
    from analyses.composition.tracing import Trace, trace
    from analyses.composition.weights import weight_scores

__getattr__, __dir__ = exports(__name__, __file__)
