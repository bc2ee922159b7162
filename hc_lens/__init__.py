"""hc_lens: find, ablate and explain the subnetworks of a fine-tuned language model.

The public names stand here in the order of the pipeline. Each is imported on first use, so that
``import hc_lens`` costs no more than this file.
"""

# ruff: noqa: F401, I001 (a list of names in the order of the pipeline, not of the alphabet)

from __future__ import annotations

from typing import TYPE_CHECKING

from hc_lens.lazy import exports

from hc_lens.version import __version__ as __version__

if TYPE_CHECKING:
    from hc_lens.errors import HcLensError as HcLensError
    from hc_lens.models.loading import load as load
    from hc_lens.models.adapters import register as register_adapters
    from hc_lens.units import Unit as Unit, UnitSpace as UnitSpace, pairs as pairs
    from hc_lens.data.task import Task as Task
    from hc_lens.data.prompts import Prompts as Prompts
    from hc_lens.data.batches import Batch as Batch, Batches as Batches
    from hc_lens.masks.means import Means as Means, collect_means as collect_means
    from hc_lens.masks.replacements import (
        Source as Source,
        Zero as Zero,
        Resample as Resample,
        Counterfactual as Counterfactual,
    )
    from hc_lens.masks.ablate import ablate as ablate, attach as attach, masked as masked
    from hc_lens.masks.attached import attached as attached, detach_all as detach_all
    from hc_lens.pruning.gates import HardConcrete as HardConcrete
    from hc_lens.pruning.importance import importance as importance
    from hc_lens.pruning.optimal import (
        OptimalConfig as OptimalConfig,
        optimal_constants as optimal_constants,
    )
    from hc_lens.pruning.config import PathConfig as PathConfig, PruneConfig as PruneConfig
    from hc_lens.pruning.train import prune as prune
    from hc_lens.pruning.path import prune_path as prune_path
    from hc_lens.pruning.subnetwork import Subnetwork as Subnetwork
    from hc_lens.evaluation import evaluate as evaluate
    from hc_lens.sweeps.config import SweepConfig as SweepConfig
    from hc_lens.sweeps.runs import Runs as Runs
    from hc_lens.sweeps.sweep import sweep as sweep
    from hc_lens.scans.scan import ScanRows as ScanRows, scan as scan, scan_rows as scan_rows
    from hc_lens.scans.top import top as top
    from hc_lens.attention.patterns import (
        patterns as patterns,
        word_batch as word_batch,
        word_batches as word_batches,
    )
    from hc_lens.finetuning.config import FinetuneConfig as FinetuneConfig
    from hc_lens.finetuning.train import finetune as finetune

    import hc_lens.analyses as analyses
    import hc_lens.circuits as circuits
    import hc_lens.organism as organism
    import hc_lens.show as show

__getattr__, __dir__ = exports(__name__, __file__)
