"""The records of a sweep, and the finished runs that they hold.

1. ``runs/KEY`` is a run: its subnetwork, ``evaluation.csv`` and ``about.json``. The key is the hash
   of everything that decides the result (`run_parts`). A run on a path also has
   ``state.safetensors``, from which the path goes on after it.
2. ``prepared/KEY`` has the means of a checkpoint and the full model's evaluation;
   ``checkpoints/NAME`` says which model a name stands for.
3. A store may hold several sweeps. Their runs are told apart by ``settings``, the hash of the rows
   and of the settings other than sparsity and seed.
4. `read_runs` reads the finished runs of one sweep without its settings and without running
   anything. Checkpoints come in the order of the numbers in their names.
5. `write_tables` writes ``runs.parquet`` and ``full.parquet``, the tables of a whole store.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from safetensors.torch import load

from hc_lens.errors import HcLensError
from hc_lens.masks.means import Means
from hc_lens.metrics import NAMED, SHARE
from hc_lens.models.fingerprint import check_version
from hc_lens.pruning.path import State
from hc_lens.pruning.subnetwork import Subnetwork
from hc_lens.records import (
    Files,
    Fill,
    Records,
    as_folder,
    digest,
    files_of,
    json_bytes,
    read_table,
    safe_name,
    table_bytes,
)
from hc_lens.settings import plain_value
from hc_lens.sweeps.config import SweepConfig

KIND = "sweep"
RUNS, PREPARED, CHECKPOINTS = "runs", "prepared", "checkpoints"
ABOUT, EVALUATION, MEANS = "about.json", "evaluation.csv", "means.safetensors"
STATE = "state.safetensors"
"""Files of the records; `STATE` is what a path goes on from."""
TABLE, FULL_TABLE = "runs.parquet", "full.parquet"
METHOD_VERSION = 3
"""Raised whenever means, pruning or evaluation give other numbers, or more, for the same input."""
SCORES = ["dataset", "case", "side", "n", "accuracy", "low", "high"]
MEASURES = [*SCORES, "kl", "agreement"]
COLUMNS = ["run", "checkpoint", "sparsity", "seed", *MEASURES]
FULL_COLUMNS = ["checkpoint", *SCORES]

Name = tuple[str, float, int]
"""Checkpoint, sparsity and seed of a run."""


@dataclass(frozen=True, eq=False)
class Runs:
    """The runs of one sweep."""

    table: pd.DataFrame
    """One row per run, dataset and case: run (its key), checkpoint, sparsity and seed, then the
    columns of `hc.evaluate` from dataset on."""
    full: pd.DataFrame
    """The full models: checkpoint, then the same columns without kl and agreement."""
    subnetworks: Mapping[Name, Subnetwork]
    """Subnetwork by (checkpoint, sparsity, seed)."""
    failed: pd.DataFrame
    """Runs that failed: checkpoint, sparsity, seed, why."""
    checkpoints: tuple[str, ...]
    """Names of the checkpoints, in order of training."""

    def check_finished(self) -> None:
        """Raise an HcLensError if a run failed."""
        if len(self.failed):
            first = self.failed.iloc[0]
            raise HcLensError(
                f"expected every run to finish, {len(self.failed)} failed, the first "
                f"({first['checkpoint']}, sparsity {first['sparsity']}, seed {first['seed']}) "
                f"with: {first['why']}; the same call tries the failed ones again"
            )

    def __repr__(self) -> str:
        return (
            f"Runs({len(self.subnetworks)} finished, {len(self.failed)} failed, "
            f"{len(self.checkpoints)} checkpoints)"
        )


Inputs = Mapping[str, Any]
"""Fingerprints of what a checkpoint's runs read: ``model``, ``train`` (the rows to prune on),
``means`` (the rows of the means), ``evaluation`` (the evaluation rows, by name) and, if there are
any, ``metrics`` (further ones)."""


def prepared_key(inputs: Inputs) -> str:
    """Name of the record with a checkpoint's means and its full evaluation.

    Runs that are read back say by which method they were made, and find their full model by it.
    """
    parts = {name: inputs[name] for name in ("model", "means", "evaluation")}
    parts |= {"metrics": inputs["metrics"]} if "metrics" in inputs else {}
    return digest({"method": inputs.get("method", METHOD_VERSION), **parts})


def run_parts(inputs: Inputs, config: SweepConfig, sparsity: float, seed: int) -> dict[str, Any]:
    """Everything that decides the result of a run."""
    prune = asdict(config.prune_config(sparsity, seed)) | {"sparsity": sparsity}
    return {"method": METHOD_VERSION, **inputs, "prune": prune}


def run_key(inputs: Inputs, config: SweepConfig, sparsity: float, seed: int) -> str:
    """Name of the record of a run."""
    return digest(run_parts(inputs, config, sparsity, seed))


def given(config: SweepConfig) -> Any:
    """What the settings of a sweep say of its pruning, as the record of a run holds it."""
    path = {"path": list(config.sparsities)} if config.as_paths else {}
    return plain_value({**config.prune, **path})


@dataclass(frozen=True, eq=False)
class Record:
    """A finished run, a prepared checkpoint or the name of a checkpoint, as the store holds it."""

    about: Mapping[str, Any]
    """Everything that decided the result, and where it was computed."""
    files: Files
    """The files of the record."""

    @property
    def settings(self) -> str:
        """Hash of a run's rows and of its settings other than sparsity and seed."""
        parts = ("method", "train", "means", "evaluation", "given")
        further = [self.about["metrics"]] if "metrics" in self.about else []
        return digest([*(self.about[name] for name in parts), *further])

    def rows(self, checkpoint: str) -> pd.DataFrame:
        """The evaluation, under one of the names of its checkpoint."""
        table = read_table(self.files[EVALUATION])
        table = table.assign(checkpoint=checkpoint, model=self.about["model"])
        if "prune" not in self.about:
            return table
        name = {key: self.about["prune"][key] for key in ("sparsity", "seed")}
        return table.assign(run=self.about["key"], settings=self.settings, **name)

    def subnetwork(self) -> Subnetwork:
        """A run's subnetwork."""
        with as_folder(self.files) as folder:
            return Subnetwork.load(folder)

    def state(self) -> State:
        """What the path of a run goes on from."""
        return load(self.files[STATE])

    def means(self) -> Means:
        """A prepared checkpoint's means."""
        with as_folder(self.files) as folder:
            return Means.load(folder / MEANS)


