"""The command ``hc-lens analyse effective-size``.

It reads a store of sweeps, runs nothing, and writes the table and the figure with ``--out``.
"""

from __future__ import annotations

from dataclasses import field

from hc_lens.analyses.effective_size import SizeConfig, effective_size
from hc_lens.cli import options
from hc_lens.cli.work import Work


@options.changes(SizeConfig, "id", "ood", "chance")
class Choices:
    """When a subnetwork does what the model does."""


@options.section()
class Settings:
    """Which runs, and which of their rows."""

    store: options.Store = field(kw_only=False)
    choices: Choices = field(default_factory=Choices)
    id_name: str = "id"
    """Name of the in-domain dataset in the store."""
    ood_name: str = "ood"
    """Name of the out-of-domain dataset in the store; '' for none."""
    id_labels: int = 0
    """Number of labels in domain, for the floor; 0 if it is not known."""
    ood_labels: int = 0
    """Number of labels out of domain, for the floor; 0 if it is not known."""
    output: options.Output = field(default_factory=options.Output)
    table: options.Table = field(default_factory=options.Table)


def run(settings: Settings, work: Work) -> None:
    """Effective size of each checkpoint in domain, out of domain and mixed (arXiv 2403.03942)."""
    from hc_lens.analyses.effective_size.figures import figure

    labels = {settings.id_name: settings.id_labels, settings.ood_name: settings.ood_labels}
    config = SizeConfig(
        **options.given(settings.choices),
        id=settings.id_name,
        ood=settings.ood_name or None,
        chance={name: 1 / count for name, count in labels.items() if name and count},
    )
    runs = work.store(settings.store)
    if not work.begin():
        return
    sizes = effective_size(runs.table, runs.full, config)
    work.keep(lambda folder: figure(sizes).savefig(folder / "effective-size.png", dpi=150))
    work.finish(sizes)
