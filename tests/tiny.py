"""Tiny Hugging Face models with random weights, and tokenizers to go with them."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers as hf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor

from hc_lens.models.installed import BRIDGES

VOCABULARY = 60
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
}
COMMON = {"vocab_size": VOCABULARY, "num_labels": 3}
GROUPED = {**SIZES, "num_key_value_heads": 2, "pad_token_id": 0}
ROBERTA = {**SIZES, "pad_token_id": 1, "type_vocab_size": 1}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 40, "pad_token_id": 0}
DISTIL = {
    "dim": 32,
    "n_layers": 2,
    "n_heads": 4,
    "hidden_dim": 48,
    "max_position_embeddings": 40,
}

DEBERTA = {
    **SIZES,
    "relative_attention": True,
    "share_att_key": True,
    "pos_att_type": ["c2p", "p2c"],
    "norm_rel_ebd": "layer_norm",
    "position_buckets": 4,
    "pad_token_id": 0,
}
DEBERTA_V1 = {
    **SIZES,
    "relative_attention": True,
    "pos_att_type": ["c2p", "p2c"],
    "position_biased_input": False,
    "max_relative_positions": 6,
    "pad_token_id": 0,
}
MODERN = {
    **SIZES,
    "num_hidden_layers": 3,
    "local_attention": 6,
    "pad_token_id": 0,
    **dict.fromkeys(("bos_token_id", "cls_token_id"), 2),
    **dict.fromkeys(("eos_token_id", "sep_token_id"), 3),
}

ALL = {
    "bert": (hf.BertConfig, hf.BertForSequenceClassification, SIZES),
    "roberta": (hf.RobertaConfig, hf.RobertaForSequenceClassification, ROBERTA),
    "xlm-roberta": (hf.XLMRobertaConfig, hf.XLMRobertaForSequenceClassification, ROBERTA),
    "distilbert": (hf.DistilBertConfig, hf.DistilBertForSequenceClassification, DISTIL),
    "electra": (
        hf.ElectraConfig,
        hf.ElectraForSequenceClassification,
        {**SIZES, "embedding_size": 32},
    ),
    "electra-small": (
        hf.ElectraConfig,
        hf.ElectraForSequenceClassification,
        {**SIZES, "embedding_size": 16},
    ),
    "deberta": (hf.DebertaConfig, hf.DebertaForSequenceClassification, DEBERTA_V1),
    "deberta-v3": (
        hf.DebertaV2Config,
        hf.DebertaV2ForSequenceClassification,
        {**DEBERTA, "position_biased_input": False},
    ),
    "deberta-v2": (
        hf.DebertaV2Config,
        hf.DebertaV2ForSequenceClassification,
        {**DEBERTA, "share_att_key": False},
    ),
    "modernbert": (hf.ModernBertConfig, hf.ModernBertForSequenceClassification, MODERN),
    "modernbert-mean": (
        hf.ModernBertConfig,
        hf.ModernBertForSequenceClassification,
        {**MODERN, "classifier_pooling": "mean"},
    ),
    "albert": (
        hf.AlbertConfig,
        hf.AlbertForSequenceClassification,
        {**SIZES, "embedding_size": 16},
    ),
    "mpnet": (
        hf.MPNetConfig,
        hf.MPNetForSequenceClassification,
        {**SIZES, "pad_token_id": 1},
    ),
    "gpt2": (hf.GPT2Config, hf.GPT2ForSequenceClassification, GPT2),
    "gpt_neox": (
        hf.GPTNeoXConfig,
        hf.GPTNeoXForSequenceClassification,
        {**SIZES, "pad_token_id": 0},
    ),
    "llama": (hf.LlamaConfig, hf.LlamaForSequenceClassification, GROUPED),
    "mistral": (hf.MistralConfig, hf.MistralForSequenceClassification, GROUPED),
    "qwen2": (hf.Qwen2Config, hf.Qwen2ForSequenceClassification, GROUPED),
    "qwen3": (hf.Qwen3Config, hf.Qwen3ForSequenceClassification, {**GROUPED, "head_dim": 8}),
}
NEWER = ("deberta", "deberta-v3", "deberta-v2", "modernbert", "modernbert-mean", "albert", "mpnet")
"""Encoders that TransformerLens 4 has no bridge for."""
BRIDGED = tuple(name for name in ALL if name not in NEWER)
FAMILIES = {name: family for name, family in ALL.items() if not BRIDGES or name in BRIDGED}
ENCODERS = ("bert", "roberta", "xlm-roberta", "distilbert", "electra", "electra-small", *NEWER)
DECODERS = tuple(family for family in FAMILIES if family not in ENCODERS)
MASKED_LANGUAGE_MODELS = {
    "bert": hf.BertForMaskedLM,
    "roberta": hf.RobertaForMaskedLM,
    "xlm-roberta": hf.XLMRobertaForMaskedLM,
}
CAUSAL_LANGUAGE_MODELS = {
    "gpt2": hf.GPT2LMHeadModel,
    "gpt_neox": hf.GPTNeoXForCausalLM,
    "llama": hf.LlamaForCausalLM,
    "mistral": hf.MistralForCausalLM,
    "qwen2": hf.Qwen2ForCausalLM,
    "qwen3": hf.Qwen3ForCausalLM,
}
LANGUAGE_MODELS = {**MASKED_LANGUAGE_MODELS, **CAUSAL_LANGUAGE_MODELS}
MNLI_LABELS = {0: "entailment", 1: "neutral", 2: "contradiction"}


def roughen(model: torch.nn.Module, seed: int = 0, scale: float = 0.2) -> torch.nn.Module:
    """Move every weight away from its initial 0 or 1, so that a forgotten bias shows."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
                module.weight[module.padding_idx] = 0
    return model.eval()


