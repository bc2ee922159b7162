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

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from analyses.composition.exact import ALL, TOTAL, edge_effects, joint_effects
from analyses.composition.gradient import agreement, edge_attribution
from analyses.composition.layers import RECOMPUTED, check_supported
from analyses.composition.measures import MEASURES, over_cases
from analyses.composition.receivers import WHOLE, Receiver, reads_after
from analyses.composition.weights import weight_scores
from hc_lens.errors import HcLensError
from hc_lens.scan import scan
from hc_lens.sources import Source
from hc_lens.suffix.sets import UnitSet, as_units, set_label
from hc_lens.units import Unit, UnitSpace

FORMAT = "hc_lens.composition.1"
EDGE = ["sender", "receiver", "kind"]
"""The columns that name an edge."""
TOP = "top"
_TABLES = ("edges", "explained", "dependents", "agreement")
_COMPARED = ("kl", "accuracy_change", "margin_change")
_HEAD_COLUMNS = ["head", "dataset", "case", "n", *MEASURES, "ablated_kl", "ablated_accuracy_change"]


@dataclass(frozen=True, eq=False)
class Trace:
    """What `trace` found."""

    core: tuple[str, ...]
    """The core units, in the order in which the model runs them."""
    norms: str
    """How contributions passed layer norms."""
    edges: pd.DataFrame
    """One row per edge, dataset and case: the columns of `edge_effects`, attribution (of the
    margin_change), weight_score and weight_excess (over random bases; NaN for an MLP's edges)."""
    explained: pd.DataFrame
    """sender, patched (``top`` or ``all``), receivers, n_edges, dataset, case, n; kl,
    accuracy_change and margin_change of the joint patch, the same of ablating the sender as
    total_..., and share = kl / total_kl."""
    dependents: pd.DataFrame
    """head, dataset, case, n, the measures of cutting all core heads off from its q, k and v, and
    ablated_kl, ablated_accuracy_change of ablating the head. The most dependent heads first."""
    agreement: pd.DataFrame
    """dataset, edges (``top`` 20 or ``all``), n, spearman: rank correlation of attribution with
    margin_change."""

    def strongest(self, n: int = 10, dataset: str | None = None) -> pd.DataFrame:
        """The n edges with the largest mean KL divergence, over all datasets or in one."""
        return strongest(self.edges, n, dataset)

    def figure(self, **settings: Any) -> Any:
        """The graph of the strongest edges; see `figure`."""
        from analyses.composition.figures import figure

        return figure(self, **settings)

    def save(self, folder: str | Path) -> Path:
        """Write the tables as parquet files, and the rest as JSON."""
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        for name in _TABLES:
            getattr(self, name).to_parquet(place / f"{name}.parquet", index=False)
        about = {"format": FORMAT, "core": list(self.core), "norms": self.norms}
        (place / "trace.json").write_text(json.dumps(about, indent=2) + "\n")
        return place

    @classmethod
    def load(cls, folder: str | Path) -> Trace:
        """Read what `save` wrote."""
        place = Path(folder)
        try:
            about = json.loads((place / "trace.json").read_text())
            if about.get("format") != FORMAT:
                raise ValueError(f"format {about.get('format')!r}")
            tables = {name: pd.read_parquet(place / f"{name}.parquet") for name in _TABLES}
        except (OSError, ValueError, AttributeError) as error:
            raise HcLensError(
                f"expected a folder that Trace.save wrote ({FORMAT}), got {place}: {error}; trace "
                "again, or check the path"
            ) from error
        return cls(tuple(about["core"]), about["norms"], **tables)


def trace(
    model: Any,
    datasets: Mapping[str, Any] | Any,
    means: Source | str,
    core: Sequence[Unit | str],
    *,
    top: int = 10,
    norms: str = RECOMPUTED,
    steps: int = 0,
    limit: int | None = None,
    progress: bool = True,
) -> Trace:
    """Trace the edges of the core heads.

    Args:
        model: a classifier of `hc.load`, without hooks.
        datasets: batches by name, such as ``{"id": ..., "ood": ...}``.
        means: what replaces a sender's activation.
        core: labels of the core units, such as ``["L0.H6", "L1.H1"]``.
        top: how many edges of each core unit are patched together.
        norms: how contributions pass layer norms: ``"recomputed"``, with which all edges of a unit
            together are its ablation, or ``"frozen"``.
        steps: integration steps of the gradient attribution; 0 is the plain gradient.
        limit: at most so many rows of each dataset.
        progress: show progress bars.
    """
    check_supported(model)
    units = _core(UnitSpace.of(model), core)
    if isinstance(top, bool) or not isinstance(top, int) or top < 1:
        raise HcLensError(f"expected top as a number of edges of at least 1, got {top!r}; raise it")
    settings: dict[str, Any] = {"norms": norms, "limit": limit, "progress": progress}
    exact = edge_effects(model, datasets, means, units, **settings)
    found = edge_attribution(model, datasets, means, units, steps=steps, **settings)
    return Trace(
        core=tuple(map(str, units)),
        norms=norms,
        edges=_with_scores(exact, found, _weights(model, units)),
        explained=_explained(model, datasets, means, units, exact, top, settings),
        dependents=_dependents(model, datasets, means, units, settings),
        agreement=agreement(exact, found),
    )


