"""A sweep small enough for tests: tiny random BERTs on disk and rows of their few words."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from hc_lens.data.specs import DataSpec
from hc_lens.records import DONE, digest
from hc_lens.sweeps.config import SweepConfig
from hc_lens.sweeps.engines import Local
from hc_lens.sweeps.runs import Runs
from hc_lens.sweeps.sweep import sweep
from tests import tiny

LABELS = tuple(tiny.MNLI_LABELS.values())


def write_rows(path: Path, n_rows: int, seed: int) -> Path:
    """Pairs of random sentences with a random label, one JSON object a line."""
    draw = random.Random(seed)
    lines = []
    for index in range(n_rows):
        texts = (" ".join(draw.choices(tiny.WORDS, k=draw.randint(2, 6))) for _ in range(2))
        a, b = texts
        row = {"a": a, "b": b, "label": draw.choice(LABELS), "case": "xy"[index % 2]}
        lines.append(json.dumps(row))
    path.write_text("\n".join(lines))
    return path


def rows(path: Path, **settings: Any) -> DataSpec:
    """A spec of rows that `write_rows` wrote."""
    return DataSpec(
        "own", str(path), columns=("a", "b"), labels=LABELS, token_budget=64, **settings
    )


def make(folder: Path, names: tuple[str, ...] = ("early", "final"), **changes: Any) -> SweepConfig:
    """Write checkpoints and rows into a folder; the sweep over them."""
    folder.mkdir(exist_ok=True)
    for seed, name in enumerate(names):
        if not (folder / name).exists():
            tiny.save_checkpoint(folder / name, seed=seed)
    files = {name: folder / f"{name}.jsonl" for name in ("train", "id", "ood")}
    for seed, path in enumerate(files.values()):
        if not path.exists():
            write_rows(path, 24, seed)
    settings: dict[str, Any] = {
        "checkpoints": {name: str(folder / name) for name in names},
        "train": rows(files["train"]),
        "evaluation": {"id": rows(files["id"]), "ood": rows(files["ood"], case="case")},
        "sparsities": (0.3, 0.6),
        "seeds": (0, 1),
        "prune": {"steps": 4},
    }
    return SweepConfig(**{**settings, **changes})


def small(**changes: Any) -> SweepConfig:
    """Random subnetworks of two checkpoints: no training, so a matter of seconds."""
    settings: dict[str, Any] = {
        "checkpoints": {"step-200": "organism:200", "step-1200": "organism:1200"},
        "train": DataSpec("organism", split="train", limit=8),
        "evaluation": {
            "id": DataSpec("organism", split="validation", limit=12),
            "ood": DataSpec("organism-ood", limit=40),
        },
        "sparsities": (0.25, 0.5),
        "seeds": (1, 2),
        "prune": {"method": "random"},
    }
    return SweepConfig(**{**settings, **changes})


def run(config: SweepConfig, store: str | Path, progress: bool = False) -> Runs:
    """The sweep in this process."""
    return sweep(config, store, engine=Local(workers=0), progress=progress)


def snapshot(store: Path, kinds: tuple[str, ...] = ("runs", "checkpoints")) -> dict[str, bytes]:
    """Every byte of the runs and the tables, by path."""
    files = [path for kind in kinds for path in (store / kind).rglob("*") if path.is_file()]
    files += store.glob("*.parquet")
    return {str(path.relative_to(store)): path.read_bytes() for path in files}


def at_address(files: dict[str, bytes]) -> dict[str, bytes]:
    """The files of a local store by their path at an address, where a record's stand by their hash.

    ``done.json`` and what is in no record have the same path in both.
    """
    placed = {}
    for path, content in files.items():
        folder, _, file = path.rpartition("/")
        own = file != DONE and f"{folder}/{DONE}" in files
        placed[f"{folder}/{digest(content)}/{file}" if own else path] = content
    return placed
