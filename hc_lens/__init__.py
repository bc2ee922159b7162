"""hc_lens: find, ablate and explain the subnetworks of a fine-tuned language model.

The public names stand here in the order of the pipeline. Each is imported on first use, so that
``import hc_lens`` costs no more than this file.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hc_lens import organism, show
    from hc_lens.ablate import ablate, attach, masked
    from hc_lens.data import Batch, Batches, Task
    from hc_lens.errors import HcLensError
    from hc_lens.evaluate import evaluate
    from hc_lens.finetune import FinetuneConfig, finetune
    from hc_lens.gates import HardConcrete
    from hc_lens.importance import importance
    from hc_lens.means import Means, collect_means
    from hc_lens.models import load
    from hc_lens.patterns import patterns, word_batch, word_batches
    from hc_lens.prune import prune
    from hc_lens.pruneconfig import PruneConfig
    from hc_lens.scan import ScanRows, scan, scan_rows
    from hc_lens.sources import Counterfactual, Resample, Source, Zero
    from hc_lens.store import Subnetwork
    from hc_lens.sweep import Runs, sweep
    from hc_lens.sweepconfig import SweepConfig
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
    "collect_means": "hc_lens.means",
    "Means": "hc_lens.means",
    "Source": "hc_lens.sources",
    "Zero": "hc_lens.sources",
    "Resample": "hc_lens.sources",
    "Counterfactual": "hc_lens.sources",
    "ablate": "hc_lens.ablate",
    "masked": "hc_lens.ablate",
    "attach": "hc_lens.ablate",
    "HardConcrete": "hc_lens.gates",
    "importance": "hc_lens.importance",
    "PruneConfig": "hc_lens.pruneconfig",
    "prune": "hc_lens.prune",
    "Subnetwork": "hc_lens.store",
    "evaluate": "hc_lens.evaluate",
    "SweepConfig": "hc_lens.sweepconfig",
    "sweep": "hc_lens.sweep",
    "Runs": "hc_lens.sweep",
    "scan": "hc_lens.scan",
    "scan_rows": "hc_lens.scan",
    "ScanRows": "hc_lens.scan",
    "word_batches": "hc_lens.patterns",
    "word_batch": "hc_lens.patterns",
    "patterns": "hc_lens.patterns",
    "FinetuneConfig": "hc_lens.finetune",
    "finetune": "hc_lens.finetune",
}
_SUBPACKAGES = ("organism", "show")

__all__ = [
    "Batch",
    "Batches",
    "Counterfactual",
    "FinetuneConfig",
    "HardConcrete",
    "HcLensError",
    "Means",
    "PruneConfig",
    "Resample",
    "Runs",
    "ScanRows",
    "Source",
    "Subnetwork",
    "SweepConfig",
    "Task",
    "Unit",
    "UnitSpace",
    "Zero",
    "ablate",
    "attach",
    "collect_means",
    "evaluate",
    "finetune",
    "importance",
    "load",
    "masked",
    "organism",
    "patterns",
    "prune",
    "scan",
    "scan_rows",
    "show",
    "sweep",
    "word_batch",
    "word_batches",
]


def __getattr__(name: str) -> Any:
    if name in _SUBPACKAGES:
        return importlib.import_module(f"hc_lens.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'hc_lens' has no attribute {name!r}; it has {__all__}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(types.ModuleType):
    """A package in which `hc_lens.ablate` stays the function when the module of that name loads."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOME and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
