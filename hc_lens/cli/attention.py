"""``hc-lens attention``: attention patterns of a pair of sentences, as a page for the browser."""

from __future__ import annotations

from dataclasses import field

from hc_lens.cli import options
from hc_lens.cli.work import Work
from hc_lens.errors import HcLensError

PAGE = "attention.html"


@options.section()
class Settings:
    """Whose attention to what."""

    checkpoint: options.Checkpoint
    premise: str
    """The first, or only, sentence."""
    hypothesis: str | None = None
    """The second sentence."""
    heads: options.Names = ()
    """Heads to draw, such as L4.H0,L2.H5; by default all."""
    subnetwork: options.Names = ()
    """Folder of hc-lens prune: show the patterns of this subnetwork."""
    replacement: options.Replacement = field(default_factory=options.Replacement)
    output: options.Folder


def run(settings: Settings, work: Work) -> None:
    """Draw attention patterns as one HTML file."""
    from hc_lens.show import attention

    networks = work.subnetworks(settings.subnetwork)
    if len(networks) > 1:
        raise HcLensError(f"expected at most one --subnetwork, got {list(networks)}; choose one")
    network = next(iter(networks.values()), None)
    model = work.model(settings.checkpoint)
    if not work.begin():
        return
    source = None
    if network is not None:
        if network.model != work.fingerprint:
            raise HcLensError(
                f"expected a subnetwork of this model ({work.fingerprint[:8]}), got one of another "
                f"({network.model[:8]}); load the checkpoint it was found in"
            )
        source = work.means(model, settings.replacement, subnetworks=settings.subnetwork)
    heads = list(settings.heads)
    figure = attention(model, settings.premise, settings.hypothesis, heads or None, network, source)
    files = work.keep(lambda folder: figure.save(folder / PAGE))
    work.finish(page=str(work.folder / PAGE), heads=heads or "all", bytes=len(files[PAGE]))
