"""The folder of a command's results.

1. A new or empty folder gets ``command.toml``, the settings, once the model and rows are read.
2. A folder whose ``command.toml`` has the same settings is gone on with: what is finished in it is
   read, not computed again.
3. Any other folder with something in it is an error, unless ``--force``: then the files that the
   command writes are removed first, and nothing else.
4. ``result.json``, the document that ``--json`` prints, is written last and in one step: a folder
   that has it is finished.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hc_lens import __version__
from hc_lens.cli.group import is_full
from hc_lens.cli.settings import COMMAND, FILE, read_toml, write_toml
from hc_lens.errors import HcLensError
from hc_lens.files import write_text

RESULT = "result.json"


def check_folder(folder: Path, settings: Mapping[str, Any], free: Sequence[str] = ()) -> None:
    """Refuse a folder with the results of something else; `free` settings may differ."""
    if not folder.is_dir():
        return
    found = sorted(place.name for place in folder.iterdir())
    if found and found != [FILE]:
        _check_same(folder, settings, found, free)


def start_folder(
    folder: Path, settings: Mapping[str, Any], writes: Sequence[str], force: bool
) -> None:
    """Make the folder and write the settings; with `force` remove earlier results."""
    if force:
        for place in [place for name in (RESULT, *writes) for place in folder.glob(name)]:
            shutil.rmtree(place) if place.is_dir() else place.unlink()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if is_full(error):
            raise
        raise HcLensError(
            f"expected a folder for the results that can be made, got {error}; give another --out"
        ) from error
    write_settings(folder, settings)


def write_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Write ``command.toml``."""
    command = settings[COMMAND]
    about = (
        f"# What hc-lens {command} ran with (hc_lens {__version__}).\n"
        f"# Again: hc-lens {command} --config {folder / FILE} --out another-folder\n"
    )
    write_text(folder / FILE, about + write_toml(settings))


def finished(folder: Path) -> dict[str, Any] | None:
    """The result that a folder holds, if it is finished."""
    path = folder / RESULT
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise HcLensError(
            f"expected a result in {path}, got {error}; pass --force to compute it again"
        ) from error


def _check_same(
    folder: Path, settings: Mapping[str, Any], found: Sequence[str], free: Sequence[str]
) -> None:
    if FILE not in found:
        raise HcLensError(
            f"expected a new folder for the results, got {folder} with {list(found[:3])}; "
            "give another --out, or pass --force to write into it"
        )
    there = read_toml(folder / FILE)
    keys = [key for key in {**there, **settings} if key not in ("out", *free)]
    other = [key for key in keys if there.get(key) != settings.get(key)]
    if other:
        key = other[0]
        raise HcLensError(
            f"expected the settings in {folder / FILE} to go on there, got {key} "
            f"{settings.get(key)!r} where they have {there.get(key)!r}; give another --out, or "
            "pass --force to write over it"
        )
