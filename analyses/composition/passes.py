"""Forward passes that keep the stream with and the stream without a sender's own contribution.

Let d be the change of a residual stream if the senders' direct contributions are replaced. Along a
pass it starts at 0 and (a post-norm layer; n1, n2 its norms, `carry` as in `layers`)

1. the receivers among q, k, v read ``x + d``, all others x; both kinds share the outputs o;
2. the senders of the layer add ``(value - z) W_O``:  ``d' = carry(n1, x + o, d + that)``;
3. the MLP, if a receiver, reads ``n1(x + o) + d'``, else ``n1(x + o)``, and writes m;
4. a sending MLP adds ``value - m``:  ``d'' = carry(n2, n1(x + o) + m, d' + that)``;
5. the classifier, if a receiver, reads ``x + d`` at the end.

A pre-norm layer has the same steps without norms on the stream; there n1, n2 and the final norm
stand in front of a receiver, and its input moves by ``carry(n, x, d)``.

With norms recomputed and every receiver patched, x + d is the stream of the model without the
senders: joint patching of all paths is ablation. Patched nowhere, x is the clean stream.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from analyses.composition.layers import Heads, Layer, Norm, Read, Resid, check_supported
from analyses.composition.receivers import INPUTS, Receiver, Sender
from hc_lens.hooks import mlp_name, z_name
from hc_lens.models import EncoderClassifier
from hc_lens.suffix.blocks import Stream
from hc_lens.suffix.fused import FusedBlocks, at_reads
from hc_lens.units import Unit, UnitSpace


class Trunk:
    """A model in pieces."""

    def __init__(self, model: Any):
        check_supported(model)
        self.model, self.space = model, UnitSpace.of(model)
        self.blocks = FusedBlocks(model)
        self.layers = [
            Layer(block, fused)
            for block, fused in zip(model.blocks, self.blocks.layers, strict=True)
        ]
        self.encoder = isinstance(model, EncoderClassifier)
        self.parallel = self.layers[0].parallel
        self.final = None if self.encoder else Norm(getattr(model, "ln_final", torch.nn.Identity()))

    def head(self, read: Read) -> Float[Tensor, "rows labels"]:
        """The classifier's logits from its input, one position a row."""
        if self.encoder:
            return self.model.unembed(self.model.pooler(read))
        return self.model.unembed(read).squeeze(1)


@dataclass
class LayerRun:
    """What one layer computed in a pass."""

    x: Resid
    """The stream in front of the layer."""
    reads: Resid
    """What the heads read."""
    q: Heads
    k: Heads
    v: Heads
    z: Heads
    attention: Resid
    """What the heads write together."""
    before_mlp: Resid | None = None
    """The input of the norm in front of the MLP."""
    mlp_in: Resid | None = None
    """What the MLP reads if it is not patched."""
    mlp_out: Resid | None = None
    out: Resid | None = None
    """The stream behind the layer, before a post-norm encoder's last norm."""


class Pass:
    """A clean pass over one batch; subclasses change what is read or written."""

    def __init__(self, trunk: Trunk, stream: Stream, begun: Sequence[LayerRun] = ()):
        """Prepare a pass.

        Args:
            trunk: the model.
            stream: the batch.
            begun: the first layers' activations, if they are those of another pass, and one more.
        """
        self.trunk, self.stream = trunk, stream
        self.runs: list[LayerRun] = list(begun[:-1])
        self._x = begun[-1].x if begun else stream.resid
        self.final: Resid | None = None

    def run(self) -> Float[Tensor, "rows labels"]:
        """The logits; the layers' activations stay in `runs`, the last stream in `final`."""
        x = self._x
        for index in range(len(self.runs), len(self.trunk.layers)):
            x = self._layer(index, self.trunk.layers[index], x)
        self.final = x
        read = at_reads(x, self.stream)
        if self.trunk.final is not None:
            read = self.trunk.final(read)
        return self.trunk.head(self.classifier(read))

    def _layer(self, index: int, layer: Layer, x: Resid) -> Resid:
        reads = layer.attention_input(x)
        q, k, v = self.projections(index, layer, x, reads)
        z = self.heads(index, layer.attend(q, k, v, self.stream))
        run = LayerRun(x, reads, q, k, v, z, layer.attention_out(z))
        self.runs.append(run)
        if not layer.has_mlp:
            run.out = x + run.attention
            self.wrote(index, layer)
            return run.out
        run.before_mlp = layer.before_mlp(x, run.attention)
        run.mlp_in = layer.mlp_norm(run.before_mlp)
        run.mlp_out = self.mlp(index, layer.mlp(self.mlp_input(index, layer, run.mlp_in)))
        run.out = layer.close(x, run.attention, run.mlp_in, run.mlp_out)
        self.wrote(index, layer)
        return layer.norm2(run.out) if layer.post_norm else run.out

    def projections(
        self, index: int, layer: Layer, x: Resid, reads: Resid
    ) -> tuple[Heads, Heads, Heads]:
        """Queries, keys and values of a layer whose heads read `reads`."""
        q, k, v = (layer.project(reads, kind) for kind in INPUTS)
        return q, k, v

    def heads(self, index: int, z: Heads) -> Heads:
        """The heads' outputs as the layer goes on with them."""
        return z

    def mlp_input(self, index: int, layer: Layer, mlp_in: Resid) -> Resid:
        """What the MLP is given."""
        return mlp_in

    def mlp(self, index: int, mlp_out: Resid) -> Resid:
        """The MLP's output as the layer goes on with it."""
        return mlp_out

    def wrote(self, index: int, layer: Layer) -> None:
        """Called when a layer has written."""

    def classifier(self, read: Read) -> Read:
        """What the classifier is given."""
        return read


