"""Masks on a live model, as hook functions.

1. A mask has one entry per unit (or one row of entries per row of the batch), in `UnitSpace` order.
2. At ``hook_z`` the entry of a head multiplies its output's distance from the replacement:
   ``value + m * (x - value)``; at ``hook_mlp_out`` the entry of an MLP does the same
   (Bhaskar, Friedman and Chen 2024, section 3). ``torch.lerp`` computes this so that m = 1 leaves
   x bit-identical and m = 0 gives the replacement exactly.
3. The replacement is the unit's mean by default; any `hc_lens.masks.replacements.Source` will do.
4. The mask may carry gradients; the model's weights are never touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hc_lens.errors import HcLensError
from hc_lens.masks.hooks import Edit, Handle, hook_points, hooked_units
from hc_lens.masks.replacements import Source, as_source
from hc_lens.protocols import Model
from hc_lens.units import Unit, UnitSpace

Mask = Float[Tensor, "units"] | Float[Tensor, "batch units"]
AnyMask = Float[Tensor, "*batch units"] | Bool[Tensor, "*batch units"] | Int[Tensor, "*batch units"]
MOST_NAMED = 3
"""Most removed units that a handle names."""


def attach(model: Model, mask: AnyMask | Iterable[Unit | str], means: Source | str) -> Handle:
    """Put a mask, or the ablation of a set of units, on a model until `Handle.detach`.

    Args:
        model: a model of `hc.load`, a HookedEncoder, HookedTransformer or TransformerBridge.
        mask: [units] for all rows, [batch, units] for a mask per row, or the units to remove.
        means: what replaces a removed unit: means, ``"zero"``, or another source.
    """
    space, source = hooked_units(model), as_source(means)
    source.check(model, space)
    if isinstance(mask, Tensor):
        values = check_mask(mask, space)
    else:
        values = torch.ones(len(space))
        values[space.indices(mask)] = 0.0
    device = next(iter(model.parameters())).device
    return Handle(model, mask_edits(space, values.to(device), source), about(space, values))


def ablate(model: Model, units: Iterable[Unit | str] | Tensor, means: Source | str) -> Handle:
    """Remove a fixed set of units inside a ``with`` block; see `attach`."""
    if isinstance(units, Tensor):
        raise HcLensError(
            "expected units such as ['L4.H0', 'L2.MLP'] to ablate, got a tensor; "
            "use hc.masked(model, mask, means) for a mask"
        )
    return attach(model, units, means)


def masked(model: Model, mask: AnyMask | Iterable[Unit | str], means: Source | str) -> Handle:
    """Run the model under a mask inside a ``with`` block; see `attach`."""
    if not isinstance(mask, Tensor):
        raise HcLensError(
            f"expected a mask tensor of shape [units] or [batch, units], got "
            f"{type(mask).__name__}; use hc.ablate(model, units, means) for a list of units"
        )
    return attach(model, mask, means)


def check_mask(mask: AnyMask, space: UnitSpace) -> Mask:
    """The mask as floats; a wrong shape or a value outside [0, 1] is an HcLensError."""
    if mask.ndim not in (1, 2) or mask.shape[-1] != len(space):
        raise HcLensError(
            f"expected a mask of shape [{len(space)}] or [batch, {len(space)}] for {space}, got "
            f"{list(mask.shape)}; the entries follow hc.UnitSpace.of(model).labels"
        )
    values = mask if mask.is_floating_point() else mask.float()
    outside = ~((values >= 0) & (values <= 1)).reshape(-1, len(space)).all(0)
    if bool(outside.any()):
        index = int(outside.nonzero()[0, 0])
        raise HcLensError(
            "expected mask entries between 0 and 1, got "
            f"{values[..., index].flatten().tolist()[:3]} at {space[index]}; "
            "clamp the mask, and look for NaN where it comes from"
        )
    return values


def about(space: UnitSpace, mask: Mask) -> str:
    """What a mask does, in a few words: ``"L0.H1, L0.H3, L0.H4 and 15 more removed"``."""
    if mask.ndim == 2:
        return f"a mask for each of {len(mask)} rows"
    values = mask.tolist()
    gone = [label for label, value in zip(space.labels, values, strict=True) if value == 0]
    soft = sum(0 < value < 1 for value in values)
    more = f" and {len(gone) - MOST_NAMED} more" if len(gone) > MOST_NAMED else ""
    removed = f"{', '.join(gone[:MOST_NAMED]) or 'nothing'}{more} removed"
    return f"{removed}, {soft} partly" if soft else removed


def mask_edits(space: UnitSpace, mask: Mask, source: Source) -> Mapping[str, Edit]:
    """The hook functions of a mask: only the hook points where some unit is not fully kept."""
    skip = (mask == 1).reshape(-1, len(space)).all(0) & (not mask.requires_grad)
    return {
        name: _edit(name, mask[..., at, None], source)
        for name, at in hook_points(space).items()
        if not bool(skip[at].all())
    }


def _edit(name: str, weight: Tensor, source: Source) -> Edit:
    def edit(x: Tensor) -> Tensor:
        per_row = weight.ndim == x.ndim - 1
        if per_row and len(weight) != len(x):
            raise HcLensError(
                f"expected one mask per row of the batch ({len(x)} rows), got {len(weight)}; "
                "pass a mask of shape [units] to share it"
            )
        entry = (weight.unsqueeze(1) if per_row else weight).to(x)
        return torch.lerp(source.value(name, x), x, entry)

    return edit
