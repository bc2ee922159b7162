"""BERT: token, position and token-type tables, post-norm blocks, tanh pooler, linear classifier."""

from hc_lens.models.encoders import EncoderFamily

FAMILY = EncoderFamily()
