"""The records of a sweep, and the finished runs that they hold.

1. ``runs/KEY`` is a run: its subnetwork, ``evaluation.csv`` and ``about.json``. The key is the hash
   of everything that decides the result: fingerprints of the model, of the training rows, of the
   rows of the means and of the evaluation rows, all settings of pruning, and the version of the
   method.
2. ``prepared/KEY`` has the means of a checkpoint and the full model's evaluation;
   ``checkpoints/NAME`` says which model a name stands for.
3. A store may hold several sweeps. Their runs are told apart by ``settings``, the hash of the rows
   and of the settings other than sparsity and seed.
4. `read_runs` reads the finished runs of one sweep without its settings and without running
   anything. Its checkpoints come in the order of the numbers in their names, ``step-200`` before
   ``step-1000``.
5. `write_tables` writes ``runs.parquet`` and ``full.parquet``, the tables of a whole store.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from hc_lens.errors import HcLensError
from hc_lens.pruning.subnetwork import Subnetwork
from hc_lens.records import Files, Records, as_folder, digest, read_table
from hc_lens.sweeps.config import SweepConfig

KIND = "sweep"
"""What `hc_lens.records` calls the work of a sweep."""
RUNS, PREPARED, CHECKPOINTS = "runs", "prepared", "checkpoints"
ABOUT, EVALUATION = "about.json", "evaluation.csv"
TABLE, FULL_TABLE = "runs.parquet", "full.parquet"
METHOD_VERSION = 1
"""Raised whenever means, pruning or evaluation give other numbers for the same input."""
MEASURES = ["dataset", "case", "n", "accuracy", "kl", "agreement"]
COLUMNS = ["run", "checkpoint", "sparsity", "seed", *MEASURES]
FULL_COLUMNS = ["checkpoint", "dataset", "case", "n", "accuracy"]

Name = tuple[str, float, int]
"""Checkpoint, sparsity and seed of a run."""


@dataclass(frozen=True, eq=False)
class Runs:
    """The runs of one sweep."""

    table: pd.DataFrame
    """One row per run, dataset and case: run (its key), checkpoint, sparsity, seed, dataset, case,
    n, accuracy, kl, agreement."""
    full: pd.DataFrame
    """The full models: checkpoint, dataset, case, n, accuracy."""
    subnetworks: Mapping[Name, Subnetwork]
    """Subnetwork by (checkpoint, sparsity, seed)."""
    failed: pd.DataFrame
    """Runs that failed: checkpoint, sparsity, seed, why."""
    checkpoints: tuple[str, ...]
    """Names of the checkpoints, in order of training."""

    def __repr__(self) -> str:
        return (
            f"Runs({len(self.subnetworks)} finished, {len(self.failed)} failed, "
            f"{len(self.checkpoints)} checkpoints)"
        )


@dataclass(frozen=True)
class Inputs:
    """Fingerprints of what a checkpoint's runs read."""

    model: str
    """Of the model."""
    train: str
    """Of the rows to prune on."""
    means: str
    """Of the rows of the means."""
    evaluation: Mapping[str, str]
    """Of the evaluation rows, by name."""

    def prepared_key(self) -> str:
        """Name of the record with the means and the full model's evaluation."""
        parts = {"model": self.model, "means": self.means, "evaluation": dict(self.evaluation)}
        return digest({"method": METHOD_VERSION, **parts})

    def parts(self, config: SweepConfig, sparsity: float, seed: int) -> dict[str, Any]:
        """Everything that decides the result of a run."""
        prune = asdict(config.prune_config(sparsity, seed))
        return {"method": METHOD_VERSION, **asdict(self), "prune": prune}

    def run_key(self, config: SweepConfig, sparsity: float, seed: int) -> str:
        """Name of the record of a run."""
        return digest(self.parts(config, sparsity, seed))


@dataclass(frozen=True, eq=False)
class Record:
    """A finished run, a prepared checkpoint or the name of a checkpoint, as the store holds it."""

    key: str
    """Name of the record."""
    about: Mapping[str, Any]
    """Everything that decided the result, and where it was computed."""
    files: Files
    """The files of the record."""

    @property
    def inputs(self) -> Inputs:
        """What a run read."""
        return Inputs(*(self.about[name] for name in ("model", "train", "means", "evaluation")))

    @property
    def settings(self) -> str:
        """Hash of a run's rows and of its settings other than sparsity and seed."""
        parts = ("method", "train", "means", "evaluation", "given")
        return digest([self.about[name] for name in parts])

    def name(self, checkpoint: str) -> Name:
        """A run's name, under one of the names of its checkpoint."""
        return checkpoint, self.about["prune"]["sparsity"], self.about["prune"]["seed"]

    def rows(self, checkpoint: str) -> pd.DataFrame:
        """The evaluation, under one of the names of its checkpoint."""
        table = read_table(self.files[EVALUATION]).assign(checkpoint=checkpoint)
        if "prune" not in self.about:
            return table
        _, sparsity, seed = self.name(checkpoint)
        return table.assign(run=self.key, sparsity=sparsity, seed=seed)

    def subnetwork(self) -> Subnetwork:
        """A run's subnetwork."""
        with as_folder(self.files) as folder:
            return Subnetwork.load(folder)


