"""Text in, keyword arguments of a hooked model out.

1. Tokenise with the checkpoint's own tokenizer; a pair goes in as the tokenizer's pair.
2. Pad to the longest row: right for encoders (the classifier reads position 0), on the tokenizer's
   own side for decoders.
3. Name the tensors as the model's ``forward`` does: HookedEncoder takes
   ``one_zero_attention_mask``, HookedTransformer and TransformerBridge take ``attention_mask``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from jaxtyping import Int
from torch import Tensor

from hc_lens.errors import HcLensError

Text = str | tuple[str, str]


def is_encoder(model: Any) -> bool:
    """Whether the model attends in both directions (BERT and its kin)."""
    if getattr(model.cfg, "attention_dir", "causal") == "bidirectional":
        return True
    # A TransformerBridge of an encoder says "causal" there and tells the truth in its architecture.
    architecture = getattr(model.cfg, "architecture", None) or ""
    return architecture.startswith(("Bert", "Roberta", "XLMRoberta", "DistilBert", "Electra"))


def tokenizer_of(model: Any) -> Any:
    """The model's tokenizer; a model without one is an HcLensError."""
    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is None:
        raise HcLensError(
            f"expected a tokenizer on the model to read text, got a {type(model).__name__} without "
            "one; pass tokenizer=... to hc.load, or call the model with token ids"
        )
    return tokenizer


def pad_id(model: Any) -> int:
    """The token id to pad with: what the checkpoint names, else any id (the mask hides it)."""
    tokenizer = getattr(model, "tokenizer", None)
    candidates = [getattr(model, "pad_token_id", None)]
    candidates += [
        getattr(tokenizer, "pad_token_id", None),
        getattr(tokenizer, "eos_token_id", None),
    ]
    return next((int(candidate) for candidate in candidates if candidate is not None), 0)


def padding_side(model: Any) -> str:
    """``"right"`` for encoders, the tokenizer's own side for decoders."""
    tokenizer = getattr(model, "tokenizer", None)
    return "right" if is_encoder(model) else getattr(tokenizer, "padding_side", None) or "right"


def pad(
    rows: Sequence[Sequence[int]], value: int, side: str, width: int | None = None
) -> Int[Tensor, "batch pos"]:
    """Stack rows of unequal length into one tensor, filling with `value` on one side."""
    width = max(len(row) for row in rows) if width is None else width
    stacked = torch.full((len(rows), width), value, dtype=torch.long)
    for place, row in enumerate(rows):
        start = width - len(row) if side == "left" else 0
        stacked[place, start : start + len(row)] = torch.as_tensor(row, dtype=torch.long)
    return stacked


def name_inputs(
    model: Any,
    tokens: Int[Tensor, "batch pos"],
    mask: Int[Tensor, "batch pos"],
    token_types: Int[Tensor, "batch pos"] | None = None,
) -> dict[str, Tensor]:
    """The tensors under the keyword names of the model's ``forward``, on the model's device."""
    from transformer_lens import HookedEncoder

    mask_name = "one_zero_attention_mask" if isinstance(model, HookedEncoder) else "attention_mask"
    inputs = {"input": tokens, mask_name: mask}
    if token_types is not None and is_encoder(model):
        inputs["token_type_ids"] = token_types
    return {name: tensor.to(model.cfg.device) for name, tensor in inputs.items()}


def mask_of(inputs: Mapping[str, Tensor]) -> Int[Tensor, "batch pos"]:
    """The 0/1 attention mask among a model's keyword arguments; all ones where there is none."""
    for name in ("one_zero_attention_mask", "attention_mask"):
        if inputs.get(name) is not None:
            return inputs[name]
    return torch.ones_like(inputs["input"])


def encode(model: Any, texts: Text | Sequence[Text]) -> dict[str, Tensor]:
    """Keyword arguments for ``model(**inputs)`` from sentences or (premise, hypothesis) pairs."""
    tokenizer = tokenizer_of(model)
    rows = cast(list[Text], [texts] if isinstance(texts, (str, tuple)) else list(texts))
    encodings = [tokenizer(row) if isinstance(row, str) else tokenizer(*row) for row in rows]
    longest = max(len(encoding["input_ids"]) for encoding in encodings)
    if longest > model.cfg.n_ctx:
        raise HcLensError(
            f"expected at most {model.cfg.n_ctx} tokens (the model's context), got a row of "
            f"{longest}; shorten the text"
        )
    side = padding_side(model)
    types = None
    if all("token_type_ids" in encoding for encoding in encodings):
        types = pad([encoding["token_type_ids"] for encoding in encodings], 0, side)
    ids = [encoding["input_ids"] for encoding in encodings]
    mask = pad([[1] * len(row) for row in ids], 0, side)
    return name_inputs(model, pad(ids, pad_id(model), side), mask, types)
