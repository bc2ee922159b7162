"""Logits of many patched edges of one batch, re-run from the receiver on.

1. One clean pass keeps every layer's activations (`passes.Pass`).
2. A sender's direct contributions to all later inputs are computed once, along the clean pass.
3. For each layer, three attention calls (with patched queries, keys, values) give the patched
   output of every head; patching input i of head h moves the stream by
   ``(z_h patched - z_h) W_O[h]`` only, and the MLP behind uses that (`lowrank`). A patched MLP
   runs once on its patched input.
4. The moved streams of a layer are stacked along the batch and run to the logits by the fused
   layers of `hc_lens.suffix`, the last layer at the read positions alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from analyses.composition.layers import Resid
from analyses.composition.lowrank import MovedMlp, is_plain
from analyses.composition.passes import (
    AblatedPass,
    Contributions,
    JointPass,
    Pass,
    Trunk,
    contributions,
)
from analyses.composition.receivers import Receiver, Sender
from hc_lens.models.inputs import mask_of
from hc_lens.sources import Source
from hc_lens.suffix.blocks import is_row_wise
from hc_lens.suffix.engine import STACK_TOKENS, take_rows
from hc_lens.suffix.fused import at_reads
from hc_lens.suffix.parts import Part

PIECE_TOKENS = 1024
"""Batches are cut along their rows to about so many tokens: every layer's activations are held."""
STACK_TOKENS_ELSEWHERE = 16_384
"""Tokens in a stack on a device other than the processor, where larger stacks are faster."""


