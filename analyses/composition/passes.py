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
5. the classifier or unembedding, if a receiver, reads ``x + d`` at the end.

A pre-norm layer has the same steps without norms on the stream; there n1, n2 and the final norm
stand in front of a receiver, and its input moves by ``carry(n, x, d)``.

With norms recomputed and every receiver patched, x + d is the stream of the model without the
senders: joint patching of all paths is ablation. Patched nowhere, x is the clean stream.

Of a language model a pass leaves what the unembedding reads (`PathView`), d_model numbers for each
row, and the logits of the vocabulary are made when they are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from transformer_lens.utilities.activation_functions import softcap_enabled

from hc_lens.analyses.composition.receivers import INPUTS, Receiver, Sender, last_receiver
from hc_lens.blocks import Block, Norm, PerHead, Resid
from hc_lens.errors import HcLensError
from hc_lens.masks.hooks import has_user_hooks, mlp_name, z_name
from hc_lens.models.reading import is_classifier
from hc_lens.models.views import ModelView, can_fuse, view
from hc_lens.protocols import Model
from hc_lens.scans.layers import Stream, check_runnable
from hc_lens.units import Unit

How = Literal["frozen", "recomputed", "tangent"]
"""How a change passes a norm."""
Input = Float[Tensor, "rows pos ..."]
"""What a kind of receiver is given: q, k or v of every head, an MLP's input, the last one's."""
Output = Literal["z", "mlp_out"]
"""The outputs of units that can be replaced, by their names in `LayerRun`."""
NAMES: dict[Output, Callable[[int], str]] = {"z": z_name, "mlp_out": mlp_name}
"""Their hook points, by layer."""


def check_supported(model: Model) -> Model:
    """The model itself; an HcLensError unless path patching knows how its blocks are built."""
    known = check_runnable(model)
    capped = softcap_enabled(getattr(model.cfg, "output_logits_soft_cap", None))
    fits = not capped and can_fuse(known) and view(known, 0).heads.norm_q.identity
    layers = range(model.cfg.n_layers) if fits else ()
    convolved = any(not view(known, layer).entrance.identity for layer in layers)
    if convolved or not fits:
        what = "a soft cap on its logits" if capped else "other blocks"
        what = "a convolution between its layers" if convolved else what
        raise HcLensError(
            "expected a model whose block structure is known, got a "
            f"{type(model).__name__} with {what}; supported are classifiers and language models: "
            "post-norm encoders (BERT, RoBERTa, XLM-RoBERTa, DistilBERT, ELECTRA, DeBERTa, ALBERT, "
            "MPNet), ModernBERT and pre-norm decoders (GPT-2, GPT-Neo, GPT-NeoX, Llama, Mistral, "
            "Qwen2)"
        )
    if has_user_hooks(model):
        raise HcLensError(
            "expected a model without hooks, got one with hooks on it, which path patching would "
            "not run; remove them with model.reset_hooks() or leave their with block"
        )
    return known


class PathView(ModelView):
    """A model in the pieces that path patching runs, and what a pass over it leaves."""

    def __init__(self, model: Model):
        """Read the weights of every layer; a model that is not supported is an HcLensError."""
        super().__init__(check_supported(model))
        self.last = last_receiver(model)
        """The receiver behind the last layer."""
        self._keeps_logits = is_classifier(model)

    def held(self, read: Float[Tensor, "rows 1 d_model"]) -> Float[Tensor, "rows width"]:
        """What is kept of what the last receiver reads: a classifier's logits, else all of it."""
        return self.logits(read) if self._keeps_logits else read.squeeze(1)

    def read_out(self, held: Float[Tensor, "*runs width"]) -> Float[Tensor, "*runs out"]:
        """The logits of what is held."""
        if self._keeps_logits:
            return held
        return self.logits(held.flatten(0, -2)[:, None]).unflatten(0, held.shape[:-1])


