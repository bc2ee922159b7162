"""A model's forward pass, written down, and how the reward R moves with what it writes.

1. `write` computes what one site (the embeddings, an attention, an MLP, the read-out) writes: its
   output, each component's part of it and what is added to the residual stream. The weights may
   differ from the model's own. The read-out writes the logits of the last position.
2. `record` runs a model and keeps what every site read and wrote.
3. Two ways tell how R moves if the model W before fine-tuning writes something else; W' is the
   model after it. `Exact` makes every change and runs the rest of the model again, many changes
   stacked along the batch. By position it changes one position at a time; positions interact, so
   these effects need not sum to that of the whole change.
4. `Linear` takes the directional derivative in the weights, and multiplies a change by dR/dy, the
   gradient at what the site wrote, position by position.
The blocks are those of `hc_lens.blocks`. Where these do not know a model's attention (soft caps,
ALiBi, sinks), the model's own attention module computes the heads' outputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.func import functional_call, jvp

from hc_lens.analyses.extractive.models import Component, Site, State, parameters, sites, swap
from hc_lens.analyses.extractive.prompts import Encoded
from hc_lens.analyses.extractive.settings import ScoreConfig
from hc_lens.blocks import Block, Context, Norm, PerHead, Resid, forward_mode
from hc_lens.models.views import can_view, view
from hc_lens.protocols import LanguageModel

Reads = Float[Tensor, "batch pos d_model"] | Int[Tensor, "batch pos"]
"""The residual stream that a site reads; the embeddings read tokens."""
Stream = Float[Tensor, "batch written width"]
"""What a site adds to the residual stream; of the read-out the logits at its one position."""
Parts = Float[Tensor, "batch written parts width"]
"""What each of a site's writers writes: the heads of an attention, or a single part elsewhere."""
Effect = Float[Tensor, "batch copies"]
"""Rise of the reward of each prompt, for a whole change or for each position that it is made at."""
Where = Literal["added", "output", "late"]
"""What a change is made to: what a site adds, its output before any norm of it, or that output with
the blocks after the site those of W'; the read-out is always that of W."""


@dataclass(frozen=True)
class Written:
    """What one site read and wrote."""

    reads: Reads
    parts: Parts
    """What each of its writers wrote."""
    output: Stream
    """The sum of the parts, with b_O in an attention."""
    adds: Stream
    """What is added to the stream: the output, or the norm of it (Gemma 2)."""
    z: PerHead | None = None
    """What the heads of an attention hand to W_O."""

    def detach(self) -> Written:
        """The same values without a graph."""
        known = {name: value for name, value in vars(self).items() if value is not None}
        return Written(**{name: value.detach() for name, value in known.items()})


Record = Mapping[Site, Written]
"""What every site read and wrote on one batch of prompts of one length, in order."""


@dataclass(frozen=True)
class _OwnAttention(Block):
    """A block in which the model's own attention module computes the heads' outputs."""

    module: Any = None
    replaced: State = field(default_factory=dict)
    """Parameters that take the place of the module's own."""

    def attention(self, x: Resid, context: Context) -> PerHead:
        """The output of every head that reads `x`, at every position."""
        kept: list[Tensor] = []
        handle = self.module.hook_z.register_forward_hook(lambda m, given, z: kept.append(z))
        try:
            functional_call(self.module, dict(self.replaced), (x, x, x))
        finally:
            handle.remove()
        return kept[0]


def block_of(model: LanguageModel, layer: int, weights: State | None = None) -> Block:
    """One block of a model; parameters named in `weights` replace the model's own."""
    block = view(model, layer, weights)
    if can_view(model):
        return block
    start = f"blocks.{layer}.attn."
    named = (weights or {}).items()
    replaced = {name.removeprefix(start): w for name, w in named if name.startswith(start)}
    return _OwnAttention(**vars(block), module=model.blocks[layer].attn, replaced=replaced)


def write(model: LanguageModel, site: Site, reads: Reads, weights: State | None = None) -> Written:
    """What a site writes if it reads `reads`; parameters in `weights` replace the model's own."""
    if site.kind in ("embed", "read-out"):
        assert isinstance(model, nn.Module)
        given, options = reads, {"stop_at_layer": 0, "attention_mask": torch.ones_like(reads)}
        if site.kind == "read-out":
            # No block is left, so this is the final norm, the unembedding and any soft cap.
            given, options = reads[:, -1:], {"start_at_layer": model.cfg.n_layers}
        output = functional_call(model, dict(weights or {}), (given,), options, strict=False)
        return Written(reads, output[:, :, None], output, output)
    block, z = block_of(model, site.layer, weights), None
    if site.kind == "attention":
        z = block.attention(block.attention_input(reads), Context())
        output, parts = block.attention_out(z), block.written_by_heads(z)
    else:
        assert block.mlp is not None
        output = block.mlp(block.norm2(reads))
        parts = output[:, :, None]
    return Written(reads, parts, output, _norm_behind(block, site)(output), z)


def _norm_behind(block: Block, site: Site) -> Norm:
    """The norm of what an attention or an MLP writes, which makes it what is added (Gemma 2)."""
    return block.attention_norm if site.kind == "attention" else block.mlp_out_norm


