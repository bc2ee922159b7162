"""The logits of many ablations of one batch, each layer run only where something changed.

1. Within a layer the heads act before the MLP, so a set of units is a sequence of `Part`, what it
   removes from each layer. All sets start as one node, the clean residual stream at layer 0; two
   sets share all work up to the first layer in which their parts differ.
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

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from hc_lens.blocks import Resid
from hc_lens.errors import HcLensError
from hc_lens.masks.replacements import Source
from hc_lens.models.inputs import mask_of
from hc_lens.protocols import BatchLike, Model
from hc_lens.scans.fused import FusedLayers, can_fuse
from hc_lens.scans.hooked import HookedLayers, check_classifier, has_user_hooks
from hc_lens.scans.layers import Layers, Part, Step, Stream
from hc_lens.units import Unit, UnitSpace

STACK_TOKENS = 512
"""On a processor children are stacked up to so many tokens."""

Branch = tuple[int, Part, list[int]]
"""One child of a node: the node's index, what is removed, the sets that the child stands for."""


def parts_of(units: Iterable[Unit], n_layers: int) -> tuple[Part, ...]:
    """The parts of a set, one per layer."""
    heads: list[list[int]] = [[] for _ in range(n_layers)]
    mlps = [False] * n_layers
    for unit in units:
        if unit.head is None:
            mlps[unit.layer] = True
        else:
            heads[unit.layer].append(unit.head)
    return tuple(Part(tuple(sorted(h)), mlp) for h, mlp in zip(heads, mlps, strict=True))


def children(
    nodes: Sequence[Sequence[int]], parts: Sequence[Sequence[Part]], layer: int
) -> list[Branch]:
    """The branches of some nodes, each a list of sets, at a layer."""
    found: list[Branch] = []
    for node, members in enumerate(nodes):
        groups: dict[Part, list[int]] = {}
        for member in members:
            groups.setdefault(parts[member][layer], []).append(member)
        found += [(node, part, group) for part, group in groups.items()]
    return found


def cut(batch: BatchLike, size: int) -> list[BatchLike]:
    """A batch in pieces of at most `size` rows."""
    rows = range(len(batch.rows))
    if len(rows) <= size:
        return [batch]
    return [batch.take(rows[first : first + size]) for first in rows[::size]]


