"""HookedEncoder and HookedTransformer with the head of their checkpoint.

1. An encoder's classification head is ``pooler`` (a dense layer and its activation at position 0,
   in ModernBERT also of the mean of all tokens, and with a norm) followed by ``unembed`` with one
   column per label. A pre-norm encoder has ``ln_final`` in front of it.
2. A decoder's classification head is ``unembed`` with one column per label, read at the rightmost
   token that is not a pad, on whichever side the pads are.
3. A masked language model's head is ``mlm_head`` (a dense layer, its activation and a norm at every
   position) followed by ``unembed`` with one column per token; a causal one's is ``unembed``.
4. All are the TransformerLens classes themselves plus this head: hooks, caches and weights keep
   their names. All but the causal language model, whose ``forward`` is HookedTransformer's own,
   also take Hugging Face's keyword names.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformer_lens import HookedEncoder, HookedTransformer
from transformer_lens.components.bert_pooler import BertPooler
from transformer_lens.components.layer_norm import LayerNorm
from transformer_lens.config.hooked_transformer_config import HookedTransformerConfig

from hc_lens.blocks import mean_of_tokens
from hc_lens.errors import check_choice
from hc_lens.models.embeddings import MaskedEmbed
from hc_lens.models.fingerprint import fingerprint
from hc_lens.models.inputs import Text, encode
from hc_lens.models.parts import last_real
from hc_lens.protocols import Model

Input = Int[Tensor, "batch pos"] | Text | Sequence[Text]
"""What a model reads: token ids, a sentence or a pair, or several of either."""


def additive(mask: Int[Tensor, "batch pos"] | None) -> Float[Tensor, "batch 1 1 pos"] | None:
    """Minus infinity at the pads, as HookedEncoder gives it to its blocks."""
    return None if mask is None else torch.where(mask == 0, -torch.inf, 0.0)[:, None, None, :]


class _Fingerprinted:
    """A hooked model that names its own weights."""

    @property
    def fingerprint(self) -> str:
        """Hash of weights, architecture and labels; the same in every process."""
        return fingerprint(cast(Model, self))


class _Classifier(_Fingerprinted):
    """What both kinds of hooked classifier carry besides their TransformerLens class."""

    cfg: HookedTransformerConfig
    labels: dict[int, str]
    """Label names by id, as the checkpoint spells them."""
    pad_token_id: int | None = None
    """The pad id of the checkpoint's configuration, if it names one."""

    def _returned(
        self, logits: Float[Tensor, "batch labels"], return_type: str | None
    ) -> Float[Tensor, "batch labels"] | list[str] | None:
        """The logits in the form that the caller asked for."""
        check_choice("a classifier's return_type", return_type, ("logits", "predictions", None))
        if return_type == "predictions":
            return [self.labels[label] for label in logits.argmax(-1).tolist()]
        return logits if return_type else None


