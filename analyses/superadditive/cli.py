"""The command ``hc-lens analyse superadditive``."""

from __future__ import annotations

from dataclasses import field
from pathlib import Path

from hc_lens.analyses.superadditive import SuperAdditiveConfig, analyse
from hc_lens.cli import options
from hc_lens.cli.work import BATCHES, Work
from hc_lens.errors import check_choice
from hc_lens.metrics import NAMED
from hc_lens.records import table_bytes


@options.changes(SuperAdditiveConfig, "limit")
class Choices:
    """Which sets, and how their excess is measured."""


@options.section()
class Settings(options.OnRows):
    """Which heads, on which rows."""

    core: options.Names
    """The heads in question."""
    choices: Choices = field(default_factory=Choices)


def run(settings: Settings, work: Work) -> None:
    """Do heads do more damage together than the sum of what each does alone?"""
    config = SuperAdditiveConfig(**options.given(settings.choices))
    check_choice("a measure", config.measure, NAMED)
    model = work.model(settings.checkpoint)
    data = work.evaluation(model, settings.rows, settings.ood)
    if not work.begin():
        return
    source = work.means(model, settings.replacement, settings.rows)
    store = None if work.out is None else work.out / BATCHES
    found = analyse(model, data, source, settings.core, config, store=store, progress=work.progress)

    def write(folder: Path) -> None:
        found.layout.to_csv(folder / "layout.csv")
        (folder / "minimal.csv").write_bytes(table_bytes(found.minimal))
        for number, units in enumerate(config.joint or ["+".join(settings.core)]):
            found.figure(units).savefig(folder / f"set-{number}.png", dpi=150)

    work.keep(write)
    least = zip(found.minimal["set"], found.minimal["case"], strict=True)
    work.finish(found.excess, minimal=[f"{units} ({name})" for units, name in least])
