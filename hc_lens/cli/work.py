"""One call of a command: what it reads, what it says, where its result goes.

1. A folder of ``--out`` with other work in it is refused before a model is loaded.
2. Models, rows, subnetworks and stores are read through `Work`, which remembers their fingerprints.
3. `Work.begin` makes the folder and writes the settings there as ``command.toml``, which
   ``--config`` reads again. The result of a finished folder is shown instead, if it is one of these
   inputs and as it was written; a damaged one is computed again.
4. `Work.finish` keeps the result as one record (`hc_lens.records`) and shows it: ``result.json``,
   the table in a file of its own, and what the command kept beside them.
5. Results go to stdout: readable lines and a table, or with ``--json`` one JSON document. Notes go
   to stderr, one line each, and progress bars if that is a terminal.
"""

from __future__ import annotations

import io
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hc_lens import __version__
from hc_lens.cli.parse import COMMAND, UNWRITTEN, Call
from hc_lens.cli.words import in_options
from hc_lens.data.specs import DataSpec, read_model
from hc_lens.errors import HcLensError, HcLensWarning
from hc_lens.records import (
    COPY,
    MARKER,
    Fill,
    OtherWorkError,
    Records,
    digest,
    files_of,
    json_bytes,
    read_table,
    recorded_files,
    table_bytes,
    write_file,
)
from hc_lens.settings import plain_value, write_toml

if TYPE_CHECKING:
    import pandas as pd

    from hc_lens.cli.options import Checkpoint, Ood, Output, Replacement, Rows, Store
    from hc_lens.data.batches import Batches
    from hc_lens.masks.means import Means
    from hc_lens.masks.replacements import Source
    from hc_lens.models.loading import HookedModel
    from hc_lens.pruning.subnetwork import Subnetwork
    from hc_lens.sweeps.runs import Runs

    Summary = Callable[[pd.DataFrame], pd.DataFrame]

SETTINGS = "command.toml"
RESULT = "result.json"
MEANS = "means.safetensors"
BATCHES = "batches"
"""Folder of the finished batches of a scan."""
HIDDEN = ("command", "out", "model", "inputs", "read", "table", "text")
"""Entries of a document that the readable form leaves out, or shows elsewhere."""


