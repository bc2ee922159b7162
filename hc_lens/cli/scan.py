"""``hc-lens scan``: what the model loses without each unit, or each set of units.

With ``--out`` every finished batch is kept there, and the same command continues after a stop.
With ``--precision`` or ``--top`` a sample of the rows is measured, of each set as many as it takes.
"""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Any

from hc_lens.cli import options
from hc_lens.cli.work import BATCHES, Work
from hc_lens.errors import HcLensError

if TYPE_CHECKING:
    import pandas as pd

PRECISE = ("precision", "confidence", "simultaneous", "precision_of", "by_case")
"""Options of a scan to a stated precision."""


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
    precision: float | None = None
    """Half the width of each interval: measure each set on as many rows as that takes; by default
    on all."""
    confidence: float = 0.95
    """Probability with which an interval of --precision holds."""
    simultaneous: bool = False
    """Whether all intervals of --precision hold together with this probability."""
    precision_of: str = "logit"
    """What --precision and --top are about: logit, kl, accuracy, agreement or one of --metrics."""
    top: int | None = None
    """Find so many sets with the largest effects, instead of measuring all of them."""
    delta: float = 0.05
    """Probability with which --top is wrong."""
    seed: int = 0
    """Which rows --precision and --top draw."""
    memory: str = "1GB"
    """Most memory beside the model."""
    more: options.Metrics = field(default_factory=options.Metrics)


def run(settings: Settings, work: Work) -> None:
    """Ablate every unit, or sets of units, and tell what changes."""
    from hc_lens.scans.scan import scan
    from hc_lens.scans.top import top
    from hc_lens.units import UnitSpace, pairs

    _check(settings)
    metrics = settings.more.checked()
    model = work.model(settings.checkpoint)
    data = work.evaluation(model, settings.rows, settings.ood)
    exact = settings.precision is None and settings.top is None
    if not work.begin(by_dataset if exact and not settings.by_case else None):
        return
    source = work.means(model, settings.replacement, settings.rows)
    work.note("scanning")
    sets = settings.sets or settings.units or None
    if settings.pairs:
        sets = pairs(settings.units or UnitSpace.of(model))
    store = None if work.out is None else work.out / BATCHES
    common: Any = {
        "metrics": metrics,
        "memory": settings.memory,
        "store": store,
        "progress": work.progress,
    }
    drawn: Any = {"seed": settings.seed} if not exact else {}
    if settings.top is not None:
        by = settings.precision_of
        table = top(
            model, data, source, settings.top, settings.delta, sets, by=by, **common, **drawn
        )
    elif settings.precision is not None:
        drawn |= {name: getattr(settings, name) for name in PRECISE}
        table = scan(model, data, source, sets, **common, **drawn)
    else:
        table = scan(model, data, source, sets, **common)
    work.finish(table)


def _check(settings: Settings) -> None:
    """Refuse options that say two things, before anything is read."""
    if settings.sets and (settings.units or settings.pairs):
        raise HcLensError(
            "expected either --sets or --units and --pairs, got both; write a unit or a pair as a "
            "set, such as --sets L0.H1,L0.H1+L1.H2"
        )
    if settings.top is not None and settings.precision is not None:
        raise HcLensError(
            "expected either --precision or --top, got both; --top measures each set as precisely "
            "as it must to tell it from the others"
        )
    if settings.top is not None and settings.ood.ood:
        raise HcLensError(
            "expected the rows of one task to rank sets on with --top, got --ood as well; call "
            "the command once for each"
        )


def by_dataset(table: pd.DataFrame) -> pd.DataFrame:
    """The table of a scan with the cases of each dataset averaged over their rows."""
    from hc_lens.metrics import over_cases

    keys = ("dataset", "set")
    numbers = [name for name in table.columns if name not in (*keys, "case", "n")]
    return over_cases(table, keys, numbers)
