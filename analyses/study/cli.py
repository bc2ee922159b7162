"""``hc-lens demo``, ``hc-lens study`` and ``hc-lens report``.

A study keeps its own folder and continues where it stopped (`hc_lens.analyses.study`).
"""

from __future__ import annotations

import json
from dataclasses import field, replace
from pathlib import Path

from hc_lens.analyses.study.config import PAPER_CASES, StudyConfig, read_settings
from hc_lens.analyses.study.config import demo as demo_config
from hc_lens.cli import options
from hc_lens.cli.prune import Preset, Pruning
from hc_lens.cli.sweep import Evaluation, named_models
from hc_lens.cli.work import SETTINGS, Work, last_name
from hc_lens.data.known import WITH_ADVERSARIAL
from hc_lens.data.specs import DataSpec
from hc_lens.errors import HcLensError
from hc_lens.records import write_file
from hc_lens.sweeps.sizes import SIZES, Size, SizeName


@options.section("Results")
class DemoFolder(options.Output):
    """Where the demo goes."""

    out: Path | None = Path("hc-lens-demo")


@options.section()
class Demo:
    """How large the demo is."""

    full: bool = False
    """The paper's size, not one of minutes."""
    workers: options.Workers = None
    """Processes that prune at once; by default one for each core."""
    model: options.Device = field(default_factory=options.Device)
    output: DemoFolder = field(default_factory=DemoFolder)


@options.section("Model")
class StudyModel(options.Checkpoint):
    """The final model; a file may describe it instead."""

    model: str = ""


@options.section("Rows")
class StudyRows(options.Rows):
    """The rows to prune on; a file may describe them instead."""

    task: str = ""
    limit: int | None = None
    """Most rows, drawn with the seed; by default as many as the size says, of prompts that are made
    2,000."""
    token_budget: int = 512
    """Most tokens in the batch of an update, padding included."""

    def trained_on(self, most: int) -> DataSpec:
        """The rows to prune on, all of them in one case unless they are prompts."""
        spec = self.of(self.task, self.path, case=None)
        made = spec.is_prompts and spec.path is None
        if made or spec.limit is not None or spec.limit_per_case is not None:
            return spec
        return replace(spec, limit=most)


@options.section("Out of domain")
class StudyOod(options.Ood):
    """The rows with adversarial cases."""

    ood: str | None = None
    """Second task, out of domain; named like --task. By default agreement-ood for agreement,
    organism-ood for the organism."""


@options.changes(
    StudyConfig,
    *("model", "train", "evaluation", "title", "adversarial", "checkpoints", "model_labels"),
    *("early", "sparsities", "seeds", "prune", "grid", "grid_seeds", "grid_prune"),
    *("scan_rows", "attention_rows", "trace_rows"),
)
class Sizes:
    """How much is done."""