def pieces(batch: Any, source: Source) -> Iterator[Any]:
    """A batch in pieces of about `PIECE_TOKENS`, if the source allows it."""
    rows, pos = mask_of(batch.inputs).shape
    size = max(1, PIECE_TOKENS // pos)
    if rows <= size or not is_row_wise(source):
        yield batch
        return
    for first in range(0, rows, size):
        yield take_rows(batch, list(range(first, min(first + size, rows))))


class PathEngine:
    """Patched edges of one model on one batch after the other."""

    def __init__(self, model: Any, source: Source, norms: str):
        """Prepare a model.

        Args:
            model: a classifier of `hc.load`.
            source: what replaces a sender's activation.
            norms: ``"frozen"`` or ``"recomputed"``; see `layers`.
        """
        self.trunk, self.source, self.norms = Trunk(model), source, norms
        self._moved_mlps: dict[int, MovedMlp] = {}

    @torch.no_grad()
    def start(self, batch: Any) -> tuple[Pass, Float[Tensor, "batch labels"]]:
        """The clean pass over a batch, and its logits."""
        clean = Pass(self.trunk, self.trunk.blocks.start(batch, self.source.on(batch)))
        return clean, clean.run()

    @torch.no_grad()
    def joint(
        self, clean: Pass, sender: Sender, receivers: Sequence[Receiver]
    ) -> Float[Tensor, "batch labels"]:
        """The logits with all the receivers patched together."""
        return JointPass(clean, sender, receivers, self.norms).run()

    @torch.no_grad()
    def ablated(self, clean: Pass, sender: Sender) -> Float[Tensor, "batch labels"]:
        """The logits without the sender."""
        return AblatedPass(clean, sender).run()

    @torch.no_grad()
    def edges(
        self, clean: Pass, sender: Sender, receivers: Sequence[Receiver]
    ) -> Float[Tensor, "edges batch labels"]:
        """The logits with each receiver patched alone, in the order of the receivers."""
        direct = contributions(clean, sender, self.norms)
        results: dict[Receiver, Tensor] = {}
        for index in range(len(self.trunk.layers)):
            here = [r for r in receivers if r.unit is not None and r.unit.layer == index]
            for receiver, logits in self._layer(clean, index, direct, here):
                results[receiver] = logits
        for receiver in receivers:
            if receiver.unit is None:
                results[receiver] = self._classifier(clean, direct)
        return torch.stack([results[receiver] for receiver in receivers])

    def _layer(
        self, clean: Pass, index: int, direct: Contributions, receivers: Sequence[Receiver]
    ) -> Iterator[tuple[Receiver, Tensor]]:
        """The logits of the receivers of one layer."""
        if not receivers:
            return
        heads = [receiver for receiver in receivers if receiver.kind != "mlp"]
        moved = _moved_heads(clean, index, direct.to_heads[index], {r.inputs for r in heads})
        size = self._copies(clean)
        narrow = index == len(self.trunk.layers) - 1
        size *= clean.stream.tokens.shape[1] if narrow else 1
        base = clean.runs[index].x + clean.runs[index].attention
        mlp = self._moved_mlp(index) if heads and not narrow else None
        shared = None if mlp is None else mlp.start(base)
        for first in range(0, len(heads), size):
            chunk = heads[first : first + size]
            if mlp is None or shared is None:
                out = self._after_heads(clean, index, moved, chunk, narrow)
            else:
                out = mlp.finish(base, shared, [_move(moved, receiver) for receiver in chunk])
            yield from zip(chunk, self._to_logits(clean, index + 1, out, narrow), strict=True)
        for receiver in receivers:
            if receiver.kind == "mlp":
                out = self._after_mlp(clean, index, direct.to_mlp[index], narrow)
                yield receiver, self._to_logits(clean, index + 1, out, narrow)[0]

    def _moved_mlp(self, index: int) -> MovedMlp | None:
        """A layer's MLP for streams that a head moved, made on first use; None if not plain."""
        layer, block = self.trunk.layers[index], self.trunk.model.blocks[index]
        if index not in self._moved_mlps and is_plain(layer, block):
            self._moved_mlps[index] = MovedMlp(layer, block)
        return self._moved_mlps.get(index)

    def _after_heads(
        self,
        clean: Pass,
        index: int,
        moved: dict[tuple[str, ...], Tensor],
        chunk: Sequence[Receiver],
        narrow: bool,
    ) -> Resid:
        """The streams behind the layer, one per receiver, stacked along the batch."""
        layer, run = self.trunk.layers[index], clean.runs[index]
        base = run.x + run.attention
        mlp_out = run.mlp_out if layer.parallel else None
        if narrow:
            base = at_reads(base, clean.stream)
            mlp_out = None if mlp_out is None else at_reads(mlp_out, clean.stream)
        changes = []
        for receiver in chunk:
            head, by_head = _move(moved, receiver)
            if narrow:
                by_head = at_reads(by_head, clean.stream)
            changes.append(torch.addmm(base.flatten(0, 1), by_head.flatten(0, 1), layer.W_O[head]))
        stacked = torch.cat(changes).view(len(chunk) * len(base), *base.shape[1:])
        mlp_out = None if mlp_out is None else mlp_out.repeat(len(chunk), 1, 1)
        return layer.finish(stacked, mlp_out)

    def _after_mlp(
        self, clean: Pass, index: int, change: Resid | None, narrow: bool
    ) -> Float[Tensor, "rows kept d_model"]:
        """The stream behind the layer whose MLP reads its patched input, where it is `kept`."""
        layer, run = self.trunk.layers[index], clean.runs[index]
        assert run.mlp_in is not None
        assert run.mlp_out is not None
        parts = [run.x, run.attention, run.mlp_in, run.mlp_in]
        if change is not None:
            parts[3] = run.mlp_in + change
        if narrow:
            parts = [at_reads(part, clean.stream) for part in parts]
        x, attention, mlp_in, reads = parts
        out = layer.close(x, attention, mlp_in, layer.mlp(reads))
        return layer.norm2(out) if layer.post_norm else out

    def _classifier(self, clean: Pass, direct: Contributions) -> Tensor:
        assert clean.final is not None
        read = at_reads(clean.final, clean.stream)
        if self.trunk.final is not None:
            read = self.trunk.final(read)
        change = direct.to_classifier
        return self.trunk.head(read if change is None else read + change)

    def _to_logits(
        self, clean: Pass, index: int, resid: Resid, narrow: bool
    ) -> Float[Tensor, "nodes batch labels"]:
        """The logits of stacked streams in front of layer `index`."""
        blocks, stream = self.trunk.blocks, clean.stream
        rows = stream.n_rows
        last = len(self.trunk.layers) - 1
        for layer in range(index, last + 1):
            narrow = layer == last
            step = blocks.step(stream, layer, resid, narrow)
            resid = step.children([(node, Part()) for node in range(len(resid) // rows)])
        return blocks.logits(stream, resid, narrow).unflatten(0, (-1, rows))

    def _copies(self, clean: Pass) -> int:
        """How many streams are stacked."""
        on_cpu = clean.stream.tokens.device.type == "cpu"
        most = STACK_TOKENS if on_cpu else STACK_TOKENS_ELSEWHERE
        return max(1, most // clean.stream.tokens.numel())


def _move(moved: dict[tuple[str, ...], Tensor], receiver: Receiver) -> tuple[int, Tensor]:
    """A receiver's head, and the change of its output."""
    assert receiver.unit is not None
    assert receiver.unit.head is not None
    return receiver.unit.head, moved[receiver.inputs][:, :, receiver.unit.head]


def _moved_heads(
    clean: Pass, index: int, change: Resid | None, kinds: set[tuple[str, ...]]
) -> dict[tuple[str, ...], Tensor]:
    """By patched inputs, the change of every head's output."""
    layer, run = clean.trunk.layers[index], clean.runs[index]
    if change is None:
        return {inputs: torch.zeros_like(run.z) for inputs in kinds}
    patched: dict[str, Tensor] = {}
    for kind in {kind for inputs in kinds for kind in inputs}:
        patched[kind] = layer.project(run.reads + change, kind)
    found = {}
    for inputs in kinds:
        q, k, v = (patched[i] if i in inputs else getattr(run, i) for i in ("q", "k", "v"))
        found[inputs] = layer.attend(q, k, v, clean.stream) - run.z
    return found
