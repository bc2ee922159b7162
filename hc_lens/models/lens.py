"""What a hooked model is in the installed TransformerLens.

1. TransformerLens 3 has HookedEncoder and HookedTransformer. A checkpoint is converted to one of
   them (`hc_lens.models.encoders`, `hc_lens.models.decoders`).
2. TransformerLens 4 has neither; a TransformerBridge is put around Hugging Face's own model
   (`hc_lens.models.bridges`).
3. Any other version is refused (`hc_lens.models.installed`).

The rest of hc_lens asks this module, and does not know which of the two it runs on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hc_lens.errors import HcLensError
from hc_lens.models.installed import BRIDGES
from hc_lens.models.parts import Parts
from hc_lens.protocols import Model
from hc_lens.units import check_head

if TYPE_CHECKING or not BRIDGES:
    from hc_lens.models.conversion import HookedModel, convert
    from hc_lens.models.hooked import HookedParts as KnownParts
else:
    from hc_lens.models.bridged import BridgeParts as KnownParts
    from hc_lens.models.bridges import HookedModel, convert

__all__ = ["HookedModel", "convert", "known_parts", "parts_of"]


def parts_of(model: Model) -> Parts | None:
    """The parts of a model; None if hc_lens can only run it as a whole."""
    check_head(model)
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
