"""Head composition: who reads a head, through which input, and what depends on it.

`trace` asks this of some core heads, by weights, exactly and by gradient; `figure` draws it. Names
are imported on first use.
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
