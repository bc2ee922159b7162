"""``hc-lens finetune``: a classifier, with evaluations and a checkpoint series.

The folder resumes by itself (`hc_lens.checkpoints`); ``command.toml`` joins it once it is there.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hc_lens.cli import options
from hc_lens.cli.folder import write_settings
from hc_lens.cli.run import Run
from hc_lens.cli.screen import quiet_reading
from hc_lens.cli.settings import Context
from hc_lens.errors import HcLensError

if TYPE_CHECKING:
    from hc_lens.data import Task
    from hc_lens.finetune import FinetuneConfig

SETTINGS = (
    *("steps", "batch_size", "learning_rate", "warmup_steps", "weight_decay", "max_length"),
    *("checkpoint_every", "evaluation_rows", "seed"),
)


def command(
    context: Context,
    model: Annotated[str, typer.Argument(help="Directory or Hub id of the model to start from.")],
    out: Annotated[Path, typer.Option(help="Folder of the run; the same folder resumes it.")],
    task: options.TaskName = "mnli",
    path: options.RowsPath = None,
    columns: options.Columns = None,
    label: options.Label = "label",
    labels: options.Labels = None,
    case: options.Case = None,
    ood: options.Ood = None,
    ood_path: options.OodPath = None,
    paper: Annotated[
        bool, typer.Option("--paper", help="Begin from the paper's settings for this task.")
    ] = False,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Rows a step.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Highest learning rate.")] = None,
    warmup_steps: Annotated[int | None, typer.Option(help="Steps of the warm-up.")] = None,
    weight_decay: Annotated[float | None, typer.Option(help="AdamW's weight decay.")] = None,
    max_length: options.MaxLength = None,
    checkpoint_every: Annotated[int | None, typer.Option(help="Steps between checkpoints.")] = None,
    evaluation_rows: Annotated[
        int | None, typer.Option(help="Score at most this many rows of each task.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Decides new weights, order, dropout.")] = None,
    device: options.Device = None,
    as_json: options.Json = False,
    config: options.Config = None,
) -> None:
    """Fine-tune a classifier, with a series of checkpoints."""
    from hc_lens.checkpoints import RUN
    from hc_lens.finetune import finetune

    chosen = finetune_config(context.params)
    run = Run(context, checks=False)
    rows = options.rows(run.values).read()
    evaluation = {"id": (rows, held_out(rows)[0])} if held_out(rows) else {}
    if ood is not None:
        # The organism's own rows out of domain, for whoever names it twice.
        named = "organism-ood" if ood == "organism" else ood
        spec = options.ood({**run.values, "ood": named})
        assert spec is not None
        other = spec.read()
        evaluation["ood"] = (other, (held_out(other) or list(other.splits))[0])
    run.screen.note(f"fine-tuning {model} on {rows.name} for {chosen.steps} steps")
    new = not (out / RUN).exists()
    try:
        with quiet_reading(run.progress):
            result = finetune(
                model,
                rows,
                out,
                chosen,
                evaluation=evaluation,
                device=device,
                progress=run.progress,
            )
    finally:
        # A folder of another run, which was refused, keeps its own settings.
        if new and (out / RUN).is_file():
            write_settings(out, run.settings)
    last = result.history.loc[result.history["step"] == result.steps[-1]]
    run.finish(last, checkpoints=list(result.steps))


def held_out(task: Task) -> list[str]:
    """The splits of a task that are not for training."""
    return [split for split in task.splits if split.startswith(("validation", "dev", "test"))]


def finetune_config(values: Mapping[str, Any]) -> FinetuneConfig:
    """The settings of the options, from the paper's with --paper."""
    from hc_lens.finetune import FinetuneConfig

    changes = {name: values[name] for name in SETTINGS if values.get(name) is not None}
    if values.get("paper"):
        return FinetuneConfig.paper(values["task"], **changes)
    if "steps" not in changes:
        raise HcLensError("expected --steps or --paper, got neither; say how long to train")
    return FinetuneConfig(**changes)
