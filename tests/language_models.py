"""A checkpoint of a tiny language model that knows the words of the prompts that are made."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers as hf

from hc_lens.data.generated import agreement, ioi
from tests.hc_lens.data.words import word_tokenizer
from tests.tiny import roughen

NOUNS = ("dog", "cat", "bird", "boy")
TEXTS = (
    *(f"{noun} {agreement.NOUNS[noun]}" for noun in NOUNS),
    *(*agreement.PAST, *agreement.PRESENT, *agreement.ADJECTIVES, *agreement.PREPOSITIONS),
    *(*agreement.PAST_VERBS, "that was were is are has have"),
    *(*ioi.NAMES[:6], *ioi.TEMPLATES, *ioi.PLACES, *ioi.THINGS),
)
SIZES = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 48}


def save_language_model(folder: Path, seed: int = 0) -> Path:
    """A GPT-2 of 2 layers x 2 heads with random weights, as save_pretrained writes it."""
    words = " ".join(TEXTS).translate(str.maketrans("{},.", "    ")).split()
    tokenizer = word_tokenizer([*words, ",", "."])
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = hf.GPT2Config(
            **SIZES, vocab_size=len(tokenizer), bos_token_id=1, eos_token_id=1, pad_token_id=1
        )
        roughen(hf.GPT2LMHeadModel(config), seed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