def tiny_hf(family: str, seed: int = 0, labels: dict[int, str] | None = None, **changes):
    """A sequence classifier of one family, 2 layers x 4 heads, rough random weights."""
    config_class, model_class, sizes = ALL[family]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        names = labels or MNLI_LABELS
        config = config_class(**{**COMMON, **sizes, **changes, "id2label": names})
        config.label2id = {name: place for place, name in names.items()}
        return roughen(model_class(config), seed)


def tiny_language_model(family: str, seed: int = 0, **changes):
    """A causal or masked language model of one family, of the same size as its classifier."""
    config_class, _, sizes = FAMILIES[family]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = config_class(**{**sizes, **changes, "vocab_size": VOCABULARY})
        return roughen(LANGUAGE_MODELS[family](config), seed)


def tiny_inputs(
    pad: int, side: str, lengths=(9, 5, 2), seed: int = 0, token_types: bool = False
) -> dict[str, Tensor]:
    """Hugging Face keyword arguments: random ids, rows of unequal length padded on one side."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids = torch.randint(5, VOCABULARY, (len(lengths), width), generator=generator)
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths):
        pads = slice(length, None) if side == "right" else slice(0, width - length)
        ids[row, pads], mask[row, pads] = pad, 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    if token_types:
        inputs["token_type_ids"] = (torch.arange(width) > width // 2).long().expand_as(ids)
    return inputs


WORDS = (  # noqa: SIM905
    "the a doctor lawyer judge artist banker student saw helped admired called slept ran near by "
    "if said that and not who old young did was in on today . ,"
).split()


def bert_tokenizer() -> hf.PreTrainedTokenizerFast:
    """Word-piece tokenizer with BERT's special tokens; "##s" splits plurals in two."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {token: place for place, token in enumerate([*special, *WORDS, "##s"])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


def byte_tokenizer(roberta: bool = False) -> hf.PreTrainedTokenizerFast:
    """Byte-level tokenizer: GPT-2's shape (no pad, no pair template) or RoBERTa's."""
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    letters = sorted({*"abcdefghijklmnopqrstuvwxyz.,", "Ġ"})
    pieces = [*special, *letters, "th", "the", "Ġthe"]
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the")]
    vocabulary = {token: place for place, token in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if roberta:
        tokenizer.post_processor = processors.RobertaProcessing(
            ("</s>", 2), ("<s>", 0), add_prefix_space=False
        )
        names = {"bos_token": "<s>", "cls_token": "<s>", "sep_token": "</s>", "pad_token": "<pad>"}
        return hf.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>", **names
        )
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>"
    )


def tokenizer_for(family: str) -> hf.PreTrainedTokenizerFast:
    """The tokenizer that fits a family's vocabulary and special tokens."""
    if family in ("roberta", "xlm-roberta", "mpnet"):
        return byte_tokenizer(roberta=True)
    return bert_tokenizer() if family in ENCODERS else byte_tokenizer()


def save_checkpoint(folder: Path, family: str = "bert", **settings) -> Path:
    """A checkpoint directory as save_pretrained writes it, with its tokenizer."""
    tiny_hf(family, **settings).save_pretrained(folder)
    tokenizer_for(family).save_pretrained(folder)
    return folder


def save_language_model(folder: Path, family: str, **settings) -> Path:
    """The same for a language model."""
    tiny_language_model(family, **settings).save_pretrained(folder)
    tokenizer_for(family).save_pretrained(folder)
    return folder
