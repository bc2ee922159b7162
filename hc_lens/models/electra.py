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

from hc_lens.models.classifiers import EncoderClassifier
from hc_lens.models.encoders import build_encoder
from hc_lens.models.names import ConfigNames, EncoderNames

NAMES = EncoderNames(
    embeddings="electra.embeddings.",
    layer="electra.encoder.layer.{l}.",
    pooler="classifier.dense",
    classifier="classifier.out_proj",
)


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


def convert(hf_model: Any, **settings: Any) -> EncoderClassifier:
    """An ElectraForSequenceClassification as a HookedEncoder with its classifier."""
    width = hf_model.config.embedding_size
    if width == hf_model.config.hidden_size:
        return build_encoder(hf_model, NAMES, ConfigNames(), activation=nn.GELU(), **settings)
    projection = hf_model.electra.embeddings_project
    extra = {"embed.W_project": projection.weight.T, "embed.b_project": projection.bias}
    return build_encoder(
        hf_model,
        NAMES,
        ConfigNames(),
        embed=lambda cfg: ProjectedEmbed(cfg, width),
        activation=nn.GELU(),
        extra=extra,
        **settings,
    )
