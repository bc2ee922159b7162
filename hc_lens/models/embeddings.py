"""Embeddings of TransformerLens 3's HookedEncoder that differ from BERT's."""

from __future__ import annotations

import dataclasses

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformer_lens.components.bert_embed import BertEmbed
from transformer_lens.components.layer_norm import LayerNorm
from transformer_lens.config.hooked_transformer_config import HookedTransformerConfig


class PadAwareEmbed(BertEmbed):
    """BertEmbed whose positions count the tokens that are not pads."""

    def __init__(self, cfg: HookedTransformerConfig, pad_token_id: int):
        super().__init__(cfg)
        self.pad_token_id = pad_token_id

    def forward(
        self,
        input_ids: Int[Tensor, "batch pos"],
        token_type_ids: Int[Tensor, "batch pos"] | None = None,
    ) -> Float[Tensor, "batch pos d_model"]:
        """Sum of token, position and token-type vectors, normalised."""
        real = input_ids != self.pad_token_id
        positions = (real.cumsum(-1) - 1).clamp(min=0)
        types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        words = self.hook_embed(self.embed(input_ids))
        where = torch.where(real.unsqueeze(-1), self.pos_embed.W_pos[positions], 0.0)
        summed = words + self.hook_pos_embed(where)
        return self.ln(summed + self.hook_token_type_embed(self.token_type_embed(types)))


class ProjectedEmbed(BertEmbed):
    """BertEmbed of width `d_embed`, projected to the width of the residual stream."""

    def __init__(self, cfg: HookedTransformerConfig, d_embed: int):
        super().__init__(dataclasses.replace(cfg, d_model=d_embed))
        self.W_project = nn.Parameter(torch.empty(d_embed, cfg.d_model, dtype=cfg.dtype))
        self.b_project = nn.Parameter(torch.zeros(cfg.d_model, dtype=cfg.dtype))

    def forward(
        self,
        input_ids: Int[Tensor, "batch pos"],
        token_type_ids: Int[Tensor, "batch pos"] | None = None,
    ) -> Float[Tensor, "batch pos d_model"]:
        """The normalised sum of the tables, projected."""
        return super().forward(input_ids, token_type_ids) @ self.W_project + self.b_project


class WordEmbed(BertEmbed):
    """ModernBERT's: the normalised words alone."""

    def __init__(self, cfg: HookedTransformerConfig):
        super().__init__(cfg)
        del self.pos_embed, self.hook_pos_embed, self.token_type_embed, self.hook_token_type_embed

    def forward(
        self, input_ids: Int[Tensor, "batch pos"], token_type_ids: Tensor | None = None
    ) -> Float[Tensor, "batch pos d_model"]:
        """The table's rows, normalised; there are no token types."""
        return self.ln(self.hook_embed(self.embed(input_ids)))


class MaskedEmbed(BertEmbed):
    """DeBERTa's: tables of width `d_embed`, projected, then normed; positions only if asked for.

    Pads are 0 behind the norm, which counts where a convolution, or a pad's own query, sees them.
    """

    relative: nn.Module
    """The table of relative embeddings, which the layers share."""

    def __init__(self, cfg: HookedTransformerConfig, d_embed: int, positions: bool):
        super().__init__(dataclasses.replace(cfg, d_model=d_embed))
        self.W_project = None
        if d_embed != cfg.d_model:
            self.W_project = nn.Parameter(torch.empty(d_embed, cfg.d_model, dtype=cfg.dtype))
        self.ln = LayerNorm(cfg)
        if not positions:
            del self.pos_embed, self.hook_pos_embed

    def forward(
        self,
        input_ids: Int[Tensor, "batch pos"],
        token_type_ids: Int[Tensor, "batch pos"] | None = None,
        mask: Int[Tensor, "batch pos"] | None = None,
    ) -> Float[Tensor, "batch pos d_model"]:
        """The normalised sum of the tables, 0 at pads."""
        types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        summed = self.hook_embed(self.embed(input_ids))
        if hasattr(self, "pos_embed"):
            places = torch.arange(input_ids.shape[1], device=input_ids.device)
            summed = summed + self.hook_pos_embed(self.pos_embed(places.expand_as(input_ids)))
        summed = summed + self.hook_token_type_embed(self.token_type_embed(types))
        normed = self.ln(summed if self.W_project is None else summed @ self.W_project)
        return normed if mask is None else normed * mask[..., None]