def carry(norm: Norm, at: Resid, change: Resid, clean: Resid, how: How) -> Resid:
    """The change behind the norm whose input is `at`, in the clean run `clean`."""
    if norm.identity:
        return change
    if how == "recomputed":
        return norm(at + change) - norm(at)
    weight = 1.0 if norm.weight is None else norm.weight
    moved = norm.centred(change)
    if how == "frozen":
        return moved / norm.scale(clean) * weight
    scale = norm.scale(at)
    unit = norm.centred(at) / scale
    return (moved - unit * (unit * moved).mean(-1, keepdim=True)) / scale * weight


class LayerRun:
    """What one layer computed in a pass; what belongs to the MLP is there only if it has one."""

    q: PerHead
    k: PerHead
    v: PerHead
    z: PerHead
    """The heads' outputs, as the rest of the layer reads them."""
    attention: Resid
    """What the heads write together."""
    before_mlp: Resid
    """The input of the norm in front of the MLP."""
    mlp_in: Resid
    """What the MLP reads if it is not patched."""
    mlp_out: Resid
    """What the MLP writes, as the stream takes it up."""
    out: Resid
    """The stream behind the layer, before a post-norm encoder's last norm."""
    behind: Resid
    """The stream behind the layer."""

    def __init__(self, index: int, block: Block, x: Resid):
        self.index, self.block = index, block
        self.x, self.reads = x, block.attention_input(x)
        """The stream in front of the layer, and what the heads read."""

    def heads_of(self, units: Sender) -> list[int]:
        """The heads of this layer among some units."""
        return [u.head for u in units if u.layer == self.index and u.head is not None]


Runs = Sequence[LayerRun]
"""The layers of a pass, in order."""


class Pass:
    """A pass over one batch; subclasses change what is heard or written."""

    held: Float[Tensor, "rows width"]
    """What is left where each row is read."""

    def __init__(self, view: PathView, stream: Stream, begun: Runs = (), removed: Sender = ()):
        """Prepare a pass.

        `begun` holds the first layers, where they are the same as in another pass. The outputs of
        `removed` units are replaced for all readers.
        """
        self.view, self.stream, self.removed = view, stream, removed
        self.runs: list[LayerRun] = list(begun)

    @property
    def final(self) -> Resid:
        """The stream behind the last layer."""
        return self.runs[-1].behind if self.runs else self.stream.resid

    @cached_property
    def logits(self) -> Float[Tensor, "rows out"]:
        """The logits where each row is read."""
        return self.view.read_out(self.held)

    def run(self) -> Float[Tensor, "rows width"]:
        """What is left to read; it stays in `held`, and the layers' activations in `runs`."""
        for block in self.view.blocks[len(self.runs) :]:
            run = LayerRun(len(self.runs), block, self.final)
            self.runs.append(run)
            self._layer(run)
        context = self.stream.context
        read = context.pooled(self.view.final(context.at_reads(self.final)))
        self.held = self.view.held(self.heard(self.view.last.kind, read))
        return self.held

    def _layer(self, run: LayerRun) -> None:
        block, reads = run.block, run.reads
        run.q, run.k, run.v = (self.heard(i, block.project(reads, i), run) for i in INPUTS)
        run.z = block.attend(run.q, run.k, run.v, self.stream.context)
        heads = run.heads_of(self.removed)
        if heads:
            replaced, run.z = self.replacement(run, "z"), run.z.clone()
            run.z[:, :, heads] = replaced[:, :, heads]
        run.attention = block.attention_out(run.z)
        if block.mlp is None:
            run.out = run.behind = run.x + run.attention
            return
        run.before_mlp = block.before_mlp(run.x, run.attention)
        run.mlp_in = block.mlp_norm(run.before_mlp)
        run.mlp_out = block.mlp_out(self.heard("mlp", run.mlp_in, run))
        if Unit(run.index) in self.removed:
            run.mlp_out = self.replacement(run, "mlp_out")
        run.out = block.close(run.x, run.attention, run.mlp_in, run.mlp_out)
        run.behind = block.norm2(run.out) if block.post_norm else run.out

    def heard(self, kind: str, value: Input, run: LayerRun | None = None) -> Input:
        """What the receivers of a kind are given, in a layer or, without one, behind the last."""
        return value

    def replacement(self, run: LayerRun, what: Output) -> Input:
        """What replaces the output of removed units."""
        return self.stream.replacement(NAMES[what](run.index), getattr(run, what))


