"""``hc-lens means``: mean activations of every unit, for the other commands."""

from __future__ import annotations

from typing import Annotated

import typer

from hc_lens.cli import options
from hc_lens.cli.run import MEANS, Run
from hc_lens.cli.settings import Context


def command(
    context: Context,
    model: options.Model,
    task: options.TaskName,
    out: options.Out,
    path: options.RowsPath = None,
    split: options.Split = None,
    limit: options.Limit = None,
    by: Annotated[str, typer.Option(help="token, or position for one mean a place.")] = "token",
    max_length: options.MaxLength = None,
    token_budget: options.TokenBudget = 4096,
    seed: options.Seed = 0,
    columns: options.Columns = None,
    label: options.Label = "label",
    labels: options.Labels = None,
    case: options.Case = None,
    device: options.Device = None,
    force: options.Force = False,
    as_json: options.Json = False,
    config: options.Config = None,
) -> None:
    """Collect the mean activations of all heads and MLPs."""
    from hc_lens.means import collect_means

    run = Run(context, writes=(MEANS,))
    hooked = run.model()
    batches = run.rows(hooked, options.rows(run.values))
    if not run.begin():
        return
    means = collect_means(hooked, batches, by=by, progress=run.progress)
    run.finish(
        means=str(run.save_means(means)),
        by=means.by,
        rows=means.n_rows,
        tokens=means.n_tokens,
        fingerprint=means.fingerprint,
    )