def read_record(store: Records, under: str, key: str) -> Record | None:
    """The record of a key below `RUNS`, `PREPARED` or `CHECKPOINTS`, if it is finished."""
    files = store.read(f"{under}/{key}")
    return None if files is None else Record(key, json.loads(files[ABOUT]), files)


def gather(
    store: Records,
    found: Sequence[tuple[str, Record]],
    prepared: Mapping[str, str | None],
    failed: Mapping[Name, str],
) -> Runs:
    """The tables and subnetworks of runs.

    Args:
        store: where they come from.
        found: each run with the name of its checkpoint, in the order of the table.
        prepared: checkpoint -> key of what was prepared of it, if anything, in order of training.
        failed: why each failed run failed.
    """
    full = ((name, read_record(store, PREPARED, key)) for name, key in prepared.items() if key)
    return Runs(
        table=_joined([run.rows(name) for name, run in found], COLUMNS),
        full=_joined([record.rows(name) for name, record in full if record], FULL_COLUMNS),
        subnetworks={run.name(name): run.subnetwork() for name, run in found},
        failed=pd.DataFrame(
            [(*name, why) for name, why in failed.items()],
            columns=["checkpoint", "sparsity", "seed", "why"],
        ),
        checkpoints=tuple(prepared),
    )


def read_runs(store: str | Path, settings: str = "") -> Runs:
    """The finished runs of one sweep of a store.

    Args:
        store: folder or fsspec address that `hc.sweep` wrote to.
        settings: how the hash of the sweep's settings begins; needed if the store has several.
    """
    records = Records.existing(store, KIND)
    every = _finished(records, RUNS)
    known = Counter(run.settings for run in every)
    chosen = [name for name in known if name.startswith(settings)]
    if len(chosen) != 1:
        listed = ", ".join(f"{name[:8]} ({count} runs)" for name, count in known.items()) or "none"
        raise HcLensError(
            f"expected the finished runs of one sweep in {store}, got {len(chosen)} sweeps for "
            f"settings {settings!r}; it has {listed}: say how its settings begin"
        )
    names = _names(records)
    mine = [run for run in every if run.settings == chosen[0]]
    found = [(name, run) for run in mine for name in names[run.about["model"]]]
    found.sort(key=lambda pair: (natural(pair[0]), pair[1].name(pair[0])))
    prepared = {name: run.inputs.prepared_key() for name, run in found}
    return gather(records, found, prepared, {})


def natural(name: str) -> list[tuple[bool, int | str]]:
    """Key that sorts names by the numbers in them."""
    parts = re.split(r"(\d+)", str(name))
    return [(part.isdigit(), int(part) if part.isdigit() else part) for part in parts if part]


def write_tables(store: Records) -> None:
    """Write the tables of all finished runs and full models of a store.

    A checkpoint has the names that sweeps gave it. `model` is its fingerprint; `settings` tells
    sweeps that share a store apart.
    """
    names = _names(store)
    runs = [
        run.rows(name).assign(model=run.about["model"], settings=run.settings)
        for run in _finished(store, RUNS)
        for name in names[run.about["model"]]
    ]
    full = [
        record.rows(name).assign(model=record.about["model"])
        for record in _finished(store, PREPARED)
        for name in names[record.about["model"]]
    ]
    tables = {
        TABLE: _joined(runs, [*COLUMNS, "model", "settings"]),
        FULL_TABLE: _joined(full, [*FULL_COLUMNS, "model"]),
    }
    for file, table in tables.items():
        # Sorted, so that the file does not tell in which order the runs finished.
        order = [column for column in ("checkpoint", "sparsity", "seed", "run") if column in table]
        table = table.sort_values(order, kind="stable", ignore_index=True)
        store.write_file(file, table.to_parquet(index=False))


def _finished(store: Records, under: str) -> list[Record]:
    found = (read_record(store, under, key) for key in store.names(under))
    return [record for record in found if record is not None]


def _names(store: Records) -> Mapping[str, list[str]]:
    """The names of each model."""
    names: dict[str, list[str]] = defaultdict(list)
    for record in _finished(store, CHECKPOINTS):
        names[record.about["model"]].append(record.about["name"])
    return names


def _joined(tables: list[pd.DataFrame], columns: list[str]) -> pd.DataFrame:
    if not tables:
        return pd.DataFrame(columns=columns)
    return pd.concat(tables, ignore_index=True).filter(items=columns)
