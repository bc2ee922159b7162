"""Which masks of ours are on a model, and how they come off.

1. `hc.attach`, `hc.ablate`, `hc.masked` and `Subnetwork.attach` give a `Handle`. Its hooks point
   back to it, so a handle whose variable was lost or replaced, as in a notebook cell that ran
   twice, is still found at the model's hook points. What `reset_hooks` took off is no longer there.
2. Functions that speak of the full model call `warn_if_masked` first. The hooks that they put on
   themselves do not count.
"""

from __future__ import annotations

from hc_lens.errors import HcLensWarning, warn
from hc_lens.masks.hooks import Handle
from hc_lens.protocols import Model


class MaskedModelWarning(HcLensWarning):
    """A function that runs the full model was given a model with masks of ours on it."""


def attached(model: Model) -> list[Handle]:
    """The masks of hc_lens that are on the model, in the order in which they were put on."""
    points = getattr(model, "hook_dict", {}).values()
    hooks = [hook for point in points for hook in point.fwd_hooks if hasattr(hook, "hc_lens")]
    hooks.sort(key=lambda hook: hook.hook.id)  # torch counts the hooks as they are made
    found = {id(hook.hc_lens): hook.hc_lens for hook in hooks}
    return [handle for handle in found.values() if handle.about]


def detach_all(model: Model) -> list[Handle]:
    """Take every mask of hc_lens off the model, and no other hook; gives the masks it took off."""
    found = attached(model)
    for handle in found:
        handle.detach()
    return found


def warn_if_masked(model: Model) -> None:
    """Warn, at the user's line, if masks of hc_lens are on the model."""
    found = attached(model)
    if found:
        warn(
            f"expected a model without masks, got one with {len(found)} on: "
            f"{'; '.join(handle.about for handle in found)}. They stay on, so every number, also "
            "of the full model, is of the masked model; take them off with hc.detach_all(model)",
            MaskedModelWarning,
        )
