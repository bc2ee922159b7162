"""``hc-lens``: the pipeline from a terminal.

Every command imports what it needs when it runs, so that ``hc-lens --help`` is quick. An
HcLensError is one line on the error stream and exit code 1; ``hc-lens --debug COMMAND`` shows where
it came from.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hc_lens.errors import HcLensError

if TYPE_CHECKING:
    from hc_lens.data import Task
    from hc_lens.finetune import FinetuneConfig

app = typer.Typer(
    name="hc-lens", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of errors.")] = False,
) -> None:
    """Find, ablate and explain the subnetworks of a fine-tuned language model."""


@app.command()
def finetune(
    model: Annotated[str, typer.Argument(help="Directory or Hub id of the model to start from.")],
    out: Annotated[Path, typer.Option(help="Folder of the run; the same folder resumes it.")],
    task: Annotated[
        str, typer.Option(help="mnli, snli, qqp, hans, paws-qqp or organism.")
    ] = "mnli",
    path: Annotated[
        Path | None, typer.Option(help="File or folder with the task's rows, not the Hub.")
    ] = None,
    ood: Annotated[str | None, typer.Option(help="Task to score out of domain.")] = None,
    ood_path: Annotated[
        Path | None, typer.Option(help="File or folder with the rows of --ood.")
    ] = None,
    paper: Annotated[
        bool, typer.Option("--paper", help="Begin from the paper's settings for this task.")
    ] = False,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Rows a step.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Highest learning rate.")] = None,
    warmup_steps: Annotated[int | None, typer.Option(help="Steps of the warm-up.")] = None,
    weight_decay: Annotated[float | None, typer.Option(help="AdamW's weight decay.")] = None,
    max_length: Annotated[int | None, typer.Option(help="Cut rows to this many tokens.")] = None,
    checkpoint_every: Annotated[int | None, typer.Option(help="Steps between checkpoints.")] = None,
    evaluation_rows: Annotated[
        int | None, typer.Option(help="Score at most this many rows of each task.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Decides new weights, order, dropout.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...")] = None,
) -> None:
    """Fine-tune a classifier on a task, with evaluations and a checkpoint series."""
    from hc_lens.finetune import finetune as run

    given = {
        "steps": steps,
        "batch_size": batch_size,
        "learning_rate": learning_rate,
        "warmup_steps": warmup_steps,
        "weight_decay": weight_decay,
        "max_length": max_length,
        "checkpoint_every": checkpoint_every,
        "evaluation_rows": evaluation_rows,
        "seed": seed,
    }
    config = _config(paper, task, {key: value for key, value in given.items() if value is not None})
    rows = _task(task, path)
    evaluation = {"id": (rows, _held_out(rows)[0])} if _held_out(rows) else {}
    if ood is not None:
        other = _task("organism-ood" if ood == "organism" else ood, ood_path)
        evaluation["ood"] = (other, (_held_out(other) or list(other.splits))[0])
    result = run(model, rows, out, config, evaluation=evaluation, device=device)
    last = result.history[result.history["step"] == result.steps[-1]]
    typer.echo(last.to_string(index=False))
    typer.echo(f"checkpoints {list(result.steps)} in {out}")


@app.command(add_help_option=False, context_settings={"ignore_unknown_options": True})
def analyse(
    name: Annotated[str, typer.Argument(help="The analysis; --help after it shows its options.")],
    options: Annotated[list[str] | None, typer.Argument(help="Options of the analysis.")] = None,
) -> None:
    """Run an analysis: one of this package's, or of any that registers in hc_lens.analyses."""
    from importlib.metadata import entry_points

    known = {found.name: found for found in entry_points(group="hc_lens.analyses")}
    if name not in known:
        raise HcLensError(
            f"expected one of the analyses {sorted(known)}, got {name!r}; a package adds its own "
            "with an entry point in the group hc_lens.analyses"
        )
    known[name].load()(args=options or [], prog_name=f"hc-lens analyse {name}")


def _held_out(task: Task) -> list[str]:
    return [split for split in task.splits if split.startswith(("validation", "dev", "test"))]


def _config(paper: bool, task: str, changes: dict[str, Any]) -> FinetuneConfig:
    from hc_lens.finetune import FinetuneConfig

    if paper:
        return FinetuneConfig.paper(task, **changes)
    if "steps" not in changes:
        raise HcLensError("expected --steps or --paper, got neither; say how long to train")
    return FinetuneConfig(**changes)


def _task(name: str, path: Path | None) -> Task:
    from hc_lens import organism
    from hc_lens.data import Task

    if name.startswith("organism"):
        return organism.task("ood" if name == "organism-ood" else "id")
    return Task.named(name, path)


def main() -> None:
    """Run the command line."""
    try:
        app()
    except HcLensError as error:
        if "--debug" in sys.argv:
            raise
        typer.echo(f"hc-lens: {error}", err=True)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
