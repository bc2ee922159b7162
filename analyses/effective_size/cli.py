"""The command ``hc-lens analyse effective-size``.

It reads a store of sweeps or two CSV files, runs nothing, and writes the table and the figure with
``--out``.
"""

from __future__ import annotations

from dataclasses import field
from pathlib import Path

import pandas as pd

from hc_lens.analyses.effective_size import SizeConfig, effective_size
from hc_lens.analyses.tables import full_table, run_table
from hc_lens.cli import options
from hc_lens.cli.work import Work
from hc_lens.errors import HcLensError
from hc_lens.records import digest, table_bytes


@options.changes(SizeConfig, "id", "ood", "chance")
class Choices:
    """When a subnetwork does what the model does."""


@options.section()
class Settings:
    """Which runs, and which of their rows."""

    store: options.Store = field(kw_only=False)
    full: Path | None = None
    """CSV file of the full models' accuracies, where STORE is a CSV file of runs."""
    published: bool = False
    """Begin from the choices of the paper's public code."""
    choices: Choices = field(default_factory=Choices)
    id_name: str = "id"
    """Name of the in-domain dataset in the store."""
    ood_name: str = "ood"
    """Name of the out-of-domain dataset in the store; '' for none."""
    id_labels: int = 0
    """Number of labels in domain, or of answers to a prompt, for the floor; 0 if not known."""
    ood_labels: int = 0
    """Number of labels out of domain, or of answers, for the floor; 0 if not known."""
    output: options.Output = field(default_factory=options.Output)
    table: options.Table = field(default_factory=options.Table)


def run(settings: Settings, work: Work) -> None:
    """Effective size of each checkpoint in domain, out of domain and mixed (arXiv 2403.03942)."""
    from hc_lens.analyses.effective_size.figures import figure

    labels = {settings.id_name: settings.id_labels, settings.ood_name: settings.ood_labels}
    make = SizeConfig.published if settings.published else SizeConfig
    config = make(
        **options.given(settings.choices),
        id=settings.id_name,
        ood=settings.ood_name or None,
        chance={name: 1 / count for name, count in labels.items() if name and count},
    )
    runs, full = _tables(settings, work, config.measure)
    if not work.begin():
        return
    sizes = effective_size(runs, full, config)
    drawing = figure(sizes, config.measure)
    work.keep(lambda folder: drawing.savefig(folder / "effective-size.png", dpi=150))
    work.finish(sizes)


def _tables(settings: Settings, work: Work, measure: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The runs and the full models: those of a store, or of two CSV files."""
    chosen = settings.store
    if not chosen.store.endswith(".csv"):
        runs = work.store(chosen)
        return runs.table, runs.full
    if settings.full is None or chosen.sparsity or chosen.seeds or chosen.settings:
        raise HcLensError(
            f"expected {chosen.store} whole and --full with the CSV file of the full models, got "
            f"--full {settings.full}, --sparsity {chosen.sparsity}, --seeds {chosen.seeds} and "
            f"--settings {chosen.settings!r}; give --full, and choose rows in the file itself"
        )
    tables = run_table(chosen.store, measure), full_table(settings.full, measure)
    for name, table in zip(("runs", "full models"), tables, strict=True):
        work.reads(name, digest(table_bytes(table)), f"{len(table)} rows")
    return tables