class _Encoder(_Fingerprinted, HookedEncoder, ABC):
    """What both kinds of hooked encoder carry: the embedding of their family, and how they read."""

    def __init__(self, cfg: HookedTransformerConfig, embed: nn.Module | None, head: str):
        """Blocks and the module called `head`; `embed` replaces BERT's embedding."""
        super().__init__(cfg, move_to_device=False)
        # The other heads would hold uninitialised weights that no checkpoint fills.
        for other in {"mlm_head", "nsp_head", "pooler"} - {head}:
            delattr(self, other)
        if embed is not None:
            self.embed = embed

    def to_tokens(
        self, input: Text | Sequence[Text], move_to_device: bool = True, truncate: bool = True
    ) -> tuple[Int[Tensor, "batch pos"], Int[Tensor, "batch pos"], Int[Tensor, "batch pos"]]:
        """Token ids, token types and mask; token types are zero where the tokenizer has none."""
        inputs = encode(self, input)
        tokens = inputs["input"]
        types = inputs.get("token_type_ids", torch.zeros_like(tokens))
        return tokens, types, inputs["one_zero_attention_mask"]

    def enter(
        self,
        tokens: Int[Tensor, "batch pos"],
        token_type_ids: Int[Tensor, "batch pos"] | None,
        mask: Int[Tensor, "batch pos"] | None,
    ) -> Float[Tensor, "batch pos d_model"]:
        """The residual stream in front of the first block."""
        given = (mask,) if isinstance(self.embed, MaskedEmbed) else ()
        return self.hook_full_embed(self.embed(tokens, token_type_ids, *given))

    def encoder_output(
        self,
        tokens: Int[Tensor, "batch pos"],
        token_type_ids: Int[Tensor, "batch pos"] | None = None,
        one_zero_attention_mask: Int[Tensor, "batch pos"] | None = None,
    ) -> Float[Tensor, "batch pos d_model"]:
        """HookedEncoder's own, whose embedding is also given the mask, if it takes one."""
        device = self.unembed.W_U.device
        given = (token_type_ids, one_zero_attention_mask)
        types, mask = (None if each is None else each.to(device) for each in given)
        resid, added = self.enter(tokens.to(device), types, mask), additive(mask)
        for block in self.blocks:
            resid = block(resid, added)
        return resid

    def forward(  # type: ignore[override]
        self,
        input: Input | None = None,
        return_type: str | None = "logits",
        token_type_ids: Int[Tensor, "batch pos"] | None = None,
        one_zero_attention_mask: Int[Tensor, "batch pos"] | None = None,
        *,
        input_ids: Int[Tensor, "batch pos"] | None = None,
        attention_mask: Int[Tensor, "batch pos"] | None = None,
    ) -> Float[Tensor, "batch *out"] | list[str] | None:
        """Logits of token ids, sentences or (premise, hypothesis) pairs.

        They are [batch, labels] from a classifier, [batch, pos, vocab] from a language model.
        """
        read = encode(self, input_ids if input is None else input)
        mask = attention_mask if one_zero_attention_mask is None else one_zero_attention_mask
        mask = read.get("one_zero_attention_mask", mask)
        types = read.get("token_type_ids", token_type_ids)
        resid = self.encoder_output(read["input"], types, mask)
        return self._answer(resid, mask, return_type)

    @abstractmethod
    def _answer(
        self,
        resid: Float[Tensor, "batch pos d_model"],
        mask: Int[Tensor, "batch pos"] | None,
        return_type: str | None,
    ) -> Float[Tensor, "batch *out"] | list[str] | None:
        """What the head says of the last residual stream, in the form that was asked for."""


class Pooler(BertPooler):
    """BertPooler that reads the mean of the tokens, or has a norm behind its activation."""

    def __init__(self, cfg: HookedTransformerConfig, mean: bool, activation: nn.Module):
        super().__init__(cfg)
        setattr(self, "activation", activation)  # noqa: B010 (typed as Tanh there)
        self.mean, self.ln = mean, LayerNorm(cfg)
        self.says = f"{mean} {activation}"

    def forward(  # type: ignore[override]
        self,
        resid: Float[Tensor, "batch pos d_model"],
        mask: Int[Tensor, "batch pos"] | None = None,
    ) -> Float[Tensor, "batch d_model"]:
        """The normalised dense layer of what is read."""
        read = mean_of_tokens(resid, mask) if self.mean else resid[:, :1]
        made = self.activation(read @ self.W + self.b)
        return self.hook_pooler_out(self.ln(made)[:, 0])


