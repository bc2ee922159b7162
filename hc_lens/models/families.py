"""The families of models that hc_lens loads."""

from __future__ import annotations

from hc_lens.models import (
    albert,
    bert,
    deberta,
    deberta_v1,
    distilbert,
    electra,
    modernbert,
    mpnet,
    roberta,
)
from hc_lens.models.encoders import EncoderFamily

ENCODERS: dict[str, EncoderFamily] = {
    "bert": bert.FAMILY,
    "roberta": roberta.FAMILY,
    "xlm-roberta": roberta.FAMILY,
    "distilbert": distilbert.FAMILY,
    "electra": electra.FAMILY,
    "deberta": deberta_v1.FAMILY,
    "deberta-v2": deberta.FAMILY,
    "modernbert": modernbert.FAMILY,
    "albert": albert.FAMILY,
    "mpnet": mpnet.FAMILY,
}
"""Hugging Face model type -> how its encoders are built."""

ARCHITECTURES = {
    "gpt2": "GPT2LMHeadModel",
    "gpt_neo": "GPTNeoForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""Hugging Face model type -> the architecture of its causal language models, which TransformerLens
knows."""

FAMILIES: dict[str, EncoderFamily | str] = {**ENCODERS, **ARCHITECTURES}
"""All of them."""

MASKED = {
    "bert": "BertForMaskedLM",
    "roberta": "RobertaForMaskedLM",
    "xlm-roberta": "XLMRobertaForMaskedLM",
}
"""Hugging Face model type -> the masked-LM architecture that its family converts."""
