"""The command ``hc-lens analyse extractive``."""

from __future__ import annotations

from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hc_lens.analyses.extractive.settings import DeskConfig, ScoreConfig, SetName, TrainConfig
from hc_lens.cli import options
from hc_lens.cli.work import Work
from hc_lens.errors import HcLensError
from hc_lens.records import digest
from hc_lens.settings import plain_value

if TYPE_CHECKING:
    import pandas as pd

    from hc_lens.analyses.extractive.facts import FactSet


@options.changes(ScoreConfig, "seed")
class Scoring:
    """How components are scored."""


@options.changes(TrainConfig, "lr", "seed", title="Training")
class Training:
    """How a model is fine-tuned on facts."""


@options.section("Rows")
class Facts:
    """Which facts."""

    data: SetName = "first-hop"
    """A set of facts that is generated."""
    path: str | None = None
    """File of facts of your own instead, .csv or .jsonl."""
    counterfactual: str | None = None
    """File of counterfactual facts for grafting; --data invented generates some."""

    def read(self, seed: int) -> tuple[FactSet, FactSet | None]:
        """The facts, and their counterfactual twins where there are any."""
        from hc_lens.analyses.extractive.facts import named_set

        chosen, twin = named_set(self.path or self.data, seed)
        return chosen, named_set(self.counterfactual, seed)[0] if self.counterfactual else twin


@options.section()
class Settings:
    """Which experiment, on which facts."""

    what: Literal["scores", "out-of-context", "freezing", "ordering", "grafting"] = field(
        default="scores", kw_only=False
    )
    """The scores of two checkpoints, or an experiment that trains one."""
    demo: bool = False
    """The desk-scale study instead, which needs no files."""
    before: str | None = None
    """Checkpoint before fine-tuning on facts."""
    after: str | None = None
    """Checkpoint after it, for the scores."""
    placed: options.Device = field(default_factory=options.Device)
    facts: Facts = field(default_factory=Facts)
    scoring: Scoring = field(default_factory=Scoring)
    lr: float = 1e-5
    """Largest learning rate of the experiments."""
    training: Training = field(default_factory=Training)
    n_test: int = 20
    """People held out of the ordering experiment."""
    seed: int = 0
    """Seed of generated facts, of counterfactual prompts and of training."""
    seeds: options.Seeds = (0, 1, 2)
    """Seeds of the worlds of --demo, such as 0-2."""
    threads: int = 0
    """CPU threads; 0 leaves the choice to PyTorch."""
    output: options.Output = field(default_factory=options.Output)
    table: options.Table = field(default_factory=options.Table)


def run(settings: Settings, work: Work) -> None:
    """Which components store a fact, which query it and which use it (arXiv 2412.04614)."""
    import torch

    if settings.threads or settings.demo:
        # The demo's matrices are so small that a second thread costs more than it brings.
        torch.set_num_threads(settings.threads or 1)
    if settings.demo:
        _demo(settings, work)
    elif settings.what == "scores":
        _scores(settings, work)
    else:
        _experiment(settings, work)


def _demo(settings: Settings, work: Work) -> None:
    from hc_lens.analyses.extractive.desk import report, save, study

    work.out = work.out or Path("extractive-demo")
    if work.begin():
        config = DeskConfig()
        tables = study(settings.seeds, config, progress=work.progress)
        work.keep(lambda folder: save(tables, folder, config))
        work.finish(text=report(tables))


def _scores(settings: Settings, work: Work) -> None:
    from hc_lens.analyses.extractive.figures import heat_maps
    from hc_lens.analyses.extractive.models import language_model
    from hc_lens.analyses.extractive.scoring import scores
    from hc_lens.models.fingerprint import fingerprint

    if not settings.before or not settings.after:
        raise HcLensError(
            f"expected two checkpoints, got {settings.before or 'none'} before and "
            f"{settings.after or 'none'} after; pass --before and --after, or --demo"
        )
    chosen, _ = settings.facts.read(settings.seed)
    before, after = (
        language_model(name, settings.placed.device) for name in (settings.before, settings.after)
    )
    work.fingerprint, work.inputs["after"] = fingerprint(before), fingerprint(after)
    work.reads("facts", digest(plain_value(chosen)), f"{len(chosen.implications)} implications")
    if not work.begin(by_component):
        return
    config = ScoreConfig(seed=settings.seed, **options.given(settings.scoring))
    questions, answers = chosen.implications, chosen.implication_options
    table = scores(before, after, questions, answers, config, progress=work.progress)
    if config.by == "position":
        title = f"{settings.facts.path or settings.facts.data}: {config.method} scores"
        work.keep(
            lambda folder: heat_maps(table, title=title).savefig(folder / "heat-maps.png", dpi=150)
        )
    work.finish(table)


def by_component(table: pd.DataFrame) -> pd.DataFrame:
    """The mean over questions of each component's scores, one column for each score."""
    names = ["score", "component"]
    means: Any = table.groupby([*names, "question"], sort=False)["value"].sum()
    return means.groupby(names, sort=False).mean().unstack("score").reset_index()


def _experiment(settings: Settings, work: Work) -> None:
    from hc_lens.analyses.extractive import experiments
    from hc_lens.analyses.extractive.models import language_model
    from hc_lens.models.fingerprint import fingerprint

    if not settings.before:
        raise HcLensError("expected a checkpoint to train, got none; pass --before, or --demo")
    chosen, twin = settings.facts.read(settings.seed)
    if settings.what == "grafting" and twin is None:
        raise HcLensError(
            "expected counterfactual facts for grafting, got none; "
            "pass --data invented, or --counterfactual FILE"
        )
    config = TrainConfig(lr=settings.lr, seed=settings.seed, **options.given(settings.training))
    model = language_model(settings.before, settings.placed.device)
    work.fingerprint = fingerprint(model)
    work.reads("facts", digest(plain_value(chosen)), f"{len(chosen.facts)} facts")
    if not work.begin():
        return
    if settings.what == "out-of-context":
        table = experiments.out_of_context(model, chosen, config)
    elif settings.what == "freezing":
        table = experiments.freezing(model, chosen, config)
    elif settings.what == "ordering":
        table = experiments.ordering(model, chosen, config, config, n_test=settings.n_test)
    else:
        assert twin is not None
        table = experiments.grafting(model, chosen, twin, config)
    work.finish(table)