class Direct:
    """The change of every receiver's input by a sender's own contributions, along a pass.

    The layers of the pass are followed as far as somebody asks, so they may still be running.
    """

    def __init__(self, clean: Pass, sender: Sender, how: How, along: Runs, sending: Runs):
        """Begin in front of the sender.

        `along` are the layers that are followed; the clean pass gives the frozen scales. The sender
        sends its replacement minus its output in the layers `sending`.
        """
        self._clean, self._sender, self._along, self._sending = clean, sender, along, sending
        self._how: How = how
        first = sender[0].layer
        self._streams = [torch.zeros_like(clean.runs[first].x)] * (first + 1)
        self._to_mlp: dict[int, Resid] = {}

    def to_heads(self, index: int) -> Resid:
        """Of what the heads of a layer read."""
        run, change = self._along[index], self._stream(index)
        if run.block.post_norm:
            return change
        return carry(run.block.norm1, run.x, change, self._clean.runs[index].x, self._how)

    def to_mlp(self, index: int) -> Resid:
        """Of what the MLP of a layer reads."""
        if index not in self._to_mlp:
            run, clean = self._along[index], self._clean.runs[index]
            change = self._stream(index) if run.block.parallel else self._behind_heads(index)
            self._to_mlp[index] = carry(
                run.block.mlp_norm, run.before_mlp, change, clean.before_mlp, self._how
            )
        return self._to_mlp[index]

    def to_last(self) -> Float[Tensor, "rows 1 d_model"]:
        """Of what the last receiver reads at each row's read position."""
        streams = (self._along[-1].behind, self._stream(len(self._along)), self._clean.final)
        context = self._clean.stream.context
        at, moved, clean = map(context.at_reads, streams)
        return context.pooled(carry(self._clean.view.final, at, moved, clean, self._how))

    def _stream(self, index: int) -> Resid:
        """Of the stream in front of a layer."""
        for before in range(len(self._streams) - 1, index):
            self._streams.append(self._behind(before))
        return self._streams[index]

    def _behind_heads(self, index: int) -> Resid:
        """Of the stream behind the heads of a layer."""
        block, heads = self._along[index].block, self._along[index].heads_of(self._sender)
        if not heads:
            return self._stream(index)
        z = self._sending[index].z
        return self._stream(index) + self._clean.stream.without_heads(block, index, z, heads)

    def _behind(self, index: int) -> Resid:
        """Of the stream behind a layer."""
        run, post_norm = self._along[index], self._along[index].block.post_norm
        change = self.to_mlp(index) if post_norm else self._behind_heads(index)
        if Unit(index) in self._sender:
            sending = self._sending[index]
            change = change + (self._clean.replacement(sending, "mlp_out") - sending.mlp_out)
        if not post_norm:
            return change
        return carry(run.block.norm2, run.out, change, self._clean.runs[index].out, self._how)


class JointPass(Pass):
    """A pass in which several receivers of a sender are patched together."""

    def __init__(self, clean: Pass, sender: Sender, receivers: Collection[Receiver], how: How):
        # Nothing changes in front of the first sender.
        super().__init__(clean.view, clean.stream, clean.runs[: sender[0].layer])
        self._direct = Direct(clean, sender, how, self.runs, self.runs)
        self._patched = {(r.unit, kind) for r in receivers for kind in r.inputs}

    def heard(self, kind: str, value: Input, run: LayerRun | None = None) -> Input:
        """Patched receivers read the moved stream."""
        if run is None:
            patched = (None, kind) in self._patched
            return value + self._direct.to_last() if patched else value
        if kind not in INPUTS:
            patched = (Unit(run.index), kind) in self._patched
            return value + self._direct.to_mlp(run.index) if patched else value
        heads = [(Unit(run.index, head), kind) in self._patched for head in range(value.shape[2])]
        if not any(heads):
            return value
        moved = run.block.project(run.reads + self._direct.to_heads(run.index), kind)
        return torch.where(torch.tensor(heads, device=value.device)[:, None], moved, value)
