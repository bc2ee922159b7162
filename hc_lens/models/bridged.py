"""A TransformerBridge of TransformerLens 4 in the parts that engines run.

1. A bridge runs Hugging Face's own modules, so a part of it is had by running the model up to a
   component and no further: `BridgeParts._reach` raises an exception there, as TransformerLens
   itself does.
2. The weights of a block are read from its components, in TransformerLens's layout.
3. Rotary tables are those of the model's own ``rotary_emb``, at positions counted over the tokens
   that are not pads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import gelu
from transformer_lens.model_bridge import TransformerBridge
from transformers.activations import ACT2FN

from hc_lens.blocks import NO_NORM, Block, Heads, Mlp, Norm
from hc_lens.models.adapters import ClassifierAdapter
from hc_lens.models.families import ARCHITECTURES, ENCODERS, MASKED
from hc_lens.models.inputs import is_encoder, mask_of
from hc_lens.models.installed import only_before_bridges
from hc_lens.models.parts import Entered, Parts, Weights, first_positions, last_real
from hc_lens.protocols import BatchLike, Model

Given = tuple[tuple[Any, ...], dict[str, Any]]
"""What a component is given, by place and by name."""
LANGUAGE_MODELS = {*ARCHITECTURES.values(), *MASKED.values()}
"""The architectures of language models whose blocks the kernels know."""


class BridgeParts(Parts):
    """A bridge of a family that `hc.load` loads, of `hc.load` or booted by the user."""

    @staticmethod
    def owns(model: Model) -> bool:
        """Whether a model is one of these."""
        if not isinstance(model, TransformerBridge):
            return False
        # Of a classifier the adapter counts: that of another package may have other components.
        ours = isinstance(model.adapter, ClassifierAdapter)
        return ours or model.cfg.architecture in LANGUAGE_MODELS

    @property
    def is_classifier(self) -> bool:
        """By the architecture."""
        return self.model.cfg.architecture.endswith("ForSequenceClassification")

    def reads(self, batch: BatchLike) -> Int[Tensor, "batch"] | None:
        """Position 0 of an encoder, the last token of a decoder that is not a pad."""
        if not self.is_classifier:
            return None
        if is_encoder(self.model):
            return first_positions(batch)
        tokens, mask = batch.inputs["input"], mask_of(batch.inputs)
        return last_real(tokens, mask, self._pad, tokens)

    def can_view(self) -> bool:
        """Not in compatibility mode, where weights are folded beside the model's own.

        Nor an MLP whose gate has biases, which `hc_lens.blocks.Mlp` does not know.
        """
        mlps = [block.mlp for block in self.model.blocks]
        biased = any(getattr(mlp, "b_gate", None) is not None for mlp in mlps)
        return not (self.model.compatibility_mode or biased)

    def view(self, layer: int, weights: Weights) -> Block:
        """The weights of one layer, which nothing can take the place of."""
        if weights:
            only_before_bridges("weights in the place of a model's own")
        block = self.model.blocks[layer]
        return Block(
            heads=self._heads(block.attn),
            norm1=_norm(block.ln1),
            norm2=_norm(block.ln2),
            mlp=self._mlp(block.mlp),
            post_norm=is_encoder(self.model),
            parallel=bool(self.model.cfg.parallel_attn_mlp),
        )

    def final_norm(self) -> Norm:
        """An encoder has none."""
        return NO_NORM if is_encoder(self.model) else _norm(self.model.ln_final)

    def enter(self, inputs: Mapping[str, Tensor], blocks: bool = False) -> Entered:
        """Up to the first block; if blocks are run, once through all to see what each is given."""
        given = self._reach(inputs, *self.model.blocks[: None if blocks else 1])
        return Entered(_stream(given[0]), _mask(inputs), beside=list(map(_beside, given)))

    def block(self, layer: int, entered: Entered) -> Callable[[Tensor], Tensor]:
        """A block takes what the model gives it beside the stream."""
        args, kwargs = entered.beside[layer]
        block = self.model.blocks[layer]

        def run(resid: Tensor) -> Tensor:
            behind = block(resid, *args, **kwargs)
            return behind[0] if isinstance(behind, tuple) else behind

        return run

    def stream(self, inputs: Mapping[str, Tensor]) -> Float[Tensor, "batch pos d_model"]:
        """Up to the first component behind the blocks."""
        return _stream(self._reach(inputs, self._first_behind())[-1])

    def head(
        self,
        resid: Float[Tensor, "batch pos d_model"],
        mask: Int[Tensor, "batch pos"] | None = None,
    ) -> Float[Tensor, "batch *out"]:
        """With the components behind the blocks."""
        return self.unembed(resid if is_encoder(self.model) else self.model.ln_final(resid))

    def unembed(self, normed: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch *out"]:
        """An encoder's head whole, a decoder's without the norm."""
        model = self.model
        if not is_encoder(model):
            return model.unembed(normed)
        if self.is_classifier:
            return model.unembed(self._family.activation(self._config)(model.pooler(normed[:, 0])))
        act = ACT2FN[self._family.masked_act_fn(self._config)]
        return model.unembed(model.ln_final(act(model.mlm_head(normed))))

    def last_matrix(self) -> Float[Tensor, "d_model _"]:
        """Of the pooler, of the dense layer of a masked language model, or W_U."""
        first = self._first_behind() if is_encoder(self.model) else self.model.unembed
        return first.original_component.weight.detach().T

    @property
    def _config(self) -> Any:
        return self.model.original_model.config

    @property
    def _family(self) -> Any:
        return ENCODERS[self._config.model_type]

    @property
    def _pad(self) -> int | None:
        return getattr(self.model, "pad_token_id", self.model.original_model.config.pad_token_id)

    def _first_behind(self) -> Any:
        model = self.model
        if not is_encoder(model):
            return model.ln_final
        return model.pooler if self.is_classifier else model.mlm_head

    def _reach(self, inputs: Mapping[str, Tensor], *components: nn.Module) -> list[Given]:
        """What the model gives to some components, in its order; nothing runs behind the last."""
        seen: list[Given] = []

        def see(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen.append((args, kwargs))
            if len(seen) == len(components):
                raise _Reached

        # A cache would be handed to every run of a block, and grow.
        beside = {} if is_encoder(self.model) else {"use_cache": False}
        handles = [each.register_forward_pre_hook(see, with_kwargs=True) for each in components]
        try:
            self.model(**inputs, **beside)
        except _Reached:
            return seen
        finally:
            for handle in handles:
                handle.remove()
        raise AssertionError("a component that the model does not run")

    def _heads(self, attn: Any) -> Heads:
        cfg, own, config = self.model.cfg, attn.original_component, self.model.original_model.config
        inside = [getattr(own, each) for each in ("self", "attention") if hasattr(own, each)]
        inner = [*inside, own][0]
        read = partial(_read, attn)
        rotary = None
        if cfg.positional_embedding_type == "rotary":
            rotary = partial(_rotate, self.model.rotary_emb.original_component)
        keys = read("W_K")
        return Heads(
            W_Q=read("W_Q"),
            W_K=keys,
            W_V=read("W_V"),
            b_Q=read("b_Q", (cfg.n_heads, cfg.d_head)),
            b_K=read("b_K", (len(keys), cfg.d_head)),
            b_V=read("b_V", (len(keys), cfg.d_head)),
            W_O=read("W_O"),
            b_O=read("b_O", (cfg.d_model,)),
            scale=1 if config.model_type == "gpt_neo" else 1 / inner.scaling,
            causal=not is_encoder(self.model),
            window=_window(inner, config),
            rotate=rotary,
            norm_q=_norm(getattr(attn, "q_norm", None)),
            norm_k=_norm(getattr(attn, "k_norm", None)),
        )

    def _mlp(self, mlp: Any) -> Mlp:
        cfg, read = self.model.cfg, partial(_read, mlp)
        gated = getattr(mlp, "gate", None) is not None
        # PyTorch has this one as a single kernel.
        act = partial(gelu, approximate="tanh") if cfg.act_fn == "gelu_new" else ACT2FN[cfg.act_fn]
        inner = read("W_in")
        return Mlp(
            W_in=inner,
            b_in=read("b_in", (inner.shape[1],)),
            W_out=read("W_out"),
            b_out=read("b_out", (cfg.d_model,)),
            act=act,
            W_gate=read("W_gate") if gated else None,
        )


class _Reached(Exception):  # noqa: N818 (it says that all is well)
    """The last component is reached."""


def _stream(given: Given) -> Tensor:
    """The first argument of a component."""
    args, kwargs = given
    return args[0] if args else kwargs["hidden_states"]


def _beside(given: Given) -> Given:
    """The arguments of a block without the stream."""
    args, kwargs = given
    return args[1:], {name: value for name, value in kwargs.items() if name != "hidden_states"}


def _mask(inputs: Mapping[str, Tensor]) -> Int[Tensor, "batch pos"] | None:
    return mask_of(inputs) if any("mask" in name for name in inputs) else None


def _read(component: Any, part: str, shape: tuple[int, ...] | None = None) -> Tensor:
    """A weight of a component, detached; zeros of a shape if there is none."""
    own = getattr(component, part, None)
    if own is None:
        assert shape is not None
        like = next(component.parameters())
        return torch.zeros(shape, dtype=like.dtype, device=like.device)
    return own.detach()


def _norm(component: Any) -> Norm:
    if component is None:
        return NO_NORM
    own = component.original_component
    eps = own.eps if hasattr(own, "eps") else own.variance_epsilon
    bias = getattr(own, "bias", None)
    return Norm(
        centres=isinstance(own, nn.LayerNorm),
        eps=eps,
        weight=own.weight.detach(),
        bias=None if bias is None else bias.detach(),
    )


def _window(inner: Any, config: Any) -> int | None:
    """How many tokens back a layer sees, itself included."""
    if getattr(inner, "attention_type", None) == "local":  # GPT-Neo
        return config.window_size
    if hasattr(inner, "sliding_window"):  # Qwen
        return inner.sliding_window
    return config.sliding_window if config.model_type == "mistral" else None


def _rotate(
    rotary: Any,
    x: Float[Tensor, "rows pos heads d_head"],
    mask: Int[Tensor, "rows pos"] | None,
) -> Float[Tensor, "rows pos heads d_head"]:
    """Queries or keys turned by their positions, the first dimensions alone where that is all."""
    positions = torch.arange(x.shape[1], device=x.device)[None]
    if mask is not None:
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cos, sin = (table[:, :, None].to(x.dtype) for table in rotary(x, positions))
    turned, kept = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    one, other = turned.chunk(2, dim=-1)
    return torch.cat([turned * cos + torch.cat([-other, one], dim=-1) * sin, kept], dim=-1)
