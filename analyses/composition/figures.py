"""The strongest edges of a trace as a graph, layer above layer."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch

from analyses.composition.receivers import CLASSIFIER
from analyses.composition.tracing import Trace, strongest
from hc_lens.errors import HcLensError
from hc_lens.units import Unit

COLOURS = {
    "q": "#0072B2",
    "k": "#D55E00",
    "v": "#009E73",
    "mlp": "#7F7F7F",
    CLASSIFIER: "#000000",
}
"""Colours of the kinds, told apart by colour-blind readers."""
WIDEST = 7.0
MEASURES = {
    "kl": "KL divergence (nats)",
    "accuracy_change": "change of accuracy",
    "margin_change": "change of the margin",
}


def figure(
    trace: Trace, *, n_edges: int = 25, dataset: str | None = None, measure: str = "kl"
) -> Figure:
    """Nodes layer by layer from below; width is the effect of an edge, colour its kind.

    Args:
        trace: what `trace` returned.
        n_edges: how many edges to draw, those with the largest KL divergence.
        dataset: the effect in this dataset; default the mean over datasets.
        measure: what the width shows: ``"kl"``, ``"accuracy_change"`` or ``"margin_change"``, the
            last two in size (dashed where patching raises them).
    """
    if measure not in MEASURES:
        raise HcLensError(f"expected a measure among {list(MEASURES)}, got {measure!r}; choose one")
    if isinstance(n_edges, bool) or not isinstance(n_edges, int) or n_edges < 1:
        raise HcLensError(f"expected n_edges of at least 1, got {n_edges!r}; raise it")
    edges = strongest(trace.edges, n_edges, dataset)
    places = _places([*edges["sender"], *edges["receiver"]], trace.core)
    across, heights = zip(*places.values(), strict=True)
    size = (max(7.0, 1.3 * (max(across) - min(across)) + 3.0), 1.7 * (max(heights) + 1))
    drawing = Figure(figsize=size, layout="constrained")
    axes = drawing.subplots()
    largest = float(edges[measure].abs().max()) or 1.0
    for edge in edges.iloc[::-1].itertuples():
        value = float(getattr(edge, measure))
        _draw_edge(axes, places, edge, abs(value) / largest, measure != "kl" and value > 0)
    for name, (x, y) in places.items():
        _draw_node(axes, name, x, y, name in trace.core)
    _frame(axes, places)
    _legend(axes, edges, largest, measure)
    where = dataset or "mean over " + ", ".join(trace.edges["dataset"].unique())
    axes.set_title(f"{len(edges)} strongest edges of the core heads ({where})", fontsize=11)
    return drawing


def _places(names: list[str], core: tuple[str, ...]) -> dict[str, tuple[float, float]]:
    """Where each node stands: heads by layer and number, MLPs in a column of their own."""
    given = [name for name in dict.fromkeys([*core, *names]) if name != CLASSIFIER]
    units = {name: Unit.parse(name) for name in given}
    columns = sorted({unit.head for unit in units.values() if unit.head is not None})
    top = 1.0 + max(unit.layer for unit in units.values())
    places = {}
    for name, unit in units.items():
        if unit.head is None:
            places[name] = (len(columns) + 0.3, unit.layer + 0.5)
        else:
            places[name] = (float(columns.index(unit.head)), float(unit.layer))
    if CLASSIFIER in names:
        places[CLASSIFIER] = ((len(columns) - 1) / 2, top)
    return places


_BEND = {"q": 0.25, "k": 0.1, "v": -0.12, "mlp": 0.06, CLASSIFIER: -0.2}
"""Edges of different kinds between the same nodes are bent apart."""


def _draw_edge(axes: Axes, places: dict, edge: Any, share: float, raises: bool) -> None:
    arrow = FancyArrowPatch(
        places[edge.sender],
        places[edge.receiver],
        connectionstyle=f"arc3,rad={_BEND[edge.kind]}",
        arrowstyle="-",
        linewidth=max(0.5, WIDEST * share),
        linestyle="--" if raises else "-",
        color=COLOURS[edge.kind],
        alpha=0.75,
        zorder=1,
        shrinkA=12,
        shrinkB=12,
    )
    axes.add_patch(arrow)


def _draw_node(axes: Axes, name: str, x: float, y: float, in_core: bool) -> None:
    axes.text(
        x,
        y,
        name,
        ha="center",
        va="center",
        fontsize=9,
        fontweight="bold" if in_core else "normal",
        zorder=3,
        bbox={
            "boxstyle": "round,pad=0.35",
            "facecolor": "#FFE08A" if in_core else "white",
            "edgecolor": "black",
            "linewidth": 0.8,
        },
    )


def _frame(axes: Axes, places: dict[str, tuple[float, float]]) -> None:
    across, heights = zip(*places.values(), strict=True)
    axes.set_xlim(min(across) - 0.6, max(across) + 0.6)
    axes.set_ylim(min(heights) - 0.3, max(heights) + 0.3)
    layers = sorted({Unit.parse(name).layer for name in places if name != CLASSIFIER})
    axes.set_yticks(layers, [f"layer {layer}" for layer in layers], fontsize=9)
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _legend(axes: Axes, edges: pd.DataFrame, largest: float, measure: str) -> None:
    kinds = [kind for kind in COLOURS if kind in set(edges["kind"])]
    lines = [Line2D([], [], color=COLOURS[kind], linewidth=3, label=kind) for kind in kinds]
    lines += [
        Line2D([], [], color="0.4", linewidth=WIDEST * part, label=f"{part * largest:.2g}")
        for part in (1.0, 0.5, 0.1)
    ]
    axes.legend(
        handles=lines,
        loc="center left",
        bbox_to_anchor=(1.0, 0.5),
        frameon=False,
        fontsize=9,
        title=f"colour: read as\nwidth: {MEASURES[measure]}",
        title_fontsize=9,
    )
