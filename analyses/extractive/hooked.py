"""TransformerLens's HookedTransformer, which this analysis trains and takes apart."""

from hc_lens.models.installed import only_before_bridges

only_before_bridges("extractive structures")

from transformer_lens import HookedTransformer, HookedTransformerConfig  # noqa: E402

__all__ = ["HookedTransformer", "HookedTransformerConfig"]
