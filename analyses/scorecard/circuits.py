"""What a user may call a circuit or a ranking, and circuits in the MIB's JSON.

1. A circuit is a set of kept units; a ranking has every unit of the model, the most important
   first. `as_ranking` reads one from labels in order, from scores by label, from a table with the
   columns unit and score (or importance), or from a `Subnetwork` with scores.
2. The Mechanistic Interpretability Benchmark (Mueller et al. 2025, arXiv 2504.13151) has circuits
   as JSON: ``{"cfg": ..., "nodes": {"a0.h1": {"in_graph": true, "score": 0.3}, "m0": ...}}``, with
   the nodes ``input`` and ``logits`` beside the heads and MLPs. Edges are not read.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from hc_lens.errors import HcLensError, first_line
from hc_lens.models.fingerprint import fingerprint
from hc_lens.protocols import Model
from hc_lens.pruning.subnetwork import Subnetwork
from hc_lens.records import json_bytes, write_file
from hc_lens.units import Unit, UnitSpace

Ranking = Sequence[Unit | str] | Mapping[str, float] | pd.DataFrame | Subnetwork
"""Every unit of a model, from the most important to the least."""
SCORES = ("score", "importance", "effect")
"""The columns of a table that may hold scores, in this order."""
NODE = re.compile(r"a(?P<layer>\d+)\.h(?P<head>\d+)|m(?P<mlp>\d+)")
BESIDE = ("input", "logits")
"""Nodes of every MIB circuit that are no units."""


def as_ranking(space: UnitSpace, given: Ranking) -> tuple[Unit, ...]:
    """The units of a model in the order of a ranking; one over other units is an HcLensError.

    Equal scores stay in mask order. Of a subnetwork the kept units come first.
    """
    if isinstance(given, Subnetwork):
        if given.space != space:
            raise _other_units(space, str(given.space))
        if given.scores is None:
            raise HcLensError(
                "expected a subnetwork with scores to rank units by, got one without; give a "
                "ranking, or use it as a circuit alone"
            )
        kept, scores = given.keep.tolist(), given.scores.tolist()
        keys = [(not keep, -score) for keep, score in zip(kept, scores, strict=True)]
        return tuple(space[index] for index in sorted(range(len(space)), key=keys.__getitem__))
    if isinstance(given, pd.DataFrame):
        given = _scores(given)
    if isinstance(given, Mapping):
        wrong = [unit for unit, score in given.items() if not math.isfinite(score)]
        if wrong:
            raise HcLensError(f"expected a finite score for every unit, got none for {wrong[:3]}")
        scored = {Unit.parse(unit): float(score) for unit, score in given.items()}
        units = sorted(scored, key=lambda unit: (-scored[unit], unit))
    else:
        units = [Unit.parse(unit) for unit in given]
    if sorted(units) != sorted(space):
        missing = [str(unit) for unit in space if unit not in units]
        beyond = [str(unit) for unit in units if unit not in space]
        raise _other_units(
            space, f"{len(units)} units, missing {missing[:3]}, unknown {beyond[:3]}"
        )
    return tuple(units)


def _scores(table: pd.DataFrame) -> dict[str, float]:
    column = next((name for name in SCORES if name in table), None)
    if "unit" not in table or column is None:
        raise HcLensError(
            f"expected a table with the columns unit and one of {SCORES}, got {list(table)}; "
            "rename them"
        )
    return dict(zip(table["unit"], table[column].astype(float), strict=True))


def _other_units(space: UnitSpace, got: str) -> HcLensError:
    return HcLensError(
        f"expected a ranking of the units of this model, each once ({space}), got {got}; rank "
        "hc.UnitSpace.of(model)"
    )


def to_mib(path: str | Path, model: Model, circuit: Subnetwork) -> Path:
    """Write a circuit as the benchmark's JSON."""
    cfg, path = model.cfg, Path(path)
    scores = [None] * len(circuit.space) if circuit.scores is None else circuit.scores.tolist()
    nodes: dict[str, dict[str, Any]] = {name: {"in_graph": True} for name in BESIDE}
    for unit, keep, score in zip(circuit.space, circuit.keep.tolist(), scores, strict=True):
        name = f"m{unit.layer}" if unit.head is None else f"a{unit.layer}.h{unit.head}"
        finite = {} if score is None or not math.isfinite(score) else {"score": score}
        nodes[name] = {"in_graph": keep, **finite}
    about = {
        "n_layers": cfg.n_layers,
        "n_heads": cfg.n_heads,
        "parallel_attn_mlp": bool(getattr(cfg, "parallel_attn_mlp", False)),
        "d_model": cfg.d_model,
    }
    write_file(path, json_bytes({"cfg": about, "nodes": nodes, "edges": {}}))
    return path


def from_mib(path: str | Path, model: Model) -> Subnetwork:
    """Read a circuit of the benchmark; unknown nodes, and units without one, are an HcLensError."""
    try:
        nodes = json.loads(Path(path).read_text(encoding="utf-8"))["nodes"]
        kept = {str(name): bool(about["in_graph"]) for name, about in nodes.items()}
        scores = {name: float(nodes[name].get("score", math.nan)) for name in kept}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise HcLensError(
            "expected a circuit of the Mechanistic Interpretability Benchmark, JSON with "
            f'{{"nodes": {{"a0.h1": {{"in_graph": true}}}}}}, got {first_line(error)} in {path}'
        ) from error
    space = UnitSpace.of(model)
    units = {name: _unit(name) for name in kept if name not in BESIDE}
    unknown = [name for name, unit in units.items() if unit is None or unit not in space]
    missing = [str(unit) for unit in space if unit not in units.values()]
    if unknown or missing:
        raise HcLensError(
            f"expected a node for each unit of this model ({space}) in {path}, got unknown nodes "
            f"{unknown[:3]} and none for {missing[:3]}; read it for the model that it was found in"
        )
    named = {unit: name for name, unit in units.items()}
    keep = torch.tensor([kept[named[unit]] for unit in space])
    found = torch.tensor([scores[named[unit]] for unit in space])
    return Subnetwork(
        space, keep, fingerprint(model), scores=None if found.isnan().any() else found
    )


def _unit(name: str) -> Unit | None:
    match = NODE.fullmatch(name)
    if match is None:
        return None
    if match["mlp"] is not None:
        return Unit(int(match["mlp"]))
    return Unit(int(match["layer"]), int(match["head"]))


def without(space: UnitSpace, kept: Iterable[Unit]) -> tuple[Unit, ...]:
    """The units outside a circuit."""
    inside = set(kept)
    return tuple(unit for unit in space if unit not in inside)
