"""``hc-lens attention``: attention patterns of a pair of sentences, as a page for the browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hc_lens.cli import options
from hc_lens.cli.run import Run
from hc_lens.cli.settings import Context
from hc_lens.errors import HcLensError

PAGE = "attention.html"


def command(
    context: Context,
    model: options.Model,
    premise: Annotated[str, typer.Option(help="The first, or only, sentence.")],
    out: options.Out,
    hypothesis: Annotated[str | None, typer.Option(help="The second sentence.")] = None,
    heads: Annotated[
        list[str] | None,
        typer.Option(
            callback=options.split, metavar="A,B,...", help="Such as L4.H0,L2.H5; by default all."
        ),
    ] = None,
    subnetwork: Annotated[
        list[Path] | None,
        typer.Option(help="Folder of hc-lens prune: show the patterns of this subnetwork."),
    ] = None,
    means: options.MeansFile = None,
    device: options.Device = None,
    force: options.Force = False,
    as_json: options.Json = False,
    config: options.Config = None,
) -> None:
    """Draw attention patterns as one HTML file."""
    from hc_lens.show import attention

    run = Run(context, writes=(PAGE,))
    networks = run.subnetworks()
    if len(networks) > 1:
        raise HcLensError(f"expected at most one --subnetwork, got {list(networks)}; choose one")
    network = next(iter(networks.values()), None)
    hooked = run.model()
    if not run.begin():
        return
    if network is not None and network.model != run.fingerprint:
        raise HcLensError(
            f"expected a subnetwork of this model ({run.fingerprint[:8]}), got one of another "
            f"({network.model[:8]}); load the checkpoint it was found in"
        )
    source = None if network is None else run.means(hooked)
    figure = attention(hooked, premise, hypothesis, heads or None, network, source)
    page = figure.save(run.folder / PAGE)
    run.finish(page=str(page), heads=heads or "all", bytes=page.stat().st_size)