class SuffixEngine:
    """Runs the given sets of ablations of one model, batch by batch."""

    def __init__(self, model: Model, sets: Sequence[Sequence[Unit]], source: Source, memory: int):
        """Prepare the layers; an empty set is the model itself, `memory` is in bytes."""
        self.model = check_classifier(model)
        self.space = UnitSpace.of(model)
        self.source, self.memory = source, memory
        self.parts = [parts_of(units, self.space.n_layers) for units in sets]
        fused = can_fuse(self.model) and not has_user_hooks(self.model)
        self.layers: Layers = FusedLayers(self.model) if fused else HookedLayers(self.model)
        # One level per layer that a set touches, and the node that does not branch.
        self._levels = 1 + max((sum(map(bool, parts)) for parts in self.parts), default=0)

    @torch.no_grad()
    def logits(
        self, batch: BatchLike, report: Callable[[int], object] = lambda n: None
    ) -> Float[Tensor, "sets batch labels"]:
        """The logits of every set on a batch; `report` is told how many new results there are."""
        pieces = []
        for piece in self._pieces(batch):
            stream = self.layers.start(piece, self.source.on(piece))
            pieces.append(_Walk(self, stream, report).run())
        return torch.cat(pieces, dim=1)

    def rows_that_fit(self, pos: int) -> int:
        """How many stacked rows of `pos` tokens the memory holds; none is an HcLensError."""
        row_bytes = self._row_bytes(pos)
        rows = (self.memory - self.layers.held_bytes) // row_bytes
        if rows < 1:
            least = row_bytes + self.layers.held_bytes
            raise HcLensError(
                f"expected memory for at least one row of {pos} tokens ({least:,} bytes), got "
                f"{self.memory:,} bytes; raise memory=, or cut the rows with max_length="
            )
        return rows

    def _row_bytes(self, pos: int) -> int:
        """Bytes for one row of `pos` tokens: its activations, and what the source holds of it."""
        held = pos * self.source.bytes_per_token(self.model.cfg)
        return held + self.layers.row_bytes(pos, self._levels)

    def _pieces(self, batch: BatchLike) -> list[BatchLike]:
        """The batch, cut along its rows if it does not fit into the memory."""
        rows, pos = mask_of(batch.inputs).shape
        fit = self.rows_that_fit(pos)
        if rows > fit and not self.source.row_wise:
            need = rows * self._row_bytes(pos) + self.layers.held_bytes
            raise HcLensError(
                f"expected memory for a whole batch of {rows} rows ({need:,} bytes), as "
                f"{type(self.source).__name__} needs its rows together, got {self.memory:,} "
                "bytes; raise memory=, or make smaller batches with token_budget="
            )
        return cut(batch, fit)

    def copies(self, stream: Stream) -> int:
        """How many nodes are stacked along the batch."""
        rows, pos = stream.tokens.shape
        most = self.rows_that_fit(pos) // rows if self.layers.stacks else 1
        if stream.tokens.device.type == "cpu":
            most = min(most, STACK_TOKENS // (rows * pos))
        return max(1, most)


class _Walk:
    """All sets on one batch."""

    def __init__(self, engine: SuffixEngine, stream: Stream, report: Callable[[int], object]):
        self.layers, self.parts, self.stream = engine.layers, engine.parts, stream
        self.n_layers, self.report = engine.space.n_layers, report
        self.copies = engine.copies(stream)
        self.constant = stream.source.constant
        self.results: dict[int, Float[Tensor, "batch labels"]] = {}

    def run(self) -> Float[Tensor, "sets batch labels"]:
        """Every set's logits, in the order of the sets."""
        members = list(range(len(self.parts)))
        self._descend(0, self.stream.resid, [members])
        return torch.stack([self.results[member] for member in members])

    def _descend(self, layer: int, resid: Resid, nodes: list[list[int]]) -> None:
        """Take stacked nodes, each a list of sets, from the entrance of a layer to the logits."""
        while layer < self.n_layers - 1:
            branches = children(nodes, self.parts, layer)
            step = self.layers.step(self.stream, layer, resid, narrow=False)
            layer += 1
            for chunk in self._chunks([branch for branch in branches if branch[1]], 1):
                self._descend(layer, *_after(step, chunk))
            keeping = [branch for branch in branches if not branch[1]]
            if not keeping:
                return
            resid, nodes = _after(step, keeping)
        self._finish(resid, nodes)

    def _finish(self, resid: Resid, nodes: list[list[int]]) -> None:
        """The last layer and the classifier, at the read positions alone where that is enough."""
        branches = children(nodes, self.parts, self.n_layers - 1)
        at_reads = [b for b in branches if self.layers.narrows and (self.constant or not b[1])]
        everywhere = [b for b in branches if b not in at_reads]
        for narrow, group in ((True, at_reads), (False, everywhere)):
            if not group:
                continue
            step = self.layers.step(self.stream, self.n_layers - 1, resid, narrow)
            for chunk in self._chunks(group, self.stream.tokens.shape[1] if narrow else 1):
                after, found = _after(step, chunk)
                logits = self.layers.logits(self.stream, after, narrow).split(self.stream.n_rows)
                for members, result in zip(found, logits, strict=True):
                    self.results.update(dict.fromkeys(members, result))
                    self.report(len(members) * self.stream.n_rows)

    def _chunks(self, branches: list[Branch], times: int) -> Iterator[list[Branch]]:
        """Branches in stacks that fit; at read positions alone many `times` more fit."""
        size = self.copies * times
        for first in range(0, len(branches), size):
            yield branches[first : first + size]


def _after(step: Step, branches: list[Branch]) -> tuple[Resid, list[list[int]]]:
    """The streams of some branches after a layer, and the sets of each."""
    resid = step([(node, part) for node, part, _ in branches])
    return resid, [members for _, _, members in branches]
