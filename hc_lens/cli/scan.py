"""``hc-lens scan``: what the model loses without each unit, or each set of units.

With ``--out`` every finished batch is kept there, and the same command continues after a stop.
"""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING

from hc_lens.cli import options
from hc_lens.cli.work import BATCHES, Work
from hc_lens.errors import HcLensError

if TYPE_CHECKING:
    import pandas as pd


@options.section()
class Settings(options.OnRows):
    """What is ablated, on which rows."""

    sets: options.Names = ()
    """Sets to ablate together, such as L2.H5+L3.H7."""
    units: options.Names = ()
    """Units to ablate alone; by default all."""
    pairs: bool = False
    """Also ablate every pair of the units."""
    by_case: bool = False
    """Show every case; --out and --json always have them."""
    memory: str = "1GB"
    """Most memory beside the model."""
    more: options.Metrics = field(default_factory=options.Metrics)


def run(settings: Settings, work: Work) -> None:
    """Ablate every unit, or sets of units, and tell what changes."""
    from hc_lens.scans.scan import scan
    from hc_lens.units import UnitSpace, pairs

    if settings.sets and (settings.units or settings.pairs):
        raise HcLensError(
            "expected either --sets or --units and --pairs, got both; write a unit or a pair as a "
            "set, such as --sets L0.H1,L0.H1+L1.H2"
        )
    metrics = settings.more.checked()
    model = work.model(settings.checkpoint)
    data = work.evaluation(model, settings.rows, settings.ood)
    if not work.begin(None if settings.by_case else by_dataset):
        return
    source = work.means(model, settings.replacement, settings.rows)
    work.note("scanning")
    sets = settings.sets or settings.units or None
    if settings.pairs:
        sets = pairs(settings.units or UnitSpace.of(model))
    store = None if work.out is None else work.out / BATCHES
    table = scan(
        model,
        data,
        source,
        sets,
        metrics=metrics,
        memory=settings.memory,
        store=store,
        progress=work.progress,
    )
    work.finish(table)


def by_dataset(table: pd.DataFrame) -> pd.DataFrame:
    """The table of a scan with the cases of each dataset averaged over their rows."""
    from hc_lens.metrics import over_cases

    keys = ("dataset", "set")
    numbers = [name for name in table.columns if name not in (*keys, "case", "n")]
    return over_cases(table, keys, numbers)
