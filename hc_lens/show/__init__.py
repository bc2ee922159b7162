"""Pictures: attention patterns that open anywhere.

`attention` shows the heads of a model on a pair of sentences, `Page` puts several such figures in
one file. A page of another kind embeds them with `bundle`, once, and ``figure.fragment(id)``.
"""

from hc_lens.show.attention import Attention, Page, attention
from hc_lens.show.page import bundle

__all__ = ["Attention", "Page", "attention", "bundle"]
