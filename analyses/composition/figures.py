"""The strongest edges of a trace as a graph, layer above layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch

from hc_lens.analyses.composition.receivers import LAST
from hc_lens.analyses.style import BLUE, GREEN, GREY, PALE, RED, legend, panels
from hc_lens.errors import check_count
from hc_lens.units import Unit

if TYPE_CHECKING:
    from hc_lens.analyses.composition.tracing import Trace

COLOURS = {"q": BLUE, "k": RED, "v": GREEN, "mlp": GREY, **dict.fromkeys(LAST, "black")}
"""Colours of the kinds."""
_BEND = {"q": 0.25, "k": 0.1, "v": -0.12, "mlp": 0.06, **dict.fromkeys(LAST, -0.2)}
"""Edges of different kinds between the same nodes are bent apart."""
WIDEST = 7.0

Position = tuple[float, float]
"""Where a node stands: across and up."""


def figure(trace: Trace, *, n_edges: int = 25, dataset: str | None = None) -> Figure:
    """Nodes layer by layer from below; width is the effect of an edge, colour its kind.

    The effect is the KL divergence in a dataset, by default the mean over datasets, and the edges
    are those with the largest.
    """
    check_count("n_edges", n_edges)
    edges = trace.strongest(n_edges, dataset)
    positions = _positions([*edges["sender"], *edges["receiver"]], trace.core)
    across, heights = zip(*positions.values(), strict=True)
    size = (max(7.0, 1.3 * (max(across) - min(across)) + 3.0), 1.7 * (max(heights) + 1))
    drawing, (axes,) = panels(size)
    largest = float(edges["kl"].max()) or 1.0
    for edge in edges.iloc[::-1].itertuples():
        _draw_edge(axes, positions, edge, largest)
    for name, position in positions.items():
        in_core = name in trace.core
        axes.text(
            *position,
            name,
            ha="center",
            va="center",
            fontsize=9,
            fontweight="bold" if in_core else "normal",
            zorder=3,
            bbox={"boxstyle": "round,pad=0.35", "facecolor": PALE if in_core else "white"},
        )
    layers = sorted({Unit.parse(name).layer for name in positions if name not in LAST})
    where = dataset or "mean over " + ", ".join(trace.edges["dataset"].unique())
    axes.set(
        xlim=(min(across) - 0.6, max(across) + 0.6),
        ylim=(min(heights) - 0.3, max(heights) + 0.3),
        xticks=[],
        title=f"{len(edges)} strongest edges of the core heads ({where})",
    )
    axes.set_yticks(layers, [f"layer {layer}" for layer in layers])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    title = "colour: read as\nwidth: KL divergence (nats)"
    legend(drawing, side="right", handles=_lines(edges, largest), title=title)
    return drawing


def _positions(names: list[str], core: tuple[str, ...]) -> dict[str, Position]:
    """Where each node stands: heads by layer and number, MLPs in a column of their own."""
    given = [name for name in dict.fromkeys([*core, *names]) if name not in LAST]
    units = {name: Unit.parse(name) for name in given}
    columns = sorted({unit.head for unit in units.values() if unit.head is not None})
    top = 1.0 + max(unit.layer for unit in units.values())
    positions: dict[str, Position] = {}
    for name, unit in units.items():
        head = unit.head
        across = len(columns) + 0.3 if head is None else float(columns.index(head))
        positions[name] = (across, unit.layer + (0.5 if head is None else 0.0))
    last = {name: ((len(columns) - 1) / 2, top) for name in LAST if name in names}
    return positions | last


def _draw_edge(axes: Axes, positions: dict[str, Position], edge: Any, largest: float) -> None:
    arrow = FancyArrowPatch(
        positions[edge.sender],
        positions[edge.receiver],
        connectionstyle=f"arc3,rad={_BEND[edge.kind]}",
        arrowstyle="-",
        linewidth=max(0.5, WIDEST * edge.kl / largest),
        color=COLOURS[edge.kind],
        alpha=0.75,
        zorder=1,
        shrinkA=12,
        shrinkB=12,
    )
    axes.add_patch(arrow)


def _lines(edges: pd.DataFrame, largest: float) -> list[Line2D]:
    """Samples of the colours and of the widths."""
    kinds = [kind for kind in COLOURS if kind in set(edges["kind"])]
    lines = [Line2D([], [], color=COLOURS[kind], linewidth=3, label=kind) for kind in kinds]
    return lines + [
        Line2D([], [], color="0.4", linewidth=WIDEST * part, label=f"{part * largest:.2g}")
        for part in (1.0, 0.5, 0.1)
    ]
