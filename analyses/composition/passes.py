"""Forward passes that keep the stream with and the stream without a sender's own contribution.

A norm is ``n(u) = c(u) / s(u) * w + b`` with c(u) = u minus its mean (u itself for RMS norms) and
``s(u) = sqrt(mean(c(u)^2) + eps)``. A change d of its input u arrives behind it (`carry`) as

- ``frozen``: ``c(d) / s(u_clean) * w``, linear in d, the scale that of the clean run;
- ``recomputed``: ``n(u + d) - n(u)``;
- ``tangent``: the derivative of ``recomputed`` at d = 0, in closed form
  ``(c(d) - h mean(h c(d))) / s(u) * w`` with ``h = c(u) / s(u)``.

Let d be the change of a residual stream if the senders' direct contributions are replaced. Along a
pass it starts at 0 and (a post-norm layer; n1, n2 its norms)

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

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from analyses.composition.config import FROZEN, RECOMPUTED
from analyses.composition.receivers import CLASSIFIER, INPUTS, Receiver, Sender
from hc_lens.blocks import Block, Norm, PerHead, Resid
from hc_lens.errors import HcLensError
from hc_lens.masks.hooks import mlp_name, z_name
from hc_lens.masks.replacements import Source
from hc_lens.models.classifiers import DecoderClassifier, EncoderClassifier
from hc_lens.models.views import ClassifierView
from hc_lens.protocols import BatchLike, Model
from hc_lens.scans.layers import Stream, can_fuse, has_user_hooks
from hc_lens.units import Unit, UnitSpace

TANGENT = "tangent"
How = Literal["frozen", "recomputed", "tangent"]
"""How a change passes a norm."""

SUPPORTED = (
    "classifiers of hc.load: post-norm encoders (BERT, RoBERTa, XLM-RoBERTa, DistilBERT, ELECTRA) "
    "and pre-norm decoders (GPT-2, GPT-Neo, GPT-NeoX, Llama, Mistral, Qwen2)"
)
"""The block structures that path patching knows."""

Read = Float[Tensor, "rows 1 d_model"]
"""A stream at each row's read position alone."""

Output = Literal["z", "mlp_out"]
"""The outputs of units that can be replaced, by their names in `LayerRun`."""
NAMES: dict[Output, Callable[[int], str]] = {"z": z_name, "mlp_out": mlp_name}
"""Their hook points, by layer."""


def check_supported(model: Model) -> EncoderClassifier | DecoderClassifier:
    """The model itself; an HcLensError unless path patching knows how its blocks are built."""
    known = isinstance(model, EncoderClassifier | DecoderClassifier)
    if not known or not can_fuse(model) or getattr(model.cfg, "use_qk_norm", False):
        what = f"a {type(model).__name__}" + (" with other blocks" if known else "")
        raise HcLensError(
            f"expected a model whose block structure is known, got {what}; supported are "
            f"{SUPPORTED}"
        )
    if has_user_hooks(model):
        raise HcLensError(
            "expected a model without hooks, got one with hooks on it, which path patching would "
            "not run; remove them with model.reset_hooks() or leave their with block"
        )
    return model


def carry(norm: Norm, at: Resid, change: Resid, clean: Resid, how: How) -> Resid:
    """The change behind the norm whose input is `at`, in the clean run `clean`."""
    if norm.identity:
        return change
    if how == RECOMPUTED:
        return norm(at + change) - norm(at)
    weight = 1.0 if norm.weight is None else norm.weight
    moved = norm.centred(change)
    if how == FROZEN:
        return moved / norm.scale(clean) * weight
    scale = norm.scale(at)
    unit = norm.centred(at) / scale
    return (moved - unit * (unit * moved).mean(-1, keepdim=True)) / scale * weight


class Trunk(ClassifierView):
    """A model in pieces, with its units."""

    def __init__(self, model: Model):
        super().__init__(check_supported(model))
        self.space = UnitSpace.of(model)
        self.parallel = self.blocks[0].parallel

    def stream(self, batch: BatchLike, source: Source) -> Stream:
        """A batch in front of the first layer; the source is bound to it."""
        resid, context = self.start(batch.inputs)
        return Stream(resid, batch.inputs["input"], source, context)


