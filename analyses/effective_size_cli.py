"""The command ``hc-lens analyse effective-size``.

It reads a store of sweeps, runs nothing, and writes the table and the figure with ``--out``.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from analyses.subnetworks_cli import OutOption, SettingsOption, StoreArgument

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command("effective-size")
def run(
    store: StoreArgument,
    margin: Annotated[float, typer.Option(help="How far from the full model passes.")] = 0.03,
    average: Annotated[str, typer.Option(help="One of seeds-first (the paper) and seeds-last.")] = (
        "seeds-first"
    ),
    monotone: Annotated[
        bool, typer.Option("--monotone", help="Stop at the first sparsity that fails.")
    ] = False,
    one_sided: Annotated[
        bool, typer.Option("--one-sided", help="Better than the full model always passes.")
    ] = False,
    id: Annotated[str, typer.Option(help="Name of the in-domain dataset.")] = "id",
    ood: Annotated[str, typer.Option(help="Name of the other dataset; '' for none.")] = "ood",
    case: Annotated[
        list[str] | None, typer.Option(help="Case of --ood to use, may be repeated; default all.")
    ] = None,
    id_labels: Annotated[int, typer.Option(help="Labels of --id, for the floor; 0 unknown.")] = 0,
    ood_labels: Annotated[int, typer.Option(help="Labels of --ood, for the floor; 0 unknown.")] = 0,
    settings: SettingsOption = "",
    out: OutOption = None,
) -> None:
    """Effective size of each checkpoint in domain, out of domain and mixed (arXiv 2403.03942)."""
    from analyses.effective_size import effective_size
    from analyses.effective_size_figures import figure
    from analyses.stores import read_store

    runs = read_store(store, settings)
    labels = {name: n for name, n in ((id, id_labels), (ood, ood_labels)) if name and n}
    chosen: Any = average
    sizes = effective_size(
        runs.table,
        runs.full,
        margin=margin,
        average=chosen,
        monotone=monotone,
        one_sided=one_sided,
        id=id,
        ood=ood or None,
        cases=case or None,
        n_labels=labels or None,
    )
    typer.echo(sizes.round(3).to_string(index=False))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        sizes.to_csv(out / "effective-size.csv", index=False)
        figure(sizes).savefig(out / "effective-size.png", dpi=150)
        typer.echo(f"written to {out}")
