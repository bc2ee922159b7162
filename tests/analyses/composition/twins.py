"""Two-layer attention-only decoders, set by hand, in which one head is read by one other.

The residual stream has a part for the word, one for the position, one for the previous word and
one for the answer. L0.H0 writes the previous word. L1.H0 reads it in one of three ways:

- ``k`` (induction): it looks for the place whose previous word is the current word, and answers
  the word there;
- ``q``: it looks for the place whose word is the previous word, and answers the word there;
- ``v``: it looks for the mark, and answers the word before it.

The other heads have small random weights.
"""

from __future__ import annotations

import torch

from hc_lens.models.quiet import quiet
from tests.batches import Batches, Rows
from tests.lens import HookedTransformerConfig

N_WORDS, N_PLACES = 7, 8
MARK = N_WORDS - 1
WORD, PLACE = slice(0, N_WORDS), slice(N_WORDS, N_WORDS + N_PLACES)
PREVIOUS, ANSWER = slice(20, 20 + N_WORDS), slice(30, 30 + N_WORDS)
WIDTH, D_HEAD, N_HEADS = 128, 16, 3
SHARP, NOISE = 4.0, 0.02


class LabelledBatches(Batches):
    labels = tuple(f"word {place}" for place in range(N_WORDS))


def twin(kind: str, seed: int = 0):
    """The model in which L1.H0 reads L0.H0 through `kind`, float64."""
    cfg = HookedTransformerConfig(
        n_layers=2,
        d_model=WIDTH,
        n_ctx=N_PLACES,
        d_head=D_HEAD,
        n_heads=N_HEADS,
        d_vocab=N_WORDS,
        d_vocab_out=N_WORDS,
        attn_only=True,
        normalization_type=None,
        dtype=torch.float64,
        seed=None,
        init_weights=False,
        device="cpu",
    )
    from hc_lens.models.classifiers import DecoderClassifier

    with quiet():
        model = DecoderClassifier(cfg, dict(enumerate(LabelledBatches.labels)))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.zero_()
            if ".attn.W_" in name:
                weight[1:] = NOISE * torch.randn(weight[1:].shape, generator=generator)
        eye = torch.eye(WIDTH, dtype=torch.float64)
        model.embed.W_E[:] = eye[WORD]
        model.pos_embed.W_pos[:] = eye[PLACE]
        model.unembed.W_U[:] = 4 * eye[:, ANSWER]
        _previous_word(model.blocks[0].attn)
        _reader(model.blocks[1].attn, kind)
    return model.eval()


def _previous_word(attn) -> None:
    places = torch.arange(N_PLACES - 1)
    attn.W_Q[0, N_WORDS + 1 + places, places] = 8 * attn.attn_scale
    attn.W_K[0, N_WORDS + places, places] = 1
    words = torch.eye(N_WORDS, dtype=torch.float64)
    attn.W_V[0, WORD, :N_WORDS] = words
    attn.W_O[0, :N_WORDS, PREVIOUS] = words


def _reader(attn, kind: str) -> None:
    words = torch.eye(N_WORDS, dtype=torch.float64)
    attn.W_Q[0, PREVIOUS if kind == "q" else WORD, :N_WORDS] = SHARP * attn.attn_scale * words
    attn.W_K[0, PREVIOUS if kind == "k" else WORD, :N_WORDS] = words
    attn.W_V[0, PREVIOUS if kind == "v" else WORD, :N_WORDS] = words
    attn.W_O[0, :N_WORDS, ANSWER] = words
    if kind == "v":
        attn.W_Q[0] = 0
        attn.b_Q[0, MARK] = SHARP * attn.attn_scale


def rows(kind: str, n_rows: int = 48, seed: int = 1) -> LabelledBatches:
    """Rows of six words whose answer the twin knows, in batches of 16."""
    generator = torch.Generator().manual_seed(seed)
    sentences, answers = [], []
    for _ in range(n_rows):
        order = torch.randperm(N_WORDS - 1, generator=generator).tolist()
        if kind == "k":  # mark a b ... a -> b; the first place has no previous word but its own
            words = [MARK, *order[:4], order[0]]
            at = 2
        elif kind == "q":  # ... a x -> a
            words = order
            at = 4
        else:  # ... a mark ... -> a
            words = [*order[:2], MARK, *order[2:5]]
            at = 1
        sentences.append(words)
        answers.append(words[at])
    batches = LabelledBatches()
    for first in range(0, n_rows, 16):
        ids = torch.tensor(sentences[first : first + 16])
        inputs = {"input": ids, "attention_mask": torch.ones_like(ids)}
        places = torch.arange(first, first + len(ids))
        gold = torch.tensor(answers[first : first + 16])
        batches.append(Rows(inputs, places, gold, ("all",) * len(ids)))
    return batches
