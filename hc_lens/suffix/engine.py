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
from hc_lens.sources import Counterfactual, Source
from hc_lens.suffix.blocks import Blocks, Step, Stream, is_constant, is_row_wise
from hc_lens.suffix.fused import FusedBlocks, can_fuse
from hc_lens.suffix.hooked import HookedBlocks, check_classifier, has_user_hooks
from hc_lens.suffix.parts import Branch, children, parts_of
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
        row_bytes = self._row_bytes(pos)
        rows = (self.memory - self.blocks.held_bytes) // row_bytes
        if rows < 1:
            least = row_bytes + self.blocks.held_bytes
            raise HcLensError(
                f"expected memory for at least one row of {pos} tokens ({least:,} bytes), got "
                f"{self.memory:,} bytes; raise memory=, or cut the rows with max_length="
            )
        return rows

    def _row_bytes(self, pos: int) -> int:
        """Bytes for one row of `pos` tokens: its activations, and what the source holds of it."""
        cfg, width = self.model.cfg, 0
        if not is_constant(self.source):
            width += 3 * cfg.d_model
        if isinstance(self.source, Counterfactual):
            width += 2 * cfg.n_layers * cfg.d_model
        held = pos * width * torch.finfo(cfg.dtype).bits // 8
        return held + self.blocks.row_bytes(pos, self._levels)

    def _pieces(self, batch: Any) -> Iterator[Any]:
        """The batch, cut along its rows if it does not fit into the memory."""
        rows, pos = mask_of(batch.inputs).shape
        fit = self.rows_that_fit(pos)
        if rows > fit and not is_row_wise(self.source):
            need = rows * self._row_bytes(pos) + self.blocks.held_bytes
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
        self.constant = is_constant(stream.source)
        self.results: list[Tensor | None] = [None] * len(self.parts)

    def run(self) -> Float[Tensor, "sets batch labels"]:
        """Every set's logits, in the order of the sets."""
        self._descend(0, self.stream.resid, [list(range(len(self.parts)))])
        return torch.stack([result for result in self.results if result is not None])

    def _descend(
        self, layer: int, resid: Float[Tensor, "rows pos d_model"], nodes: list[list[int]]
    ) -> None:
        """Take stacked nodes, each a list of sets, from the entrance of a layer to the logits."""
        while layer < self.n_layers - 1:
            branches = children(nodes, self.parts, layer)
            step = self.blocks.step(self.stream, layer, resid, narrow=False)
            layer += 1
            for chunk in self._chunks([branch for branch in branches if branch[1]], 1):
                self._descend(layer, *_after(step, chunk))
            keeping = [branch for branch in branches if not branch[1]]
            if not keeping:
                return
            resid, nodes = _after(step, keeping)
        self._finish(resid, nodes)

    def _finish(self, resid: Float[Tensor, "rows pos d_model"], nodes: list[list[int]]) -> None:
        """The last layer and the classifier, at the read positions alone where that is enough."""
        branches = children(nodes, self.parts, self.n_layers - 1)
        at_reads = [b for b in branches if self.blocks.narrows and (self.constant or not b[1])]
        everywhere = [b for b in branches if b not in at_reads]
        for narrow, group in ((True, at_reads), (False, everywhere)):
            if not group:
                continue
            step = self.blocks.step(self.stream, self.n_layers - 1, resid, narrow)
            for chunk in self._chunks(group, self.stream.tokens.shape[1] if narrow else 1):
                after, members = _after(step, chunk)
                self._keep(self.blocks.logits(self.stream, after, narrow), members)

    def _keep(self, logits: Float[Tensor, "rows labels"], nodes: list[list[int]]) -> None:
        """Give each set its logits."""
        for members, result in zip(nodes, logits.unflatten(0, (len(nodes), -1)), strict=True):
            for member in members:
                self.results[member] = result
            self.report(len(members) * self.stream.n_rows)

    def _chunks(self, branches: list[Branch], times: int) -> Iterator[list[Branch]]:
        """Branches in stacks that fit; at read positions alone many `times` more fit."""
        size = self.copies * times
        for first in range(0, len(branches), size):
            yield branches[first : first + size]


def _after(step: Step, branches: list[Branch]) -> tuple[Tensor, list[list[int]]]:
    """The streams of some branches after a layer, and the sets of each."""
    resid = step.children([(node, part) for node, part, _ in branches])
    return resid, [members for _, _, members in branches]


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
