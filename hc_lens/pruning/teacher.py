"""The full model's own logits on batches that come again.

1. `Teacher` runs a batch once and keeps what its logits are made of, a few numbers per row; of a
   language model the stream at the read position, as its vocabulary is large.
2. `Shelf` keeps them in memory as long as there is room, and then in a temporary file, which goes
   with it.
"""

from __future__ import annotations

import tempfile
import weakref
from typing import BinaryIO, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from hc_lens.data.batches import cut
from hc_lens.masks.finite import check_finite
from hc_lens.models.inputs import rows_at_once
from hc_lens.models.reading import Readout
from hc_lens.protocols import BatchLike, Model

ROOM = 2**28
"""Bytes that are kept in memory."""

Key = tuple[int, ...]
"""The rows of a batch."""


class Place(NamedTuple):
    """Where a tensor stands in a file."""

    offset: int
    nbytes: int
    shape: torch.Size
    dtype: torch.dtype


class Shelf:
    """Tensors by key: in memory as long as there is room, then in a temporary file."""

    def __init__(self, room: int = ROOM):
        """Begin with nothing kept; `room` is the number of bytes for the memory."""
        self._room = room
        self._near: dict[Key, Tensor] = {}
        self._far: dict[Key, Place] = {}
        self._file: BinaryIO | None = None

    def __contains__(self, key: object) -> bool:
        return key in self._near or key in self._far

    def put(self, key: Key, value: Tensor) -> None:
        """Keep a tensor of the CPU under a new key."""
        if value.nbytes <= self._room:
            self._near[key] = value
            self._room -= value.nbytes
            return
        file = self._opened()
        place = Place(file.seek(0, 2), value.nbytes, value.shape, value.dtype)
        file.write(value.contiguous().flatten().view(torch.uint8).numpy().data)
        self._far[key] = place

    def __getitem__(self, key: Key) -> Tensor:
        if key in self._near:
            return self._near[key]
        place, file = self._far[key], self._opened()
        file.seek(place.offset)
        read = torch.frombuffer(bytearray(file.read(place.nbytes)), dtype=place.dtype)
        return read.view(place.shape)

    def _opened(self) -> BinaryIO:
        if self._file is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the shelf)
            weakref.finalize(self, self._file.close)
        return self._file


class Teacher:
    """The full model's logits on batches that come again: run once and kept."""

    def __init__(self, model: Model):
        self.model, self.readout = model, Readout(model)
        self._kept = Shelf()

    @torch.no_grad()
    def logits(self, batch: BatchLike) -> Float[Tensor, "batch out"]:
        """The full model's logits on a batch."""
        return self.readout.logits(self.held(batch))

    @torch.no_grad()
    def held(self, batch: BatchLike) -> Float[Tensor, "batch width"]:
        """What the full model's logits on a batch are made of; a batch is known by its rows."""
        key = tuple(batch.rows.tolist())
        if key not in self._kept:
            size = rows_at_once(self.model, batch.inputs)
            held = torch.cat([self.readout.held(piece) for piece in cut(batch, size)])
            check_finite(self.model, batch.inputs, held)
            self._kept.put(key, held.cpu())
        return self._kept[key].to(batch.rows.device)
