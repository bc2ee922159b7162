"""The command ``hc-lens analyse composition`` (also ``python -m analyses.composition``)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hc_lens.errors import HcLensError

if TYPE_CHECKING:
    from analyses.composition.tracing import Trace

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

HELD_OUT = ("validation", "dev", "test")


@app.command("composition")
def run(
    core: Annotated[str, typer.Option(help="core heads, such as L0.H6,L1.H1")],
    model: Annotated[str, typer.Option(help="organism, a folder or a Hub id")] = "organism",
    task: Annotated[str, typer.Option(help="in-domain task")] = "organism",
    path: Annotated[str, typer.Option(help="file or folder with its rows, not the Hub")] = "",
    ood: Annotated[str, typer.Option(help="task out of domain; '' for none")] = "organism-ood",
    ood_path: Annotated[str, typer.Option(help="file or folder with the rows of --ood")] = "",
    split: Annotated[str, typer.Option(help="split of --task to trace; default held out")] = "",
    ood_split: Annotated[str, typer.Option(help="split of --ood; default held out")] = "",
    limit: Annotated[int, typer.Option(help="rows of --task")] = 200,
    ood_limit: Annotated[int, typer.Option(help="rows of --ood")] = 800,
    means_limit: Annotated[int, typer.Option(help="training rows for the means")] = 2000,
    max_length: Annotated[int, typer.Option(help="cut rows to so many tokens")] = 128,
    norms: Annotated[str, typer.Option(help="recomputed or frozen")] = "recomputed",
    top: Annotated[int, typer.Option(help="edges of each head that are patched together")] = 10,
    steps: Annotated[int, typer.Option(help="integration steps of the attribution")] = 0,
    threads: Annotated[int, typer.Option(help="CPU threads; 0 is the default choice")] = 0,
    out: Annotated[Path | None, typer.Option(help="folder for the tables and the figure")] = None,
) -> None:
    """Who reads the core heads: the edges from them, exactly, by gradient and by weights."""
    import torch

    from analyses.composition.tracing import trace
    from hc_lens.means import collect_means
    from hc_lens.spec import read_model

    if threads:
        torch.set_num_threads(threads)
    loaded = read_model(model)
    settings: dict[str, Any] = {"max_length": min(max_length, loaded.cfg.n_ctx)}
    datasets = {"id": _batches(loaded, task, path, split, limit, True, settings)}
    if ood:
        datasets["ood"] = _batches(loaded, ood, ood_path, ood_split, ood_limit, True, settings)
    training = _batches(loaded, task, path, "", means_limit, False, settings)
    units = [label for label in re.split(r"[,\s+]+", core) if label]
    found = trace(
        loaded, datasets, collect_means(loaded, training), units, norms=norms, top=top, steps=steps
    )
    typer.echo(summary(found))
    if out is not None:
        found.save(out)
        found.figure().savefig(out / "edges.png", dpi=150)
        typer.echo(f"\nwritten to {out}")


def _batches(
    model: Any,
    task: str,
    path: str,
    split: str,
    limit: int,
    held_out: bool,
    settings: dict[str, Any],
) -> Any:
    """Rows of a task: of the named split, of the first held-out one, or to collect means on."""
    from hc_lens.spec import DataSpec

    rows = DataSpec(task, path or None).read()
    splits = list(rows.splits)
    kept = [name for name in splits if name.startswith(HELD_OUT)]
    others = [name for name in splits if name not in kept]
    chosen = split or ((kept or others) if held_out else (others or kept))[0]
    return rows.batches(model, chosen, limit=limit, **settings)


def summary(found: Trace) -> str:
    """The strongest edges, what they explain, the dependents and the agreement, as text."""
    from analyses.composition.measures import over_cases

    edges = found.strongest(15).drop(columns=["agreement"])
    weights = found.edges[["sender", "receiver", "kind", "weight_excess"]].drop_duplicates()
    edges = edges.merge(weights, on=["sender", "receiver", "kind"], how="left")
    shares = found.explained
    keys = ["sender", "patched", "dataset"]
    columns = [*keys, "n", "kl", "margin_change"]
    total = shares.assign(kl=shares["total_kl"], margin_change=shares["total_margin_change"])
    both = over_cases(shares.reindex(columns=columns), keys).merge(
        over_cases(total.reindex(columns=columns), keys),
        on=[*keys, "n"],
        suffixes=("", "_total"),
    )
    both = both.assign(share=both["kl"] / both["kl_total"])
    tops = shares.loc[shares["patched"] == "top", ["sender", "receivers"]].drop_duplicates()
    parts = [
        f"strongest edges of {', '.join(found.core)} (norms {found.norms}), means over datasets",
        edges.round(3).to_string(index=False),
        "\npatched together, against ablating the sender; the top edges are",
        "\n".join(f"  {sender}: {names}" for sender, names in tops.itertuples(index=False)),
        both.round(3).to_string(index=False),
        "\nheads outside the core, cut off from all core heads",
        _dependents(found),
        "\nrank correlation of attribution with the exact change of the margin",
        found.agreement.round(3).to_string(index=False),
    ]
    return "\n".join(parts)


def _dependents(found: Trace, n: int = 8) -> str:
    from analyses.composition.measures import over_cases

    table = found.dependents
    if table.empty:
        return "none: no head outside the core reads after a core head"
    keys = ["head", "dataset"]
    means = over_cases(table, keys)
    alone = table.assign(kl=table["ablated_kl"], accuracy_change=table["ablated_accuracy_change"])
    columns = ["kl", "accuracy_change"]
    alone = over_cases(alone.reindex(columns=[*keys, "n", *columns]), keys)
    both = means[[*keys, "n", *columns]].merge(
        alone[[*keys, *columns]], on=keys, suffixes=("", "_ablated")
    )
    first = list(dict.fromkeys(table["head"]))[:n]
    return both[both["head"].isin(first)].round(3).to_string(index=False)


def main() -> None:
    """Run the command; an HcLensError is one line on the error stream and exit code 1."""
    try:
        app()
    except HcLensError as error:
        typer.echo(f"hc-lens: {error}", err=True)
        raise SystemExit(1) from error
