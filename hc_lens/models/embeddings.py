"""Embeddings of TransformerLens 3's HookedEncoder that differ from BERT's."""

from __future__ import annotations

import dataclasses

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformer_lens.components.bert_embed import BertEmbed
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