class EncoderClassifier(_Classifier, _Encoder):
    """A HookedEncoder whose output is [batch, labels]."""

    def __init__(
        self,
        cfg: HookedTransformerConfig,
        labels: dict[int, str],
        embed: nn.Module | None,
        activation: nn.Module,
    ):
        """Blocks, pooler and classifier; `embed` replaces BERT's embedding."""
        super().__init__(cfg, embed, "pooler")
        setattr(self.pooler, "activation", activation)  # noqa: B010 (typed as Tanh there)
        self.labels = labels
        self.setup()

    def answer(
        self, resid: Float[Tensor, "batch pos d_model"], mask: Int[Tensor, "batch pos"] | None
    ) -> Float[Tensor, "batch labels"]:
        """The logits of the stream behind the last block; a mean of tokens needs the mask."""
        norm: Any = getattr(self, "ln_final", None)
        normed = resid if norm is None else norm(resid)
        plain = type(self.pooler) is BertPooler
        return self.unembed(self.pooler(normed) if plain else self.pooler(normed, mask))

    def _answer(
        self,
        resid: Float[Tensor, "batch pos d_model"],
        mask: Int[Tensor, "batch pos"] | None,
        return_type: str | None,
    ) -> Float[Tensor, "batch labels"] | list[str] | None:
        return self._returned(self.answer(resid, mask), return_type)


class EncoderLanguageModel(_Encoder):
    """A HookedEncoder whose output is [batch, pos, vocab]: a masked language model of `hc.load`."""

    def __init__(
        self, cfg: HookedTransformerConfig, embed: nn.Module | None, activation: nn.Module
    ):
        """Blocks and head; `embed` replaces BERT's embedding, `activation` the head's."""
        super().__init__(cfg, embed, "mlm_head")
        setattr(self.mlm_head, "act_fn", activation)  # noqa: B010 (typed as GELU there)
        self.setup()

    def _answer(
        self,
        resid: Float[Tensor, "batch pos d_model"],
        mask: Int[Tensor, "batch pos"] | None,
        return_type: str | None,
    ) -> Float[Tensor, "batch pos vocab"] | None:
        check_choice("a masked language model's return_type", return_type, ("logits", None))
        logits = self.unembed(self.mlm_head(resid))
        return logits if return_type else None


class DecoderClassifier(_Classifier, HookedTransformer):
    """A HookedTransformer whose output is [batch, labels], read at the last non-pad token."""

    def __init__(self, cfg: HookedTransformerConfig, labels: dict[int, str]):
        """Embedding, blocks and classifier of `cfg`, with cfg.d_vocab_out labels."""
        super().__init__(cfg, move_to_device=False)
        self.labels = labels

    def read_positions(
        self,
        tokens: Int[Tensor, "batch pos"] | None,
        attention_mask: Int[Tensor, "batch pos"] | None,
        like: Float[Tensor, "batch pos width"],
    ) -> Int[Tensor, "batch"]:
        """Where the classifier reads: the rightmost token that is not a pad (0 if all are)."""
        return last_real(tokens, attention_mask, self.pad_token_id, like)

    def forward(  # type: ignore[override]
        self,
        input: Input | Float[Tensor, "batch pos d_model"] | None = None,
        return_type: str | None = "logits",
        *,
        input_ids: Int[Tensor, "batch pos"] | None = None,
        attention_mask: Int[Tensor, "batch pos"] | None = None,
        start_at_layer: int | None = None,
        stop_at_layer: int | None = None,
        tokens: Int[Tensor, "batch pos"] | None = None,
    ) -> Float[Tensor, "..."] | list[str] | None:
        """Logits [batch, labels] of token ids, sentences or (premise, hypothesis) pairs.

        `start_at_layer` takes a residual stream as `input`; `stop_at_layer` returns one.
        """
        read = encode(self, input_ids if input is None else input)
        attention_mask = read.get("attention_mask", attention_mask)
        if start_at_layer is None:
            tokens = read["input"]
        everywhere = super().forward(
            read["input"],
            return_type="logits",
            prepend_bos=False,
            start_at_layer=start_at_layer,
            stop_at_layer=stop_at_layer,
            attention_mask=attention_mask,
        )
        if stop_at_layer is not None:
            return everywhere
        at = self.read_positions(tokens, attention_mask, everywhere)
        logits = everywhere[torch.arange(len(at), device=at.device), at]
        return self._returned(logits, return_type)


class DecoderLanguageModel(_Fingerprinted, HookedTransformer):
    """A HookedTransformer of `hc.load`, with a logit for every token of its vocabulary."""
