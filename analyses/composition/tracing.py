"""Who reads the core heads, how much of their effect that explains, and who depends on them.

1. Every edge of every core head is patched alone (`edge_effects`), attributed by gradient
   (`edge_attribution`) and scored by weights (`weight_scores`): the table `edges`.
2. The `top` edges of each core head, by their mean KL divergence over the datasets, are patched
   together, and so are all of its edges; both are compared with ablating the head: `explained`.
   The edges are chosen and measured on the same rows.
3. For each head outside the core, what all core heads contribute to its q, k and v is replaced at
   once; the effect is set beside that of ablating the head itself: `dependents`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from hc_lens.analyses.composition.config import TraceConfig
from hc_lens.analyses.composition.exact import (
    ALL,
    EDGE,
    MEASURES,
    TOTAL,
    change_of,
    edge_effects,
    joint_effects,
    strongest,
)
from hc_lens.analyses.composition.figures import figure
from hc_lens.analyses.composition.gradient import agreement, check_attributed, edge_attribution
from hc_lens.analyses.composition.receivers import (
    INPUTS,
    WHOLE,
    Heard,
    Receiver,
    Sender,
    reads_after,
)
from hc_lens.analyses.composition.weights import weight_scores
from hc_lens.errors import HcLensError
from hc_lens.masks.replacements import Source
from hc_lens.metrics import KL, MARGIN, NAMED, over_cases
from hc_lens.protocols import BatchesLike, Model
from hc_lens.records import json_bytes, read_table, sealed, table_bytes, unsealed, write_file
from hc_lens.scans.scan import scan
from hc_lens.units import Unit, UnitSet, UnitSpace, as_units

FORMAT = "hc_lens.composition.2"
_TABLES = ("edges", "explained", "dependents", "agreement")
_COMPARED = [KL, "accuracy_change", "margin_change"]
_HEAD_COLUMNS = ["head", "dataset", "case", "n", *MEASURES, "ablated_kl", "ablated_accuracy_change"]


@dataclass(frozen=True, eq=False)
class Trace:
    """What `trace` found."""

    core: tuple[str, ...]
    """The core units, in the order in which the model runs them."""
    norms: str
    """How contributions passed layer norms."""
    metric: str
    """The metric whose change was attributed."""
    edges: pd.DataFrame
    """For each edge, dataset and case the columns of `edge_effects`, attribution (of the change of
    the metric), weight_score and weight_excess (over random bases; NaN for an MLP's edges)."""
    explained: pd.DataFrame
    """sender, patched (``top`` or ``all``), receivers, n_edges, dataset, case, n; kl,
    accuracy_change and margin_change of the joint patch, the same of ablating the sender as
    total_..., and share = kl / total_kl."""
    dependents: pd.DataFrame
    """head, dataset, case, n, the measures of cutting all core heads off from its q, k and v, and
    ablated_kl, ablated_accuracy_change of ablating the head. The most dependent heads first."""
    agreement: pd.DataFrame
    """dataset, edges (``top`` 20 or ``all``), n, spearman: rank correlation of attribution with
    the exact change."""

    def strongest(self, n: int = 10, dataset: str | None = None) -> pd.DataFrame:
        """The n edges with the largest mean KL divergence, over all datasets or in one."""
        return strongest(self.edges, n, dataset)

    def figure(self, **settings: Any) -> Figure:
        """The graph of the strongest edges; see `figure`."""
        return figure(self, **settings)

    def save(self, folder: str | Path) -> Path:
        """Write the tables as CSV files and the rest as JSON into a folder."""
        path = Path(folder)
        tables = {name: table_bytes(getattr(self, name)) for name in _TABLES}
        for name, content in tables.items():
            write_file(path / f"{name}.csv", content)
        about = {name: getattr(self, name) for name in ("core", "norms", "metric")}
        about["format"] = FORMAT
        write_file(path / "trace.json", json_bytes(sealed(about, *tables.values())))
        return path

    @classmethod
    def load(cls, folder: str | Path) -> Trace:
        """Read what `save` wrote."""
        path = Path(folder)
        try:
            contents = [(path / f"{name}.csv").read_bytes() for name in _TABLES]
            about = unsealed((path / "trace.json").read_bytes(), *contents)
            if about.get("format") != FORMAT:
                raise ValueError(f"format {about.get('format')!r}")
            tables = dict(zip(_TABLES, map(read_table, contents), strict=True))
            # Older files attribute the margin and do not say so.
            fields = tuple(about["core"]), about["norms"], about.get("metric", MARGIN)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise HcLensError(
                f"expected a folder that Trace.save wrote ({FORMAT}), got {path}: {error}; trace "
                "again, or check the path"
            ) from error
        return cls(*fields, **tables)


def trace(
    model: Model,
    datasets: Mapping[str, BatchesLike] | BatchesLike,
    means: Source | str,
    core: Sequence[Unit | str] | str,
    config: TraceConfig | None = None,
    *,
    progress: bool = True,
) -> Trace:
    """Trace the edges of the core units, such as ``["L0.H6", "L1.H1"]``.

    The model, the datasets and the means are those of `edge_effects`.
    """
    config = TraceConfig() if config is None else config
    units, space = as_units(core), UnitSpace.of(model)
    space.indices(units)
    if not units:
        raise HcLensError("expected at least one core unit, got none; give core=['L0.H6', ...]")
    check_attributed(config.metric)
    given = (model, datasets, means)
    settings: dict[str, Any] = {"limit": config.limit, "progress": progress}
    patching: dict[str, Any] = {"norms": config.norms, **settings}
    metric = NAMED[config.metric]  # one metric has two names; its column has one
    exact = edge_effects(*given, units, metrics=[metric], **patching)
    found = edge_attribution(*given, units, metric=metric, steps=config.steps, **patching)
    joint = joint_effects(*given, _paths(exact, config.top), **patching)
    dependents = pd.DataFrame(columns=_HEAD_COLUMNS)
    others = [head for head in space.heads if head not in units]
    readers = [str(head) for head in others if reads_after(model, Receiver(head, WHOLE), units)]
    if readers:
        cut_off = edge_effects(*given, [units], readers, **patching)
        dependents = _dependents(cut_off, scan(*given, readers, **settings))
    return Trace(
        core=tuple(map(str, units)),
        norms=config.norms,
        metric=config.metric,
        edges=_with_scores(exact, found, model, units),
        explained=_explained(joint),
        dependents=dependents,
        agreement=agreement(exact, found, change=change_of(metric)),
    )


def _with_scores(
    exact: pd.DataFrame, found: pd.DataFrame, model: Model, units: Sender
) -> pd.DataFrame:
    """The exact effects with the attributions and, for heads, the scores by weights."""
    edges = exact.merge(found, how="left", validate="one_to_one")
    heads = [unit for unit in units if unit.is_head]
    if not heads:
        return edges.assign(weight_score=float("nan"), weight_excess=float("nan"))
    # Scores do not depend on the norms' scales, so no rows are needed.
    scores = weight_scores(model, senders=heads, progress=False).set_index(EDGE)
    chosen = scores[["score", "excess"]].add_prefix("weight_").reset_index()
    return edges.merge(chosen, how="left", validate="many_to_one")


def _paths(exact: pd.DataFrame, top: int) -> list[tuple[UnitSet, Heard]]:
    """For each sender its strongest edges, and all of them."""
    paths: list[tuple[UnitSet, Heard]] = []
    for sender, edges in exact.groupby("sender", sort=False):
        best = strongest(edges, top)
        names = zip(best["receiver"], best["kind"], strict=True)
        labels = [f"{name}.{kind}" if kind in INPUTS else name for name, kind in names]
        paths += [(str(sender), labels), (str(sender), ALL)]
    return paths


def _explained(joint: pd.DataFrame) -> pd.DataFrame:
    """The edges that were patched together against ablating their sender."""
    by = ["sender", "dataset", "case"]
    ablated = joint["receivers"] == TOTAL
    total = joint[ablated].set_index(by)[_COMPARED].add_prefix("total_").reset_index()
    table = joint[~ablated].merge(total)
    table["patched"] = table["receivers"].where(table["receivers"] == ALL, "top")
    table["share"] = table["kl"] / table["total_kl"]
    columns = ["sender", "patched", "receivers", "n_edges", "dataset", "case", "n"]
    pairs = [name for measure in _COMPARED for name in (measure, f"total_{measure}")]
    return table[[*columns, *pairs, "share"]]


def _dependents(cut_off: pd.DataFrame, alone: pd.DataFrame) -> pd.DataFrame:
    """Heads without what the core contributes to their inputs, beside the heads ablated."""
    by = ["head", "dataset", "case"]
    ablated = alone.rename(columns={"set": "head"}).set_index(by)[[KL, "accuracy_change"]]
    named = cut_off.rename(columns={"receiver": "head"})
    merged = named.merge(ablated.add_prefix("ablated_").reset_index())
    means: Any = over_cases(merged, ["dataset", "head"], [KL]).groupby("head")[KL].mean()
    order = means.sort_values(ascending=False, kind="stable").index
    ordered = merged.sort_values("head", key=order.get_indexer, kind="stable", ignore_index=True)
    return ordered.reindex(columns=_HEAD_COLUMNS)
