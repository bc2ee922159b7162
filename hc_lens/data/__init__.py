"""Rows of text into batches for a hooked model.

`Task` reads labelled rows, `Batches` tokenises and buckets them, `Batch` is one of those buckets.
"""

from typing import TYPE_CHECKING

from hc_lens.lazy import exports

if TYPE_CHECKING:
    from hc_lens.data.batches import Batch as Batch
    from hc_lens.data.batches import Batches as Batches
    from hc_lens.data.batches import named_batches as named_batches
    from hc_lens.data.task import Task as Task

__getattr__, __dir__ = exports(__name__, __file__)