class Work:
    """The state of one call."""

    def __init__(self, call: Call):
        """Begin with nothing read and nothing written."""
        self.call, self.command = call, call.command
        self.output: Output = call.settings.output
        self.out = self.output.out
        self.format: str = call.values.get("format", "csv")
        self.settings = {
            key: plain_value(value)
            for key, value in call.values.items()
            if key not in UNWRITTEN and value is not None and value != ()
        }
        self.fingerprint = ""
        self.inputs: dict[str, str] = {}
        self.read: dict[str, str] = {}
        self.files: dict[str, bytes] = {}
        self.records: Records | None = None
        self.summary: Summary | None = None
        self.progress = sys.stderr.isatty()

    @property
    def folder(self) -> Path:
        """The folder of --out, for a command that cannot do without."""
        assert self.out is not None
        return self.out

    def check_alone(self, file: Path, free: Sequence[str] = ()) -> None:
        """Refuse options that are given beside a file which says the same, except `free` ones."""
        kept = (*UNWRITTEN, "file", "out", "format", "workers", *free)
        other = [key for key in self.call.given if key not in kept]
        if other:
            raise HcLensError(
                f"expected settings from {file} or from options, got both "
                f"({', '.join(other)}); leave one out"
            )

    def note(self, line: str) -> None:
        """Say on stderr what is being done."""
        sys.stderr.write(f"{in_options(line)}\n")
        sys.stderr.flush()

    def model(self, chosen: Checkpoint) -> HookedModel:
        """The model of --model."""
        from hc_lens.models.fingerprint import fingerprint

        self._open_existing()
        self.note(f"loading {chosen.model}")
        model = read_model(chosen.model, device=chosen.device, labels=chosen.model_labels or None)
        self.fingerprint = fingerprint(model)
        return model

    def rows(self, model: HookedModel, spec: DataSpec) -> Batches:
        """The rows of a description, in batches for the model."""
        batches = spec.batches(model)
        cut = f", {batches.n_truncated} of them cut" if batches.n_truncated else ""
        self.reads(batches.name, batches.fingerprint, f"{batches.n_rows} rows{cut}")
        return batches

    def evaluation(self, model: HookedModel, rows: Rows, ood: Ood) -> dict[str, Batches]:
        """The rows of --task and of --ood, by name, of held-out splits unless others are named."""
        specs = [self.held_out(spec) for spec in (rows, ood.spec(rows)) if spec is not None]
        found = [self.rows(model, spec) for spec in specs]
        return {batches.name: batches for batches in found}

    def held_out(self, spec: DataSpec) -> DataSpec:
        """Rows of the held-out split unless one is named; says so if the task has none."""
        from hc_lens.data.splits import HELD_OUT

        chosen = spec.held_out()
        if spec.split is None and not (chosen.split or "").startswith(HELD_OUT):
            self.note(f"note: {spec.task} has no held-out split; {chosen.split} is scored")
        return chosen

    def reads(self, name: str, fingerprint: str, what: str) -> None:
        """Remember an input by its fingerprint, and say what it is."""
        if name in self.inputs:
            raise HcLensError(
                f"expected two sets of rows with different names, got {name} twice; "
                "name another --ood, or another split"
            )
        self.inputs[name] = fingerprint
        self.read[name] = what
        self.note(f"{name}: {what}")

    def store(self, chosen: Store) -> Runs:
        """The runs of a sweep."""
        runs = chosen.read()
        self.reads("store", digest(sorted(set(runs.table["run"]))), f"{len(runs.subnetworks)} runs")
        return runs

    def subnetworks(self, folders: Sequence[str]) -> dict[str, Subnetwork]:
        """Subnetworks by the last name of their folder, or by the whole where two are alike."""
        from hc_lens.pruning.subnetwork import Subnetwork

        short = [last_name(folder) for folder in folders]
        names = short if len(set(short)) == len(short) else folders
        found = {name: Subnetwork.load(folder) for name, folder in zip(names, folders, strict=True)}
        for name, network in found.items():
            self.inputs[name] = digest(network.model, network.means, *network.kept)
        return found

    def means(
        self,
        model: HookedModel,
        chosen: Replacement,
        rows: Batches | DataSpec | None = None,
        subnetworks: Sequence[str] = (),
    ) -> Source | str:
        """What replaces removed units: as --means says, beside a subnetwork, or collected on rows.

        Rows that are only described are those of the split that a task is trained on.
        """
        from hc_lens.masks.means import Means, collect_means
        from hc_lens.masks.replacements import Counterfactual
        from hc_lens.units import UnitSpace

        if chosen.means == "zero":
            return chosen.means
        if chosen.means == "counterfactual":
            return Counterfactual(model)
        if chosen.means is None:
            _check_beside(subnetworks)
        beside = [path for folder in subnetworks if (path := Path(folder) / MEANS).is_file()]
        if chosen.means is not None or beside:
            path = Path(chosen.means or beside[0])
            path = path / MEANS if path.is_dir() else path
            means = Means.load(path)
            self.read["means"] = str(path)
            self.note(f"means of {path}")
            means.check(model, UnitSpace.of(model))
            return means
        if rows is None:
            raise HcLensError(
                "expected --means to replace the removed units, got none; give a file of hc-lens "
                "means, or zero"
            )
        if isinstance(rows, DataSpec):
            rows = rows.training().batches(model)
        self.read["means"] = f"{rows.n_rows} rows of {rows.name}"
        means = self._kept_means(rows)
        if means is None:
            self.note(f"collecting means over {self.read['means']}")
            means = collect_means(model, rows, progress=self.progress)
        self.keep_means(means)
        return means

    def _kept_means(self, rows: Batches) -> Means | None:
        """The means of this model and these rows that this command kept before it was stopped."""
        from hc_lens.masks.means import Means

        if self.out is None or not (self.out / MEANS).is_file():
            return None
        try:
            means = Means.load(self.out / MEANS)
        except HcLensError as error:
            self.note(f"{error}: they are collected again")
            return None
        if (means.model, means.rows) != (self.fingerprint, rows.fingerprint):
            return None
        self.note(f"means of {self.out / MEANS}")
        return means

    def keep_means(self, means: Means) -> None:
        """Write means at once, so that the same command finds them after a stop."""
        self.keep(lambda folder: means.save(folder / MEANS))
        if self.records is not None:
            self.records.write_file(MEANS, self.files[MEANS])

    def keep(self, fill: Fill) -> dict[str, bytes]:
        """The files that a function writes into a folder, to be kept beside the result."""
        made = {} if self.out is None else files_of(fill)
        self.files |= made
        return made

    def begin(
        self, summary: Summary | None = None, *, free: Sequence[str] = (), resumes: bool = False
    ) -> bool:
        """Begin to write, once everything is read; False if the folder is finished.

        A finished folder's result is shown; one of another model or input is an HcLensError.

        Args:
            summary: makes the table that is shown, where the whole one is too long for the eye.
            free: settings that may differ from those that the folder was begun with.
            resumes: the command knows by itself what is finished, and always continues.
        """
        self.summary = summary
        if self.out is None:
            return True
        records = self._open(free)
        if not resumes and records.find("") is not None:
            self._show_finished()
            return False
        records.write_file(SETTINGS, self.settings_text())
        return True

    def finish(self, table: pd.DataFrame | None = None, /, **facts: Any) -> None:
        """Keep the result and show it; the entry ``text`` is shown instead of everything else."""
        document = {
            COMMAND: self.command,
            "model": self.fingerprint,
            "inputs": self.inputs,
            "read": self.read,
            **facts,
        }
        if self.out is not None:
            document["out"] = str(self.out)
            if table is not None:
                self.files[f"table.{self.format}"] = self._table_bytes(table)
            self.files[RESULT] = json_bytes(document)
            if self.records is not None:
                self.files[SETTINGS] = self.settings_text().encode()
                self.records.write("", self.files, digest(self.fingerprint, self.inputs))
            else:  # the command keeps a folder of its own kind
                for name, content in self.files.items():
                    write_file(self.out / name, content)
        self._show(document, table)

    def settings_text(self) -> str:
        """What ``command.toml`` says."""
        return (
            f"# What hc-lens {self.command} ran with (hc_lens {__version__}).\n"
            f"# Again: hc-lens {self.command} --config {self.folder / SETTINGS} "
            "--out another-folder\n"
        ) + write_toml({COMMAND: self.command, **self.settings})

    def give_up(self, kind: str, *names: str) -> None:
        """With --force, remove the finished work of a command that keeps its own kind of folder."""
        if self.output.force and (self.folder / MARKER).is_file():
            gone = (*names, SETTINGS, RESULT, f"table.{self.format}", MARKER, COPY)
            with Records(self.folder, kind, force=True, alone=True) as there:
                for name in gone:
                    there.remove(name)

    def close(self) -> None:
        """Let others write to the folder of --out."""
        if self.records is not None:
            self.records.close()

    def _open_existing(self) -> None:
        """Refuse a folder with other work at once; with --force it stays until `begin`."""
        there = self.out is not None and os.path.isdir(self.out) and any(self.out.iterdir())
        if there and not self.output.force:
            self._open()

    def _open(self, free: Sequence[str] = ()) -> Records:
        if self.records is None:
            about = {key: value for key, value in self.settings.items() if key != "out"}
            kind, force = f"hc-lens {self.command}", self.output.force
            try:
                self.records = Records(
                    self.folder, kind, about, free=free, owner=True, force=force, alone=True
                )
            except OtherWorkError as error:
                raise HcLensError(f"{error}, or pass --force to write over it") from error
            if force:
                for name in (MEANS, BATCHES):
                    self.records.remove(name)
        return self.records

    def _show_finished(self) -> None:
        from hc_lens.models.fingerprint import check_version

        document = json.loads((self.folder / RESULT).read_bytes())
        check_version("results", document["model"], self.fingerprint, "give another --out")
        there = {"the model": document["model"], **document["inputs"]}
        here = {"the model": self.fingerprint, **self.inputs}
        for name in {**there, **here}:
            if there.get(name) != here.get(name):
                raise HcLensError(
                    f"expected {self.out} to hold results of what is read now, got other results: "
                    f"{name} has changed since ({there.get(name)} then, {here.get(name)} now); "
                    "give another --out, or pass --force"
                )
        self.note(f"{self.out} is finished; --force computes it again")
        self._show(document, self._read_table())

    def _table_bytes(self, table: pd.DataFrame) -> bytes:
        if self.format == "csv":
            return table_bytes(table)
        content = io.BytesIO()
        table.to_parquet(content, index=False)
        return content.getvalue()

    def _read_table(self) -> pd.DataFrame | None:
        import pandas as pd

        path = self.folder / f"table.{self.format}"
        if not path.is_file():
            return None
        return read_table(path) if self.format == "csv" else pd.read_parquet(path)

    def _show(self, document: Mapping[str, Any], table: pd.DataFrame | None) -> None:
        """Print the result, with the table or a summary of it."""
        if self.output.json:
            shown = dict(document)
            if table is not None:
                finite = table.astype(object).where(table.notna() & ~table.isin([inf, -inf]), None)
                shown["table"] = finite.to_dict(orient="records")
            if "out" in shown:
                shown["out"] = shown.pop("out")  # the last entry
            sys.stdout.write(json_bytes(shown).decode() + "\n")
            return
        facts = {key: value for key, value in document.items() if key not in HIDDEN}
        width = max(map(len, facts), default=0)
        lines = [f"{key:<{width}}".replace("_", " ") + f"  {_text(facts[key])}" for key in facts]
        if table is not None:
            shown = table if self.summary is None else self.summary(table)
            lines += [*([""] if lines else []), readable(shown)]
        if "text" in document:
            lines = [document["text"]]
        if document.get("out"):
            lines += ["", f"written to {document['out']}"]
        sys.stdout.write("\n".join(lines) + "\n")


