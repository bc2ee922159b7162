"""The command ``hc-lens analyse self-repair``."""

from __future__ import annotations

from dataclasses import field
from pathlib import Path

import pandas as pd

from hc_lens.analyses.self_repair import RepairConfig, analyse
from hc_lens.cli import options
from hc_lens.cli.work import Work
from hc_lens.errors import check_choice
from hc_lens.metrics import NAMED
from hc_lens.records import table_bytes

SHOWN = 20
"""Most lines that are shown of the table; the file has all."""


@options.changes(RepairConfig, "limit")
class Choices:
    """What is measured."""


@options.section()
class Settings(options.OnRows):
    """Which units, on which rows."""

    units: options.Names = ()
    """Units or sets, such as L2.H5,L3.H7+L4.H0; by default every unit alone."""
    choices: Choices = field(default_factory=Choices)


def run(settings: Settings, work: Work) -> None:
    """Does the model make up for what is ablated, and which units do it?"""
    config = RepairConfig(**options.given(settings.choices))
    check_choice("a measure", config.measure, NAMED)
    model = work.model(settings.checkpoint)
    data = work.evaluation(model, settings.rows, settings.ood)
    if not work.begin(_largest):
        return
    source = work.means(model, settings.replacement, settings.rows)
    found = analyse(model, data, source, settings.units or None, config, progress=work.progress)

    def write(folder: Path) -> None:
        (folder / "givers.csv").write_bytes(table_bytes(found.givers))
        if len(found.backup):
            (folder / "backup.csv").write_bytes(table_bytes(found.backup))
        found.figure().savefig(folder / "self-repair.png", dpi=150)

    work.keep(write)
    work.finish(found.effects)


def _largest(table: pd.DataFrame) -> pd.DataFrame:
    """The lines with the largest direct effect."""
    order = table["direct"].abs().sort_values(ascending=False, kind="stable").index
    return table.loc[order].head(SHOWN)