def read_record(store: Records, under: str, key: str) -> Record | None:
    """The record of a key below `RUNS`, `PREPARED` or `CHECKPOINTS`, if it is finished."""
    files = store.read(f"{under}/{key}")
    return None if files is None else Record(json.loads(files[ABOUT]), files)


def write_record(
    store: Records, under: str, about: Mapping[str, Any], table: pd.DataFrame, save: Fill
) -> Record:
    """Write a run or a prepared checkpoint; `save` writes what it has beside the evaluation."""
    evaluation = {EVALUATION: table_bytes(table), ABOUT: json_bytes(about)}
    record = Record(about, {**files_of(save), **evaluation})
    store.write(f"{under}/{about['key']}", record.files)
    return record


def name_checkpoint(store: Records, name: str, model: str) -> None:
    """Note which model a name stands for; in one store it stands for one model only."""
    record = f"{CHECKPOINTS}/{safe_name(name)}"
    store.write(record, {ABOUT: json_bytes({"name": name, "model": model})})
    known = json.loads((store.read(record) or {})[ABOUT])["model"]
    check_version("a store", known, model, "use another store")
    if known != model:
        raise HcLensError(
            f"expected the model that the store {store.address} knows as {name!r} ({known[:8]}), "
            f"got another ({model[:8]}); its runs were not touched. Give the checkpoint another "
            "name, or use another store"
        )


def gather(
    store: Records,
    found: Mapping[Name, Record],
    checkpoints: Mapping[str, Inputs | None],
    failed: Mapping[Name, str],
) -> Runs:
    """The tables and subnetworks of runs.

    Args:
        store: where they come from.
        found: the finished runs, in the order of the table.
        checkpoints: what the runs of each checkpoint read, if it is known, in order of training.
        failed: why each failed run failed.
    """
    full = {
        name: read_record(store, PREPARED, prepared_key(inputs))
        for name, inputs in checkpoints.items()
        if inputs is not None
    }
    return Runs(
        table=_joined([run.rows(checkpoint) for (checkpoint, *_), run in found.items()], COLUMNS),
        full=_joined([record.rows(name) for name, record in full.items() if record], FULL_COLUMNS),
        subnetworks={name: run.subnetwork() for name, run in found.items()},
        failed=pd.DataFrame(
            [(*name, why) for name, why in failed.items()],
            columns=["checkpoint", "sparsity", "seed", "why"],
        ),
        checkpoints=tuple(checkpoints),
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
    found = {
        (name, run.about["prune"]["sparsity"], run.about["prune"]["seed"]): run
        for run in every
        if run.settings == chosen[0]
        for name in names[run.about["model"]]
    }
    found = dict(sorted(found.items(), key=lambda item: (natural(item[0][0]), item[0])))
    return gather(records, found, {name: run.about for (name, *_), run in found.items()}, {})


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
    tables = {
        TABLE: (RUNS, [*COLUMNS, "model", "settings"]),
        FULL_TABLE: (PREPARED, [*FULL_COLUMNS, "model"]),
    }
    for file, (under, columns) in tables.items():
        records = _finished(store, under)
        rows = [record.rows(name) for record in records for name in names[record.about["model"]]]
        # Sorted, so that the file does not tell in which order the runs finished.
        order = [
            column for column in ("checkpoint", "sparsity", "seed", "run") if column in columns
        ]
        table = _joined(rows, columns).sort_values(order, kind="stable", ignore_index=True)
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
    """Tables under each other, with these columns."""
    return with_others(
        pd.concat(tables or [pd.DataFrame(columns=columns)], ignore_index=True), columns
    )


def with_others(table: pd.DataFrame, columns: list[str]) -> pd.DataFrame:
    """These columns of an evaluation, its further metrics, and its shares of predicted labels."""
    further = [name for name in table.columns if name in NAMED and name not in MEASURES]
    shares = [name for name in table.columns if name.startswith(SHARE)]
    return table.loc[:, [name for name in (*columns, *further, *shares) if name in table]]