def record(
    model: LanguageModel, tokens: Int[Tensor, "batch pos"], *, differentiable: bool = False
) -> Record:
    """Run the model on tokens and write down what every site read and wrote.

    With `differentiable` the embeddings are the root of a graph: all that follows can be
    differentiated with respect to what any site wrote.
    """
    first, *others = sites(model)
    stream = write(model, first, tokens).output
    if differentiable:
        stream = stream.detach().requires_grad_()
    written = {first: Written(tokens, stream[:, :, None], stream, stream)}
    reads = stream
    for site in others:
        if site.kind != "mlp" or not model.cfg.parallel_attn_mlp:
            reads = stream
        written[site] = write(model, site, reads)
        if site.kind != "read-out":
            stream = stream + written[site].adds
    return written


class Exact:
    """Every change is made, and the rest of the model run again."""

    def __init__(
        self, before: LanguageModel, after: LanguageModel, batch: Encoded, config: ScoreConfig
    ):
        self.before, self.after, self.batch, self.config = before, after, batch, config
        self.kept, self.tuned = (record(model, batch.tokens) for model in (before, after))
        self._blocks, self._late_blocks = (
            [block_of(model, layer) for layer in range(model.cfg.n_layers)]
            for model in (before, after)
        )

    def moved(self, component: Component) -> Stream:
        """What the component's site adds with its new weights, minus what it adds with the old."""
        kept = self.kept[component.site]
        weights = swap(parameters(self.before), parameters(self.after), [component])
        return write(self.before, component.site, kept.reads, weights).adds - kept.adds

    def rises(self, site: Site, changes: Sequence[Stream], where: Where) -> list[Effect]:
        """The rewards with each change of what a site writes, minus the reward without."""
        if where != "added" and site.kind != "embed":
            kept, norm = self.kept[site], _norm_behind(self._blocks[site.layer], site)
            changes = [norm(kept.output + each) - kept.adds for each in changes]
        blocks = self._late_blocks if where == "late" else self._blocks
        step = max(1, self.config.max_rows // len(self.batch.tokens))
        copies = self._copies(changes)
        rewards: list[Tensor] = []
        while part := list(itertools.islice(copies, step)):
            logits = self._resume(blocks, site, torch.stack(part))
            rewards.extend(self.batch.reward(each) for each in logits)
        base, *moved = rewards
        rises = torch.stack(moved, dim=1) - base[:, None]
        return list(rises.split(rises.shape[1] // len(changes), dim=1))

    def _copies(self, changes: Sequence[Stream]) -> Iterator[Stream]:
        """No change, then each change at every position alone, or at all of them at once."""
        yield torch.zeros_like(changes[0])
        for change in changes:
            if self.config.by == "component":
                yield change
            else:
                alone = torch.eye(change.shape[1]).to(change)
                yield from (change * chosen[:, None] for chosen in alone)

    def _resume(
        self,
        blocks: Sequence[Block],
        site: Site,
        change: Float[Tensor, "copies batch written width"],
    ) -> Float[Tensor, "copies batch vocab"]:
        """Logits after adding a change to what one site added, with these blocks after it."""
        if site.kind == "read-out":
            return (self.kept[site].adds + change)[:, :, -1]
        cfg = self.before.cfg
        read_out, reader = Site(cfg.n_layers, "read-out"), Site(site.layer + 1, "attention")
        if site.kind == "attention" and not (cfg.attn_only or cfg.parallel_attn_mlp):
            reader = Site(site.layer, "mlp")
        stream = (self.kept.get(reader, self.kept[read_out]).reads + change).flatten(0, 1)
        if reader.kind == "mlp":
            stream = blocks[site.layer].finish(stream)
        for block in blocks[site.layer + 1 :]:
            stream = block(stream, Context())
        logits = write(self.before, read_out, stream).output[:, -1]
        return logits.unflatten(0, (len(change), -1))


class Linear:
    """Gradients instead of one run per component."""

    def __init__(self, before: LanguageModel, after: LanguageModel, batch: Encoded):
        self.before, self.after = before, after
        self.kept, output, added = _slopes(before, batch)
        self.tuned, late, _ = _slopes(after, batch)
        self._slopes = {"added": added, "output": output, "late": late}

    def moved(self, component: Component) -> Stream:
        """The derivative of what the component's site adds along the change of its weights."""
        site, own = component.site, parameters(self.before)
        new = swap(own, parameters(self.after), [component])
        old = {name: own[name] for name in component.parameters}
        delta = {name: new[name] - old[name] for name in old}
        reads = self.kept[site].reads
        with forward_mode():
            made = jvp(lambda given: write(self.before, site, reads, given).adds, (old,), (delta,))
        return cast("Tensor", made[1])

    def rises(self, site: Site, changes: Sequence[Stream], where: Where) -> list[Effect]:
        """Each change of what a site writes times the slope of R there, position by position."""
        return [(change * self._slopes[where][site]).sum(-1) for change in changes]


def _slopes(
    model: LanguageModel, batch: Encoded
) -> tuple[Record, dict[Site, Stream], dict[Site, Stream]]:
    """A model's pass, and the slope of R at every site's output and at what it adds."""
    with torch.enable_grad():
        kept = record(model, batch.tokens, differentiable=True)
        values = [each.output for each in kept.values()] + [each.adds for each in kept.values()]
        *_, read_out = kept.values()
        found = torch.autograd.grad(batch.reward(read_out.adds[:, -1]).sum(), values)
    halves = found[: len(kept)], found[len(kept) :]
    outputs, adds = (dict(zip(kept, half, strict=True)) for half in halves)
    return {site: each.detach() for site, each in kept.items()}, outputs, adds


Way = Exact | Linear
