"""A subnetwork on disk: a mask, where it came from, and how it was found.

1. `Subnetwork` holds the binary mask, the soft scores behind it, the settings and the fingerprints
   of the model, the means and the data.
2. ``save`` writes ``subnetwork.json`` and ``subnetwork.safetensors`` into a folder: a few KB. The
   JSON is written last and under another name first, so a half-written folder is never read.
3. ``&``, ``|`` and ``-`` combine the kept units of subnetworks of one architecture.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from jaxtyping import Bool, Float
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from hc_lens.ablate import attach
from hc_lens.errors import HcLensError
from hc_lens.files import write_text
from hc_lens.hooks import Handle
from hc_lens.models.fingerprint import fingerprint
from hc_lens.sources import Source
from hc_lens.units import UnitSpace

FORMAT = "hc_lens.subnetwork.1"


@dataclass(frozen=True, eq=False)
class Subnetwork:
    """Which units of a model are kept, and where that came from."""

    space: UnitSpace
    """The units of the model's architecture."""
    keep: Bool[Tensor, "units"]
    """True for a unit that is kept."""
    model: str
    """Fingerprint of the model; empty for a combination of subnetworks of several models."""
    scores: Float[Tensor, "units"] | None = None
    """Soft score of each unit (log alpha), if the method gives one; higher is kept longer."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Settings that produced the mask."""
    means: str = ""
    """Fingerprint of the means that replaced removed units."""
    data: str = ""
    """Fingerprint of the batches it was found on."""
    history: pd.DataFrame | None = None
    """One row per recorded step: step, target, sparsity, loss, lambda_1, lambda_2."""

    @property
    def mask(self) -> Float[Tensor, "units"]:
        """1 for a kept unit, 0 for a removed one."""
        return self.keep.float()

    @property
    def kept(self) -> list[str]:
        """Labels of the kept units, in order."""
        return [label for label, on in zip(self.space.labels, self.keep, strict=True) if on]

    @property
    def removed(self) -> list[str]:
        """Labels of the removed units, in order."""
        return [label for label, on in zip(self.space.labels, self.keep, strict=True) if not on]

    @property
    def sparsity(self) -> float:
        """Fraction of the units that is removed."""
        return 1.0 - self.keep.float().mean().item()

    @property
    def seed(self) -> int | None:
        """Seed it was found with."""
        return self.config.get("seed")

    def attach(self, model: Any, means: Source | str) -> Handle:
        """Put the mask on the model it was found in; use in a ``with`` block or detach later."""
        if fingerprint(model) != self.model:
            found = self.model[:8] or "several models combined"
            raise HcLensError(
                f"expected the model of this subnetwork ({found}), got another "
                f"({fingerprint(model)[:8]}) or one with other weights, labels or dtype; load the "
                "checkpoint it was found in, or use hc.masked(model, sub.mask, means)"
            )
        return attach(model, self.mask, means)

    def __and__(self, other: Subnetwork) -> Subnetwork:
        return self._combine(other, "&", torch.logical_and)

    def __or__(self, other: Subnetwork) -> Subnetwork:
        return self._combine(other, "|", torch.logical_or)

    def __sub__(self, other: Subnetwork) -> Subnetwork:
        return self._combine(other, "-", lambda mine, theirs: mine & ~theirs)

    def _combine(
        self, other: Subnetwork, sign: str, rule: Callable[[Tensor, Tensor], Tensor]
    ) -> Subnetwork:
        if self.space != other.space:
            raise HcLensError(
                f"expected subnetworks of one architecture, got {self.space} and {other.space}; "
                "combine subnetworks of the same model"
            )
        model = self.model if self.model == other.model else ""
        config = {"combined": sign, "of": [dict(self.config), dict(other.config)]}
        return Subnetwork(self.space, rule(self.keep, other.keep), model, config=config)

    def save(self, folder: str | Path) -> Path:
        """Write the two files into a folder (made if it is not there)."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {"keep": self.keep.cpu()}
        if self.scores is not None:
            tensors["scores"] = self.scores.detach().cpu()
        save_file(tensors, folder / "subnetwork.safetensors")
        about = {
            "format": FORMAT,
            "n_heads": list(self.space.n_heads),
            "mlps": list(self.space.mlps),
            "model": self.model,
            "means": self.means,
            "data": self.data,
            "config": dict(self.config),
            "kept": self.kept,
            "history": None if self.history is None else self.history.to_dict(orient="list"),
        }
        write_text(folder / "subnetwork.json", json.dumps(about, indent=1))
        return folder

    @classmethod
    def load(cls, folder: str | Path) -> Subnetwork:
        """Read a folder that `save` wrote."""
        folder = Path(folder)
        try:
            about = json.loads((folder / "subnetwork.json").read_text())
            tensors = load_file(folder / "subnetwork.safetensors")
        except (OSError, ValueError, SafetensorError) as error:
            raise HcLensError(
                f"expected subnetwork.json and subnetwork.safetensors in {folder}, got {error}; "
                "pass a folder that Subnetwork.save wrote"
            ) from error
        if about.get("format") != FORMAT:
            raise HcLensError(
                f"expected a subnetwork in the format {FORMAT!r}, got {about.get('format')!r} in "
                f"{folder}; prune again with this version"
            )
        history = about["history"]
        return cls(
            space=UnitSpace(tuple(about["n_heads"]), tuple(about["mlps"])),
            keep=tensors["keep"],
            model=about["model"],
            scores=tensors.get("scores"),
            config=about["config"],
            means=about["means"],
            data=about["data"],
            history=None if history is None else pd.DataFrame(history),
        )

    def push_to_hub(self, repo: str, *, path: str = ".", private: bool = False) -> None:
        """Upload the two files to a Hub model repository, made if it is not there."""
        import tempfile

        from huggingface_hub import HfApi

        api = HfApi()
        api.create_repo(repo, private=private, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            self.save(folder)
            api.upload_folder(repo_id=repo, folder_path=folder, path_in_repo=path)

    def __repr__(self) -> str:
        return (
            f"Subnetwork({len(self.kept)} of {len(self.space)} units kept, seed {self.seed}, "
            f"model {self.model[:8] or 'several'})"
        )
