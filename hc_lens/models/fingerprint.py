"""A name for a model's weights and shape, the same in every process.

1. Hash the architecture: the configuration fields that change what the weights compute.
2. Hash the label names, in id order.
3. Hash every parameter under its name: dtype, shape, bytes.
The digest keys means, subnetworks and runs to the model they came from. It is recomputed when a
parameter has been written to since the last call.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

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

_cache: WeakKeyDictionary[nn.Module, tuple[object, str]] = WeakKeyDictionary()


def fingerprint(model: Any) -> str:
    """32 hexadecimal digits that name the model's weights, architecture and labels."""
    parameters = sorted(model.named_parameters(), key=lambda item: item[0])
    state = tuple((name, p._version, p.data_ptr(), p.dtype) for name, p in parameters)
    if model in _cache and _cache[model][0] == state:
        return _cache[model][1]
    digest = hashlib.blake2b(digest_size=16)
    shape = {name: getattr(model.cfg, name, None) for name in _ARCHITECTURE}
    labels = sorted((getattr(model, "labels", None) or {}).items())
    digest.update(json.dumps([shape, labels], default=str).encode())
    for name, parameter in parameters:
        digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}".encode())
        flat = parameter.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    _cache[model] = (state, digest.hexdigest())
    return digest.hexdigest()
