"""The command ``hc-lens analyse lexical-overlap``."""

from __future__ import annotations

from dataclasses import field
from pathlib import Path

import pandas as pd

from hc_lens.analyses.lexical_overlap import figure, heat_maps, scores
from hc_lens.attention.patterns import word_batches
from hc_lens.cli import options
from hc_lens.cli.work import Work


@options.section()
class Settings:
    """Whose heads, on which rows."""

    checkpoint: options.Checkpoint
    rows: options.HeldOutRows
    mark: options.Names = ()
    """Heads to mark in the figures."""
    n_bootstrap: int = 1000
    """Number of bootstrap replicates; 0 for no interval."""
    seed: int = 0
    """Seed of the swapped rows and the replicates."""
    output: options.Output = field(default_factory=options.Output)
    table: options.Table = field(default_factory=options.Table)


def run(settings: Settings, work: Work) -> None:
    """Which heads look from a word to the same word in the other sentence?"""
    task, spec = settings.rows.read_task(), work.held_out(settings.rows)
    model = work.model(settings.checkpoint)
    rows = word_batches(
        model,
        task,
        spec.split,
        limit=spec.limit,
        seed=spec.seed,
        max_length=spec.max_length,
        token_budget=spec.token_budget,
    )
    work.reads(rows.name, rows.fingerprint, f"{rows.n_rows} rows")
    if not work.begin(highest):
        return
    table = scores(
        model,
        rows,
        n_bootstrap=settings.n_bootstrap,
        seed=settings.seed,
        progress=work.progress,
    )

    def draw(folder: Path) -> None:
        figure(table, mark=settings.mark).savefig(folder / "heads.png", dpi=150)
        heat_maps(table, mark=settings.mark).savefig(folder / "maps.png", dpi=150)

    work.keep(draw)
    work.finish(table)


def highest(table: pd.DataFrame) -> pd.DataFrame:
    """The twelve heads with the highest overlap score, beside chance and the permuted rows."""
    overlap = table.loc[table["score"] == "overlap"]
    shown = overlap.sort_values(by="value", ascending=False, kind="stable").head(12)
    return shown.loc[:, ["unit", "value", "low", "high", "chance", "permuted", "n", "role"]]
