"""A tokenizer with one token a word, for models trained from scratch: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

PAD, UNKNOWN = "<pad>", "<unk>"


def word_tokenizer(texts: Iterable[str]) -> Any:
    """A Hugging Face tokenizer whose tokens are the words of the texts, in alphabetical order."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = sorted({word for text in texts for word in text.split()})
    vocabulary = {word: place for place, word in enumerate([PAD, UNKNOWN, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, unk_token=UNKNOWN, eos_token=PAD
    )