class LayerRun:
    """What one layer computed in a pass; what belongs to the MLP is there only if it has one."""

    q: PerHead
    k: PerHead
    v: PerHead
    z: PerHead
    """The heads' outputs as the layer goes on with them."""
    attention: Resid
    """What the heads write together."""
    before_mlp: Resid
    """The input of the norm in front of the MLP."""
    mlp_in: Resid
    """What the MLP reads if it is not patched."""
    mlp_out: Resid
    """What the MLP writes, as the layer goes on with it."""
    out: Resid
    """The stream behind the layer, before a post-norm encoder's last norm."""

    def __init__(self, index: int, block: Block, x: Resid):
        self.index, self.block = index, block
        self.x, self.reads = x, block.attention_input(x)
        """The stream in front of the layer, and what the heads read."""

    def heads_of(self, units: Sender) -> list[int]:
        """The heads of this layer among some units."""
        return [u.head for u in units if u.layer == self.index and u.head is not None]


class Pass:
    """A pass over one batch; subclasses change what is read or written."""

    final: Resid
    """The stream behind the last layer."""

    def __init__(
        self, trunk: Trunk, stream: Stream, begun: Sequence[LayerRun] = (), removed: Sender = ()
    ):
        """Prepare a pass.

        `begun` holds the first layers of another pass, if they are the same here, and one more. The
        outputs of `removed` units are replaced for all readers.
        """
        self.trunk, self.stream, self.removed = trunk, stream, removed
        self.runs: list[LayerRun] = list(begun[:-1])
        self._x = begun[-1].x if begun else stream.resid

    def run(self) -> Float[Tensor, "rows labels"]:
        """The logits; the layers' activations stay in `runs`, the last stream in `final`."""
        self.final = self._x
        for index in range(len(self.runs), len(self.trunk.blocks)):
            self.final = self.layer(LayerRun(index, self.trunk.blocks[index], self.final))
        read = self.trunk.final(self.stream.context.at_reads(self.final))
        return self.trunk.logits(self.classifier(read))

    def layer(self, run: LayerRun) -> Resid:
        """Run one layer; the stream behind it."""
        self.runs.append(run)
        block = run.block
        run.q, run.k, run.v = self.projections(run)
        run.z = block.attend(run.q, run.k, run.v, self.stream.context)
        heads = run.heads_of(self.removed)
        if heads:
            replaced, run.z = self.replacement(run, "z"), run.z.clone()
            run.z[:, :, heads] = replaced[:, :, heads]
        run.attention = block.attention_out(run.z)
        if block.mlp is None:
            run.out = run.x + run.attention
            return run.out
        run.before_mlp = block.before_mlp(run.x, run.attention)
        run.mlp_in = block.mlp_norm(run.before_mlp)
        run.mlp_out = block.mlp_out(self.mlp_input(run))
        if Unit(run.index) in self.removed:
            run.mlp_out = self.replacement(run, "mlp_out")
        run.out = block.close(run.x, run.attention, run.mlp_in, run.mlp_out)
        return block.norm2(run.out) if block.post_norm else run.out

    def projections(self, run: LayerRun) -> tuple[PerHead, PerHead, PerHead]:
        """Queries, keys and values."""
        q, k, v = (run.block.project(run.reads, kind) for kind in INPUTS)
        return q, k, v

    def mlp_input(self, run: LayerRun) -> Resid:
        """What the MLP is given."""
        return run.mlp_in

    def replacement(self, run: LayerRun, what: Output) -> Float[Tensor, "rows pos ..."]:
        """What replaces the output of removed units."""
        return self.stream.replacement(NAMES[what](run.index), getattr(run, what))

    def classifier(self, read: Read) -> Read:
        """What the classifier is given."""
        return read


