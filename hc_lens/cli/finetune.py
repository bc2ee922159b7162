"""``hc-lens finetune``: a classifier, with evaluations and a checkpoint series.

The run keeps its own folder and resumes by itself (`hc_lens.finetuning`); the settings of the
command join it once it is there.
"""

from __future__ import annotations

from dataclasses import field
from typing import Annotated

from hc_lens.cli import options
from hc_lens.cli.work import SETTINGS, Work
from hc_lens.errors import HcLensError
from hc_lens.finetuning.config import FinetuneConfig
from hc_lens.records import MARKER, write_file


@options.changes(FinetuneConfig, title="Training")
class Training:
    """Settings of fine-tuning."""


@options.section("Rows")
class WholeTask(options.Rows):
    """A task that is read whole."""

    task: str = "mnli"
    split: Annotated[str | None, options.Hidden] = None
    limit: Annotated[int | None, options.Hidden] = None
    max_length: Annotated[int | None, options.Hidden] = None
    token_budget: Annotated[int, options.Hidden] = 4096
    seed: Annotated[int, options.Hidden] = 0


@options.section("Out of domain")
class WholeOod(options.Ood):
    """A second task that is read whole."""

    ood_limit: Annotated[int | None, options.Hidden] = None


@options.section("Training")
class Preset:
    """Where the settings of fine-tuning begin."""

    paper: bool = False
    """Begin from the paper's settings for this task."""


@options.section()
class Settings:
    """What is trained on what."""

    model: str = field(kw_only=False)
    """Directory or Hub id of the model to start from."""
    device: str | None = None
    """Where it runs: cpu, cuda, ..."""
    rows: WholeTask = field(default_factory=WholeTask)
    ood: WholeOod = field(default_factory=WholeOod)
    preset: Preset = field(default_factory=Preset)
    training: Training = field(default_factory=Training)
    output: options.Folder
    table: options.Table = field(default_factory=options.Table)

    def config(self) -> FinetuneConfig:
        """How to train, from the paper's settings with --paper."""
        changed = options.given(self.training)
        if self.preset.paper:
            return FinetuneConfig.paper(self.rows.task, **changed)
        if "steps" not in changed:
            raise HcLensError("expected --steps or --paper, got neither; say how long to train")
        return FinetuneConfig(**changed)


def run(settings: Settings, work: Work) -> None:
    """Fine-tune a classifier, with a series of checkpoints."""
    from hc_lens.finetuning.checkpoints import KIND
    from hc_lens.finetuning.train import finetune
    from hc_lens.models.loading import check_device

    config = settings.config()
    check_device(settings.device)
    task = settings.rows.read_task()
    evaluation = {}
    if task.held_out_split() != task.training_split():
        evaluation["id"] = (task, task.held_out_split())
    other = settings.ood.spec(settings.rows)
    if other is not None:
        second = other.read_task()
        evaluation["ood"] = (second, other.split or second.held_out_split())
    work.note(f"fine-tuning {settings.model} on {task.name} for {config.steps} steps")
    work.give_up(KIND, "optimizer")
    own = not (work.folder / MARKER).exists()
    try:
        result = finetune(
            settings.model,
            task,
            work.folder,
            config,
            evaluation=evaluation,
            device=settings.device,
            progress=work.progress,
        )
        own = True
    finally:
        # A folder of another run, which was refused, keeps its own settings.
        if own and (work.folder / MARKER).is_file():
            write_file(work.folder / SETTINGS, work.settings_text())
    last = result.history.loc[result.history["step"] == result.steps[-1]]
    work.finish(last, checkpoints=list(result.steps))