def _check_beside(subnetworks: Sequence[str]) -> None:
    """Refuse a folder that has lost the means which were written beside its subnetwork."""
    for folder in map(Path, subnetworks):
        if MEANS in (recorded_files(folder) or ()) and not (folder / MEANS).is_file():
            raise HcLensError(
                f"expected {MEANS} in {folder}, where it was written beside the subnetwork, got "
                "none; put it back, prune again, or give --means"
            )


def last_name(path: str) -> str:
    """The last name of a path or Hub id, also of ``.``."""
    return Path(os.path.abspath(path)).name


def readable(table: pd.DataFrame) -> str:
    """A table as text: four digits, nothing left out."""
    if table.empty:
        return "(no rows)"
    return table.to_string(index=False, float_format=lambda value: f"{value:.4f}", na_rep="-")


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {entry}" for key, entry in value.items())
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


@contextmanager
def noted_warnings(note: Callable[[str], None]) -> Iterator[None]:
    """Say the warnings of hc_lens in one line each."""
    with warnings.catch_warnings():
        show = warnings.showwarning

        def noted(message: Any, category: type[Warning], *where: Any, **more: Any) -> None:
            if issubclass(category, HcLensWarning):
                note(f"note: {message}")
            else:
                show(message, category, *where, **more)

        warnings.simplefilter("default", HcLensWarning)
        warnings.showwarning = noted
        yield


@contextmanager
def quiet_reading(progress: bool) -> Iterator[None]:
    """Keep the progress bars of ``datasets`` off a stream that is no terminal."""
    if progress:
        yield
        return
    import datasets

    hidden = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if not hidden:
            datasets.enable_progress_bars()
