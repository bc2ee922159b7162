"""A name for a model's weights and shape, the same in every process.

1. Hash the architecture: the configuration fields that change what the weights compute.
2. Hash the label names, in id order.
3. Hash every parameter under its name: dtype, shape, bytes.
4. Hash what is set on a module and is not what the configuration says: the scale of attention
   scores, a norm's epsilon, an activation function (by its name).
The digest keys means, subnetworks and runs to the model they came from. The weights of a
TransformerBridge have other names and shapes than those of a HookedEncoder or HookedTransformer of
the same checkpoint, so its digest is another. It ends in a mark, by which `check_version` tells
this from another checkpoint.

Every call reads all of
this: an edit through ``.data`` or NumPy leaves no other trace. A fast checksum of the content tells
whether the digest of the last call still holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from weakref import WeakKeyDictionary

import torch
import xxhash
from jaxtyping import Int, Shaped
from torch import Tensor
from transformer_lens.utilities.activation_functions import SUPPORTED_ACTIVATIONS

from hc_lens.errors import HcLensError
from hc_lens.protocols import Model
from hc_lens.records import OtherWorkError, digest
from hc_lens.settings import plain_value

BRIDGE = "-bridge"
"""Ends the fingerprint of a TransformerBridge."""
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

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
"""How values of so many bytes are read as whole numbers."""
_BLOCK = 2**20
"""Whole numbers that are added up at one time."""

_cache: WeakKeyDictionary[Model, tuple[list[object], str]] = WeakKeyDictionary()
"""The content of a model at the last call, each parameter by its checksum, and its digest."""


def fingerprint(model: Model) -> str:
    """32 hexadecimal digits that name the model's weights, architecture and labels.

    Those of a TransformerBridge are followed by `BRIDGE`.
    """
    content: list[object] = [
        {name: str(getattr(model.cfg, name, None)) for name in _ARCHITECTURE},
        sorted((getattr(model, "labels", None) or {}).items()),
    ]
    for name, parameter in sorted(model.named_parameters(), key=lambda item: item[0]):
        flat = parameter.detach().contiguous().reshape(-1)
        content += [name, str(parameter.dtype), list(parameter.shape), flat]
    content += _set_by_hand(model)
    seen = [checksum(part) if isinstance(part, Tensor) else part for part in content]
    if model not in _cache or _cache[model][0] != seen:
        parts = (_bytes(part) if isinstance(part, Tensor) else part for part in content)
        is_bridge = any(kind.__name__ == "TransformerBridge" for kind in type(model).__mro__)
        _cache[model] = (seen, digest(*parts) + (BRIDGE if is_bridge else ""))
    return _cache[model][1]


def check_version(what: str, given: str, own: str, cure: str) -> None:
    """Refuse what was made of a checkpoint with another TransformerLens than the one that runs it.

    Args:
        what: what was made, such as means.
        given: the fingerprint that it carries.
        own: the fingerprint of the model.
        cure: what to do with this TransformerLens.
    """
    if not given or given.endswith(BRIDGE) == own.endswith(BRIDGE):
        return
    there, here = (4 if each.endswith(BRIDGE) else 3 for each in (given, own))
    raise HcLensError(
        f"expected {what} made with TransformerLens {here}, as this model is, got {what} made with "
        f"TransformerLens {there}, where the same checkpoint has another fingerprint "
        f"({given[:8]} there, {own[:8]} here); {cure}, or go on with TransformerLens {there}"
    )


@contextmanager
def same_version(own: str) -> Iterator[None]:
    """Opens a folder of work on a model, whose other `model` may be told by `check_version`."""
    try:
        yield
    except OtherWorkError as error:
        check_version("a run", str(error.there.get("model", "")), own, "name another folder")
        raise


def _set_by_hand(model: Model) -> list[object]:
    """The settings of modules that are not those of the configuration."""
    known = SUPPORTED_ACTIVATIONS.get(str(model.cfg.act_fn))
    usual = {"attn_scale": getattr(model.cfg, "attn_scale", None), "eps": model.cfg.eps}
    usual["variance_epsilon"] = model.cfg.eps  # Hugging Face's name of it in RMS norms
    found: list[object] = []
    for name, module in model.named_modules():
        own = vars(module)
        found += [
            [name, key, str(own[key])] for key in usual if own.get(key, usual[key]) != usual[key]
        ]
        # `says`: of a module of `hc_lens.models.encoder_blocks`.
        found += [[name, key, own[key]] for key in ("scaling", "says") if key in own]
        if "act_fn" in own and own["act_fn"] is not known:
            found.append([name, "act_fn", plain_value(own["act_fn"])])
    return found


def checksum(flat: Shaped[Tensor, "values"]) -> bytes:
    """What any edit of the values changes, found where they are: no copy leaves a graphics card."""
    if flat.device.type == "cpu":
        return xxhash.xxh3_128_digest(_bytes(flat))
    return weighted_sums(flat).cpu().numpy().tobytes()


def weighted_sums(flat: Shaped[Tensor, "values"]) -> Int[Tensor, "blocks"]:
    """The sum of each block of values, read as whole numbers, modulo 2^64.

    Every place has a weight of its own, so that a swap counts; the weights are odd, so that every
    bit counts.
    """
    words = flat.view(_WORDS[flat.element_size()])
    weights = _weights(flat.device)
    return torch.stack([(part * weights[: len(part)]).sum() for part in words.split(_BLOCK)])


@cache
def _weights(device: torch.device) -> Int[Tensor, "block"]:
    generator = torch.Generator().manual_seed(0)
    return (2 * torch.randint(2**62, (_BLOCK,), generator=generator) + 1).to(device)


def _bytes(flat: Shaped[Tensor, "values"]) -> memoryview:
    return flat.cpu().view(torch.uint8).numpy().data
