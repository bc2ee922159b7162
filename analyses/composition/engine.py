"""Logits of many patched edges of one batch, re-run from the receiver on.

1. One clean pass keeps every layer's activations (`passes.Pass`).
2. A sender's direct contributions to all later inputs are computed once, along the clean pass.
3. For each layer, three attention calls (with patched queries, keys, values) give the patched
   output of every head; patching input i of head h moves the stream by
   ``(z_h patched - z_h) W_O[h]`` only, and the MLP behind uses that (`lowrank`). A patched MLP
   runs once on its patched input.
4. The moved streams of a layer are stacked along the batch and run to the logits, the last layer at
   the read positions alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor

from analyses.composition.config import NORMS, Norms
from analyses.composition.lowrank import MovedMlp
from analyses.composition.passes import Contributions, JointPass, Pass, Trunk, contributions
from analyses.composition.receivers import CLASSIFIER, INPUTS, Receiver, Sender
from hc_lens.blocks import PerHead, Resid
from hc_lens.errors import check_choice
from hc_lens.masks.replacements import Source
from hc_lens.protocols import BatchLike, Model
from hc_lens.scans.engine import STACK_TOKENS

STACK_TOKENS_ELSEWHERE = 16_384
"""Tokens in a stack on a device other than the processor, where larger stacks are faster."""

Moved = dict[tuple[str, ...], PerHead]
"""By patched inputs, the change of every head's output."""


