"""BERT: token, position and token-type tables, post-norm blocks, tanh pooler, linear classifier."""

from __future__ import annotations

from typing import Any

from hc_lens.models.classifiers import EncoderClassifier
from hc_lens.models.encoders import build_encoder
from hc_lens.models.names import ConfigNames, EncoderNames

NAMES = EncoderNames(
    embeddings="bert.embeddings.",
    layer="bert.encoder.layer.{l}.",
    pooler="bert.pooler.dense",
    classifier="classifier",
)


def convert(hf_model: Any, **settings: Any) -> EncoderClassifier:
    """A BertForSequenceClassification as a HookedEncoder with its classifier."""
    return build_encoder(hf_model, NAMES, ConfigNames(), **settings)
