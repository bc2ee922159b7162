"""Hooks that come off without a trace.

1. hc_lens reads and writes two hook points of a block: ``blocks.{l}.attn.hook_z`` [batch, pos,
   head, d_head] and ``blocks.{l}.hook_mlp_out`` [batch, pos, d_model].
2. A `Handle` remembers exactly the hooks it put on and takes exactly those off again. Hooks of the
   user stay, whatever happens in between. A user's own ``reset_hooks`` takes ours off too: a mask
   that lost hooks inside its ``with`` block says so at the end of the block.
3. A handle with something to say of itself is a mask that a user put on. Its hooks point back to
   it, so that `hc_lens.masks.attached` finds it on the model and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hc_lens.errors import HcLensError, HcLensWarning, warn
from hc_lens.protocols import Model
from hc_lens.units import Unit, UnitSpace

Edit = Callable[[Tensor], Tensor | None]
"""A hook's work: the activation in, a replacement (or None to leave it) out."""


def z_name(layer: int) -> str:
    """Hook point of the per-head attention outputs of a layer."""
    return f"blocks.{layer}.attn.hook_z"


def mlp_name(layer: int) -> str:
    """Hook point of the MLP output of a layer."""
    return f"blocks.{layer}.hook_mlp_out"


def hook_points(space: UnitSpace) -> dict[str, slice | int]:
    """The hook points of the units, and the indices of the units of each in a mask."""
    heads = {z_name(layer): space.head_slice(layer) for layer in range(space.n_layers)}
    return {**heads, **{mlp_name(layer): space.index(Unit(layer)) for layer in space.mlps}}


def is_hooked(module: Any) -> bool:
    """Whether something hooks into a module itself or replaces its forward pass."""
    return "forward" in vars(module) or any(map(_is_a_user_s, _hooks(module)))


def has_user_hooks(model: Model) -> bool:
    """Whether anything hooks into the forward pass of the model or replaces a part of it."""
    return any(is_hooked(module) for module in model.modules())


def _hooks(module: Any) -> Iterator[Any]:
    """What runs whenever a module runs: functions, and hooks in the list of a hook point."""
    yield from getattr(module, "fwd_hooks", ())
    yield from getattr(module, "bwd_hooks", ())
    yield from module._forward_hooks.values()
    yield from module._forward_pre_hooks.values()


def _is_a_user_s(hook: Any) -> bool:
    """Whether a hook is not one of those with which a bridge and Hugging Face do their work."""
    if not callable(hook):
        hook = getattr(hook, "user_hook", None)  # TransformerLens 3 does not tell, and has none
    return getattr(hook, "__module__", "").split(".")[0] not in ("transformers", "transformer_lens")


def hooked_units(model: Model) -> UnitSpace:
    """The units of the model; an HcLensError unless it has all their hook points."""
    space, known = UnitSpace.of(model), getattr(model, "hook_dict", {})
    missing = [name for name in hook_points(space) if name not in known]
    if missing:
        raise HcLensError(
            f"expected the hook points {missing[:3]} on the model, got a {type(model).__name__} "
            "without them; load the model with hc.load, or pass a HookedEncoder, HookedTransformer "
            "or TransformerBridge"
        )
    return space


class LostMaskWarning(HcLensWarning):
    """A mask was taken off inside its own ``with`` block, so what ran after that ran without it."""


class Handle:
    """The hooks that one call put on a model; `detach` (or leaving a ``with``) takes them off."""

    def __init__(self, model: Model, edits: Mapping[str, Edit], about: str = ""):
        """Put each edit on the hook point of that name; on any failure take all off again.

        `about` says what a user's mask does; hooks of our own functions leave it empty.
        """
        self.about = about
        self._hooks: list[tuple[str, Any, Any]] = []
        try:
            for name, edit in edits.items():
                point = model.hook_dict[name]
                point.add_hook(lambda activation, hook, edit=edit: edit(activation))
                hook = point.fwd_hooks[-1]
                self._hooks.append((name, point, hook))
                hook.hc_lens = self
        except BaseException:
            self.detach()
            raise

    @property
    def attached(self) -> bool:
        """Whether the hooks are still on the model."""
        return any(hook in point.fwd_hooks for _, point, hook in self._hooks)

    def detach(self) -> None:
        """Take the hooks off; a second call does nothing."""
        for _, point, hook in self._hooks:
            hook.hook.remove()
            point.fwd_hooks = [kept for kept in point.fwd_hooks if kept is not hook]
        self._hooks = []

    def __repr__(self) -> str:
        return f"Handle({self.about or 'no mask'}, {'on' if self.attached else 'off'})"

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        lost = [name for name, point, hook in self._hooks if hook not in point.fwd_hooks]
        self.detach()
        if lost and self.about:
            warn(
                f"expected the mask ({self.about}) to stay on until its with block ends, got its "
                f"hooks at {lost[:3]} ({len(lost)} in all) taken off inside, likely by "
                "reset_hooks(): what ran after that ran without them. Call reset_hooks() outside "
                "the block, or hc.detach_all(model) to end every mask on purpose",
                LostMaskWarning,
            )


def observe(
    model: Model,
    inputs: Mapping[str, Tensor],
    names: Iterable[str],
    see: Callable[[str, Tensor], None],
    run: Callable[[Mapping[str, Tensor]], Any] | None = None,
) -> tuple[Any, list[str]]:
    """Run the model; `see` gets the name and the activation of each hook point that fires.

    Gives what the run gave, the logits unless there is another `run`, and the names of the hook
    points that did not fire, also because the model has none of that name.
    """
    silent = dict.fromkeys(names)

    def read(name: str, activation: Tensor) -> None:
        silent.pop(name, None)
        see(name, activation)

    known = getattr(model, "hook_dict", {})
    edits = {name: partial(read, name) for name in silent if name in known}
    with torch.no_grad(), Handle(model, edits):
        left = model(**inputs) if run is None else run(inputs)
    return left, list(silent)