@options.section()
class Study:
    """What is studied."""

    file: Path | None = field(default=None, kw_only=False)
    """A study.toml instead of options, such as that in a study's folder."""
    checkpoint: StudyModel = field(default_factory=StudyModel)
    rows: StudyRows = field(default_factory=StudyRows)
    evaluation: Evaluation = field(default_factory=Evaluation)
    ood: StudyOod = field(default_factory=StudyOod)
    adversarial: options.Names = ()
    """Cases of --ood that the heuristic gets wrong; by default the paper's, or all such."""
    checkpoints: options.Names = ()
    """Checkpoints of the training series, each as MODEL or NAME=MODEL."""
    early: str | None = None
    """Checkpoint from before generalisation, by its name."""
    size: SizeName = "standard"
    """How much is done, where an option does not say it: quick, standard or paper."""
    sparsity: options.Numbers = ()
    """Fractions of the units to remove, two or more; by default 0.5,0.7."""
    seeds: options.Seeds = ()
    """Seeds of the subnetworks at each sparsity, such as 42-53; by default those of the size."""
    grid: options.Numbers = ()
    """Sparsities of the grid; by default those of the size."""
    grid_seeds: options.Seeds = ()
    """Seeds of the subnetworks of the grid, such as 42-44; by default those of the size."""
    grid_steps: int | None = None
    """Updates of each path of the grid, or of each subnetwork where it has no paths."""
    scan_rows: int | None = None
    """About how many rows in domain and of the adversarial cases are in the ablation scan; by
    default those of the size."""
    attention_rows: int | None = None
    """Rows in domain whose attention is scored, prompts are not; by default those of the size."""
    trace_rows: int | None = None
    """About how many rows in domain and of the adversarial cases are in the composition trace; by
    default those of the size."""
    sizes: Sizes = field(default_factory=Sizes)
    preset: Preset = field(default_factory=Preset)
    pruning: Pruning = field(default_factory=Pruning)
    workers: options.Workers = None
    """Processes that prune at once; by default one for each core."""
    output: options.Folder

    def config(self, work: Work) -> StudyConfig:
        """The study of the options."""
        model = self.checkpoint.model
        ood = replace(self.ood, ood=self.ood.ood or WITH_ADVERSARIAL.get(self.rows.task))
        if not (model and self.rows.task and ood.ood):
            raise HcLensError(
                "expected --model, --task and --ood (or a file), got "
                f"model {model!r}, task {self.rows.task!r}, ood {ood.ood!r}; name all"
            )
        size, limit = SIZES[self.size], self.evaluation.evaluation_limit
        inside = self.rows.trained_on(size.rows)
        outside = ood.spec(self.rows, limit=size.ood_rows if limit is None else limit)
        within = replace(
            self.evaluation, evaluation_limit=size.evaluation_rows if limit is None else limit
        )
        evaluation = {
            # Without gradients a batch has room for more.
            name: replace(spec, token_budget=max(spec.token_budget, DataSpec.token_budget))
            for name, spec in within.specs(inside, outside).items()
        }
        if self.ood.ood_limit is None:
            evaluation["ood"] = _evenly(evaluation["ood"])
        used = inside.split or inside.read().training_split()
        if evaluation["id"].split == used:
            work.note(
                f"note: in domain is evaluated on the rows that are pruned on ({used}); name "
                "another split with --held-out"
            )
        named = StudyConfig(
            model=model,
            title=f"The heuristic core of {last_name(model)}",
            train=inside,
            evaluation=evaluation,
            adversarial=self.adversarial or PAPER_CASES.get(ood.ood, ()),
            checkpoints=named_models(self.checkpoints),
            early=self.early,
            model_labels=self.checkpoint.model_labels,
            **options.given(self.sizes),
        )
        return self._sized(named, size)

    def _sized(self, config: StudyConfig, size: Size) -> StudyConfig:
        """How much the study does: what the options say, and for the rest the size."""
        prune = self.preset.prune(self.pruning)
        chosen = replace(
            config,
            sparsities=self.sparsity or size.apart.sparsities,
            seeds=self.seeds or size.apart.seeds,
            prune=prune if self.preset.reference else {"steps": size.apart.steps, **prune},
            grid=self.grid or size.paths.sparsities,
            grid_seeds=self.grid_seeds or size.paths.seeds,
            scan_rows=size.scan_rows if self.scan_rows is None else self.scan_rows,
            attention_rows=(
                size.attention_rows if self.attention_rows is None else self.attention_rows
            ),
            trace_rows=size.trace_rows if self.trace_rows is None else self.trace_rows,
        )
        steps = self.grid_steps or (size.paths.steps if chosen.in_paths else None)
        return chosen if steps is None else replace(chosen, grid_prune={"steps": steps})


@options.section()
class Report:
    """Which study."""

    run: Path = field(kw_only=False)
    """Run folder of a finished study."""
    output: options.Folder


def _evenly(spec: DataSpec) -> DataSpec:
    """The rows of a limit drawn evenly over the cases, so that no case is left with a few."""
    if spec.limit is None or spec.is_prompts:  # prompts are made evenly over their cases
        return spec
    cases = spec.read_task().dataset(spec.split).unique("case")
    return replace(spec, limit=None, limit_per_case=max(1, spec.limit // len(cases)))


def demo(settings: Demo, work: Work) -> None:
    """Study the bundled model, without a network, and write one HTML page."""
    _run(demo_config(settings.full), settings.workers, settings.model, work)


def study(settings: Study, work: Work) -> None:
    """Study a classifier or a language model of your own and write one HTML page."""
    if settings.file is None:
        config = settings.config(work)
        work.note(SIZES[settings.size].announced(settings.size))
    else:
        work.check_alone(settings.file, ("device",))
        config = read_settings(settings.file)
    _run(config, settings.workers, settings.checkpoint, work)


def report(settings: Report, work: Work) -> None:
    """Write the page of a finished study again; its run folder stays as it is."""
    from hc_lens.analyses.study.steps import PAGE
    from hc_lens.analyses.study.steps import report as write

    if work.folder.resolve().is_relative_to(settings.run.resolve()):
        raise HcLensError(
            f"expected a folder outside the run folder {settings.run}, which stays as it is, got "
            f"--out {work.folder}; name another"
        )
    work.begin(resumes=True)
    work.keep(lambda folder: write(settings.run, folder / PAGE, command=work.call.line))
    work.finish(report=str(work.folder / PAGE))


def _run(config: StudyConfig, workers: int | None, model: options.Device, work: Work) -> None:
    from hc_lens.analyses.study.steps import FACTS, run, summary

    page = run(
        config,
        work.folder,
        command=work.call.line,
        workers=workers,
        device=model.device,
        progress=work.progress,
        say=work.note,
        force=work.output.force,
    )
    write_file(work.folder / SETTINGS, work.settings_text())
    facts = json.loads((work.folder / FACTS).read_text(encoding="utf-8"))
    marks = {True: "+", False: "-", None: " "}
    lines = [f"{marks[said.found]} {said.plain}" for said in summary(work.folder)]
    text = "\n".join([*lines, "", f"report: {page.resolve()}"])
    work.finish(report=str(page), run=str(work.folder), facts=facts, text=text)
