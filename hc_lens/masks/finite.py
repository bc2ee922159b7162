"""NaN and infinity stop the work, with the place where they begin.

1. `check_weights` looks at the weights of the blocks, once a call. TransformerLens gives a zero
   attention pattern where the scores are NaN, so these may not show in the logits.
2. `check_finite` looks at the logits of every run, which costs next to nothing. At pads they do not
   matter.
3. Only if they are not finite, the model runs once more, and the first hook point whose activation
   is not finite tells the layer. A weight that is not finite is named too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from hc_lens.errors import HcLensError
from hc_lens.masks.hooks import observe
from hc_lens.models.inputs import mask_of
from hc_lens.protocols import Model

_INFINITE = ("attn_scores", "mask")
"""Parts of the names of hook points at which minus infinity means that nothing is attended to."""


def is_finite(values: Shaped[Tensor, "..."]) -> bool:
    """Whether no value is NaN or infinity, in one pass that keeps nothing."""
    if values.numel() == 0 or not values.is_floating_point():
        return True
    return bool(torch.stack(values.detach().aminmax()).isfinite().all())


def check_weights(model: Model) -> None:
    """Refuse a model with a weight in its blocks that is not finite."""
    blocks = getattr(model, "blocks", None)
    name = None if blocks is None else _first_weight(blocks, "blocks.")
    if name is not None:
        raise HcLensError(
            f"expected finite weights, got NaN or infinity in {name}; read or save the checkpoint "
            "again, and look at how it was trained"
        )


def check_finite(
    model: Model,
    inputs: Mapping[str, Tensor],
    logits: Float[Tensor, "batch *shape"],
    run: str = "the model",
) -> None:
    """Refuse logits of a run that are not finite; `run` says which, its masks must still be on."""
    if is_finite(logits):
        return
    if logits.ndim == 3 and is_finite(logits[mask_of(inputs).bool().to(logits.device)]):
        return
    raise HcLensError(
        f"expected finite logits of {run}, got NaN or infinity, which {_begins(model, inputs)}; "
        "look at the weights there; if numbers grow too large for their type, load the model in a "
        "wider one"
    )


def _begins(model: Model, inputs: Mapping[str, Tensor]) -> str:
    """Where a run of the model first has a value that is not finite."""
    found: list[str] = []

    def see(name: str, activation: Tensor) -> None:
        if not found and isinstance(activation, Tensor) and not is_finite(activation):
            found.append(name)

    names = [name for name in model.hook_dict if not any(part in name for part in _INFINITE)]
    # Of several names of a hook point of a bridge the shortest is TransformerLens 3's.
    names.sort(key=lambda name: name.count("."))
    observe(model, inputs, names, see)
    place = f"at the hook point {found[0]}" if found else "behind the last hook point"
    weight = _first_weight(model)
    return f"begin {place}" + (f" (the weight {weight} is not finite)" if weight else "")


def _first_weight(part: Any, prefix: str = "") -> str | None:
    """The first parameter of a model or a part of it that is not finite, in the model's order."""
    named = part.named_parameters()
    found = next((prefix + name for name, value in named if not is_finite(value)), None)
    # A bridge puts this part between each of its components and the module that it wraps.
    return None if found is None else found.replace("_original_component.", "")
