"""Hugging Face checkpoints as hooked classifiers: one file per family, `load` in front of them."""

from hc_lens.models.classifiers import DecoderClassifier, EncoderClassifier
from hc_lens.models.fingerprint import fingerprint
from hc_lens.models.inputs import encode, is_encoder, mask_of
from hc_lens.models.loading import load

__all__ = [
    "DecoderClassifier",
    "EncoderClassifier",
    "encode",
    "fingerprint",
    "is_encoder",
    "load",
    "mask_of",
]
