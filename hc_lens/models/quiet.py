"""Keep other packages' warnings and progress bars out of our users' notebooks, while we construct.

Everything is put back on the way out; nothing is silenced outside the ``with`` block.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet() -> Iterator[None]:
    """Silence deprecations, load reports and progress bars of transformers and TransformerLens."""
    from transformers.utils import logging as hf_logging

    verbosity, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    root_level = logging.getLogger().level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hf_logging.set_verbosity_error()
        hf_logging.disable_progress_bar()
        # TransformerLens logs through the root logger.
        logging.getLogger().setLevel(logging.ERROR)
        try:
            yield
        finally:
            logging.getLogger().setLevel(root_level)
            hf_logging.set_verbosity(verbosity)
            if bars:
                hf_logging.enable_progress_bar()
