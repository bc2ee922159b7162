"""What many patched edges of one batch leave to read, re-run from the receiver on.

1. One clean pass keeps every layer's activations (`passes.Pass`).
2. A sender's direct contributions to all later inputs are computed once, along the clean pass.
3. For each layer, three attention calls (with patched queries, keys, values) give the patched
   output of every head; patching input i of head h moves the stream by ``dz W_O[h]`` only, with
   ``dz = z_h patched - z_h``. A patched MLP runs once on its patched input.
4. The MLP behind a head that moved reads ``n(u) W_in = (c(u) w) W_in / s(u) + b W_in``: its norm is
   linear but for the scale. So ``(c(u + dz W_O[h]) w) W_in`` is that of u, computed once, plus
   ``dz G[h]`` with ``G[h] = (c(W_O[h]) w) W_in``: a product of rank d_head instead of d_model.
5. The moved streams of a layer are stacked along the batch and run to the end, the last layer at
   the read positions alone. Left are a classifier's logits, or what a language model's unembedding
   reads (`passes.PathView`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import get_args

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import linear
from tqdm.auto import tqdm

from hc_lens.analyses.composition.config import Norms
from hc_lens.analyses.composition.passes import Direct, JointPass, Pass, PathView
from hc_lens.analyses.composition.receivers import INPUTS, Receiver, Sender
from hc_lens.blocks import Block, Mlp, PerHead, Resid, repeated
from hc_lens.data.batches import cut
from hc_lens.errors import check_choice
from hc_lens.masks.finite import check_weights
from hc_lens.masks.replacements import Source, as_source
from hc_lens.protocols import BatchesLike, BatchLike, Model
from hc_lens.scans.engine import STACK_TOKENS
from hc_lens.scans.layers import Stream
from hc_lens.units import UnitSpace

PIECE_TOKENS = 1024
"""Batches are cut along their rows to about so many tokens: every layer's activations are held."""
STACK_TOKENS_ELSEWHERE = 16_384
"""Tokens in a stack on a device other than the processor, where larger stacks are faster."""

Move = tuple[int, Float[Tensor, "rows pos d_head"]]
"""A head and the change of its output."""