def strongest(edges: pd.DataFrame, n: int, dataset: str | None = None) -> pd.DataFrame:
    """The n strongest of some edges: sender, receiver, kind and the means over datasets."""
    if dataset is not None and dataset not in set(edges["dataset"]):
        raise HcLensError(
            f"expected a dataset among {list(edges['dataset'].unique())}, got {dataset!r}"
        )
    chosen = edges if dataset is None else edges.loc[edges["dataset"] == dataset]
    by_dataset = over_cases(chosen, ["dataset", *EDGE])
    means: Any = by_dataset.drop(columns=["dataset", "n"]).groupby(EDGE, sort=False).mean()
    ordered = means.reset_index().sort_values("kl", ascending=False, kind="stable")
    return ordered.head(n).reset_index(drop=True)


def _core(space: UnitSpace, core: Sequence[Unit | str]) -> list[Unit]:
    if isinstance(core, str):
        core = core.split("+")
    units = list(as_units(core))
    space.indices(units)
    if not units:
        raise HcLensError("expected at least one core unit, got none; give core=['L0.H6', ...]")
    return units


def _weights(model: Any, units: list[Unit]) -> pd.DataFrame:
    """The composition scores of the core heads; an MLP has none."""
    heads = [unit for unit in units if unit.is_head]
    if not heads:
        return pd.DataFrame(columns=[*EDGE, "weight_score", "weight_excess"])
    # Scores do not depend on the norms' scales, so no rows are needed.
    scores = weight_scores(model, senders=heads, progress=False)
    named = scores.rename(columns={"score": "weight_score", "excess": "weight_excess"})
    return named.reindex(columns=[*EDGE, "weight_score", "weight_excess"])


def _with_scores(exact: pd.DataFrame, found: pd.DataFrame, weights: pd.DataFrame) -> pd.DataFrame:
    by = [*EDGE, "dataset", "case"]
    merged = exact.merge(found[[*by, "attribution"]], on=by, how="left", validate="one_to_one")
    return merged.merge(weights, on=EDGE, how="left", validate="many_to_one")


def _explained(
    model: Any,
    datasets: Any,
    means: Source | str,
    units: list[Unit],
    exact: pd.DataFrame,
    top: int,
    settings: dict[str, Any],
) -> pd.DataFrame:
    """The top edges of each core unit together, and all of them, against ablating it."""
    paths: list[tuple[UnitSet, Any]] = []
    chosen: dict[str, str] = {}
    for unit in units:
        best = strongest(exact.loc[exact["sender"] == str(unit)], top)
        names = zip(best["receiver"], best["kind"], strict=True)
        labels = [f"{name}.{kind}" if kind in "qkv" else name for name, kind in names]
        chosen[str(unit)] = "+".join(labels)
        paths += [(unit, labels), (unit, ALL)]
    table = joint_effects(model, datasets, means, paths, **settings)
    by = ["sender", "dataset", "case"]
    total = table.loc[table["receivers"] == TOTAL, [*by, *_COMPARED]]
    total = total.rename(columns={name: f"total_{name}" for name in _COMPARED})
    patched = table[table["receivers"] != TOTAL].merge(total, on=by)
    every = patched["receivers"] == ALL
    patched.insert(1, "patched", every.map({True: ALL, False: TOP}))
    patched["share"] = patched["kl"] / patched["total_kl"]
    columns = ["sender", "patched", "receivers", "n_edges", "dataset", "case", "n"]
    pairs = [name for measure in _COMPARED for name in (measure, f"total_{measure}")]
    return patched[[*columns, *pairs, "share"]].reset_index(drop=True)


def _dependents(
    model: Any, datasets: Any, means: Source | str, units: list[Unit], settings: dict[str, Any]
) -> pd.DataFrame:
    """Every head outside the core without what the core contributes to its inputs."""
    space = UnitSpace.of(model)
    parallel = bool(model.cfg.parallel_attn_mlp)
    readers = [
        Receiver(head, WHOLE)
        for head in space.heads
        if head not in units
        and any(reads_after(space, Receiver(head, WHOLE), unit, parallel) for unit in units)
    ]
    if not readers:
        return pd.DataFrame(columns=_HEAD_COLUMNS)
    table = edge_effects(model, datasets, means, [set_label(units)], readers, **settings)
    heads = [receiver.name for receiver in readers]
    limits = {"limit": settings["limit"], "progress": settings["progress"]}
    alone = scan(model, datasets, means, units=heads, **limits)
    alone = alone.rename(
        columns={"set": "head", "kl": "ablated_kl", "accuracy_change": "ablated_accuracy_change"}
    )
    by = ["head", "dataset", "case"]
    merged = table.rename(columns={"receiver": "head"}).merge(
        alone[[*by, "ablated_kl", "ablated_accuracy_change"]], on=by
    )
    order: Any = over_cases(merged, ["dataset", "head"]).groupby("head")["kl"].mean()
    place = merged["head"].map(order.rank(ascending=False, method="first"))
    return merged.loc[place.sort_values(kind="stable").index, _HEAD_COLUMNS].reset_index(drop=True)
