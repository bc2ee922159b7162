"""Head composition: who reads a head, through which input, and what depends on it.

`trace` asks this of some core heads, by weights, exactly and by gradient; `figure` draws it. Names
are imported on first use.
"""

# ruff: noqa: F401 (the names are listed for `exports`)

from __future__ import annotations

from typing import TYPE_CHECKING

from hc_lens.lazy import exports

if TYPE_CHECKING:
    from hc_lens.analyses.composition.config import TraceConfig
    from hc_lens.analyses.composition.exact import edge_effects, joint_effects
    from hc_lens.analyses.composition.figures import figure
    from hc_lens.analyses.composition.gradient import agreement, edge_attribution
    from hc_lens.analyses.composition.receivers import Receiver
    from hc_lens.analyses.composition.top import top_edges
    from hc_lens.analyses.composition.tracing import Trace, trace
    from hc_lens.analyses.composition.weights import weight_scores

__getattr__, __dir__ = exports(__name__, __file__)
