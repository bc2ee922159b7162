"""A one-layer encoder whose three heads are set by hand.

Embeddings are one-hot: a part for the word piece, one for the position, one for the sentence.
L0.H0 attends to the same piece in the other sentence, L0.H1 to the previous token, L0.H2 to [SEP].
"""

from __future__ import annotations

import pytest
import torch

import hc_lens as hc
from tests import tiny
from tests.lens import BRIDGES

N_WORDS, N_PLACES, N_TYPES = 60, 40, 2
SHARP = 40.0
SEP = 3


def handmade_model():
    """The model, float64, with tiny's word-piece tokenizer."""
    if BRIDGES:
        pytest.skip("its weights are written in the layout of a HookedEncoder")
    sizes = {"hidden_size": 192, "num_hidden_layers": 1, "num_attention_heads": 3}
    hf_model = tiny.tiny_hf("bert", **sizes)
    model = hc.load(hf_model, dtype=torch.float64, tokenizer=tiny.bert_tokenizer())
    with torch.no_grad():
        _set_embedding(model)
        _set_heads(model.blocks[0].attn)
    return model


def _set_embedding(model) -> None:
    embed = model.embed
    width = model.cfg.d_model
    tables = (embed.embed.W_E, embed.pos_embed.W_pos, embed.token_type_embed.W_token_type)
    start = 0
    for table in tables:
        table.zero_()
        table[:, start : start + len(table)] = torch.eye(len(table))
        start += len(table)
    # Every input has three ones: the layer norm's mean and variance are constants to undo.
    mean = 3 / width
    embed.ln.w.fill_((mean - mean**2 + model.cfg.eps) ** 0.5)
    embed.ln.b.fill_(mean)


def _set_heads(attn) -> None:
    for weight in (attn.W_Q, attn.W_K, attn.b_Q, attn.b_K):
        weight.zero_()
    sharp = SHARP * attn.cfg.attn_scale
    types = N_WORDS + N_PLACES
    # Same piece: +1 each; the other sentence: +1 (a key's type read crosswise).
    words = torch.eye(N_WORDS)
    attn.W_Q[0, :N_WORDS, :N_WORDS] = sharp * words
    attn.W_K[0, :N_WORDS, :N_WORDS] = words
    attn.W_Q[0, types : types + 2, N_WORDS : N_WORDS + 2] = sharp * torch.eye(2)
    attn.W_K[0, types : types + 2, N_WORDS : N_WORDS + 2] = torch.eye(2).flip(0)
    places = torch.arange(N_PLACES - 1)
    attn.W_Q[1, N_WORDS + 1 + places, places] = sharp
    attn.W_K[1, N_WORDS + places, places] = 1
    attn.b_Q[2, 0] = sharp
    attn.W_K[2, SEP, 0] = 1
