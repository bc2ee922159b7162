"""The command ``hc-lens analyse scorecard``."""

from __future__ import annotations

from dataclasses import field
from pathlib import Path

from hc_lens.analyses.scorecard import ScorecardConfig, analyse, from_mib, to_mib
from hc_lens.cli import options
from hc_lens.cli.work import Work
from hc_lens.errors import HcLensError, check_choice
from hc_lens.metrics import NAMED
from hc_lens.pruning.subnetwork import Subnetwork
from hc_lens.records import digest, table_bytes


@options.changes(ScorecardConfig, "limit")
class Choices:
    """What is measured, and how many random circuits stand beside it."""


@options.section()
class Settings:
    """Which circuit, on which rows."""

    checkpoint: options.Checkpoint
    rows: options.HeldOutRows
    subnetworks: options.Names = ()
    """Folders of subnetworks: the first is scored, the others say how stable it is."""
    circuit: options.Names = ()
    """Units to keep, such as L0.H1,L2.MLP; or all units in the order of their importance."""
    mib: Path | None = None
    """Circuit in the JSON of the Mechanistic Interpretability Benchmark."""
    choices: Choices = field(default_factory=Choices)
    replacement: options.Replacement = field(default_factory=options.Replacement)
    output: options.Output = field(default_factory=options.Output)
    table: options.Table = field(default_factory=options.Table)


def run(settings: Settings, work: Work) -> None:
    """Is the circuit right? Faithful, complete, minimal, stable, and better than random ones?"""
    config = ScorecardConfig(**options.given(settings.choices))
    check_choice("a measure", config.measure, NAMED)
    named = [bool(settings.subnetworks), bool(settings.circuit), settings.mib is not None]
    if sum(named) != 1:
        raise HcLensError(
            f"expected one of --subnetworks, --circuit and --mib, got {sum(named)} of them; name "
            "the circuit in one way"
        )
    model = work.model(settings.checkpoint)
    batches = work.rows(model, work.held_out(settings.rows))
    given, others = settings.circuit, []
    if settings.subnetworks:
        given, *others = work.subnetworks(settings.subnetworks).values()
    elif settings.mib is not None:
        given = from_mib(settings.mib, model)
        work.inputs["mib"] = digest(*given.kept)
    if not work.begin():
        return
    beside = settings.subnetworks[:1]
    source = work.means(model, settings.replacement, settings.rows, beside)
    found = analyse(model, batches, given, source, config, others=others, progress=work.progress)

    def write(folder: Path) -> None:
        (folder / "units.csv").write_bytes(table_bytes(found.units))
        kept = (
            given if isinstance(given, Subnetwork) else Subnetwork.from_units(model, found.circuit)
        )
        to_mib(folder / "circuit.json", model, kept)
        if len(found.curve):
            (folder / "curve.csv").write_bytes(table_bytes(found.curve))
            found.figure().savefig(folder / "curve.png", dpi=150)
        if found.stability is not None:
            (folder / "stability.csv").write_bytes(table_bytes(found.stability.units))

    work.keep(write)
    work.finish(found.summary, circuit=[str(unit) for unit in found.circuit])
