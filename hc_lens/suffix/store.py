"""Finished batches of a scan on disk, so that an interrupted scan loses nothing.

1. The name of a scan of one dataset is a hash of everything that decides its numbers: the model,
   what replaces removed units, the batches, the sets and the sample of rows.
2. Each finished batch is one safetensors file in the folder of that name. It is written beside its
   place and moved there in one step, so a half-written file is never read.
3. A file that cannot be read, or that holds other rows, counts as not finished.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hc_lens.errors import HcLensError
from hc_lens.means import Means
from hc_lens.models.fingerprint import fingerprint
from hc_lens.sources import Resample, Source, Zero
from hc_lens.suffix.hooked import has_user_hooks

FORMAT = "hc_lens.scan.1"


class ScanStore:
    """The finished batches of one dataset's scan."""

    def __init__(
        self,
        folder: str | Path,
        model: Any,
        source: Source,
        batches: Any,
        labels: Sequence[str],
        limit: int | None,
    ):
        """Open or make the folder of this scan below `folder`."""
        if has_user_hooks(model):
            raise HcLensError(
                "expected a model without hooks to keep results for later, got one with hooks, "
                "whose effect on the results has no name on disk; take the hooks off, or scan "
                "without store="
            )
        about = {
            "format": FORMAT,
            "model": fingerprint(model),
            "source": _name_of(source),
            "batches": _fingerprint_of(batches),
            "limit": limit,
            "sets": list(labels),
        }
        text = json.dumps(about, indent=1)
        name = hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
        self.n_sets, self.folder = len(labels), Path(folder) / name
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            _write(self.folder / "scan.json", lambda path: path.write_text(text))
        except OSError as error:
            raise HcLensError(
                f"expected a folder to write results to, got store={str(folder)!r}: {error}; "
                "give another folder"
            ) from error

    def load(self, place: int, batch: Any) -> Float[Tensor, "sets batch labels"] | None:
        """The logits of a finished batch, or None."""
        path = self._path(place)
        if not path.is_file():
            return None
        try:
            with safe_open(str(path), framework="pt") as file:
                logits, rows = file.get_tensor("logits"), file.get_tensor("rows")
        except (OSError, SafetensorError):
            return None
        whole = logits.shape[:2] == (self.n_sets, len(batch.rows))
        return logits if whole and torch.equal(rows, batch.rows.cpu()) else None

    def save(self, place: int, batch: Any, logits: Float[Tensor, "sets batch labels"]) -> None:
        """Keep the logits of a finished batch."""
        tensors = {"logits": logits.cpu().contiguous(), "rows": batch.rows.cpu().contiguous()}
        metadata = {"format": FORMAT}
        _write(self._path(place), lambda path: save_file(tensors, path, metadata=metadata))

    def _path(self, place: int) -> Path:
        return self.folder / f"batch-{place:06d}.safetensors"


def _write(path: Path, write: Any) -> None:
    """Write beside the place, then move there in one step."""
    beside = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        write(beside)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def _name_of(source: Source) -> str:
    if type(source) is Means:
        return f"means {source.fingerprint}"
    if type(source) is Zero:
        return "zero"
    if type(source) is Resample:
        return f"resample {source.seed}"
    raise HcLensError(
        "expected means, 'zero' or hc.Resample to keep results for later, got "
        f"{type(source).__name__}, which has no fingerprint; scan without store="
    )


def _fingerprint_of(batches: Any) -> str:
    found = getattr(batches, "fingerprint", None)
    if found is None:
        raise HcLensError(
            f"expected batches with a fingerprint to keep results for later, got "
            f"{type(batches).__name__}; make them with task.batches(...), or scan without store="
        )
    return found
