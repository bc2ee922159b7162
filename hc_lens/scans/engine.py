"""What many ablations of one batch leave to read, each layer run only where something changed.

1. Within a layer the heads act before the MLP, so a set of units is a sequence of parts, what it
   removes from each layer. All sets start as one node, the clean residual stream at layer 0; two
   sets share all work up to the first layer in which their parts differ.
2. At each layer a node splits into one child per distinct part. The children share the node's
   attention; those that remove something are followed to the last layer first, so that few streams
   are alive at once; then the child that removes nothing is continued.
3. Children are stacked along the batch as far as the memory allows. On a processor only up to some
   hundred tokens: beyond that a larger stack is no faster.
4. The last layer runs at the read positions alone, unless a classifier reads the mean of all
   tokens. A replacement that depends on the activation
   (`Resample`, `Counterfactual`, means by position) may need the others: there a child that removes
   something from the last layer runs at every position.
5. A batch is cut along its rows if it does not fit into the memory, and on a processor if it is
   large (`hc_lens.models.inputs.AT_ONCE`).

The result is exact: the same sums in another order.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from hc_lens.blocks import Resid
from hc_lens.data.batches import cut, shorter
from hc_lens.errors import HcLensError
from hc_lens.masks.replacements import Source
from hc_lens.models.inputs import mask_of, rows_at_once
from hc_lens.protocols import BatchLike, Model
from hc_lens.scans.layers import Branch, Stream, check_runnable, layers_of
from hc_lens.units import Unit, UnitSpace, as_units

STACK_TOKENS = 512
"""On a processor children are stacked up to so many tokens."""

Parts = tuple[tuple[Unit, ...], ...]
"""What a set removes from each layer."""
Results = Iterator[tuple[Sequence[int], Float[Tensor, "batch width"]]]
"""Sets and what they leave to read, as it becomes ready."""


def parts_of(units: Iterable[Unit], n_layers: int) -> Parts:
    """The units of a set, layer by layer."""
    ordered = as_units(units)
    return tuple(tuple(u for u in ordered if u.layer == layer) for layer in range(n_layers))


def children(nodes: Iterable[Sequence[int]], parts: Sequence[Parts], layer: int) -> list[Branch]:
    """The branches of some nodes, each a list of sets, at a layer."""
    found: list[Branch] = []
    for node, members in enumerate(nodes):
        groups: dict[tuple[Unit, ...], list[int]] = {}
        for member in members:
            groups.setdefault(parts[member][layer], []).append(member)
        found += [Branch(node, part, group) for part, group in groups.items()]
    return found


class SuffixEngine:
    """Runs the given sets of ablations of one model, batch by batch."""

    def __init__(self, model: Model, sets: Sequence[Sequence[Unit]], source: Source, memory: int):
        """Prepare the layers; an empty set is the model itself, `memory` is in bytes."""
        self.model = check_runnable(model)
        self.space = UnitSpace.of(model)
        self.source, self.memory = source, memory
        self.parts = [parts_of(units, self.space.n_layers) for units in sets]
        self.layers = layers_of(self.model)

    def of_sets(self, chosen: Sequence[int]) -> SuffixEngine:
        """This engine for some of its sets, by their indices."""
        engine = copy.copy(self)
        engine.parts = [self.parts[index] for index in chosen]
        return engine

    @torch.no_grad()
    def held(
        self, batch: BatchLike, report: Callable[[int], object] = lambda n: None
    ) -> Float[Tensor, "sets batch width"]:
        """What every set leaves to read on a batch: the logits, or what they are made of.

        `report` is told how many new results there are.
        """
        pieces, everything = [], range(len(self.parts))
        for piece in self._pieces(batch):
            stream = self.layers.start(piece, self.source.on(piece))
            results: dict[int, Float[Tensor, "batch width"]] = {}
            size = self._copies(stream)
            for members, held in self._descend(stream, size, 0, stream.resid, [everything]):
                results.update(dict.fromkeys(members, held))
                report(len(members) * stream.n_rows)
            pieces.append(torch.stack([results[member] for member in everything]))
        return torch.cat(pieces, dim=1)

    def logits(self, batch: BatchLike) -> Float[Tensor, "sets batch out"]:
        """The logits of every set on a batch."""
        return self.layers.readout.logits(self.held(batch))

    def _descend(
        self, stream: Stream, size: int, layer: int, resid: Resid, nodes: Sequence[Sequence[int]]
    ) -> Results:
        """Take stacked nodes, each a list of sets, from the entrance of a layer to the last.

        At most `size` children are stacked.
        """
        while layer < self.space.n_layers - 1:
            branches = children(nodes, self.parts, layer)
            step = self.layers.step(stream, layer, resid, narrow=False)
            layer += 1
            for chunk in _chunks([branch for branch in branches if branch.part], size):
                yield from self._descend(stream, size, layer, step(chunk), [b.sets for b in chunk])
            keeping = [branch for branch in branches if not branch.part]
            if not keeping:
                return
            resid, nodes = step(keeping), [branch.sets for branch in keeping]
        yield from self._finish(stream, size, resid, children(nodes, self.parts, layer))

    def _finish(
        self, stream: Stream, size: int, resid: Resid, branches: Sequence[Branch]
    ) -> Results:
        """The last layer, at the read positions alone where that is enough."""
        at_reads, everywhere = [], []
        narrows = not self.layers.watched and not stream.context.mean
        for branch in branches:
            enough = self.source.constant or not branch.part
            (at_reads if enough and narrows else everywhere).append(branch)
        for narrow, group in ((True, at_reads), (False, everywhere)):
            if not group:
                continue
            step = self.layers.step(stream, self.space.n_layers - 1, resid, narrow)
            # At the read positions alone as many more children fit as a row has tokens.
            for chunk in _chunks(group, size * stream.tokens.shape[1] if narrow else size):
                held = self.layers.held(stream, step(chunk)).split(stream.n_rows)
                yield from zip([branch.sets for branch in chunk], held, strict=True)

    def _pieces(self, batch: BatchLike) -> list[BatchLike]:
        """The batch, cut along its rows unless the source needs them together."""
        rows, pos = mask_of(batch.inputs).shape
        fit = self._rows_that_fit(pos)
        if fit < 1:
            least = self._row_bytes(pos) + self.layers.held_bytes
            raise HcLensError(
                f"expected memory for at least one row of {pos} tokens ({least:,} bytes), got "
                f"{self.memory:,} bytes; raise memory=, or "
                f"{shorter(prompts=getattr(batch, 'answers', None) is not None)}"
            )
        if rows > fit and not self.source.row_wise:
            need = rows * self._row_bytes(pos) + self.layers.held_bytes
            raise HcLensError(
                f"expected memory for a whole batch of {rows} rows ({need:,} bytes), as "
                f"{type(self.source).__name__} needs its rows together, got {self.memory:,} "
                "bytes; raise memory=, or make smaller batches with token_budget="
            )
        most = rows_at_once(self.model, batch.inputs) if self.source.row_wise else rows
        return cut(batch, min(fit, most))

    def _copies(self, stream: Stream) -> int:
        """How many nodes are stacked along the batch."""
        rows, pos = stream.tokens.shape
        most = 1 if self.layers.watched else self._rows_that_fit(pos) // rows
        if stream.tokens.device.type == "cpu":
            most = min(most, STACK_TOKENS // (rows * pos))
        return max(1, most)

    def _rows_that_fit(self, pos: int) -> int:
        """How many stacked rows of `pos` tokens the memory holds."""
        return (self.memory - self.layers.held_bytes) // self._row_bytes(pos)

    def _row_bytes(self, pos: int) -> int:
        """Bytes for one row of `pos` tokens: its activations, and what the source holds of it."""
        held = pos * self.source.bytes_per_token(self.model.cfg)
        # One level per layer that a set touches, and the node that does not branch.
        levels = 1 + max((sum(map(bool, parts)) for parts in self.parts), default=0)
        return held + self.layers.row_bytes(pos, levels)


def _chunks(branches: list[Branch], size: int) -> Iterator[list[Branch]]:
    for first in range(0, len(branches), size):
        yield branches[first : first + size]