class PathEngine:
    """Patched edges of one model on one batch after the other."""

    def __init__(self, model: Model, means: Source | str, norms: Norms = "frozen"):
        """Prepare a model; `means` replace a sender's activation."""
        check_choice("norms", norms, get_args(Norms))
        check_weights(model)
        self.view = PathView(model)
        self.source = as_source(means)
        self.source.check(model, UnitSpace.of(model))
        self.norms: Norms = norms
        blocks = self.view.blocks
        # The MLP of a layer for streams that a head moved; None if it is not plain.
        self._moved_mlp = cache(lambda index: MovedMlp.of(blocks[index]))

    @torch.no_grad()
    def start(self, batch: BatchLike) -> Pass:
        """The clean pass over a batch."""
        resid, context = self.view.start(batch)
        stream = Stream(resid, batch.inputs["input"], self.source.on(batch), context)
        clean = Pass(self.view, stream)
        clean.run()
        return clean

    def passes(
        self, named: Mapping[str, BatchesLike], progress: bool, what: str
    ) -> Iterator[tuple[str, BatchLike, Pass]]:
        """The clean pass over every batch, cut into pieces if the source allows it."""
        total = sum(map(len, named.values()))
        with tqdm(total=total, desc=what, disable=not progress, leave=False, unit="batch") as bar:
            for name, batches in named.items():
                for batch in batches:
                    for piece in self._pieces(batch):
                        yield name, piece, self.start(piece)
                    bar.update()

    def cleans(self, batch: BatchLike) -> Iterator[Pass]:
        """The clean pass over a batch, in pieces."""
        return map(self.start, self._pieces(batch))

    def _pieces(self, batch: BatchLike) -> list[BatchLike]:
        """The batch, cut along its rows if the source allows it."""
        rows, pos = batch.inputs["input"].shape
        return cut(batch, max(1, PIECE_TOKENS // pos) if self.source.row_wise else rows)

    @torch.no_grad()
    def joint(
        self, clean: Pass, sender: Sender, receivers: Sequence[Receiver]
    ) -> Float[Tensor, "batch width"]:
        """What is left to read with all the receivers patched together."""
        return JointPass(clean, sender, receivers, self.norms).run()

    @torch.no_grad()
    def ablated(self, clean: Pass, sender: Sender) -> Float[Tensor, "batch width"]:
        """What is left to read without the sender."""
        return Pass(self.view, clean.stream, clean.runs[: sender[0].layer], sender).run()

    @torch.no_grad()
    def edges(
        self, clean: Pass, sender: Sender, receivers: Sequence[Receiver]
    ) -> Float[Tensor, "edges batch width"]:
        """What is left to read with each receiver patched alone, in the order of the receivers."""
        direct = Direct(clean, sender, self.norms, clean.runs, clean.runs)
        results: dict[Receiver, Tensor] = {}
        for index in range(len(self.view.blocks)):
            here = [receiver for receiver in receivers if receiver.layer == index]
            heads = [receiver for receiver in here if receiver.kind != "mlp"]
            if heads:
                moves = _moves(clean, index, direct.to_heads(index), heads)
                results |= zip(heads, self._after_heads(clean, index, moves), strict=True)
            for receiver in set(here) - set(heads):
                results[receiver] = self._after_mlp(clean, index, direct.to_mlp(index))
        if self.view.last in receivers:
            context = clean.stream.context
            read = context.pooled(self.view.final(context.at_reads(clean.final)))
            results[self.view.last] = self.view.held(read + direct.to_last())
        return torch.stack([results[receiver] for receiver in receivers])

    def _after_heads(
        self, clean: Pass, index: int, moves: Sequence[Move]
    ) -> Iterator[Float[Tensor, "batch width"]]:
        """What is left to read with each of some heads of a layer moved."""
        run, kept, tokens = clean.runs[index], self._kept(clean, index), clean.stream.tokens
        block, base = run.block, kept(run.x + run.attention)
        last = index == len(self.view.blocks) - 1
        narrow = last and not clean.stream.context.mean
        low_rank = None if last else self._moved_mlp(index)
        shared = None if low_rank is None else low_rank.read(base)
        most = STACK_TOKENS if tokens.is_cpu else STACK_TOKENS_ELSEWHERE
        size = max(1, most // tokens.numel()) * (tokens.shape[1] if narrow else 1)
        for first in range(0, len(moves), size):
            chunk = [(head, kept(dz)) for head, dz in moves[first : first + size]]
            if low_rank is not None and shared is not None:
                out = low_rank.finish(base, shared, chunk)
            else:
                moved = _stacked(base, chunk, block.heads.W_O)
                beside = repeated(kept(run.mlp_out), len(moved)) if block.parallel else None
                out = block.finish(moved, beside)
            yield from self._to_end(clean, index + 1, out)

    def _after_mlp(self, clean: Pass, index: int, change: Resid) -> Float[Tensor, "batch width"]:
        """What is left to read if the MLP of a layer reads a changed input."""
        run, kept = clean.runs[index], self._kept(clean, index)
        made = run.block.mlp_out(kept(run.mlp_in + change))
        out = run.block.close(kept(run.x), kept(run.attention), kept(run.mlp_in), made)
        out = run.block.norm2(out) if run.block.post_norm else out
        return self._to_end(clean, index + 1, out)[0]

    def _to_end(self, clean: Pass, index: int, resid: Resid) -> Float[Tensor, "edges batch width"]:
        """What stacked streams in front of a layer, or behind the last at the reads, leave."""
        context, blocks = clean.stream.context, self.view.blocks
        for block in blocks[index:-1]:
            resid = block(resid, context)
        read = blocks[-1].at_reads(resid, context) if index < len(blocks) else resid
        held = self.view.held(context.pooled(self.view.final(read)))
        return held.unflatten(0, (-1, clean.stream.n_rows))

    def _kept(self, clean: Pass, index: int) -> Callable[[Tensor], Tensor]:
        """Takes what is needed of the activations of a layer: of the last, the read positions."""
        last = index == len(self.view.blocks) - 1
        return clean.stream.context.at_reads if last else lambda x: x


def _moves(clean: Pass, index: int, change: Resid, receivers: Sequence[Receiver]) -> list[Move]:
    """Each receiver's head, and the change of its output if the receiver reads the change."""
    run, reads = clean.runs[index], clean.runs[index].reads + change
    project = cache(lambda kind: run.block.project(reads, kind))

    @cache
    def moved(inputs: tuple[str, ...]) -> PerHead:
        q, k, v = (project(i) if i in inputs else getattr(run, i) for i in INPUTS)
        return run.block.attend(q, k, v, clean.stream.context) - run.z

    moves = []
    for receiver in receivers:
        assert receiver.unit is not None
        assert receiver.unit.head is not None
        moves.append((receiver.unit.head, moved(receiver.inputs)[:, :, receiver.unit.head]))
    return moves


def _stacked(
    base: Float[Tensor, "rows pos width"],
    moves: Sequence[Move],
    weights: Float[Tensor, "heads d_head width"],
) -> Float[Tensor, "stacked pos width"]:
    """``base + dz weights[head]`` for each move."""
    stack = base.new_empty(len(moves) * len(base), *base.shape[1:])
    for into, (head, dz) in zip(stack.split(len(base)), moves, strict=True):
        out = into.flatten(0, 1)
        torch.addmm(base.flatten(0, 1), dz.flatten(0, 1), weights[head], out=out)
    return stack


class MovedMlp:
    """One layer behind its attention, for streams that one head moved: step 4 of the module."""

    @classmethod
    def of(cls, block: Block) -> MovedMlp | None:
        """The layer's if it reads the moved stream through a layer norm and has no gate."""
        mlp, norm = block.mlp, block.mlp_norm
        if not isinstance(mlp, Mlp) or mlp.W_gate is not None or block.parallel:
            return None
        if not norm.centres or (norm.weight is None) != (norm.bias is None):
            return None
        # What is folded into the weights behind the norm is as if it were not there.
        ones = mlp.W_in.new_ones(len(mlp.W_in))
        weight, bias = (
            folded if given is None else given
            for given, folded in ((norm.weight, ones), (norm.bias, torch.zeros_like(ones)))
        )
        return cls(block, mlp, weight, bias)

    def __init__(self, block: Block, mlp: Mlp, weight: Tensor, bias: Tensor):
        """Multiply what the heads write with what the MLP reads behind its norm."""
        self._block, self._mlp, self._weight, self._bias = block, mlp, weight, bias
        self._offset = bias @ mlp.W_in + mlp.b_in
        self._by_head = self.read(block.heads.W_O)

    def read(self, x: Float[Tensor, "... d_model"]) -> Float[Tensor, "... d_mlp"]:
        """What the MLP's first weights make of a stream, before the norm's scale and bias."""
        return ((x - x.mean(-1, keepdim=True)) * self._weight) @ self._mlp.W_in

    def finish(
        self, base: Resid, shared: Float[Tensor, "rows pos d_mlp"], moves: Sequence[Move]
    ) -> Float[Tensor, "stacked pos d_model"]:
        """The streams behind the layer, one per move of `base`, which `read` makes `shared`."""
        block, mlp = self._block, self._mlp
        moved = _stacked(base, moves, block.heads.W_O)
        hidden = _stacked(shared, moves, self._by_head)
        shape, eps = [moved.shape[-1]], block.mlp_norm.eps
        normed, _, inverse = torch.native_layer_norm(moved, shape, self._weight, self._bias, eps)
        hidden = mlp.act(hidden.mul_(inverse).add_(self._offset))
        out = linear(hidden, mlp.W_out.T, mlp.b_out)
        return block.norm2(out.add_(normed)) if block.post_norm else out.add_(moved)
