"""Rows of text into batches for a hooked model.

`Task` reads labelled rows, `Batches` tokenises and buckets them, `Batch` is one of those buckets.
"""

from hc_lens.data.batches import Batch, Batches
from hc_lens.data.task import Task

__all__ = ["Batch", "Batches", "Task"]
