"""Which TransformerLens is installed; a version that hc_lens does not run on is refused here."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from hc_lens.errors import HcLensError


def has_bridges(installed: str) -> bool:
    """Whether hooked models are bridges in this version of TransformerLens.

    A version that hc_lens does not run on is an HcLensError.
    """
    numbers = [int(part) for part in installed.split(".")[:2] if part.isdigit()]
    if not [3, 9] <= numbers < [5]:
        raise HcLensError(
            f"expected TransformerLens 3 (from 3.9) or 4, got {installed}; install one of them: "
            'pip install "transformer-lens>=3.9,<5"'
        )
    return numbers >= [4]


def _installed() -> str:
    try:
        return version("transformer-lens")
    except PackageNotFoundError:
        return "none"


INSTALLED = _installed()
"""The version of TransformerLens."""
BRIDGES = has_bridges(INSTALLED)
"""Whether models are bridges (TransformerLens 4)."""


def only_before_bridges(what: str, bridges: bool = BRIDGES) -> None:
    """Refuse with TransformerLens 4 what needs the HookedTransformers of TransformerLens 3."""
    if bridges:
        raise HcLensError(
            f"expected TransformerLens 3 for {what}, got {INSTALLED}, which has no "
            "HookedTransformer; run it in an environment of its own: "
            'pip install hc-lens "transformer-lens>=3.9,<4"'
        )
