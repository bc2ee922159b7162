"""BERT: token, position and token-type tables, post-norm blocks, tanh pooler, linear classifier.

A masked language model has a dense layer, the blocks' activation and a norm before its decoder.
"""

from hc_lens.models.encoders import EncoderFamily

FAMILY = EncoderFamily()
