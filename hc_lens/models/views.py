"""Views of TransformerLens blocks: the weights of one layer as an `hc_lens.blocks.Block`.

1. `can_view` says whether the kernels of `hc_lens.blocks` compute what the model's own blocks
   compute. Where they do not (soft caps, attention sinks, ALiBi and others), an engine runs the
   model's own modules.
2. `view` reads the weights of a layer. Parameters named in `weights` take the place of the model's
   own, as in ``torch.func.functional_call``, and gradients flow into them; the others are detached.
3. `ModelView` adds what a model has around its blocks: it embeds a batch, says who may attend to
   whom and where each row is read, and turns what is read into logits.

A new kind of model needs its own `view` and its conditions in `can_view`, both in this module;
every engine then runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

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

from hc_lens.blocks import NO_NORM, Block, Context, Heads, Mlp, Norm
from hc_lens.models.classifiers import EncoderClassifier
from hc_lens.models.reading import read_positions
from hc_lens.protocols import BatchLike, Model

Weights = Mapping[str, Tensor]
"""Parameters by their name in the model, such as ``"blocks.0.attn.W_Q"``."""

_OFF = ("clip_qkv", "use_attention_sinks", "load_in_4bit", "use_logn_attn", "use_dynamic_ntk_rope")
"""Settings of TransformerLens that the kernels do not know."""
_NORMS = (LayerNorm, LayerNormPre, RMSNorm, RMSNormPre, nn.Identity, type(None))
_NORM_NAMES = ("ln1", "ln2", "ln1_post", "ln2_post")


def can_view(model: Model) -> bool:
    """Whether the kernels of `hc_lens.blocks` compute what the model's own blocks compute."""
    cfg, blocks = model.cfg, list(getattr(model, "blocks", ()))
    norms = [getattr(block, name, None) for block in blocks for name in _NORM_NAMES]
    return (
        cfg.positional_embedding_type in ("standard", "rotary")
        and cfg.original_architecture not in POST_NORM_ARCHITECTURES
        and cfg.original_architecture != "OlmoeForCausalLM"
        and not any(getattr(cfg, name, None) for name in _OFF)
        and not softcap_enabled(getattr(cfg, "attn_scores_soft_cap", None))
        and all(type(block) in (BertBlock, TransformerBlock) for block in blocks)
        and all(type(block.attn) in (Attention, GroupedQueryAttention) for block in blocks)
        and all(type(norm) in _NORMS for norm in norms)
    )


def view(model: Model, layer: int, weights: Weights | None = None) -> Block:
    """The weights of one layer as a `Block`; those in `weights` replace the model's own."""
    block: Any = model.blocks[layer]  # pyright: ignore[reportAttributeAccessIssue]
    name, given = f"blocks.{layer}", weights or {}
    norms = {ln: _norm(getattr(block, ln, None), f"{name}.{ln}", given) for ln in _NORM_NAMES}
    return Block(
        heads=_heads(block.attn, f"{name}.attn", given),
        norm1=norms["ln1"],
        norm2=norms["ln2"],
        mlp=None if block.cfg.attn_only else _mlp(block.mlp, f"{name}.mlp", given),
        post_norm=type(block) is BertBlock,
        parallel=bool(block.cfg.parallel_attn_mlp),
        attention_norm=norms["ln1_post"],
        mlp_out_norm=norms["ln2_post"],
    )


class ModelView:
    """A HookedEncoder or HookedTransformer in the pieces that engines run."""

    def __init__(self, model: HookedEncoder | HookedTransformer):
        """Read the weights of every layer."""
        self.model = model
        self.blocks = [view(model, layer) for layer in range(model.cfg.n_layers)]
        self.causal = bool(self.blocks) and self.blocks[0].heads.causal
        self.final = _norm(getattr(model, "ln_final", None), "ln_final", {})
        """The norm in front of a decoder's head."""

    def start(self, batch: BatchLike) -> tuple[Float[Tensor, "batch pos d_model"], Context]:
        """The residual stream in front of the first block, and who may attend to whom."""
        entered, reads = embed(self.model, batch.inputs), read_positions(self.model, batch)
        return entered.resid, Context.of(entered.mask, reads, entered.resid.shape[1], self.causal)

    def logits(self, read: Float[Tensor, "rows 1 d_model"]) -> Float[Tensor, "rows out"]:
        """The logits, from the normalised stream at each row's read position."""
        model = self.model
        if isinstance(model, EncoderClassifier):
            return model.unembed(model.pooler(read))
        if isinstance(model, HookedEncoder):
            return model.unembed(model.mlm_head(read)).squeeze(1)
        return model.unembed(read).squeeze(1)


class Entered(NamedTuple):
    """What a model hands to its first block."""

    resid: Float[Tensor, "batch pos d_model"]
    """The residual stream."""
    mask: Int[Tensor, "batch pos"] | None
    """The 0/1 attention mask; None where no row has pads."""
    positions: Float[Tensor, "batch pos d_model"] | None = None
    """What a model whose heads add the positions themselves (shortformer) gives to every block."""


def embed(model: HookedEncoder | HookedTransformer, inputs: Mapping[str, Tensor]) -> Entered:
    """A batch in front of the first block, with the model's own hooks."""
    tokens = inputs["input"]
    if isinstance(model, HookedEncoder):
        mask = inputs.get("one_zero_attention_mask")
        return Entered(
            model.hook_full_embed(model.embed(tokens, inputs.get("token_type_ids"))), mask
        )
    resid, _, positions, mask = model.input_to_embed(
        tokens, prepend_bos=False, attention_mask=inputs.get("attention_mask")
    )
    return Entered(resid, mask, positions)


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
        window=cfg.window_size if attn.attn_type == "local" else None,
        rotate=(lambda x, mask: attn.apply_rotary(x, 0, mask)) if rotary else None,
        norm_q=_norm(attn.q_norm, f"{name}.q_norm", weights),
        norm_k=_norm(attn.k_norm, f"{name}.k_norm", weights),
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
