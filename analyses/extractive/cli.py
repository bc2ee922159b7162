"""The command ``hc-lens analyse extractive`` (also ``python -m analyses.extractive``)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hc_lens.errors import HcLensError

if TYPE_CHECKING:
    from analyses.extractive.facts import FactSet

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

SETS = ("first-hop", "second-hop", "invented")
"""Generated sets that --data knows by name."""


@app.command("extractive")
def run(
    what: Annotated[
        str, typer.Argument(help="scores, out-of-context, freezing, ordering or grafting")
    ] = "scores",
    demo: Annotated[
        bool, typer.Option("--demo", help="the desk-scale study, no files needed")
    ] = False,
    before: Annotated[str, typer.Option(help="checkpoint before fine-tuning on facts")] = "",
    after: Annotated[str, typer.Option(help="checkpoint after it (scores only)")] = "",
    data: Annotated[
        str, typer.Option(help=f"a .csv or .jsonl file of facts, or one of {', '.join(SETS)}")
    ] = "first-hop",
    counterfactual: Annotated[
        str, typer.Option(help="file of counterfactual facts (grafting); default: generated")
    ] = "",
    method: Annotated[str, typer.Option(help="linear or exact")] = "linear",
    by: Annotated[str, typer.Option(help="component or position")] = "component",
    n_counterfactuals: Annotated[int, typer.Option(help="counterfactual prompts a question")] = 10,
    n_test: Annotated[int, typer.Option(help="people held out of the ordering experiment")] = 20,
    steps: Annotated[int, typer.Option(help="fine-tuning steps of each training")] = 60,
    lr: Annotated[float, typer.Option(help="fine-tuning learning rate")] = 1e-5,
    seeds: Annotated[int, typer.Option(help="worlds of the demo")] = 3,
    seed: Annotated[int, typer.Option(help="seed of generated facts and of training")] = 0,
    threads: Annotated[int, typer.Option(help="CPU threads; 0 is the default choice")] = 0,
    out: Annotated[Path | None, typer.Option(help="folder for tables and figures")] = None,
) -> None:
    """Which components store a fact, which query it and which use it (arXiv 2412.04614)."""
    import torch

    if threads or demo:
        # The demo's matrices are so small that a second thread costs more than it brings.
        torch.set_num_threads(threads or 1)
    if demo:
        _demo(out or Path("extractive-demo"), seeds)
    elif what == "scores":
        _scores(before, after, data, method, by, n_counterfactuals, seed, out)
    else:
        _experiment(what, before, data, counterfactual, n_test, steps, lr, seed, out)


def _demo(out: Path, seeds: int) -> None:
    from analyses.extractive.reporting import demo

    text, written = demo(out, seeds)
    typer.echo(text)
    typer.echo("\nwritten: " + ", ".join(str(path) for path in written))


def _facts(data: str, seed: int) -> tuple[FactSet, FactSet | None]:
    """The named set, or the one in a file; and its counterfactual twin where there is one."""
    from analyses.extractive import facts

    if data not in SETS:
        return facts.FactSet.read(data), None
    world = facts.World.real(seed)
    if data == "invented":
        return facts.invented_relation(world, seed=seed)
    make = facts.first_hop if data == "first-hop" else facts.second_hop
    return make(world, seed=seed), None


def _scores(
    before: str,
    after: str,
    data: str,
    method: str,
    by: str,
    count: int,
    seed: int,
    out: Path | None,
) -> None:
    from analyses.extractive.figures import heat_maps
    from analyses.extractive.scoring import scores

    if not before or not after:
        raise HcLensError(
            "expected two checkpoints, got "
            f"before={before!r} and after={after!r}; pass --before and --after, or --demo"
        )
    chosen, _ = _facts(data, seed)
    table = scores(
        before,
        after,
        chosen.implications,
        chosen.implication_options,
        method=method,
        by=by,
        n_counterfactuals=count,
        seed=seed,
    )
    names = ["score", "component"]
    means: Any = table.groupby([*names, "question"], sort=False)["value"].sum()
    means = means.groupby(names, sort=False).mean().unstack("score")
    typer.echo(means.round(3).to_string())
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        table.to_csv(out / "scores.csv", index=False)
        if by == "position":
            heat_maps(table, title=f"{data}: {method} scores").savefig(
                out / "heat-maps.png", dpi=150
            )
        typer.echo(f"written to {out}")


def _experiment(
    what: str,
    before: str,
    data: str,
    counterfactual: str,
    n_test: int,
    steps: int,
    lr: float,
    seed: int,
    out: Path | None,
) -> None:
    from analyses.extractive import experiments
    from analyses.extractive.scoring import load_model
    from analyses.extractive.training import TrainConfig

    known = ("out-of-context", "freezing", "ordering", "grafting")
    if what not in known:
        raise HcLensError(
            f"expected scores or one of {list(known)}, got {what!r}; name one of these"
        )
    if not before:
        raise HcLensError("expected a checkpoint to train, got none; pass --before, or --demo")
    chosen, twin = _facts(data, seed)
    if counterfactual:
        twin, _ = _facts(counterfactual, seed)
    config = TrainConfig(steps=steps, lr=lr, seed=seed)
    model = load_model(before)
    if what == "out-of-context":
        table = experiments.out_of_context(model, chosen, config)
    elif what == "freezing":
        table = experiments.freezing(model, chosen, config)
    elif what == "ordering":
        table = experiments.ordering(model, chosen, config, config, n_test=n_test)
    elif twin is None:
        raise HcLensError(
            "expected counterfactual facts for grafting, got none; "
            "pass --data invented, or --counterfactual FILE"
        )
    else:
        table = experiments.grafting(model, chosen, twin, config)
    typer.echo(table.round(3).to_string(index=False))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        table.to_csv(out / f"{what}.csv", index=False)


def main() -> None:
    """Run the command; an HcLensError is one line on the error stream and exit code 1."""
    try:
        app()
    except HcLensError as error:
        typer.echo(f"hc-lens: {error}", err=True)
        raise SystemExit(1) from error
