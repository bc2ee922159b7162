"""One call of a command: what it reads, what it says, where its results go.

1. `Run` takes the options from Typer's context and checks the folder of ``--out``.
2. It loads the model, the rows and the subnetworks, and remembers their fingerprints.
3. `begin` makes the folder, or shows the result of one that is finished, if it is of these
   inputs.
4. `finish` writes the table and ``result.json`` and shows them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hc_lens.cli import options
from hc_lens.cli.folder import RESULT, check_folder, finished, start_folder
from hc_lens.cli.screen import Screen, quiet_reading, records
from hc_lens.cli.settings import Context, command_of, settings_of
from hc_lens.errors import HcLensError
from hc_lens.files import write_text
from hc_lens.spec import DataSpec, read_model

if TYPE_CHECKING:
    import pandas as pd

    from hc_lens.data import Batches
    from hc_lens.means import Means
    from hc_lens.models.load import HookedModel
    from hc_lens.sources import Source
    from hc_lens.store import Subnetwork

MEANS = "means.safetensors"
FORMATS = ("csv", "parquet")


class Run:
    """The state of one command."""

    def __init__(
        self,
        context: Context,
        writes: Sequence[str] = (),
        summary: Callable[[pd.DataFrame], pd.DataFrame] | None = None,
        checks: bool = True,
        free: Sequence[str] = (),
    ):
        """Read the options and check the folder of --out.

        `writes` names the files there that the command makes beside its table; `summary` makes the
        table that is shown, where the whole one is too long for the eye. Without `checks` the
        command itself sees to it that the folder is its own. A folder is gone on with when settings
        other than the `free` ones are the same.
        """
        self.summary = summary
        self.values = dict(context.params)
        self.command = command_of(context)
        self.settings = settings_of(self.command, self.values)
        self.screen = Screen(self.values.get("as_json", False))
        self.out: Path | None = self.values.get("out")
        self.fingerprint = ""
        self.inputs: dict[str, str] = {}
        self.format = self.values.get("format", "csv")
        if self.format not in FORMATS:
            raise HcLensError(
                f"expected a format among {list(FORMATS)}, got {self.format!r}; choose one"
            )
        self.writes = [*writes, *(f"table.{suffix}" for suffix in FORMATS)]
        self.force = self.values.get("force", False)
        if self.out is not None and checks and not self.force:
            check_folder(self.out, self.settings, free)

    @property
    def folder(self) -> Path:
        """The folder of --out, for a command that cannot do without."""
        assert self.out is not None
        return self.out

    @property
    def progress(self) -> bool:
        """Whether to show progress bars."""
        return self.screen.progress

    def model(self) -> HookedModel:
        """The model of --model."""
        from hc_lens.models import fingerprint

        self.screen.note(f"loading {self.values['model']}")
        model = read_model(self.values["model"], device=self.values.get("device"))
        self.fingerprint = fingerprint(model)
        return model

    def rows(self, model: Any, spec: DataSpec) -> Batches:
        """The rows of a description, in batches for the model."""
        with quiet_reading(self.progress):
            batches = spec.batches(model)
        if batches.name in self.inputs:
            raise HcLensError(
                f"expected two sets of rows with different names, got {batches.name} twice; "
                "name another --ood, or another split"
            )
        self.inputs[batches.name] = batches.fingerprint
        cut = f", {batches.n_truncated} of them cut" if batches.n_truncated else ""
        self.screen.note(f"{batches.name}: {batches.n_rows} rows{cut}")
        return batches

    def evaluation(self, model: Any) -> dict[str, Batches]:
        """The rows of --task and of --ood, by name."""
        specs = [options.rows(self.values), options.ood(self.values)]
        found = [self.rows(model, spec) for spec in specs if spec is not None]
        return {batches.name: batches for batches in found}

    def subnetworks(self) -> dict[str, Subnetwork]:
        """The folders of --subnetwork, by their last name, or whole where two are alike."""
        from hc_lens.store import Subnetwork

        folders = [Path(given) for given in self.values.get("subnetwork") or []]
        short = [folder.name for folder in folders]
        alike = len(set(short)) < len(short)
        found = {
            str(folder) if alike else folder.name: Subnetwork.load(folder) for folder in folders
        }
        for name, network in found.items():
            content = [network.model, network.means, *network.kept]
            self.inputs[name] = hashlib.blake2b(
                " ".join(content).encode(), digest_size=16
            ).hexdigest()
        return found

    def means(self, model: Any, batches: Batches | None = None) -> Source | str:
        """What replaces removed units: as --means says, beside --subnetwork, or collected here.

        Means are collected over `batches`, or else over the rows of --task in its train split.
        """
        from hc_lens.means import collect_means

        given = self.values.get("means")
        beside = [Path(folder) / MEANS for folder in self.values.get("subnetwork") or []]
        own = [] if self.out is None else [self.out / MEANS]
        places = [place for place in (*beside, *own) if place.is_file()]
        if given == "zero":
            return given
        if given is not None or places:
            return self._read_means(model, Path(given) if given is not None else places[0])
        if batches is None and self.values.get("task") is None:
            raise HcLensError(
                "expected --means to replace the removed units, got none; give a file of hc-lens "
                "means, or zero"
            )
        if batches is None:
            spec = dataclasses.replace(options.rows(self.values), split=None)
            with quiet_reading(self.progress):
                batches = spec.batches(model)
        self.screen.note(f"collecting means over {batches.n_rows} rows of {batches.name}")
        means = collect_means(model, batches, progress=self.progress)
        if own:
            self.save_means(means)
        return means

    def save_means(self, means: Means) -> Path:
        """Write means into the folder, whole or not at all."""
        place = self.folder / MEANS
        beside = place.with_name(f".{MEANS}.{os.getpid()}")
        try:
            os.replace(means.save(beside), place)
        finally:
            beside.unlink(missing_ok=True)
        return place

    def _read_means(self, model: Any, place: Path) -> Source:
        from hc_lens.means import Means
        from hc_lens.units import UnitSpace

        place = place / MEANS if place.is_dir() else place
        self.screen.note(f"means of {place}")
        means = Means.load(place)
        means.check(model, UnitSpace.of(model))
        return means

    def begin(self, resumes: bool = False) -> bool:
        """Begin to write, once model and rows are read; False if the folder is finished.

        A finished folder's result is shown; one of another model or input is an HcLensError. A
        command that `resumes` knows by itself what is finished, and always goes on.
        """
        anew = self.out is None or self.force or resumes
        document = None if anew else finished(self.folder)
        if document is None:
            if self.out is not None:
                start_folder(self.out, self.settings, self.writes, self.force)
            return True
        there = {"the model": document.get("model"), **document.get("inputs", {})}
        here = {"the model": self.fingerprint, **self.inputs}
        for name in {**there, **here}:
            if there.get(name) != here.get(name):
                raise HcLensError(
                    f"expected {self.out} to hold results of what is read now, got other results: "
                    f"{name} has changed since ({there.get(name)} then, {here.get(name)} now); "
                    "give another --out, or pass --force"
                )
        self.screen.note(f"{self.out} is finished; --force computes it again")
        self.screen.show(document, self.summary)
        return False

    def finish(self, table: pd.DataFrame | None = None, /, **facts: Any) -> None:
        """Write the result and show it."""
        document: dict[str, Any] = {"command": self.command, "model": self.fingerprint}
        document |= {"inputs": self.inputs, **facts}
        if table is not None:
            document["table"] = records(table)
        if self.out is not None:
            document["out"] = str(self.out)
            if table is not None:
                self._write_table(table)
            write_text(self.out / RESULT, json.dumps(document, indent=1, ensure_ascii=False))
        self.screen.show(document, self.summary)

    def _write_table(self, table: pd.DataFrame) -> None:
        if self.format == "parquet":
            table.to_parquet(self.folder / "table.parquet", index=False)
        else:
            table.to_csv(self.folder / "table.csv", index=False)
