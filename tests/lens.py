"""What tests know of the installed TransformerLens.

With TransformerLens 4 a test that makes a HookedTransformer of its own is skipped: there is none.
"""

from __future__ import annotations

import pytest

from hc_lens.models.fingerprint import BRIDGE
from hc_lens.models.installed import BRIDGES

__all__ = [
    "BRIDGES",
    "THERE",
    "HookedEncoder",
    "HookedTransformer",
    "HookedTransformerConfig",
    "bridges_only",
    "exact",
    "hooked_only",
    "hooks_on",
    "in_the_other_version",
]

REASON = "TransformerLens 4 has no HookedTransformer"
hooked_only = pytest.mark.skipif(BRIDGES, reason=REASON)
bridges_only = pytest.mark.skipif(not BRIDGES, reason="for the bridges of TransformerLens 4")

if BRIDGES:

    class _Gone:
        def __init__(self, *args, **settings):
            pytest.skip(REASON)

    class HookedEncoder(_Gone):
        """No model is one."""

    class HookedTransformer(_Gone):
        """No model is one."""

    class HookedTransformerConfig(_Gone):
        """Of a HookedTransformer."""

else:
    from transformer_lens import HookedEncoder, HookedTransformer, HookedTransformerConfig


ROUNDED = ("llama", "mistral", "qwen2", "qwen3")
"""Families whose attention Hugging Face computes in float32, whatever the dtype."""


def exact(family: str, bound: float = 1e-10) -> float:
    """The bound to which a model in float64 is equal to itself computed in another way."""
    return 1e-5 if BRIDGES and family in ROUNDED else bound


def hooks_on(model) -> list[str]:
    """The hook points that have hooks, without those that belong to a bridge itself."""
    return [
        name
        for name, point in model.hook_dict.items()
        if not all(hook.is_permanent for hook in point.fwd_hooks)
    ]


def in_the_other_version(fingerprint: str) -> str:
    """A fingerprint as the other major version of TransformerLens would give one."""
    bare = fingerprint.removesuffix(BRIDGE)
    return bare if bare != fingerprint else bare + BRIDGE


THERE = 3 if BRIDGES else 4
"""The other major version."""
