"""From a Hugging Face decoder to a HookedTransformer, through TransformerLens's own converters.

1. TransformerLens reads a configuration from a directory and knows causal language models only. It
   gets a copy of the checkpoint's configuration under the language model's architecture name, in a
   temporary folder from whose path it cannot guess another one.
2. A classifier goes through the same converter: its ``score`` matrix takes the place of the
   language-model head, with one column per label and no bias.
3. Rotary tables are copied from the Hugging Face model, so that every kind of rope scaling and its
   float32 arithmetic carry over exactly.
No folding and no centring: the weights stay the checkpoint's own.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformer_lens import loading_from_pretrained as loading
from transformer_lens.config.hooked_transformer_config import HookedTransformerConfig

from hc_lens.errors import HcLensError
from hc_lens.models.classifiers import DecoderClassifier, DecoderLanguageModel
from hc_lens.models.families import ARCHITECTURES
from hc_lens.records import as_folder


class _Place(str):
    """A path in which TransformerLens finds no name of a model: it guesses before it reads."""

    def lower(self) -> str:
        return ""

    def __contains__(self, text: object) -> bool:
        return False


def _config(config: Any, device: str | None, dtype: torch.dtype) -> HookedTransformerConfig:
    described = json.loads(config.to_json_string(use_diff=False))
    described["architectures"] = [ARCHITECTURES[config.model_type]]
    described.pop("auto_map", None)  # names Python code of the checkpoint's own
    if "n_positions" in described:
        # GPT-2 configurations saved by transformers 5 lack the older name TransformerLens reads.
        described.setdefault("n_ctx", described["n_positions"])
    with as_folder({"config.json": json.dumps(described).encode()}) as folder:
        place = _Place(folder)
        cfg = loading.get_pretrained_model_config(place, device=device, dtype=dtype)
    windows = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    if windows and not cfg.use_local_attn:
        raise HcLensError(
            f"expected attention to all earlier tokens, got a {config.model_type} some of whose "
            f"layers see {config.sliding_window} tokens (layer_types of its config.json), which "
            "TransformerLens 3 passes over; use TransformerLens 4"
        )
    cfg.tokenizer_name = None
    cfg.model_name = config.model_type
    return cfg


def convert_decoder(
    hf_model: Any, *, device: str | None, dtype: torch.dtype
) -> DecoderClassifier | DecoderLanguageModel:
    """A decoder's classifier or language model as a HookedTransformer with its head."""
    cfg = _config(hf_model.config, device, dtype)
    if hasattr(hf_model, "score"):
        cfg.d_vocab_out = hf_model.config.num_labels
        model = DecoderClassifier(cfg, dict(hf_model.config.id2label))
        head = hf_model.score
        given = SimpleNamespace(lm_head=head, config=hf_model.config)
        setattr(given, hf_model.base_model_prefix, hf_model.base_model)
    else:
        head = hf_model.get_output_embeddings()  # called embed_out in older versions of GPT-NeoX
        model, given = DecoderLanguageModel(cfg, move_to_device=False), hf_model
    # Any path makes the converter treat the model as local; it is never read.
    there = Path.cwd().anchor
    state = loading.get_pretrained_state_dict(there, cfg, hf_model=given, dtype=cfg.dtype)
    bias = model.unembed.b_U
    state["unembed.W_U"] = head.weight.T
    if state.get("unembed.b_U") is None or state["unembed.b_U"].shape != bias.shape:
        state["unembed.b_U"] = torch.zeros_like(bias)
    state = {name: value.detach().to(cfg.dtype) for name, value in state.items()}
    model.load_state_dict(loading.fill_missing_keys(model, state), strict=False)
    rotary = getattr(hf_model.base_model, "rotary_emb", None)
    if rotary is not None and not cfg.rotary_adjacent_pairs:
        for block in model.blocks:
            positions = torch.arange(len(block.attn.rotary_cos))[None]
            cos, sin = rotary(torch.zeros(1, dtype=cfg.dtype), positions)
            block.attn.rotary_cos.copy_(cos[0])
            block.attn.rotary_sin.copy_(sin[0])
    return model