class Direct:
    """The change of the stream by the senders' own contributions, carried along a pass."""

    def __init__(self, clean: Pass, sender: Sender, how: str, fixed: bool = False):
        """Begin in front of the first layer.

        Args:
            clean: the clean pass, for frozen scales.
            sender: whose contributions are replaced.
            how: how a change passes a norm; see `layers`.
            fixed: a sender sends its replacement minus its activation in the clean pass, not in
                the pass that is followed.
        """
        self.clean, self.how, self.sender, self.fixed = clean, how, sender, fixed
        self.change: Resid | None = None
        self._inside: Resid | None = None
        self._heads: Resid | None = None

    def to_heads(self, index: int, layer: Layer, x: Resid) -> Resid | None:
        """The change of what the heads read; None if there is none."""
        if self.change is None or layer.post_norm:
            return self.change
        return layer.norm1.carry(x, self.change, self.clean.runs[index].x, self.how)

    def to_mlp(self, index: int, layer: Layer, run: LayerRun) -> Resid | None:
        """Take in what the layer's heads send; the change of what the MLP reads."""
        self._heads = self._sum(self.change, self._sent_by_heads(index, layer, run))
        if not layer.has_mlp:
            return None
        reads = self.change if layer.parallel else self._heads
        if reads is None:
            self._inside = None
            return None
        assert run.before_mlp is not None
        clean = self.clean.runs[index].before_mlp
        assert clean is not None
        self._inside = layer.mlp_norm.carry(run.before_mlp, reads, clean, self.how)
        return self._inside

    def close(self, index: int, layer: Layer, run: LayerRun) -> None:
        """Take in what the layer's MLP sends and leave the layer; after `to_mlp`."""
        sent = None
        if Unit(index) in self.sender:
            mlp_out = (self.clean.runs[index] if self.fixed else run).mlp_out
            assert mlp_out is not None
            sent = self.clean.stream.source.value(mlp_name(index), mlp_out) - mlp_out
        if not layer.post_norm:
            self.change = self._sum(self._heads, sent)
            return
        inside = self._sum(self._inside, sent)
        clean = self.clean.runs[index].out
        if inside is not None:
            assert run.out is not None
            assert clean is not None
            inside = layer.norm2.carry(run.out, inside, clean, self.how)
        self.change = inside

    def to_classifier(self, final: Resid) -> Read | None:
        """The change of what the classifier reads, one position a row."""
        if self.change is None:
            return None
        stream, norm = self.clean.stream, self.clean.trunk.final
        moved = at_reads(self.change, stream)
        if norm is None:
            return moved
        assert self.clean.final is not None
        at, clean = at_reads(final, stream), at_reads(self.clean.final, stream)
        return norm.carry(at, moved, clean, self.how)

    def _sent_by_heads(self, index: int, layer: Layer, run: LayerRun) -> Resid | None:
        heads = [unit.head for unit in self.sender if unit.layer == index and unit.is_head]
        if not heads:
            return None
        z = (self.clean.runs[index] if self.fixed else run).z
        value = self.clean.stream.source.value(z_name(index), z).expand_as(z)
        moved = (value[:, :, heads] - z[:, :, heads]).flatten(2)
        return moved @ layer.W_O[heads].flatten(0, 1)

    @staticmethod
    def _sum(one: Resid | None, other: Resid | None) -> Resid | None:
        if one is None or other is None:
            return other if one is None else one
        return one + other


