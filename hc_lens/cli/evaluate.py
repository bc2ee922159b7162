"""``hc-lens evaluate``: accuracy, KL and agreement of a model and its subnetworks."""

from __future__ import annotations

from hc_lens.cli import options
from hc_lens.cli.work import Work


@options.section()
class Settings(options.OnRows):
    """What is scored, on which rows."""

    subnetwork: options.Names = ()
    """Folders of hc-lens prune."""


def run(settings: Settings, work: Work) -> None:
    """Score a model, and subnetworks of it, case by case."""
    from hc_lens.evaluation import evaluate

    networks = work.subnetworks(settings.subnetwork)
    model = work.model(settings.checkpoint)
    data = work.evaluation(model, settings.rows, settings.ood)
    if not work.begin():
        return
    source = None
    if networks:
        training = settings.rows.spec(split=None)
        source = work.means(model, settings.replacement, training, settings.subnetwork)
    used = getattr(source, "fingerprint", "")
    for name, network in networks.items():
        if used and network.means and network.means != used:
            work.note(f"note: {name} was found with other means than those used here")
    work.finish(evaluate(model, data, means=source, subnetwork=networks, progress=work.progress))
