"""Tiny language models of several shapes in float64, in pairs, with a word-level tokenizer."""

from __future__ import annotations

import copy

import torch
from transformer_lens import HookedTransformer, HookedTransformerConfig

from hc_lens.analyses.extractive.desk import word_tokenizer
from hc_lens.models.quiet import quiet

SENTENCES = (
    "The people in the city Ann is from speak",
    "Ann Bob Cay Dan Eve Fay lives in Rome Bonn Lyon Oslo Latin German French Norse old",
)
GEMMA = {
    "normalization_type": "RMS",
    "positional_embedding_type": "rotary",
    "rotary_dim": 4,
    "d_head": 4,
    "gated_mlp": True,
    "use_normalization_before_and_after": True,
}
COMMON = {
    "n_layers": 3,
    "d_model": 12,
    "n_heads": 4,
    "d_head": 3,
    "d_mlp": 20,
    "n_ctx": 16,
    "act_fn": "gelu",
    "device": "cpu",
    "dtype": torch.float64,
    "default_prepend_bos": False,
}
SHAPES = {
    "gpt2": {"normalization_type": "LN"},
    "pythia": {
        "normalization_type": "LN",
        "positional_embedding_type": "rotary",
        "rotary_dim": 2,
        "parallel_attn_mlp": True,
        "d_head": 4,
    },
    "llama": {
        "normalization_type": "RMS",
        "positional_embedding_type": "rotary",
        "rotary_dim": 4,
        "d_head": 4,
        "gated_mlp": True,
        "act_fn": "silu",
        "n_key_value_heads": 2,
        "final_rms": True,
    },
    "gemma": {**GEMMA, "output_logits_soft_cap": 30.0},
    "gemma 2": {**GEMMA, "attn_scores_soft_cap": 5.0, "n_key_value_heads": 2},
    "attention only": {"normalization_type": "LN", "attn_only": True, "act_fn": None},
}


def random_model(shape: str = "gpt2", seed: int = 0, **changes) -> HookedTransformer:
    """A model with rough random weights, no bias and no norm left at its first value."""
    tokenizer = word_tokenizer(SENTENCES)
    settings = {**COMMON, **SHAPES[shape], **changes}
    with quiet():
        config = HookedTransformerConfig(**settings, d_vocab=len(tokenizer), seed=seed)
        model = HookedTransformer(config, move_to_device=False)
    model.tokenizer = tokenizer
    model.cfg.tokenizer_prepends_bos = False
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.add_(0.3 * noise)
    return model.eval().requires_grad_(False)


def moved(model: HookedTransformer, scale: float = 0.1, seed: int = 1, only=None):
    """A copy with every weight (or those whose name `only` accepts) moved at random."""
    twin = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            if only is None or only(name):
                parameter.add_(scale * noise)
    return twin
