"""HookedEncoder and HookedTransformer of TransformerLens 3 in the parts that engines run.

`HookedParts.can_view` says where the kernels of `hc_lens.blocks` compute what the model's own
blocks compute. Elsewhere (soft caps, attention sinks, ALiBi and others) an engine runs the model's
own modules. `HookedParts.view` reads the weights of a layer; gradients flow into those that are
given, as in ``torch.func.functional_call``, and the others are detached.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import gelu
from transformer_lens import HookedEncoder, HookedTransformer
from transformer_lens.components.attention import Attention
from transformer_lens.components.bert_block import BertBlock
from transformer_lens.components.grouped_query_attention import GroupedQueryAttention
from transformer_lens.components.layer_norm import LayerNorm
from transformer_lens.components.layer_norm_pre import LayerNormPre
from transformer_lens.components.mlps.gated_mlp import GatedMLP
from transformer_lens.components.mlps.mlp import MLP
from transformer_lens.components.rms_norm import RMSNorm
from transformer_lens.components.rms_norm_pre import RMSNormPre
from transformer_lens.components.transformer_block import TransformerBlock
from transformer_lens.utilities.activation_functions import gelu_new, softcap_enabled
from transformer_lens.utilities.architectures import POST_NORM_ARCHITECTURES

from hc_lens.blocks import NO_NORM, Block, Heads, Mlp, Norm
from hc_lens.models.classifiers import (
    DecoderClassifier,
    EncoderClassifier,
    EncoderLanguageModel,
    additive,
)
from hc_lens.models.encoder_blocks import ConvolvedBlock, EncoderAttention, PreNormBlock
from hc_lens.models.inputs import mask_of
from hc_lens.models.parts import Entered, Parts, Weights, first_positions
from hc_lens.protocols import BatchLike, Model

_OFF = ("clip_qkv", "use_attention_sinks", "load_in_4bit", "use_logn_attn", "use_dynamic_ntk_rope")
"""Settings of TransformerLens that the kernels do not know."""
_NORMS = (LayerNorm, LayerNormPre, RMSNorm, RMSNormPre, nn.Identity, type(None))
_BLOCKS = (BertBlock, PreNormBlock, ConvolvedBlock, TransformerBlock)
_ATTENTIONS = (Attention, EncoderAttention, GroupedQueryAttention)
_NORM_NAMES = ("ln1", "ln2", "ln1_post", "ln2_post")


class HookedParts(Parts):
    """A HookedEncoder or HookedTransformer, of `hc.load` or the user's own."""

    @staticmethod
    def owns(model: Model) -> bool:
        """Whether a model is one of these."""
        return isinstance(model, HookedEncoder | HookedTransformer)

    @property
    def is_classifier(self) -> bool:
        """Whether it is a classifier of `hc.load`."""
        return isinstance(self.model, EncoderClassifier | DecoderClassifier)

    @property
    def reads_mean(self) -> bool:  # type: ignore[override]
        """By the pooler."""
        return getattr(getattr(self.model, "pooler", None), "mean", False)

    def reads(self, batch: BatchLike) -> Int[Tensor, "batch"] | None:
        """Position 0 of an encoder, the last token of a decoder that is not a pad."""
        if isinstance(self.model, EncoderClassifier):
            return first_positions(batch)
        if isinstance(self.model, DecoderClassifier):
            given, mask = batch.inputs.get("attention_mask"), mask_of(batch.inputs)
            return self.model.read_positions(batch.inputs["input"], given, mask[..., None].float())
        return None

    def can_view(self) -> bool:
        """By the settings and the kinds of the modules."""
        cfg, blocks = self.model.cfg, list(getattr(self.model, "blocks", ()))
        norms = [getattr(block, name, None) for block in blocks for name in _NORM_NAMES]
        return (
            cfg.positional_embedding_type in ("standard", "rotary")
            and cfg.original_architecture not in POST_NORM_ARCHITECTURES
            and cfg.original_architecture != "OlmoeForCausalLM"
            and not any(getattr(cfg, name, None) for name in _OFF)
            and not softcap_enabled(getattr(cfg, "attn_scores_soft_cap", None))
            and all(type(block) in _BLOCKS for block in blocks)
            and all(type(block.attn) in _ATTENTIONS for block in blocks)
            and all(type(norm) in _NORMS for norm in norms)
        )

    def view(self, layer: int, weights: Weights) -> Block:
        """The weights of one layer."""
        block: Any = self.model.blocks[layer]
        name = f"blocks.{layer}"
        norms = {ln: _norm(getattr(block, ln, None), f"{name}.{ln}", weights) for ln in _NORM_NAMES}
        return Block(
            heads=_heads(block.attn, f"{name}.attn", weights),
            norm1=norms["ln1"],
            norm2=norms["ln2"],
            mlp=None if block.cfg.attn_only else _mlp(block.mlp, f"{name}.mlp", weights),
            post_norm=type(block) in (BertBlock, ConvolvedBlock),
            parallel=bool(block.cfg.parallel_attn_mlp),
            attention_norm=norms["ln1_post"],
            mlp_out_norm=norms["ln2_post"],
            entrance=self._entrance(layer, weights),
        )

    def _entrance(self, layer: int, weights: Weights) -> Norm:
        """The norm behind the convolution of the layer before, which the kernels take here."""
        before: Any = self.model.blocks[layer - 1] if layer else None
        if not isinstance(before, ConvolvedBlock):
            return NO_NORM
        return _norm(before.conv.ln, f"blocks.{layer - 1}.conv.ln", weights)

    def final_norm(self) -> Norm:
        """Most encoders have none."""
        return _norm(getattr(self.model, "ln_final", None), "ln_final", {})

    def enter(self, inputs: Mapping[str, Tensor], blocks: bool = False) -> Entered:
        """The model's own embedding."""
        model, tokens = self.model, inputs["input"]
        if isinstance(model, HookedEncoder):
            types, mask = inputs.get("token_type_ids"), inputs.get("one_zero_attention_mask")
            if isinstance(model, EncoderClassifier | EncoderLanguageModel):
                resid = model.enter(tokens, types, mask)
            else:
                resid = model.hook_full_embed(model.embed(tokens, types))
            first: Any = model.blocks[0]
            convolved = first.conv(resid, mask) if isinstance(first, ConvolvedBlock) else None
            return Entered(resid, mask, convolved=convolved)
        resid, _, positions, mask = model.input_to_embed(
            tokens, prepend_bos=False, attention_mask=inputs.get("attention_mask")
        )
        return Entered(resid, mask, positions)

    def block(self, layer: int, entered: Entered) -> Callable[[Tensor], Tensor]:
        """A block takes the mask as the model gives it."""
        block, attended = self.model.blocks[layer], entered.mask
        if not isinstance(self.model, HookedEncoder):
            return partial(block, shortformer_pos_embed=entered.positions, attention_mask=attended)
        added = additive(attended)
        return lambda resid: block(resid, added)

    def stream(self, inputs: Mapping[str, Tensor]) -> Float[Tensor, "batch pos d_model"]:
        """Without what stands behind the blocks."""
        model = self.model
        if isinstance(model, HookedEncoder):
            types, mask = inputs.get("token_type_ids"), inputs.get("one_zero_attention_mask")
            return model.encoder_output(inputs["input"], types, mask)
        return model(**inputs, stop_at_layer=model.cfg.n_layers)

    def head(
        self,
        resid: Float[Tensor, "batch pos d_model"],
        mask: Int[Tensor, "batch pos"] | None = None,
    ) -> Float[Tensor, "batch *out"]:
        """The model's own head."""
        if isinstance(self.model, EncoderClassifier):
            return self.model.answer(resid, mask)
        if isinstance(self.model, HookedEncoder):
            return self.unembed(resid)
        # Not a classifier's own, which would look for tokens to find where it is read.
        forward: Any = HookedTransformer.forward
        return forward(self.model, resid, start_at_layer=self.model.cfg.n_layers)

    def unembed(self, normed: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch *out"]:
        """An encoder's head whole, a decoder's without the norm."""
        model = self.model
        if isinstance(model, EncoderClassifier):
            return model.unembed(model.pooler(normed))
        if isinstance(model, HookedEncoder):
            return model.unembed(model.mlm_head(normed))
        return model.unembed(normed)

    def last_matrix(self) -> Float[Tensor, "d_model _"]:
        """Of the pooler, of the dense layer of a masked language model, or W_U."""
        if isinstance(self.model, EncoderClassifier):
            return self.model.pooler.W.detach()
        if isinstance(self.model, HookedEncoder):
            return self.model.mlm_head.W.detach()
        return self.model.unembed.W_U.detach()


def _read(
    module: nn.Module, name: str, weights: Weights, recurse: bool = False
) -> dict[str, Tensor]:
    """The parameters of the module called `name`: detached, or what replaces them."""
    own = module.named_parameters(recurse=recurse)
    return {part: weights.get(f"{name}.{part}", weight.detach()) for part, weight in own}


def _heads(attn: Any, name: str, weights: Weights) -> Heads:
    read = _read(attn, name, weights)
    shared = "_" if type(attn) is GroupedQueryAttention else ""
    cfg = attn.cfg
    own = isinstance(attn, EncoderAttention)
    rotary = cfg.positional_embedding_type == "rotary"
    direction = getattr(attn, "_attention_dir_override", None) or cfg.attention_dir
    return Heads(
        W_Q=read["W_Q"],
        W_K=read[f"{shared}W_K"],
        W_V=read[f"{shared}W_V"],
        b_Q=read["b_Q"],
        b_K=read[f"{shared}b_K"],
        b_V=read[f"{shared}b_V"],
        W_O=read["W_O"],
        b_O=read["b_O"],
        scale=attn.attn_scale,
        causal=direction == "causal",
        window=attn.window if own else cfg.window_size if attn.attn_type == "local" else None,
        rotate=(lambda x, mask: attn.apply_rotary(x, 0, mask)) if rotary else None,
        norm_q=_norm(attn.q_norm, f"{name}.q_norm", weights),
        norm_k=_norm(attn.k_norm, f"{name}.k_norm", weights),
        bias=attn.bias(read, fixed=True) if own else None,
        pads_see_all=own and attn.pads_see_all,
    )


def _norm(module: Any, name: str, weights: Weights) -> Norm:
    if module is None or type(module) is nn.Identity:
        return NO_NORM
    read = _read(module, name, weights)
    centres = type(module) in (LayerNorm, LayerNormPre)
    return Norm(centres, module.eps, read.get("w"), read.get("b"))


def _mlp(module: Any, name: str, weights: Weights) -> Mlp | Callable[[Tensor], Tensor]:
    """The MLP's weights; an MLP of another kind (a mixture of experts) runs its own module."""
    if type(module) not in (MLP, GatedMLP) or module.cfg.is_layer_norm_activation():
        read = _read(module, name, weights, recurse=True)
        return lambda x: functional_call(module, read, (x,))
    # PyTorch has this one as a single kernel.
    act = partial(gelu, approximate="tanh") if module.act_fn is gelu_new else module.act_fn
    return Mlp(**_read(module, name, weights), act=act)
