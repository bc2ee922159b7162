"""``hc-lens prune``: find one subnetwork.

The folder of ``--out`` gets the subnetwork (``hc.Subnetwork.load`` reads it) and the means that
replace its removed units, unless ``--means`` names others.
"""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Any

from hc_lens.cli import options
from hc_lens.cli.work import Work
from hc_lens.errors import HcLensError
from hc_lens.pruning.config import PruneConfig

if TYPE_CHECKING:
    import pandas as pd


@options.changes(PruneConfig, "sparsity", "seed", title="Pruning")
class Pruning:
    """Settings of pruning other than the sparsity and the seed."""


@options.section("Pruning")
class Preset:
    """Where the settings of pruning begin."""

    reference: bool = False
    """Begin from the choices of the paper's public code."""

    def prune(self, changed: Pruning) -> dict[str, Any]:
        """The ``prune`` settings of a sweep or a study."""
        return {**({"preset": "reference"} if self.reference else {}), **options.given(changed)}


@options.section()
class Settings:
    """Which subnetwork."""

    checkpoint: options.Checkpoint
    rows: options.Rows
    sparsity: float
    """Fraction of the units to remove."""
    seed: int = 0
    """Seed of the pruning; --rows-seed is that of the rows."""
    preset: Preset = field(default_factory=Preset)
    pruning: Pruning = field(default_factory=Pruning)
    replacement: options.Replacement = field(default_factory=options.Replacement)
    output: options.Folder

    def config(self) -> PruneConfig:
        """How to prune."""
        make = PruneConfig.reference if self.preset.reference else PruneConfig
        return make(sparsity=self.sparsity, seed=self.seed, **options.given(self.pruning))


def run(settings: Settings, work: Work) -> None:
    """Find a subnetwork that does what the model does."""
    from hc_lens.pruning.train import prune

    config = settings.config()
    model = work.model(settings.checkpoint)
    batches = work.rows(model, settings.rows)
    if not work.begin():
        return
    source = work.means(model, settings.replacement, batches)
    work.note(f"pruning with {config.method} to sparsity {config.sparsity:g}, seed {config.seed}")
    try:
        found = prune(model, batches, source, config, progress=work.progress)
    except HcLensError as error:
        if error.finished is not None:
            folder = error.finished.save(work.folder / "last-good")
            work.note(f"the last good subnetwork is in {folder}")
        raise
    work.keep(found.save)
    work.finish(
        units=len(found.space),
        kept=found.kept,
        removed=found.removed,
        sparsity=found.sparsity,
        seed=config.seed,
        **_last_step(found.history),
    )


def _last_step(history: pd.DataFrame | None) -> dict[str, Any]:
    if history is None or history.empty or "loss" not in history:
        return {}
    return {"loss": float(history["loss"].iloc[-1])}
