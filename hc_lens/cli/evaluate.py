"""``hc-lens evaluate``: accuracy, KL and agreement of a model and its subnetworks."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Any

from hc_lens.cli import options
from hc_lens.cli.work import Work

if TYPE_CHECKING:
    import pandas as pd


@options.section()
class Settings(options.OnRows):
    """What is scored, on which rows."""

    subnetwork: options.Names = ()
    """Folders of hc-lens prune."""
    more: options.Metrics = field(default_factory=options.Metrics)


def run(settings: Settings, work: Work) -> None:
    """Score a model, and subnetworks of it, case by case."""
    from hc_lens.evaluation import evaluate

    networks = work.subnetworks(settings.subnetwork)
    metrics = settings.more.checked()
    model = work.model(settings.checkpoint)
    data = work.evaluation(model, settings.rows, settings.ood)
    if not work.begin():
        return
    source = None
    if networks:
        source = work.means(model, settings.replacement, settings.rows, settings.subnetwork)
    table = evaluate(
        model,
        data,
        means=source,
        subnetwork=networks,
        metrics=metrics,
        progress=work.progress,
    )
    work.finish(table, **sides(table))


def sides(table: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """Friendly beside adversarial cases, an entry for each subnetwork and dataset with sides."""
    from hc_lens.metrics import by_side

    keys = ["subnetwork", "dataset"]
    found = by_side(table, keys).round(4).to_dict(orient="records")
    entries = {
        f"{row.pop('subnetwork')} on {row.pop('dataset')}": {
            name: value
            for name, value in row.items()
            if value == value  # a side may have no cases
        }
        for row in found
    }
    return {name: entry for name, entry in entries.items() if entry}
