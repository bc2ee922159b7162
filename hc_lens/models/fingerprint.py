"""A name for a model's weights and shape, the same in every process.

1. Hash the architecture: the configuration fields that change what the weights compute.
2. Hash the label names, in id order.
3. Hash every parameter under its name: dtype, shape, bytes.
The digest keys means, subnetworks and runs to the model they came from. It is recomputed when a
parameter has been written to since the last call.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch

from hc_lens.protocols import Model
from hc_lens.records import digest

_ARCHITECTURE = (
    "n_layers",
    "n_heads",
    "d_model",
    "d_head",
    "act_fn",
    "eps",
    "normalization_type",
    "positional_embedding_type",
    "attention_dir",
    "attn_only",
    "parallel_attn_mlp",
    "rotary_base",
    "rotary_dim",
)

_cache: WeakKeyDictionary[Model, tuple[object, str]] = WeakKeyDictionary()


def fingerprint(model: Model) -> str:
    """32 hexadecimal digits that name the model's weights, architecture and labels."""
    parameters = sorted(model.named_parameters(), key=lambda item: item[0])
    state = tuple((name, p._version, p.data_ptr(), p.dtype) for name, p in parameters)
    if model in _cache and _cache[model][0] == state:
        return _cache[model][1]
    shape = {name: str(getattr(model.cfg, name, None)) for name in _ARCHITECTURE}
    labels = sorted((getattr(model, "labels", None) or {}).items())
    parts: list[object] = []
    for name, parameter in parameters:
        flat = parameter.detach().cpu().contiguous().reshape(-1)
        parts += [name, str(parameter.dtype), list(parameter.shape)]
        parts.append(flat.view(torch.uint8).numpy().data)
    made = digest(shape, labels, *parts)
    _cache[model] = (state, made)
    return made
