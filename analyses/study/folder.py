"""The run folder of a study: each step's results, kept until what decides them changes.

1. A step's key is a hash of its name, the settings it reads, the keys of the steps it builds on and
   the version of this method.
2. Its results stand in ``steps/NAME``. They are written into another folder first, which takes the
   name when all is there: a step that was killed has left nothing behind.
3. A step whose folder has the right key is not run again; any other key runs it anew.
4. A run folder belongs to one model. Another model, or a folder that no study wrote, is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pandas as pd

from hc_lens.errors import HcLensError
from hc_lens.files import write_text

FORMAT = "hc_lens.study.1"
REPORT = "report"
"""The step that writes the page."""
METHOD = 2
"""Goes up when a step computes something else than before."""
TEXTS = ("checkpoint", "case", "dataset", "unit", "set", "sender", "receiver", "run")
"""Columns that hold text even where it looks like a number."""


class RunFolder:
    """A folder with the results of a study."""

    def __init__(self, path: str | Path, model: str):
        """Open or make the folder for the model with this fingerprint."""
        self.path = Path(path)
        self._keys: dict[str, str] = {}
        about = self.path / "study.json"
        if about.is_file():
            self._check(json.loads(about.read_text()), model)
            return
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise HcLensError(
                f"expected a new folder or the run folder of a study, got {self.path}, which holds "
                "something else; choose another --out"
            )
        self.path.mkdir(parents=True, exist_ok=True)
        new = {"format": FORMAT, "model": model, "pages": []}
        write_text(about, json.dumps(new, indent=1))

    def _check(self, about: Mapping[str, Any], model: str) -> None:
        if about.get("format") != FORMAT:
            raise HcLensError(
                f"expected a run folder in the format {FORMAT!r}, got {about.get('format')!r} in "
                f"{self.path}; choose another --out"
            )
        if about["model"] != model:
            raise HcLensError(
                f"expected the model of the run folder {self.path} ({about['model'][:8]}), got "
                f"another ({model[:8]}); choose another --out for this model"
            )

    def step(
        self,
        name: str,
        settings: Mapping[str, Any],
        needs: Sequence[str],
        run: Callable[[Path], None],
    ) -> Path:
        """The folder of a step's results; runs the step if they are not there."""
        content = [FORMAT, METHOD, name, settings, [self._keys[need] for need in needs]]
        key = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        self._keys[name] = key
        place = self.path / "steps" / name
        done = place / "done.json"
        if done.is_file() and json.loads(done.read_text()).get("key") == key:
            return place
        # What was built on the old results is no longer whole: no report is made of it.
        (self.path / "steps" / REPORT / "done.json").unlink(missing_ok=True)
        unfinished = place.with_name(f"{name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        run(unfinished)
        write_text(unfinished / "done.json", json.dumps({"key": key, "settings": settings}))
        shutil.rmtree(place, ignore_errors=True)
        os.replace(unfinished, place)
        return place

    def owns(self, page: Path) -> bool:
        """Whether a page is missing or one that was published here, unchanged."""
        return not page.exists() or _digest(page) in self._about()["pages"]

    def publish(self, page: Path, place: Path) -> None:
        """Copy a page to its place, whole, and remember it as this study's."""
        about = self._about()
        if _digest(page) not in about["pages"]:
            about["pages"].append(_digest(page))
            write_text(self.path / "study.json", json.dumps(about, indent=1))
        if not place.exists() or place.read_bytes() != page.read_bytes():
            write_text(place, page.read_text(encoding="utf-8"))

    def _about(self) -> dict[str, Any]:
        return json.loads((self.path / "study.json").read_text())

    @property
    def finished(self) -> list[str]:
        """The steps whose results are there."""
        return list(self._keys)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def pick(table: pd.DataFrame, rows: Any) -> pd.DataFrame:
    """The rows of a table where a condition holds, or the columns of a list."""
    return cast(pd.DataFrame, table[rows])


def write_table(folder: Path, name: str, table: pd.DataFrame) -> None:
    """Write a table as CSV; numbers come back exactly."""
    table.to_csv(folder / f"{name}.csv", index=False)


def read_table(folder: Path, name: str) -> pd.DataFrame:
    """Read a table that `write_table` wrote; numbers come back exactly, texts stay texts."""
    return pd.read_csv(
        folder / f"{name}.csv",
        dtype=dict.fromkeys(TEXTS, str),
        keep_default_na=False,
        na_values=[""],
        engine="python",  # its floats are exact in every version of pandas
    )
