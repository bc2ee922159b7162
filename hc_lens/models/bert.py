"""BERT: token, position and token-type tables, post-norm blocks, tanh pooler, linear classifier."""

from hc_lens.models.families import EncoderFamily

FAMILY = EncoderFamily(prefix="bert.", pooler="bert.pooler.dense", classifier="classifier")
