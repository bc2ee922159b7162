"""Mean activations of every unit, streamed over a dataset.

1. Run the model on each batch and read ``hook_z`` and ``hook_mlp_out``.
2. Add up the activations at the tokens that are not pads, in float64.
3. Divide by the number of tokens: one vector of d_head per head, one of d_model per MLP
   (Bhaskar, Friedman and Chen 2024, appendix B). With ``by="position"`` one such vector for each
   position in the sentence, counted from the first token that is not a pad.

Means belong to one checkpoint: they carry its fingerprint and refuse any other model. Their file
carries a seal (`hc_lens.records`), by which a change of it is noticed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from torch.nn.functional import pad
from tqdm.auto import tqdm

from hc_lens.errors import HcLensError, check_choice
from hc_lens.masks.attached import warn_if_masked
from hc_lens.masks.finite import check_finite, check_weights
from hc_lens.masks.hooks import hook_points
from hc_lens.masks.replacements import Source, rank_in_row
from hc_lens.models.fingerprint import check_version, fingerprint
from hc_lens.models.inputs import mask_of, pieces
from hc_lens.models.reading import read_units
from hc_lens.protocols import BatchLike, Model, check_batch
from hc_lens.records import digest, sealed, unsealed, write_file
from hc_lens.units import UnitSpace

FORMAT, OLDER = "hc_lens.means.2", "hc_lens.means.1"
"""The format, and that of files without a seal, which are read too."""
By = Literal["token", "position"]
"""One mean per unit over all tokens, or one for each position in the sentence."""
AGAIN = "collect means on this model with hc.collect_means(model, batches)"
"""What to do with means that do not fit a model."""


@dataclass(frozen=True, eq=False, repr=False)
class Means(Source):
    """Mean activations of one model, as a source for ablation."""

    at_token: Mapping[str, Tensor]
    """Mean over all tokens by hook point: [head, d_head] at hook_z, [d_model] at hook_mlp_out."""
    model: str
    """Fingerprint of the model they belong to."""
    n_rows: int
    """Rows that were averaged."""
    n_tokens: int
    """Tokens that were averaged; pads do not count."""
    at_position: Mapping[str, Tensor] | None = None
    """Mean at each position in the sentence, [pos, ...], if collected by position."""
    rows: str = ""
    """Fingerprint of the rows that were averaged, where they have one."""
    _positions: Int[Tensor, "batch pos"] | None = None

    def __post_init__(self) -> None:
        for name, value in {**self.at_token, **(self.at_position or {})}.items():
            if not torch.isfinite(value).all():
                raise HcLensError(
                    f"expected finite means, got NaN or infinity at {name}; does the model give "
                    "finite activations on these batches?"
                )

    @property
    def by(self) -> By:
        """What the means were collected by."""
        return "token" if self.at_position is None else "position"

    @property
    def constant(self) -> bool:
        """Means by token are."""
        return self.at_position is None

    @property
    def row_wise(self) -> bool:
        """The mean of a row depends on no other row."""
        return True

    @property
    def fingerprint(self) -> str:
        """Hash of the values and of the model they belong to."""
        parts: list[object] = []
        for name, value in sorted(self._tensors().items()):
            parts += [name, value.cpu().double().contiguous().numpy().data]
        return digest("means", self.model, *parts)

    def check(self, model: Model, space: UnitSpace) -> None:
        """The means must be of this model and cover every unit."""
        missing = [name for name in hook_points(space) if name not in self.at_token]
        if missing:
            raise HcLensError(
                f"expected a mean for every unit, missing {missing[:3]} (of {len(missing)}); "
                f"{AGAIN}"
            )
        own = fingerprint(model)
        check_version("means", self.model, own, AGAIN)
        if own != self.model:
            raise HcLensError(
                f"expected means of this model ({own[:8]}), got means of another "
                f"({self.model[:8]}) or of other weights, labels or dtype; {AGAIN}"
            )

    def on(self, batch: BatchLike) -> Means:
        """By token: the same means. By position: bound to where the batch's rows begin."""
        if self.at_position is None:
            return self
        return replace(self, _positions=rank_in_row(mask_of(batch.inputs)))

    def value(self, name: str, activation: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """The mean at a hook point, by position where collected so (rows begin at 0 if unbound)."""
        if self.at_position is None:
            return self.at_token[name].to(activation)
        positions = self._positions
        if positions is None:
            positions = torch.arange(activation.shape[1])[None]
        # Beyond the longest row seen there is no mean by position, so the mean over tokens is used.
        table = torch.cat([self.at_position[name], self.at_token[name][None]]).to(activation)
        return table[positions.to(activation.device).clamp(max=len(table) - 1)]

    def save(self, path: str | Path) -> Path:
        """Write one safetensors file."""
        path = Path(path)
        about = {"format": FORMAT, **{name: getattr(self, name) for name in _ABOUT}}
        tensors = {name: value.cpu().contiguous() for name, value in self._tensors().items()}
        # One entry: safetensors writes several in another order each time.
        metadata = {"about": json.dumps(sealed(about, *_parts(tensors)))}
        write_file(path, save(tensors, metadata=metadata))
        return path

    @classmethod
    def load(cls, path: str | Path) -> Means:
        """Read a file that `save` wrote."""
        try:
            with safe_open(str(path), framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise HcLensError(
                f"expected a readable safetensors file of means, got {path}: {error}; "
                "save means with means.save(path)"
            ) from error
        kinds: dict[str, dict[str, Tensor]] = {"token": {}, "position": {}}
        try:
            about = unsealed(metadata.get("about", "{}"), *_parts(tensors))
            given = about.get("format", metadata.get("format"))
            if given not in (FORMAT, OLDER):
                raise ValueError(f"the format {given!r}")
            for name, value in tensors.items():
                kind, _, point = name.partition("/")
                kinds[kind][point] = value
            known = {name: about[name] for name in _ABOUT if name != "rows" or name in about}
        except (ValueError, TypeError, KeyError) as error:
            raise HcLensError(
                f"expected means in the format {FORMAT!r}, as they were saved, got {error} in "
                f"{path}; collect and save them again"
            ) from error
        return cls(at_token=kinds["token"], at_position=kinds["position"] or None, **known)

    def __repr__(self) -> str:
        heads = [len(mean) for mean in self.at_token.values() if mean.ndim == 2]
        return (
            f"Means(by {self.by}, {sum(heads)} heads and {len(self.at_token) - len(heads)} MLPs, "
            f"{self.n_rows:,} rows, {self.n_tokens:,} tokens, model {self.model[:8]})"
        )

    def _tensors(self) -> dict[str, Tensor]:
        """Every mean under its name in a file."""
        tensors = {f"token/{name}": value for name, value in self.at_token.items()}
        positions = self.at_position or {}
        return tensors | {f"position/{name}": value for name, value in positions.items()}


_ABOUT = ("model", "n_rows", "n_tokens", "rows")
"""Fields that a file holds beside the tensors."""


def _parts(tensors: Mapping[str, Tensor]) -> list[object]:
    """The content of tensors as `digest` takes it."""
    parts: list[object] = []
    for name, value in sorted(tensors.items()):
        raw = value.contiguous().view(torch.uint8).numpy().data
        parts += [name, str(value.dtype), list(value.shape), raw]
    return parts


def collect_means(
    model: Model, batches: Iterable[BatchLike], *, by: By = "token", progress: bool = True
) -> Means:
    """Mean activation of every unit over the tokens of `batches` that are not pads.

    Args:
        batches: `hc.Batches`, or any iterable of objects with `inputs`.
        by: ``"token"`` for one mean per unit, ``"position"`` for one per unit and position.
    """
    check_choice("by", by, get_args(By))
    warn_if_masked(model)
    check_weights(model)
    sums: dict[str, Tensor] = {}
    counts = torch.zeros(0, dtype=torch.long)
    n_rows = 0
    for batch in tqdm(batches, desc="means", disable=not progress, leave=False):
        check_batch(batch, "inputs")
        for inputs in pieces(model, batch.inputs):
            mask = mask_of(inputs).bool()
            positions = rank_in_row(mask.long())[mask] * (by == "position")
            seen = torch.bincount(positions.cpu(), minlength=len(counts))
            counts = seen + pad(counts, (0, len(seen) - len(counts)))
            add = partial(_add, sums, mask, positions, len(counts))
            check_finite(model, inputs, read_units(model, inputs, add))
            n_rows += len(mask)
    if n_rows == 0:
        raise HcLensError("expected at least one batch to average, got none; check the split")
    dtype, n_tokens, at_position = model.cfg.dtype, int(counts.sum()), None
    at_token = {name: (total.sum(0) / n_tokens).to(dtype) for name, total in sums.items()}
    if by == "position":
        at_position = {
            name: (total / counts.to(total.device).view(-1, *[1] * (total.ndim - 1))).to(dtype)
            for name, total in sums.items()
        }
    rows = getattr(batches, "fingerprint", "")
    return Means(at_token, fingerprint(model), n_rows, n_tokens, at_position, rows)


def _add(
    sums: dict[str, Tensor],
    mask: Bool[Tensor, "batch pos"],
    positions: Int[Tensor, "tokens"],
    length: int,
    name: str,
    activation: Float[Tensor, "batch pos ..."],
) -> None:
    """Add the activations of the tokens that are not pads to a hook point's sums by position."""
    values = activation[mask.to(activation.device)].double()
    before = sums.get(name, values[:0])
    longer = values.new_zeros((length - len(before), *values.shape[1:]))
    sums[name] = torch.cat([before, longer]).index_add_(0, positions.to(values.device), values)
