"""``hc-lens evaluate``: accuracy, KL and agreement of a model and its subnetworks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hc_lens.cli import options
from hc_lens.cli.run import MEANS, Run
from hc_lens.cli.settings import Context


def command(
    context: Context,
    model: options.Model,
    task: options.TaskName,
    subnetwork: Annotated[
        list[Path] | None, typer.Option(help="Folder of hc-lens prune; repeatable.")
    ] = None,
    ood: options.Ood = None,
    ood_path: options.OodPath = None,
    ood_split: options.OodSplit = None,
    means: options.MeansFile = None,
    path: options.RowsPath = None,
    split: options.Split = None,
    limit: options.Limit = None,
    max_length: options.MaxLength = None,
    token_budget: options.TokenBudget = 4096,
    seed: options.Seed = 0,
    columns: options.Columns = None,
    label: options.Label = "label",
    labels: options.Labels = None,
    case: options.Case = None,
    device: options.Device = None,
    out: options.Out = None,
    format: options.Format = "csv",
    force: options.Force = False,
    as_json: options.Json = False,
    config: options.Config = None,
) -> None:
    """Score a model, and subnetworks of it, case by case."""
    from hc_lens.evaluate import evaluate

    run = Run(context, writes=(MEANS,))
    networks = run.subnetworks()
    hooked = run.model()
    data = run.evaluation(hooked)
    if not run.begin():
        return
    source = run.means(hooked) if networks else None
    used = getattr(source, "fingerprint", "")
    for name, network in networks.items():
        if used and network.means and network.means != used:
            run.screen.note(f"note: {name} was found with other means than those used here")
    table = evaluate(hooked, data, means=source, subnetwork=networks, progress=run.progress)
    run.finish(table)
