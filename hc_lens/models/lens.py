"""Which TransformerLens is installed, and what a hooked model is there.

1. TransformerLens 3 has HookedEncoder and HookedTransformer. A checkpoint is converted to one of
   them (`hc_lens.models.encoders`, `hc_lens.models.decoders`).
2. TransformerLens 4 has neither; a TransformerBridge is put around Hugging Face's own model
   (`hc_lens.models.bridges`).
3. Any other version is refused here, where every module that needs a model begins.

The rest of hc_lens asks this module, and does not know which of the two it runs on.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING

from hc_lens.errors import HcLensError
from hc_lens.models.parts import Parts
from hc_lens.protocols import Model


def has_bridges(installed: str) -> bool:
    """Whether hooked models are bridges in this version of TransformerLens.

    A version that hc_lens does not run on is an HcLensError.
    """
    major = installed.split(".")[0]
    if major not in ("3", "4"):
        raise HcLensError(
            f"expected TransformerLens 3 (from 3.9) or 4, got {installed}; install one of them: "
            'pip install "transformer-lens>=3.9,<5"'
        )
    return major == "4"


INSTALLED = version("transformer-lens")
"""The version of TransformerLens."""
BRIDGES = has_bridges(INSTALLED)
"""Whether models are bridges (TransformerLens 4)."""

if TYPE_CHECKING or not BRIDGES:
    from hc_lens.models.conversion import HookedModel, convert
    from hc_lens.models.hooked import HookedParts as KnownParts
else:
    from hc_lens.models.bridged import BridgeParts as KnownParts
    from hc_lens.models.bridges import HookedModel, convert

__all__ = ["BRIDGES", "INSTALLED", "HookedModel", "convert", "known_parts", "parts_of"]


def parts_of(model: Model) -> Parts | None:
    """The parts of a model; None if hc_lens can only run it as a whole."""
    return KnownParts(model) if KnownParts.owns(model) else None


def known_parts(model: Model) -> Parts:
    """The parts of a model; an HcLensError if hc_lens can only run it as a whole."""
    parts = parts_of(model)
    if parts is None:
        raise HcLensError(
            "expected a HookedEncoder or HookedTransformer (with TransformerLens 4 a "
            "TransformerBridge of one of the families of hc.load), whose blocks can be run one by "
            f"one, got a {type(model).__name__}; load the checkpoint with hc.load(...)"
        )
    return parts


def only_before_bridges(what: str) -> None:
    """Refuse what needs TransformerLens 3."""
    if BRIDGES:
        raise HcLensError(
            f"expected TransformerLens 3 for {what}, which trains and takes apart "
            f"HookedTransformers, got {INSTALLED}; install it in an environment of its own: "
            'pip install "transformer-lens>=3.9,<4"'
        )
