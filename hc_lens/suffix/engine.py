"""The logits of many ablations of one batch, each layer run only where something changed.

1. A set of units is what it removes from each layer (`hc_lens.suffix.parts`). All sets start as one
   node, the clean residual stream at layer 0.
2. At each layer a node splits into one child per distinct part. The children share the node's
   attention; those that remove something are followed to the last layer first, so that few streams
   are alive at once; then the child that removes nothing goes on.
3. Children are stacked along the batch as far as the memory allows. On a processor only up to some
   hundred tokens: beyond that a larger stack is no faster.
4. The last layer runs at the read positions alone. A replacement that depends on the activation
   (`Resample`, `Counterfactual`, means by position) may need the others: there a child that removes
   something from the last layer runs at every position.
5. A batch that does not fit into the memory is cut along its rows.

The result is exact: the same sums in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from hc_lens.errors import HcLensError
from hc_lens.models.inputs import mask_of
from hc_lens.sources import Source
from hc_lens.suffix.blocks import Blocks, Stream, is_constant, is_row_wise
from hc_lens.suffix.fused import FusedBlocks, can_fuse
from hc_lens.suffix.hooked import HookedBlocks, check_classifier, has_user_hooks
from hc_lens.suffix.parts import Part, children, parts_of
from hc_lens.units import Unit, UnitSpace

STACK_TOKENS = 512
"""On a processor children are stacked up to so many tokens."""


class SuffixEngine:
    """Runs the given sets of ablations of one model, batch by batch."""

    def __init__(self, model: Any, sets: Sequence[Sequence[Unit]], source: Source, memory: int):
        """Prepare the layers.

        Args:
            model: a classifier of `hc.load`.
            sets: the units that each set removes; an empty set is the model itself.
            source: what replaces a removed unit.
            memory: most bytes to hold beside the model and the results.
        """
        check_classifier(model)
        self.space = UnitSpace.of(model)
        self.model, self.source, self.memory = model, source, memory
        self.parts = [parts_of(units, self.space.n_layers) for units in sets]
        fused = can_fuse(model) and not has_user_hooks(model)
        self.blocks: Blocks = FusedBlocks(model) if fused else HookedBlocks(model)
        touched = max((sum(map(bool, parts)) for parts in self.parts), default=0)
        # One level per layer that a set touches, and the node that does not branch.
        self._levels = touched + 1

    @torch.no_grad()
    def logits(
        self, batch: Any, report: Callable[[int], object] = lambda n: None
    ) -> Float[Tensor, "sets batch labels"]:
        """The logits of every set on a batch.

        Args:
            batch: an `hc.Batch`.
            report: called with the number of (set, row) results that have just been computed.
        """
        pieces = []
        for piece in self._pieces(batch):
            stream = self.blocks.start(piece, self.source.on(piece))
            pieces.append(_Walk(self, stream, report).run())
        return torch.cat(pieces, dim=1)

    def rows_that_fit(self, pos: int) -> int:
        """How many stacked rows of `pos` tokens the memory holds; none is an HcLensError."""
        row_bytes = self.blocks.row_bytes(pos, self._levels)
        rows = (self.memory - self.blocks.held_bytes) // row_bytes
        if rows < 1:
            least = row_bytes + self.blocks.held_bytes
            raise HcLensError(
                f"expected memory for at least one row of {pos} tokens ({least:,} bytes), got "
                f"{self.memory:,} bytes; raise memory=, or cut the rows with max_length="
            )
        return rows

    def _pieces(self, batch: Any) -> Iterator[Any]:
        """The batch, cut along its rows if it does not fit into the memory."""
        rows, pos = mask_of(batch.inputs).shape
        fit = self.rows_that_fit(pos)
        if rows > fit and not is_row_wise(self.source):
            need = rows * self.blocks.row_bytes(pos, self._levels) + self.blocks.held_bytes
            raise HcLensError(
                f"expected memory for a whole batch of {rows} rows ({need:,} bytes), as "
                f"{type(self.source).__name__} needs its rows together, got {self.memory:,} "
                "bytes; raise memory=, or make smaller batches with token_budget="
            )
        if rows <= fit:
            yield batch
            return
        for first in range(0, rows, fit):
            yield take_rows(batch, list(range(first, min(first + fit, rows))))

    def copies(self, stream: Stream) -> int:
        """How many nodes are stacked along the batch."""
        if not self.blocks.stacks:
            return 1
        rows, pos = stream.tokens.shape
        most = self.rows_that_fit(pos) // rows
        if stream.tokens.device.type == "cpu":
            most = min(most, STACK_TOKENS // (rows * pos))
        return max(1, most)


class _Walk:
    """All sets on one batch."""

    def __init__(self, engine: SuffixEngine, stream: Stream, report: Callable[[int], object]):
        self.blocks, self.parts, self.stream = engine.blocks, engine.parts, stream
        self.n_layers, self.report = engine.space.n_layers, report
        self.copies = engine.copies(stream)
        self.narrows_ablations = self.blocks.narrows and is_constant(stream.source)
        self.results: list[Tensor | None] = [None] * len(self.parts)

    def run(self) -> Float[Tensor, "sets batch labels"]:
        """Every set's logits, in the order of the sets."""
        self._descend(0, self.stream.resid, [list(range(len(self.parts)))])
        return torch.stack([result for result in self.results if result is not None])

    def _descend(
        self, layer: int, resid: Float[Tensor, "rows pos d_model"], nodes: list[list[int]]
    ) -> None:
        """Take stacked nodes, each a list of sets, from the entrance of a layer to the logits."""
        while True:
            last = layer == self.n_layers - 1
            branches = children(nodes, self.parts, layer)
            removing = [branch for branch in branches if branch[1]]
            keeping = [branch for branch in branches if not branch[1]]
            wide = not last or not self.narrows_ablations
            step = None
            if removing:
                step = self.blocks.step(self.stream, layer, resid, narrow=not wide)
            for chunk in self._chunks(removing, wide):
                self._follow(layer, step, chunk, narrow=not wide)
            if not keeping:
                return
            narrow = last and self.blocks.narrows
            if step is None or narrow == wide:
                step = self.blocks.step(self.stream, layer, resid, narrow=narrow)
            if last:
                self._follow(layer, step, keeping, narrow)
                return
            del resid
            resid = step.children([(node, part) for node, part, _ in keeping])
            nodes, layer = [members for _, _, members in keeping], layer + 1

    def _follow(
        self, layer: int, step: Any, chunk: list[tuple[int, Part, list[int]]], narrow: bool
    ) -> None:
        """Take some children of a step to their logits."""
        resid = step.children([(node, part) for node, part, _ in chunk])
        nodes = [members for _, _, members in chunk]
        if layer < self.n_layers - 1:
            self._descend(layer + 1, resid, nodes)
            return
        logits = self.blocks.logits(self.stream, resid, narrow)
        per_node = logits.unflatten(0, (len(nodes), -1))
        for members, result in zip(nodes, per_node, strict=True):
            for member in members:
                self.results[member] = result
            self.report(len(members) * self.stream.n_rows)

    def _chunks(
        self, branches: list[tuple[int, Part, list[int]]], wide: bool
    ) -> Iterator[list[tuple[int, Part, list[int]]]]:
        """Branches in stacks of a size that fits; at read positions alone many more fit."""
        size = self.copies if wide else self.copies * self.stream.tokens.shape[1]
        for first in range(0, len(branches), size):
            yield branches[first : first + size]


def take_rows(batch: Any, places: Sequence[int]) -> Any:
    """Some rows of a batch as a batch."""
    at = torch.tensor(places, device=batch.labels.device)
    return replace(
        batch,
        inputs={name: value[at.to(value.device)] for name, value in batch.inputs.items()},
        labels=batch.labels[at],
        cases=tuple(batch.cases[place] for place in places),
        rows=batch.rows[at.to(batch.rows.device)],
    )
