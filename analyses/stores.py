"""Read the finished runs of a store of sweeps, without its settings and without running anything.

1. Every complete record of a run is read; what is half-written is not there (`hc_lens.sweepstore`).
2. A store may hold several sweeps. Runs are told apart by ``settings``, the hash of their rows and
   of their settings other than sparsity and seed: the column of that name in ``runs.parquet``.
3. The full model's accuracies are those on the same rows as the runs'.
4. Checkpoints come in the order of the numbers in their names, ``step-200`` before ``step-1000``.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from hc_lens.errors import HcLensError
from hc_lens.sweep import COLUMNS, FULL_COLUMNS, Runs
from hc_lens.sweepstore import MARKER, Store, open_store
from hc_lens.sweeptasks import (
    CHECKPOINTS,
    PREPARED,
    RUNS,
    Inputs,
    digest,
    read_subnetwork,
    read_table,
)

_SETTINGS = ("method", "train", "means", "evaluation", "given")
_INPUTS = ("model", "train", "means", "evaluation")


def read_store(place: str | Path, settings: str = "") -> Runs:
    """The finished runs of one sweep of a store.

    Args:
        place: folder or fsspec address that `hc.sweep` wrote.
        settings: how the hash of the sweep's settings begins; needed if the store has several.
    """
    if "://" not in str(place) and not (Path(place) / MARKER).is_file():
        raise HcLensError(
            f"expected a store of sweeps, got {place} without {MARKER}; name the store= of a sweep"
        )
    store = open_store(place)
    found = _records(store)
    known = Counter(about["settings"] for about, _ in found.values())
    chosen = [name for name in known if name.startswith(settings)]
    if len(chosen) != 1:
        listed = ", ".join(f"{name[:8]} ({count} runs)" for name, count in known.items()) or "none"
        raise HcLensError(
            f"expected the finished runs of one sweep in {place}, got {len(chosen)} sweeps for "
            f"settings {settings!r}; it has {listed}: say how its settings begin"
        )
    return _runs(store, {key: run for key, run in found.items() if run[0]["settings"] == chosen[0]})


def natural(name: str) -> list[tuple[bool, int | str]]:
    """Key that sorts names by the numbers in them."""
    parts = re.split(r"(\d+)", str(name))
    return [(part.isdigit(), int(part) if part.isdigit() else part) for part in parts if part]


def _records(store: Store) -> dict[str, tuple[dict[str, Any], Mapping[str, bytes]]]:
    """What each run's record says of it, and its files."""
    found = {}
    for key in store.names(RUNS):
        files = store.read(RUNS, key)
        if files is not None:
            about = json.loads(files["about.json"])
            about["settings"] = digest([about[name] for name in _SETTINGS])
            found[key] = (about, files)
    return found


def _runs(store: Store, found: Mapping[str, tuple[dict[str, Any], Mapping[str, bytes]]]) -> Runs:
    names = _names(store)
    tables, full, subnetworks = [], {}, {}
    for key, (about, files) in found.items():
        inputs = Inputs(**{name: about[name] for name in _INPUTS})
        prepared = store.read(PREPARED, inputs.prepared_key())
        sparsity, seed = about["prune"]["sparsity"], about["prune"]["seed"]
        for name in names.get(about["model"], []):
            run = {"run": key, "checkpoint": name, "sparsity": sparsity, "seed": seed}
            tables.append(read_table(files["evaluation.json"]).assign(**run)[COLUMNS])
            subnetworks[name, sparsity, seed] = read_subnetwork(files)
            if prepared is not None and name not in full:
                full[name] = read_table(prepared["evaluation.json"]).assign(checkpoint=name)
    order = sorted({name for name, _, _ in subnetworks}, key=natural)
    rank = {name: place for place, name in enumerate(order)}
    table = pd.concat(tables, ignore_index=True)
    table = table.assign(_at=table["checkpoint"].map(rank))
    table = table.sort_values(["_at", "sparsity", "seed"], kind="stable", ignore_index=True)
    whole = [full[name] for name in order if name in full]
    return Runs(
        table=table.loc[:, COLUMNS],
        full=pd.concat(whole, ignore_index=True).loc[:, FULL_COLUMNS],
        subnetworks=dict(
            sorted(subnetworks.items(), key=lambda run: (rank[run[0][0]], run[0][1:]))
        ),
        failed=pd.DataFrame(columns=["checkpoint", "sparsity", "seed", "why"]),
        checkpoints=tuple(order),
    )


def _names(store: Store) -> dict[str, list[str]]:
    """The names of each model."""
    names: dict[str, list[str]] = {}
    for record in store.names(CHECKPOINTS):
        files = store.read(CHECKPOINTS, record)
        if files is not None:
            about = json.loads(files["about.json"])
            names.setdefault(about["model"], []).append(about["name"])
    return names
