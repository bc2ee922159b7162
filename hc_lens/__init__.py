"""hc_lens: find, ablate and explain the subnetworks of a fine-tuned language model.

The public names stand here in the order of the pipeline. Each is imported on first use, so that
``import hc_lens`` costs no more than this file.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hc_lens.data import Batch, Batches, Task
    from hc_lens.errors import HcLensError
    from hc_lens.models import load
    from hc_lens.units import Unit, UnitSpace

__version__ = "0.1.0"

_HOME = {
    "HcLensError": "hc_lens.errors",
    "load": "hc_lens.models",
    "Unit": "hc_lens.units",
    "UnitSpace": "hc_lens.units",
    "Task": "hc_lens.data",
    "Batch": "hc_lens.data",
    "Batches": "hc_lens.data",
}

__all__ = [
    "Batch",
    "Batches",
    "HcLensError",
    "Task",
    "Unit",
    "UnitSpace",
    "load",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'hc_lens' has no attribute {name!r}; it has {__all__}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
