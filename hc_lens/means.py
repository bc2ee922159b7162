"""Mean activations of every unit, streamed over a dataset.

1. Run the model on each batch and read ``hook_z`` and ``hook_mlp_out``.
2. Add up the activations at the tokens that are not pads, in float64.
3. Divide by the number of tokens: one vector of d_head per head, one of d_model per MLP
   (Bhaskar, Friedman and Chen 2024, appendix B). With ``by="position"`` one such vector for each
   place in the sentence, counted from the first token that is not a pad.

Means belong to one checkpoint: they carry its fingerprint and refuse any other model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm.auto import tqdm

from hc_lens.errors import HcLensError
from hc_lens.hooks import Handle, check_hook_names, unit_hook_names
from hc_lens.models.fingerprint import fingerprint
from hc_lens.models.inputs import mask_of
from hc_lens.sources import Source
from hc_lens.units import UnitSpace

FORMAT = "hc_lens.means.1"


@dataclass(frozen=True, eq=False)
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
    """Mean at each place of the sentence, [pos, ...], if collected by position."""
    _positions: Int[Tensor, "batch pos"] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name, value in {**self.at_token, **(self.at_position or {})}.items():
            if not torch.isfinite(value).all():
                raise HcLensError(
                    f"expected finite means, got NaN or infinity at {name}; does the model give "
                    "finite activations on these batches?"
                )

    @property
    def by(self) -> str:
        """``"token"`` or ``"position"``."""
        return "token" if self.at_position is None else "position"

    @property
    def fingerprint(self) -> str:
        """Hash of the values and of the model they belong to."""
        digest = hashlib.blake2b(self.model.encode(), digest_size=16)
        for name, value in sorted({**self.at_token, **self._named_positions()}.items()):
            digest.update(name.encode() + value.cpu().double().numpy().tobytes())
        return digest.hexdigest()

    def check(self, model: Any, space: UnitSpace) -> None:
        """The means must be of this model and cover every unit."""
        missing = [name for name in unit_hook_names(space) if name not in self.at_token]
        if missing:
            raise HcLensError(
                f"expected a mean for every unit, missing {missing[:3]} "
                f"(of {len(missing)}); collect means on this model with "
                "hc.collect_means(model, batches)"
            )
        if fingerprint(model) != self.model:
            raise HcLensError(
                f"expected means of this model ({fingerprint(model)[:8]}), got means of another "
                f"({self.model[:8]}) or of other weights, labels or dtype; collect means on this "
                "model with hc.collect_means(model, batches)"
            )

    def on(self, batch: Any) -> Means:
        """By token: the same means. By position: bound to where the batch's rows begin."""
        if self.at_position is None:
            return self
        return replace(self, _positions=_places(mask_of(batch.inputs)))

    def value(self, name: str, activation: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """The mean at a hook point, by position where collected so (rows begin at 0 if unbound)."""
        if self.at_position is None:
            return self.at_token[name].to(activation)
        table = self.at_position[name].to(activation)
        places = self._positions
        if places is None:
            places = torch.arange(activation.shape[1], device=activation.device)[None]
        # Beyond the longest row seen there is no mean by position: the mean over tokens stands in.
        table = torch.cat([table, self.at_token[name].to(activation)[None]])
        return table[places.to(activation.device).clamp(max=len(table) - 1)]

    def save(self, path: str | Path) -> Path:
        """Write one safetensors file."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        about = {"model": self.model, "n_rows": self.n_rows, "n_tokens": self.n_tokens}
        tensors = {f"token/{name}": value for name, value in self.at_token.items()}
        tensors |= self._named_positions()
        contiguous = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
        save_file(contiguous, path, metadata={"format": FORMAT, "about": json.dumps(about)})
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
        if metadata.get("format") != FORMAT:
            raise HcLensError(
                f"expected means in the format {FORMAT!r}, got {metadata.get('format')!r} in "
                f"{path}; collect and save them again"
            )
        kinds = {"token": {}, "position": {}}
        for name, value in tensors.items():
            kind, _, point = name.partition("/")
            kinds[kind][point] = value
        about = json.loads(metadata["about"])
        return cls(at_token=kinds["token"], at_position=kinds["position"] or None, **about)

    def _named_positions(self) -> dict[str, Tensor]:
        return {f"position/{name}": value for name, value in (self.at_position or {}).items()}


def _places(mask: Int[Tensor, "batch pos"]) -> Int[Tensor, "batch pos"]:
    """Place of each token in its sentence, counted over tokens that are not pads."""
    return (mask.cumsum(1) - 1).clamp(min=0)


class _Sums:
    """Running float64 sums of one hook point, by place in the sentence."""

    def __init__(self) -> None:
        self.sums: Tensor | None = None

    def add(self, values: Tensor, places: Int[Tensor, "tokens"], width: int) -> None:
        """Add the activations of some tokens at their places; the table grows to `width`."""
        if self.sums is None:
            self.sums = values.new_zeros((0, *values.shape[1:]), dtype=torch.float64)
        if width > len(self.sums):
            more = self.sums.new_zeros((width - len(self.sums), *self.sums.shape[1:]))
            self.sums = torch.cat([self.sums, more])
        self.sums.index_add_(0, places, values.double())


def collect_means(
    model: Any, batches: Iterable[Any], *, by: str = "token", progress: bool = True
) -> Means:
    """Mean activation of every unit over the tokens of `batches` that are not pads.

    Args:
        model: a hooked model; its own hooks and the user's stay as they are.
        batches: `hc.Batches`, or any iterable of objects with `inputs`.
        by: ``"token"`` for one mean per unit, ``"position"`` for one per unit and place.
        progress: show a progress bar.
    """
    if by not in ("token", "position"):
        raise HcLensError(f"expected by='token' or by='position', got {by!r}; choose one")
    space = UnitSpace.of(model)
    check_hook_names(model, space)
    sums = {name: _Sums() for name in unit_hook_names(space)}
    counts = torch.zeros(0, dtype=torch.long)
    n_rows = 0
    for batch in tqdm(batches, desc="means", disable=not progress, leave=False):
        mask = mask_of(batch.inputs).bool()
        places = _places(mask.long())[mask]
        if by == "token":
            places = torch.zeros_like(places)
        seen = torch.bincount(places.cpu())
        width = max(len(counts), len(seen))
        counts = _padded(counts, width) + _padded(seen, width)
        edits = {name: _adder(total, mask, places, width) for name, total in sums.items()}
        with torch.no_grad(), Handle(model, edits):
            model(**batch.inputs)
        n_rows += len(mask)
    if n_rows == 0:
        raise HcLensError("expected at least one batch to average, got none; check the split")
    return _divide(sums, counts, by, fingerprint(model), n_rows, model.cfg.dtype)


def _padded(counts: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(counts, (0, width - len(counts)))


def _adder(total: _Sums, mask: Tensor, places: Tensor, width: int) -> Any:
    def edit(activation: Tensor) -> None:
        total.add(activation[mask.to(activation.device)], places.to(activation.device), width)

    return edit


def _divide(
    sums: Mapping[str, _Sums], counts: Tensor, by: str, model: str, n_rows: int, dtype: torch.dtype
) -> Means:
    silent = [name for name, total in sums.items() if total.sums is None]
    if silent:
        raise HcLensError(
            f"expected the hook points {silent[:3]} to fire, they did not; does the model run its "
            "blocks through TransformerLens hooks?"
        )
    at_token, at_position = {}, {}
    for name, total in sums.items():
        assert total.sums is not None
        at_token[name] = (total.sums.sum(0) / counts.sum().to(total.sums.device)).to(dtype)
        by_place = counts.to(total.sums.device).reshape(-1, *[1] * (total.sums.ndim - 1))
        at_position[name] = (total.sums / by_place).to(dtype)
    n_tokens = int(counts.sum())
    return Means(at_token, model, n_rows, n_tokens, at_position if by == "position" else None)