class PathEngine:
    """Patched edges of one model on one batch after the other."""

    def __init__(self, model: Model, source: Source, norms: Norms):
        """Prepare a model; the source replaces a sender's activation."""
        check_choice("norms", norms, NORMS)
        self.trunk, self.source = Trunk(model), source
        self.norms: Norms = norms
        blocks = self.trunk.blocks
        # The MLP of a layer for streams that a head moved; None if it is not plain.
        self._moved_mlp = cache(lambda index: MovedMlp.of(blocks[index]))

    @torch.no_grad()
    def start(self, batch: BatchLike) -> tuple[Pass, Float[Tensor, "batch labels"]]:
        """The clean pass over a batch, and its logits."""
        clean = Pass(self.trunk, self.trunk.stream(batch, self.source.on(batch)))
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
        return Pass(clean.trunk, clean.stream, clean.runs[: sender[0].layer + 1], sender).run()

    @torch.no_grad()
    def edges(
        self, clean: Pass, sender: Sender, receivers: Sequence[Receiver]
    ) -> Float[Tensor, "edges batch labels"]:
        """The logits with each receiver patched alone, in the order of the receivers."""
        direct = contributions(clean, sender, self.norms)
        results: dict[Receiver, Tensor] = {}
        for index in range(len(self.trunk.blocks)):
            here = [r for r in receivers if r.unit is not None and r.unit.layer == index]
            results |= dict(self._layer(clean, index, direct, here))
        last = Receiver(None, CLASSIFIER)
        if last in receivers:
            read = self.trunk.final(clean.stream.context.at_reads(clean.final))
            change = direct.to_classifier
            results[last] = self.trunk.logits(read if change is None else read + change)
        return torch.stack([results[receiver] for receiver in receivers])

    def _layer(
        self, clean: Pass, index: int, direct: Contributions, receivers: Sequence[Receiver]
    ) -> Iterator[tuple[Receiver, Float[Tensor, "batch labels"]]]:
        """The logits of the receivers of one layer."""
        heads = [receiver for receiver in receivers if receiver.kind != "mlp"]
        moved = _moved_heads(clean, index, direct.to_heads[index], {r.inputs for r in heads})
        narrow = index == len(self.trunk.blocks) - 1
        size = self._copies(clean) * (clean.stream.tokens.shape[1] if narrow else 1)
        base = clean.runs[index].x + clean.runs[index].attention
        mlp = self._moved_mlp(index) if heads and not narrow else None
        shared = None if mlp is None else mlp.read(base)
        for first in range(0, len(heads), size):
            chunk = heads[first : first + size]
            if mlp is None or shared is None:
                out = self._after_heads(clean, index, moved, chunk, narrow)
            else:
                out = mlp.finish(base, shared, [_move(moved, receiver) for receiver in chunk])
            yield from zip(chunk, self._to_logits(clean, index + 1, out), strict=True)
        for receiver in receivers:
            if receiver.kind == "mlp":
                out = self._after_mlp(clean, index, direct.to_mlp[index], narrow)
                yield receiver, self._to_logits(clean, index + 1, out)[0]

    def _after_heads(
        self, clean: Pass, index: int, moved: Moved, chunk: Sequence[Receiver], narrow: bool
    ) -> Float[Tensor, "stacked kept d_model"]:
        """The streams behind the layer, one per receiver, stacked along the batch."""
        block, run = self.trunk.blocks[index], clean.runs[index]
        at = clean.stream.context.at_reads if narrow else _everywhere
        base = at(run.x + run.attention)
        mlp_out = at(run.mlp_out).repeat(len(chunk), 1, 1) if block.parallel else None
        changes = []
        for receiver in chunk:
            head, dz = _move(moved, receiver)
            weight = block.heads.W_O[head]
            changes.append(torch.addmm(base.flatten(0, 1), at(dz).flatten(0, 1), weight))
        stacked = torch.cat(changes).view(len(chunk) * len(base), *base.shape[1:])
        return block.finish(stacked, mlp_out)

    def _after_mlp(
        self, clean: Pass, index: int, change: Resid | None, narrow: bool
    ) -> Float[Tensor, "rows kept d_model"]:
        """The stream behind the layer whose MLP reads its patched input, where it is `kept`."""
        block, run = self.trunk.blocks[index], clean.runs[index]
        at = clean.stream.context.at_reads if narrow else _everywhere
        reads = run.mlp_in if change is None else run.mlp_in + change
        out = block.close(at(run.x), at(run.attention), at(run.mlp_in), block.mlp_out(at(reads)))
        return block.norm2(out) if block.post_norm else out

    def _to_logits(
        self, clean: Pass, index: int, resid: Resid
    ) -> Float[Tensor, "nodes batch labels"]:
        """The logits of stacked streams in front of layer `index`; behind the last layer at the
        read positions alone."""
        context, blocks = clean.stream.context, self.trunk.blocks
        for block in blocks[index:-1]:
            resid = block(resid, context)
        read = blocks[-1].at_reads(resid, context) if index < len(blocks) else resid
        logits = self.trunk.logits(self.trunk.final(read))
        return logits.unflatten(0, (-1, clean.stream.n_rows))

    def _copies(self, clean: Pass) -> int:
        """How many streams are stacked."""
        on_cpu = clean.stream.tokens.device.type == "cpu"
        most = STACK_TOKENS if on_cpu else STACK_TOKENS_ELSEWHERE
        return max(1, most // clean.stream.tokens.numel())


def _everywhere(x: Tensor) -> Tensor:
    return x


def _move(moved: Moved, receiver: Receiver) -> tuple[int, Float[Tensor, "rows pos d_head"]]:
    """A receiver's head, and the change of its output."""
    assert receiver.unit is not None
    assert receiver.unit.head is not None
    return receiver.unit.head, moved[receiver.inputs][:, :, receiver.unit.head]


def _moved_heads(
    clean: Pass, index: int, change: Resid | None, kinds: set[tuple[str, ...]]
) -> Moved:
    """The change of every head's output, by the inputs that are patched."""
    block, run = clean.trunk.blocks[index], clean.runs[index]
    if change is None:
        return {inputs: torch.zeros_like(run.z) for inputs in kinds}
    needed = {kind for inputs in kinds for kind in inputs}
    patched = {k: block.project(run.reads + change, k) for k in INPUTS if k in needed}
    found = {}
    for inputs in kinds:
        q, k, v = (patched[i] if i in inputs else getattr(run, i) for i in INPUTS)
        found[inputs] = block.attend(q, k, v, clean.stream.context) - run.z
    return found
