"""DistilBERT: BERT without token types; the head is a ReLU layer at position 0 and a classifier."""

from __future__ import annotations

from typing import Any

from torch import nn

from hc_lens.models.classifiers import EncoderClassifier
from hc_lens.models.encoders import build_encoder
from hc_lens.models.names import ConfigNames, EncoderNames

NAMES = EncoderNames(
    embeddings="distilbert.embeddings.",
    layer="distilbert.transformer.layer.{l}.",
    pooler="pre_classifier",
    classifier="classifier",
    query="attention.q_lin",
    key="attention.k_lin",
    value="attention.v_lin",
    output="attention.out_lin",
    ln1="sa_layer_norm",
    mlp_in="ffn.lin1",
    mlp_out="ffn.lin2",
    ln2="output_layer_norm",
)

CONFIG = ConfigNames(
    d_model="dim",
    n_layers="n_layers",
    n_heads="n_heads",
    d_mlp="hidden_dim",
    act_fn="activation",
    eps=None,
)


def convert(hf_model: Any, **settings: Any) -> EncoderClassifier:
    """A DistilBertForSequenceClassification as a HookedEncoder with its classifier."""
    return build_encoder(hf_model, NAMES, CONFIG, activation=nn.ReLU(), **settings)