@dataclass(frozen=True)
class Contributions:
    """A sender's direct contributions: the change of every receiver's input in the clean run."""

    to_heads: tuple[Resid | None, ...]
    """By layer, of what the heads read."""
    to_mlp: tuple[Resid | None, ...]
    """By layer, of what the MLP reads."""
    to_classifier: Read | None
    """Of what the classifier reads, one position a row."""


def contributions(
    along: Pass, sender: Sender, how: str, clean: Pass | None = None
) -> Contributions:
    """The direct contributions of a sender along a pass that has been run.

    What it sends is its replacement minus its activation in the clean pass, which `along` itself is
    if `clean` is not given.
    """
    direct = Direct(along if clean is None else clean, sender, how, fixed=True)
    to_heads, to_mlp = [], []
    for index, (layer, run) in enumerate(zip(along.trunk.layers, along.runs, strict=True)):
        to_heads.append(direct.to_heads(index, layer, run.x))
        to_mlp.append(direct.to_mlp(index, layer, run))
        direct.close(index, layer, run)
    assert along.final is not None
    return Contributions(tuple(to_heads), tuple(to_mlp), direct.to_classifier(along.final))


class AblatedPass(Pass):
    """A pass without some units: their outputs are replaced for everybody."""

    def __init__(self, clean: Pass, sender: Sender):
        super().__init__(clean.trunk, clean.stream, clean.runs[: sender[0].layer + 1])
        self._sender = sender

    def heads(self, index: int, z: Heads) -> Heads:
        """The replacements of the removed heads."""
        removed = [unit.head for unit in self._sender if unit.layer == index and unit.is_head]
        if not removed:
            return z
        value = self.stream.source.value(z_name(index), z).expand_as(z)
        z = z.clone()
        z[:, :, removed] = value[:, :, removed]
        return z

    def mlp(self, index: int, mlp_out: Resid) -> Resid:
        """The replacement of a removed MLP."""
        if Unit(index) not in self._sender:
            return mlp_out
        return self.stream.source.value(mlp_name(index), mlp_out).expand_as(mlp_out)


class JointPass(Pass):
    """A pass in which several receivers of a sender are patched together."""

    def __init__(self, clean: Pass, sender: Sender, receivers: Collection[Receiver], how: str):
        # Nothing changes in front of the first sender.
        super().__init__(clean.trunk, clean.stream, clean.runs[: sender[0].layer + 1])
        self.direct = Direct(clean, sender, how)
        self._inputs = {
            (r.unit, kind) for r in receivers if r.unit is not None for kind in r.inputs
        }
        self._reads_final = any(receiver.unit is None for receiver in receivers)

    def projections(
        self, index: int, layer: Layer, x: Resid, reads: Resid
    ) -> tuple[Heads, Heads, Heads]:
        """Patched heads read the moved stream."""
        change = self.direct.to_heads(index, layer, x)
        made = []
        for kind in INPUTS:
            out = layer.project(reads, kind)
            n_heads = out.shape[2]
            chosen = [(Unit(index, head), kind) in self._inputs for head in range(n_heads)]
            if change is not None and any(chosen):
                which = torch.tensor(chosen, device=out.device)[:, None]
                out = torch.where(which, layer.project(reads + change, kind), out)
            made.append(out)
        q, k, v = made
        return q, k, v

    def mlp_input(self, index: int, layer: Layer, mlp_in: Resid) -> Resid:
        """A patched MLP reads the moved stream."""
        change = self.direct.to_mlp(index, layer, self.runs[index])
        if change is None or (Unit(index), "mlp") not in self._inputs:
            return mlp_in
        return mlp_in + change

    def wrote(self, index: int, layer: Layer) -> None:
        """Carry the change behind the layer."""
        if not layer.has_mlp:
            self.direct.to_mlp(index, layer, self.runs[index])
        self.direct.close(index, layer, self.runs[index])

    def classifier(self, read: Read) -> Read:
        """A patched classifier reads the moved stream."""
        assert self.final is not None
        change = self.direct.to_classifier(self.final)
        return read + change if self._reads_final and change is not None else read
