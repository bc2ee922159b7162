"""ELECTRA: BERT whose embeddings may be narrower than its blocks, and a GELU head.

Where ``embedding_size`` differs from ``hidden_size`` (electra-small) the embeddings, already
normalised, pass through one linear map into the residual stream.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformer_lens.components.bert_embed import BertEmbed
from transformer_lens.config.hooked_transformer_config import HookedTransformerConfig

from hc_lens.models.encoders import EncoderFamily


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


def _embed(cfg: HookedTransformerConfig, config: Any) -> ProjectedEmbed | None:
    width = config.embedding_size
    return None if width == config.hidden_size else ProjectedEmbed(cfg, width)


FAMILY = EncoderFamily(
    pooler="classifier.dense",
    classifier="classifier.out_proj",
    activation=nn.GELU,
    embed=_embed,
    extra={"embed.W_project": "embeddings_project"},
)
