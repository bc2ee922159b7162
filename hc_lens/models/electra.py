"""ELECTRA: BERT whose embeddings may be narrower than its blocks, and a GELU head.

Where ``embedding_size`` differs from ``hidden_size`` (electra-small) the embeddings, already
normalised, pass through one linear map into the residual stream.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from hc_lens.models.encoders import EncoderFamily


def _embed(cfg: Any, config: Any) -> nn.Module | None:
    from hc_lens.models.embeddings import ProjectedEmbed

    width = config.embedding_size
    return None if width == config.hidden_size else ProjectedEmbed(cfg, width)


FAMILY = EncoderFamily(
    pooler="classifier.dense",
    classifier="classifier.out_proj",
    activation=lambda config: nn.GELU(),
    embed=_embed,
    extra={"embed.W_project": "embeddings_project"},
)