class Direct:
    """The change of the stream by the senders' own contributions, carried along a pass."""

    def __init__(self, clean: Pass, sender: Sender, how: How, fixed: bool = False):
        """Begin in front of the first layer.

        With `fixed` a sender sends its replacement minus its activation in the clean pass, not in
        the pass that is followed. The clean pass also gives the frozen scales.
        """
        self.clean, self.sender, self.fixed = clean, sender, fixed
        self.how: How = how
        self.change: Resid | None = None
        self._inside: Resid | None = None
        self._heads: Resid | None = None

    def to_heads(self, run: LayerRun) -> Resid | None:
        """The change of what the heads read; None if there is none."""
        if self.change is None or run.block.post_norm:
            return self.change
        clean = self.clean.runs[run.index].x
        return carry(run.block.norm1, run.x, self.change, clean, self.how)

    def to_mlp(self, run: LayerRun) -> Resid | None:
        """Take in what the layer's heads send; the change of what the MLP reads."""
        block = run.block
        self._heads = _sum(self.change, self._sent_by_heads(run))
        reads = self.change if block.parallel else self._heads
        self._inside = None
        if block.mlp is not None and reads is not None:
            clean = self.clean.runs[run.index].before_mlp
            self._inside = carry(block.mlp_norm, run.before_mlp, reads, clean, self.how)
        return self._inside

    def close(self, run: LayerRun) -> None:
        """Take in what the layer's MLP sends and leave the layer; after `to_mlp`."""
        sent = None
        if Unit(run.index) in self.sender:
            sending = self._sending(run)
            sent = self.clean.replacement(sending, "mlp_out") - sending.mlp_out
        if not run.block.post_norm:
            self.change = _sum(self._heads, sent)
            return
        inside, clean = _sum(self._inside, sent), self.clean.runs[run.index].out
        if inside is not None:
            inside = carry(run.block.norm2, run.out, inside, clean, self.how)
        self.change = inside

    def to_classifier(self, final: Resid) -> Read | None:
        """The change of what the classifier reads at each row's read position."""
        if self.change is None:
            return None
        streams = (final, self.change, self.clean.final)
        at, moved, clean = map(self.clean.stream.context.at_reads, streams)
        return carry(self.clean.trunk.final, at, moved, clean, self.how)

    def _sending(self, run: LayerRun) -> LayerRun:
        """The run whose activations the senders send."""
        return self.clean.runs[run.index] if self.fixed else run

    def _sent_by_heads(self, run: LayerRun) -> Resid | None:
        heads = run.heads_of(self.sender)
        if not heads:
            return None
        z = self._sending(run).z
        return self.clean.stream.without_heads(run.block, run.index, z, heads)


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
    """Of what the classifier reads at each row's read position."""


def contributions(
    along: Pass, sender: Sender, how: How, clean: Pass | None = None
) -> Contributions:
    """The direct contributions of a sender along a pass that has been run.

    What it sends is its replacement minus its activation in the clean pass, which `along` itself is
    if `clean` is not given.
    """
    direct = Direct(along if clean is None else clean, sender, how, fixed=True)
    to_heads, to_mlp = [], []
    for run in along.runs:
        to_heads.append(direct.to_heads(run))
        to_mlp.append(direct.to_mlp(run))
        direct.close(run)
    return Contributions(tuple(to_heads), tuple(to_mlp), direct.to_classifier(along.final))


class JointPass(Pass):
    """A pass in which several receivers of a sender are patched together."""

    def __init__(self, clean: Pass, sender: Sender, receivers: Collection[Receiver], how: How):
        # Nothing changes in front of the first sender.
        super().__init__(clean.trunk, clean.stream, clean.runs[: sender[0].layer + 1])
        self.direct = Direct(clean, sender, how)
        self._inputs = {(r.unit, kind) for r in receivers for kind in r.inputs}

    def layer(self, run: LayerRun) -> Resid:
        """Run one layer and carry the change behind it."""
        out = super().layer(run)
        if run.block.mlp is None:
            self.direct.to_mlp(run)
        self.direct.close(run)
        return out

    def projections(self, run: LayerRun) -> tuple[PerHead, PerHead, PerHead]:
        """Patched heads read the moved stream."""
        change = self.direct.to_heads(run)
        made = dict(zip(INPUTS, super().projections(run), strict=True))
        for kind, out in made.items():
            heads = range(out.shape[2])
            chosen = [(Unit(run.index, head), kind) in self._inputs for head in heads]
            if change is not None and any(chosen):
                which = torch.tensor(chosen, device=out.device)[:, None]
                made[kind] = torch.where(which, run.block.project(run.reads + change, kind), out)
        return made["q"], made["k"], made["v"]

    def mlp_input(self, run: LayerRun) -> Resid:
        """A patched MLP reads the moved stream."""
        change = self.direct.to_mlp(run)
        if change is None or (Unit(run.index), "mlp") not in self._inputs:
            return run.mlp_in
        return run.mlp_in + change

    def classifier(self, read: Read) -> Read:
        """A patched classifier reads the moved stream."""
        change = self.direct.to_classifier(self.final)
        if change is None or (None, CLASSIFIER) not in self._inputs:
            return read
        return read + change
