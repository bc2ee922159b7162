"""``hc-lens attention``: attention patterns of one or two texts, as a page for the browser."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated

from cyclopts import Parameter

from hc_lens.cli import options
from hc_lens.cli.work import Work
from hc_lens.errors import HcLensError

PAGE = "attention.html"


@options.section("Model")
class Replacement(options.Replacement):
    """What stands in for a unit that a subnetwork has removed."""

    means: str | None = None
    """What replaces removed units: a file or folder of hc-lens means or prune, or zero; by default
    the means beside --subnetwork."""


@options.section()
class Settings:
    """Whose attention to what."""

    checkpoint: options.Checkpoint
    text: Annotated[str, Parameter(name=("--text", "--premise"))]
    """The first, or only, text."""
    hypothesis: str | None = None
    """The second text."""
    heads: options.Names = ()
    """Heads to draw, such as L4.H0,L2.H5; by default all."""
    subnetwork: options.Names = ()
    """Folder of hc-lens prune: show the patterns of this subnetwork."""
    replacement: Replacement = field(default_factory=Replacement)
    output: options.Folder


def run(settings: Settings, work: Work) -> None:
    """Draw attention patterns as one HTML file."""
    from hc_lens.show import attention

    networks = work.subnetworks(settings.subnetwork)
    if len(networks) > 1:
        raise HcLensError(f"expected at most one --subnetwork, got {list(networks)}; choose one")
    if settings.replacement.means == "counterfactual":
        raise HcLensError(
            "expected --means as a file, a folder or zero, got counterfactual, which a text that "
            "is typed does not have; give one of these"
        )
    network = next(iter(networks.values()), None)
    model = work.model(settings.checkpoint)
    if not work.begin():
        return
    source = None
    if network is not None:
        network.check(model)
        source = work.means(model, settings.replacement, subnetworks=settings.subnetwork)
    heads = list(settings.heads)
    figure = attention(model, settings.text, settings.hypothesis, heads or None, network, source)
    files = work.keep(lambda folder: figure.save(folder / PAGE))
    work.finish(page=str(work.folder / PAGE), heads=heads or "all", bytes=len(files[PAGE]))
