"""Ablation by suffix re-execution: run only what the removal of some units can change."""

from hc_lens.suffix.engine import SuffixEngine
from hc_lens.suffix.parts import Part, parts_of

__all__ = ["Part", "SuffixEngine", "parts_of"]
