"""Hugging Face checkpoints as hooked models: `load`, and one file per family of encoders.

A version of TransformerLens that hc_lens does not run on is refused before anything else here.
"""

from hc_lens.models import installed as installed
