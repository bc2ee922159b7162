"""A subnetwork on disk: a mask, where it came from, and how it was found.

1. ``save`` writes ``subnetwork.safetensors`` and ``subnetwork.json`` into a folder: a few KB. The
   JSON is written last, and each file whole or not at all. It carries a seal (`hc_lens.records`):
   neither a half-written folder nor one that has changed since is read.
2. ``load`` reads such a folder, or what ``push_to_hub`` put into a Hub repository. What comes back
   equals what was saved: two subnetworks are equal if their files would be.
3. ``&``, ``|`` and ``-`` combine the kept units of subnetworks of one architecture.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from jaxtyping import Bool, Float
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from hc_lens.errors import HcLensError, first_line
from hc_lens.masks.ablate import attach
from hc_lens.masks.hooks import Handle
from hc_lens.masks.replacements import Source
from hc_lens.models.fingerprint import check_version, fingerprint
from hc_lens.protocols import Model
from hc_lens.records import as_folder, digest, json_bytes, sealed, unsealed, write_file
from hc_lens.units import UnitSet, UnitSpace, as_units

FORMAT = "hc_lens.subnetwork.1"
ABOUT, TENSORS = "subnetwork.json", "subnetwork.safetensors"
"""The two files of a subnetwork."""
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
"""A user or organisation and a repository of theirs."""
ORIGIN = ("model", "means", "data", "config")
"""Fields that the JSON file holds as they are."""


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

    def __post_init__(self) -> None:
        for name in ("keep", "scores"):
            value = getattr(self, name)
            if value is not None and value.shape != (len(self.space),):
                raise HcLensError(
                    f"expected {name} with an entry for each of the {len(self.space)} units, got "
                    f"the shape {tuple(value.shape)}; give one value a unit"
                )

    @classmethod
    def from_units(cls, model: Model, units: UnitSet) -> Subnetwork:
        """The subnetwork of a model that keeps the named units and removes all others."""
        space = UnitSpace.of(model)
        keep = torch.zeros(len(space), dtype=torch.bool)
        keep[space.indices(as_units(units))] = True
        return cls(space, keep, fingerprint(model))

    @property
    def mask(self) -> Float[Tensor, "units"]:
        """1 for a kept unit, 0 for a removed one."""
        return self.keep.float()

    @property
    def kept(self) -> list[str]:
        """Labels of the kept units, in order."""
        return list(itertools.compress(self.space.labels, self.keep.tolist()))

    @property
    def removed(self) -> list[str]:
        """Labels of the removed units, in order."""
        return list(itertools.compress(self.space.labels, (~self.keep).tolist()))

    @property
    def sparsity(self) -> float:
        """Fraction of the units that is removed."""
        return 1.0 - self.mask.mean().item()

    def check(self, model: Model) -> None:
        """The subnetwork must be of this model."""
        own = fingerprint(model)
        again = "prune again, use hc.masked(model, sub.mask, means) if it is the same checkpoint"
        check_version("a subnetwork", self.model, own, again)
        if own != self.model:
            found = self.model[:8] or "several models combined"
            raise HcLensError(
                f"expected the model of this subnetwork ({found}), got another "
                f"({own[:8]}) or one with other weights, labels or dtype; load the "
                "checkpoint it was found in, or use hc.masked(model, sub.mask, means)"
            )

    def attach(self, model: Model, means: Source | str) -> Handle:
        """Put the mask on the model it was found in; use in a ``with`` block or detach later."""
        self.check(model)
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
        tensors, about = self._content()
        write_file(folder / TENSORS, tensors)
        write_file(folder / ABOUT, json_bytes(sealed(about, tensors)))
        return folder

    def _content(self) -> tuple[bytes, dict[str, Any]]:
        """What the two files hold."""
        scores = {} if self.scores is None else {"scores": self.scores.detach().cpu()}
        about = {
            "format": FORMAT,
            "n_heads": self.space.n_heads,
            "mlps": self.space.mlps,
            **{name: getattr(self, name) for name in ORIGIN},
            "kept": self.kept,
            "history": None if self.history is None else self.history.to_dict(orient="list"),
        }
        return save({"keep": self.keep.cpu(), **scores}), about

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Subnetwork) and self._digest == other._digest

    def __hash__(self) -> int:
        return hash(self._digest)

    @property
    def _digest(self) -> str:
        return digest(*self._content())

    @classmethod
    def load(
        cls, folder: str | Path, *, path: str = ".", revision: str | None = None
    ) -> Subnetwork:
        """Read a folder that `save` wrote, or a Hub repository that `push_to_hub` wrote to.

        Args:
            folder: a folder, or a Hub id such as ``"user/repo"`` where there is no such folder.
            path: where in the folder or repository the two files are.
            revision: branch, tag or commit of the Hub repository.
        """
        folder = _local(folder, path, revision)
        try:
            content = (folder / TENSORS).read_bytes()
            about, tensors = unsealed((folder / ABOUT).read_bytes(), content), load(content)
        except (OSError, ValueError, TypeError, SafetensorError) as error:
            raise _unreadable(folder, error) from error
        if about.get("format") != FORMAT:
            raise HcLensError(
                f"expected a subnetwork in the format {FORMAT!r}, got {about.get('format')!r} in "
                f"{folder}; prune again with this version"
            )
        try:
            history = about["history"]
            found = cls(
                UnitSpace(tuple(about["n_heads"]), tuple(about["mlps"])),
                history=None if history is None else pd.DataFrame(history),
                **tensors,
                **{name: about[name] for name in ORIGIN},
            )
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise _unreadable(folder, error) from error
        if found.kept != about["kept"]:
            raise HcLensError(
                f"expected the mask in {folder / TENSORS} to keep what {ABOUT} says "
                f"({len(about['kept'])} units), got another ({len(found.kept)} units); prune again"
            )
        return found

    def push_to_hub(self, repo: str, *, path: str = ".", private: bool = False) -> None:
        """Upload the two files to a Hub model repository, made if it is not there."""
        from huggingface_hub import HfApi

        api = HfApi()
        api.create_repo(repo, private=private, exist_ok=True)
        with as_folder({}) as folder:
            self.save(folder)
            api.upload_folder(repo_id=repo, folder_path=folder, path_in_repo=path)

    def __repr__(self) -> str:
        seed = f"seed {self.config['seed']}, " if "seed" in self.config else ""
        return (
            f"Subnetwork({len(self.kept)} of {len(self.space)} units kept, "
            f"{seed}model {self.model[:8] or 'several'})"
        )


def _unreadable(folder: Path, error: Exception) -> HcLensError:
    return HcLensError(
        f"expected {ABOUT} and {TENSORS} in {folder} as Subnetwork.save wrote them, got "
        f"{type(error).__name__}: {error}; pass a folder that Subnetwork.save wrote, or prune again"
    )


def _local(given: str | Path, path: str, revision: str | None) -> Path:
    """The folder of the two files, fetched from the Hub if a Hub id is given."""
    folder = Path(given).expanduser()
    if folder.exists() or not (isinstance(given, str) and HUB_ID.fullmatch(given)):
        return folder / path
    from huggingface_hub import snapshot_download

    # Both files in one call, so that they are of one commit.
    wanted = [(Path(path) / name).as_posix() for name in (ABOUT, TENSORS)]
    try:
        return Path(snapshot_download(given, revision=revision, allow_patterns=wanted)) / path
    except Exception as error:  # the connection errors of two HTTP libraries, by version
        raise HcLensError(
            f"expected a folder with {ABOUT} and {TENSORS}, or a Hub repository, got {given!r}: "
            f"{first_line(error)}; correct the name, or without a network pass the path of a "
            "folder that Subnetwork.save wrote"
        ) from error
