"""Text in, keyword arguments of a hooked model out.

1. Tokenise with the checkpoint's own tokenizer; a pair goes in as the tokenizer's pair.
2. Pad to the longest row: right for encoders (the classifier reads position 0), on the tokenizer's
   own side for decoders.
3. Name the tensors as the model's ``forward`` does: HookedEncoder takes
   ``one_zero_attention_mask``, HookedTransformer and TransformerBridge take ``attention_mask``.
4. `pieces` cuts the inputs of a large batch along its rows, for what needs no batch as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from jaxtyping import Int
from torch import Tensor

from hc_lens.errors import HcLensError
from hc_lens.masks.hooks import has_user_hooks
from hc_lens.protocols import Model

Text = str | tuple[str, str]
Side = Literal["left", "right"]

AT_ONCE, NUMBERS = 512, 512 * 384
"""Most tokens that run at one time on a processor, or as many as have this many numbers in the
residual stream of a narrower model. Large activations of many sizes leave gaps in memory that the
next ones do not fit into, so that the peak memory of a process would grow with the number of
batches."""


def is_encoder(model: Model) -> bool:
    """Whether the model attends in both directions (as BERT does)."""
    if getattr(model.cfg, "attention_dir", "causal") == "bidirectional":
        return True
    # A TransformerBridge of an encoder says "causal" there; its architecture has the right answer.
    architecture = getattr(model.cfg, "architecture", None) or ""
    return architecture.startswith(("Bert", "Roberta", "XLMRoberta", "DistilBert", "Electra"))


def tokenizer_of(model: Model) -> Any:
    """The model's tokenizer; a model without one is an HcLensError."""
    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is None:
        raise HcLensError(
            f"expected a tokenizer on the model to read text, got a {type(model).__name__} without "
            "one; pass tokenizer=... to hc.load, or call the model with token ids"
        )
    return tokenizer


def pad(
    rows: Sequence[Sequence[int]], value: int, side: Side, width: int | None = None
) -> Int[Tensor, "batch pos"]:
    """Stack rows of unequal length into one tensor, filling with `value` on one side."""
    width = max(map(len, rows)) if width is None else width
    stacked = torch.full((len(rows), width), value, dtype=torch.long)
    for index, row in enumerate(rows):
        start = width - len(row) if side == "left" else 0
        stacked[index, start : start + len(row)] = torch.as_tensor(row, dtype=torch.long)
    return stacked


def mask_name(model: Model) -> str:
    """What the model's ``forward`` calls the attention mask."""
    kinds = {kind.__name__ for kind in type(model).__mro__}
    return "one_zero_attention_mask" if "HookedEncoder" in kinds else "attention_mask"


@dataclass(frozen=True)
class Padding:
    """How tokenised rows become the keyword arguments of one model."""

    value: int
    """Token id to fill with: what the checkpoint names, else any id (the mask hides it)."""
    side: Side
    """Side to fill on."""
    mask_name: str
    """What the model's ``forward`` calls the attention mask."""
    token_types: bool
    """Whether the model takes token types."""
    cfg: Any
    """TransformerLens's configuration, which knows the device that the model is on."""

    @classmethod
    def of(cls, model: Model, side: Side | None = None) -> Padding:
        """The padding that a model takes, on a decoder by default on its tokenizer's own side."""
        encoder, tokenizer = is_encoder(model), getattr(model, "tokenizer", None)
        sides = ("right",) if encoder else ("right", "left")
        if side is not None and side not in sides:
            which = " on this model, which is an encoder" if encoder else ""
            raise HcLensError(
                f"expected padding_side {' or '.join(map(repr, sides))}{which}, got {side!r}; "
                "leave it out for the side that the model takes by itself"
            )
        own = "right" if encoder else getattr(tokenizer, "padding_side", None) or "right"
        named = ((model, "pad_token_id"), (tokenizer, "pad_token_id"), (tokenizer, "eos_token_id"))
        ids = [getattr(owner, name, None) for owner, name in named]
        value = next((int(each) for each in ids if each is not None), 0)
        return cls(value, side or own, mask_name(model), encoder, model.cfg)

    def __call__(
        self, rows: Mapping[str, list[list[int]]], width: int | None = None
    ) -> dict[str, Tensor]:
        """The model's inputs for some tokenised rows, on its device, as wide as the longest row."""
        ids = rows["input_ids"]
        inputs = {
            "input": pad(ids, self.value, self.side, width),
            self.mask_name: pad([[1] * len(row) for row in ids], 0, self.side, width),
        }
        if self.token_types and "token_type_ids" in rows:
            inputs["token_type_ids"] = pad(rows["token_type_ids"], 0, self.side, width)
        return {name: tensor.to(self.cfg.device) for name, tensor in inputs.items()}


def mask_of(inputs: Mapping[str, Tensor]) -> Int[Tensor, "batch pos"]:
    """The 0/1 attention mask among a model's keyword arguments; all ones where there is none."""
    for name in ("one_zero_attention_mask", "attention_mask"):
        if inputs.get(name) is not None:
            return inputs[name]
    return torch.ones_like(inputs["input"])


def rows_at_once(model: Model, inputs: Mapping[str, Tensor]) -> int:
    """How many rows of a batch run at one time.

    All of them on a device with memory of its own, and where a hook of the user expects them.
    """
    mask = mask_of(inputs)
    rows, pos = mask.shape
    tokens = max(AT_ONCE, NUMBERS // model.cfg.d_model)
    return max(1, tokens // pos) if mask.is_cpu and not has_user_hooks(model) else rows


def pieces(model: Model, inputs: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """A model's keyword arguments, cut along the rows; what has no entry for each row stays."""
    rows, size = len(mask_of(inputs)), rows_at_once(model, inputs)
    cut = {k: v for k, v in inputs.items() if isinstance(v, Tensor) and len(v) == rows > size}
    return [
        {**inputs, **{name: value[first : first + size] for name, value in cut.items()}}
        for first in (range(0, rows, size) if cut else [0])
    ]


def encode(model: Model, texts: Text | Sequence[Text] | Tensor | None) -> dict[str, Tensor]:
    """Keyword arguments for ``model(**inputs)`` from sentences or (premise, hypothesis) pairs.

    What is a tensor already, token ids or a residual stream, is the first of them as it is.
    """
    if isinstance(texts, Tensor):
        return {"input": texts}
    if texts is None:
        raise HcLensError(
            "expected token ids or text as the first argument (or input_ids=), got neither; "
            "call model(**batch.inputs) or model('a sentence')"
        )
    tokenizer = tokenizer_of(model)
    rows = cast(list[Text], [texts] if isinstance(texts, (str, tuple)) else list(texts))
    encodings = [tokenizer(row) if isinstance(row, str) else tokenizer(*row) for row in rows]
    names = [name for name in ("input_ids", "token_type_ids") if name in encodings[0]]
    columns = {name: [encoding[name] for encoding in encodings] for name in names}
    longest = max(map(len, columns["input_ids"]))
    if longest > model.cfg.n_ctx:
        raise HcLensError(
            f"expected at most {model.cfg.n_ctx} tokens (the model's context), got a row of "
            f"{longest}; shorten the text"
        )
    return Padding.of(model)(columns)
