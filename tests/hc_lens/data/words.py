"""A tiny causal language model whose tokenizer has whole words, for tests of prompts."""

from __future__ import annotations

import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from tests.lens import HookedTransformer, HookedTransformerConfig

SPECIAL = ("<unk>", "<s>", "[MASK]")


def word_tokenizer(words, bos: bool = False) -> hf.PreTrainedTokenizerFast:
    """One token for each word or mark; `bos` puts ``<s>`` before each text."""
    vocabulary = {word: place for place, word in enumerate(dict.fromkeys([*SPECIAL, *words]))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="<s>",
        pad_token="<s>",
        mask_token="[MASK]",
    )


def word_model(words, bos: bool = False, **changes) -> HookedTransformer:
    """One layer with random weights; `bos` says whether the tokenizer itself puts a BOS."""
    tokenizer = word_tokenizer(words, bos)
    settings = {
        "n_layers": 1,
        "d_model": 8,
        "n_heads": 2,
        "d_head": 4,
        "n_ctx": 80,
        "d_vocab": len(tokenizer),
        "act_fn": "relu",
        "seed": 0,
        "device": "cpu",
        "tokenizer_prepends_bos": bos,
    }
    model = HookedTransformer(HookedTransformerConfig(**{**settings, **changes}))
    model.tokenizer = tokenizer
    return model.eval()
