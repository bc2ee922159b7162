"""Views of hooked models: the weights of one layer as an `hc_lens.blocks.Block`.

1. `can_view` says whether the kernels of `hc_lens.blocks` compute what the model's own blocks
   compute. Where they do not (soft caps, attention sinks, ALiBi and others), an engine runs the
   model's own modules.
2. `view` reads the weights of a layer. Parameters named in `weights` take the place of the model's
   own, as in ``torch.func.functional_call``, and gradients flow into them; the others are detached.
3. `ModelView` adds what a model has around its blocks: it embeds a batch, says who may attend to
   whom and where each row is read, and turns what is read into logits.

A new kind of model needs its own `hc_lens.models.parts.Parts`; every engine then runs it.
"""

from __future__ import annotations

from dataclasses import replace

from jaxtyping import Float
from torch import Tensor
from transformer_lens.utilities.activation_functions import softcap_enabled

from hc_lens.blocks import Block, Context, Resid
from hc_lens.models.lens import known_parts, parts_of
from hc_lens.models.parts import Weights
from hc_lens.models.reading import Readout, is_classifier, read_positions
from hc_lens.protocols import BatchLike, Model


def can_view(model: Model) -> bool:
    """Whether the kernels of `hc_lens.blocks` compute what the model's own blocks compute."""
    parts = parts_of(model)
    return parts is not None and parts.can_view()


def can_fuse(model: Model) -> bool:
    """Whether the kernels compute what the model computes, and a layer's output adds its heads'."""
    cfg = model.cfg
    capped = softcap_enabled(getattr(cfg, "output_logits_soft_cap", None))
    return (
        can_view(model)
        and not cfg.use_normalization_before_and_after
        # The readout of a language model caps its logits itself.
        and not (capped and is_classifier(model))
    )


def view(model: Model, layer: int, weights: Weights | None = None) -> Block:
    """The weights of one layer as a `Block`; those in `weights` replace the model's own."""
    return known_parts(model).view(layer, weights or {})


class ModelView:
    """A hooked model in the pieces that engines run."""

    def __init__(self, model: Model):
        """Read the weights of every layer."""
        self.model, self.parts = model, known_parts(model)
        self.blocks = [self.parts.view(layer, {}) for layer in range(model.cfg.n_layers)]
        self.causal = bool(self.blocks) and self.blocks[0].heads.causal
        self.final = self.parts.final_norm()
        """The norm in front of a decoder's head."""

    def start(self, batch: BatchLike) -> tuple[Float[Tensor, "batch pos d_model"], Context]:
        """The residual stream in front of the first block, and who may attend to whom."""
        entered, reads = self.parts.enter(batch.inputs), read_positions(self.model, batch)
        pos, mean = entered.resid.shape[1], self.parts.reads_mean
        context = Context.of(entered.mask, reads, pos, self.causal, mean)
        return entered.resid, replace(context, beside=entered.convolved)

    def logits(self, read: Float[Tensor, "rows 1 d_model"]) -> Float[Tensor, "rows out"]:
        """The logits, from the normalised stream at each row's read position."""
        logits = self.parts.unembed(read)
        return logits if logits.ndim == 2 else logits.squeeze(1)

    def left_to_read(
        self, readout: Readout, resid: Resid, context: Context
    ) -> Float[Tensor, "rows width"]:
        """What `Readout.held` keeps of the stream behind the last block, at every position or at
        the read positions alone."""
        read = resid if resid.shape[1] == 1 else context.at_reads(resid)
        return read.squeeze(1) if readout.split else self.logits(context.pooled(self.final(read)))
