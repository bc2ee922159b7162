"""``hc-lens means``: mean activations of every unit, for the other commands."""

from __future__ import annotations

from typing import Literal

from hc_lens.cli import options
from hc_lens.cli.work import MEANS, Work


@options.section()
class Settings:
    """Which means."""

    checkpoint: options.Checkpoint
    rows: options.Rows
    by: Literal["token", "position"] = "token"
    """One mean over all tokens, or one for each position."""
    output: options.Folder


def run(settings: Settings, work: Work) -> None:
    """Collect the mean activations of all heads and MLPs."""
    from hc_lens.masks.means import collect_means

    model = work.model(settings.checkpoint)
    batches = work.rows(model, settings.rows)
    if not work.begin():
        return
    means = collect_means(model, batches, by=settings.by, progress=work.progress)
    work.keep_means(means)
    work.finish(
        means=str(work.folder / MEANS),
        by=means.by,
        rows=means.n_rows,
        tokens=means.n_tokens,
        fingerprint=means.fingerprint,
    )
