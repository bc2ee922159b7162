"""The study as a list of steps, in the order of the paper, and how they are run and kept.

1. `list_steps` states once for each step which steps it builds on and which settings it reads. Its
   function gets these beside the model and the rows, and writes its files into an empty folder.
2. `run_steps` keeps them as a record (`hc_lens.records`) whose key is made of the same settings and
   of the keys of the steps that it builds on: a step runs again exactly when one of them has
   changed.
3. The last step writes the page, its numbers and the settings. `run` copies them to the top of the
   run folder, where a page that is not the study's own is set aside, never written over.
4. `report` writes the page of a finished study again, `summary` gives its sentences.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import pandas as pd
import torch

import hc_lens as hc
from hc_lens.analyses import (
    composition,
    effective_size,
    lexical_overlap,
    subnetworks,
    superadditive,
)
from hc_lens.analyses.composition.passes import check_supported
from hc_lens.analyses.study import findings
from hc_lens.analyses.study.config import StudyConfig, read_settings
from hc_lens.analyses.study.page import build
from hc_lens.analyses.study.results import Results, one_case_in_domain
from hc_lens.analyses.tables import RUN
from hc_lens.data.known import ADVERSARIAL, FRIENDLY
from hc_lens.data.prompts import NO_ANSWER, PromptBatches
from hc_lens.data.specs import DataSpec, read_model
from hc_lens.errors import HcLensError, warn
from hc_lens.metrics import by_side, case_sides
from hc_lens.models.fingerprint import fingerprint, same_version
from hc_lens.models.loading import HookedModel
from hc_lens.protocols import BatchesLike
from hc_lens.records import (
    DamagedWarning,
    Records,
    digest,
    json_bytes,
    sealed,
    table_bytes,
    unsealed,
)
from hc_lens.settings import plain_value
from hc_lens.show import Attention, Page
from hc_lens.show.kept import save_figures
from hc_lens.show.report import Sentence
from hc_lens.sweeps.engines import Local
from hc_lens.sweeps.estimate import expected

KIND = "study"
"""The kind of work that a run folder holds."""
METHOD = 6
"""Goes up when a step computes something else than before."""
REPORT = "report"
"""The last step."""
PAGE, FACTS, SETTINGS = "report.html", "facts.json", "study.toml"
"""What it writes."""
PUBLISHED = "pages.json"
"""The hashes of the pages that were copied to the top of the run folder."""
MOST_HEADS = 6
"""Heads among which subsets are scanned and whose patterns are shown."""
MOST_TRACED = 12
"""Heads whose readers are traced; a larger core is cut, in order of the layers."""
MOST_TOKENS = 100
"""Longer rows are not shown as patterns."""
FEW_HEADS = 3
"""Heads that stand in for a core of fewer than two."""


@dataclass(frozen=True, eq=False)
class Study:
    """A model and its rows, each read when it is first asked for, and how to run."""

    config: StudyConfig
    """Which model, rows and sizes."""
    runs: Path
    """Where the runs of sweeps are kept."""
    command: str = ""
    """How the study was started, for the report."""
    workers: int | None = None
    """Processes that prune at the same time; None for one per core."""
    progress: bool = True
    """Whether progress bars are shown."""
    say: Callable[[str], None] | None = None
    """Gets a line for each step, and for how far pruning is where no bar is shown."""
    device: str | None = None
    """Where the models run."""

    @cached_property
    def model(self) -> HookedModel:
        """The final model."""
        return self.read(self.config.model)

    def read(self, model: str) -> HookedModel:
        """A model of the study."""
        return read_model(model, labels=self.config.model_labels or None, device=self.device)

    @cached_property
    def train(self) -> hc.Batches:
        """The training rows."""
        return self.config.train.batches(self.model)

    @cached_property
    def data(self) -> dict[str, hc.Batches]:
        """The evaluation rows."""
        return {name: spec.batches(self.model) for name, spec in self.config.evaluation.items()}

    @cached_property
    def cases(self) -> tuple[str, ...]:
        """The adversarial cases: those named, those that the heuristic gets wrong, or all."""
        wrong = [case for case, side in self.sides.items() if side == ADVERSARIAL]
        chosen = self.config.adversarial or tuple(wrong or self.sides)
        if absent := [case for case in chosen if case not in self.sides]:
            raise HcLensError(
                f"expected rows of every adversarial case, got none of {absent}; the rows of ood "
                f"have {list(self.sides)}; name other cases, or draw the rows evenly over the "
                "cases with limit_per_case="
            )
        return chosen

    @cached_property
    def sides(self) -> dict[str, str]:
        """The side of each case out of domain."""
        return case_sides(self.data["ood"])

    def adversarial(self, rows: int) -> dict[str, BatchesLike]:
        """So many rows of ``id`` and of the adversarial cases of ``ood``, evenly over cases."""
        chosen = {**self.data, "ood": self.data["ood"].of_cases(*self.cases)}
        return {
            name: batches.limited(per_case=math.ceil(rows / len(case_sides(batches))))
            for name, batches in chosen.items()
        }


@dataclass(frozen=True)
class Step:
    """A function from inputs to files, and what its inputs are."""

    name: str
    """Name of its folder."""
    run: Callable[..., object]
    """Called with the study, the files of `needs`, an empty folder for its own, and `settings`."""
    needs: tuple[str, ...] = ()
    """The steps that it builds on."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The settings that it reads, by name; dataclasses count with all their fields."""
    also: Mapping[str, Any] = field(default_factory=dict)
    """What else decides its files, by name, such as the weights of a checkpoint."""


def run(
    config: StudyConfig,
    out: str | Path,
    *,
    command: str = "hc_lens.analyses.study.run(...)",
    workers: int | None = None,
    device: str | None = None,
    progress: bool = True,
    say: Callable[[str], None] | None = None,
    force: bool = False,
) -> Path:
    """Run a study, or what is left of it, and return the path of its report.

    Args:
        out: the run folder; that of an earlier call is continued.
        command: how the study was started, for the report.
        workers: processes that prune at the same time; by default one per core.
        device: where the models run.
        say: gets a line at the start of each step that is run, and lines on how far pruning is
            where no bar is shown.
        force: run every step again, also in the folder of another model.
    """
    study = Study(config, Path(out) / "runs", command, workers, progress, say, device)
    about = {"model": fingerprint(study.model)}
    with same_version(about["model"]):
        records = Records(out, KIND, about, owner=True, force=force, alone=True)
    with records:
        if force:
            records.remove("steps")
        _run(study, records)
    return Path(out) / PAGE


def _run(study: Study, records: Records) -> None:
    """Run what is left of a study, and copy its page to the top of its folder."""
    page, known = records.folder(PAGE), _own_pages(records)
    if page.exists() and digest(page.read_bytes()) not in known:
        other = records.set_aside(PAGE)
        warn(f"{page} is not as this study wrote it: it is now {other}", DamagedWarning)
    steps = list_steps(study)
    if study.say is not None and not records.names("steps"):
        config = study.config
        sweeps = [config.sweep(), *([config.grid_sweep()] if config.checkpoints else [])]
        time = expected(sweeps, study.model, study.train, study.data, study.workers)
        study.say(f"{time}; the scan and the trace come on top")

    def publish(files: Mapping[str, bytes]) -> None:
        for name, content in files.items():
            target = records.folder(name)
            if not target.exists() or target.read_bytes() != content:
                records.write_file(name, content)

    # The settings come first: a study that is stopped early can be read and repeated.
    publish({SETTINGS: study.config.to_toml().encode()})
    made = run_steps(records, steps, study)[REPORT]
    files = {name: (made / name).read_bytes() for name in (FACTS, PAGE)}
    known = dict.fromkeys([*known, digest(files[PAGE])])
    # Remembered first: a page that is there but unknown would count as somebody else's.
    publish({PUBLISHED: json_bytes(sealed({"pages": list(known)})), **files})


def _own_pages(records: Records) -> list[str]:
    """The hashes of the pages that the study has written to the top of its folder."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        return unsealed(records.folder(PUBLISHED).read_bytes())["pages"]
    last = records.read(f"steps/{REPORT}")
    return [] if last is None else [digest(last[PAGE])]


def report(folder: str | Path, path: str | Path, *, command: str = "", force: bool = False) -> Path:
    """Write the report of a finished run folder again, to a path of your choice."""
    results, config = _finished(folder)
    if Path(path).exists() and not force:
        raise HcLensError(
            f"expected a new file for the report, got {path}, which exists; give another path, or "
            "pass --force to write over it"
        )
    return build(results, findings.collect(results, config), config, command).save(path)


def summary(folder: str | Path) -> list[Sentence]:
    """What the numbers of a finished run folder say, in the order of the study."""
    return findings.say(findings.collect(*_finished(folder)))


def _finished(folder: str | Path) -> tuple[Results, StudyConfig]:
    """The results and the settings of a finished run folder."""
    records = Records.existing(folder, KIND)
    steps = {name: records.find(f"steps/{name}") for name in [REPORT, *records.names("steps")]}
    whole = {name: path for name, path in steps.items() if path is not None}
    if len(whole) < len(steps):
        damaged = [name for name in steps if name not in whole]
        raise HcLensError(
            f"expected the run folder of a finished study, got {folder}, in which the steps "
            f"{', '.join(damaged)} are missing or damaged; finish it with the command that began it"
        )
    return Results(whole), read_settings(whole[REPORT] / SETTINGS)


def list_steps(study: Study) -> list[Step]:
    """The steps of a study, each after those that it builds on."""
    # What cannot work is told before the long steps, not after them.
    check_supported(study.model)
    study.adversarial(1)
    config = study.config
    rows = {"train": study.train.fingerprint}
    rows |= {name: batches.fingerprint for name, batches in study.data.items()}
    inputs = {"model": fingerprint(study.model), **rows, "adversarial": list(study.cases)}
    checkpoints = {
        name: fingerprint(study.model if model == config.model else study.read(model))
        for name, model in config.checkpoints.items()
    }

    def some(*names: str) -> dict[str, Any]:
        return {name: getattr(config, name) for name in names}

    def pruning(name: str, sweep: hc.SweepConfig) -> Step:
        # Checkpoints count for the steps that prune them: a longer series redoes nothing else.
        models = {each: key for each, key in checkpoints.items() if each in sweep.checkpoints}
        return Step(name, prune, ("inputs",), {"sweep": sweep}, {"models": models})

    core = some("final", "early", "sparsities", "core_fraction")
    core["cases"] = study.cases
    attention = some("evaluation", "attention_rows", "examples")
    steps = [
        Step("inputs", write_inputs, settings=inputs),
        Step("evaluate", evaluate, ("inputs",)),
        Step("means", collect_means, ("inputs",)),
        pruning("subnetworks", config.sweep()),
        Step("core", find_core, ("subnetworks",), core),
        Step("ablation", ablate, ("core", "means"), some("scan_rows")),
        Step("attention", score_attention, ("core",), attention),
        Step("composition", trace, ("core", "means"), some("trace_rows")),
    ]
    if config.checkpoints:
        # The accuracy of knowing nothing; on adversarial cases that of the heuristic: none.
        floors = {name: floor_of(batches) for name, batches in study.data.items()}
        wrong = config.adversarial or {study.sides[case] for case in study.cases} == {ADVERSARIAL}
        floors |= {"ood": 0.0} if wrong else {}
        sizes = {"margin": config.margin, "floors": floors, "cases": study.cases}
        steps += [
            pruning("grid", config.grid_sweep()),
            Step("effective_size", measure_sizes, ("grid",), sizes),
        ]
    every = tuple(step.name for step in steps)
    version = {"version": hc.__version__}
    return [*steps, Step(REPORT, write_report, every, {"config": config}, version)]


def floor_of(batches: hc.Batches) -> float:
    """The accuracy of knowing nothing: one label of several, or one answer of a prompt's several.

    Where a prompt names no wrong answers, every other token is one, and the floor is none.
    """
    if not isinstance(batches, PromptBatches):
        return 1 / len(batches.labels)
    counts = torch.cat([(batch.answers != NO_ANSWER).sum(-1) for batch in batches]).double()
    right, wrong = counts.unbind(-1)
    return float(torch.where(wrong > 0, right / (right + wrong), 0.0).mean())


def run_steps(records: Records, steps: Iterable[Step], study: Study) -> dict[str, Path]:
    """Run what is not there yet; the folder of each step."""
    keys: dict[str, str] = {}
    folders: dict[str, Path] = {}
    every = list(steps)
    for number, step in enumerate(every, start=1):
        decides = plain_value({**step.settings, **step.also})
        key = digest(METHOD, step.name, decides, [keys[need] for need in step.needs])
        record = f"steps/{step.name}"
        if records.find(record, key) is None:
            # What was built on the old results is no longer whole: no report is made of it.
            records.remove(f"steps/{REPORT}")
            if study.say is not None:
                study.say(f"step {number} of {len(every)}: {step.name.replace('_', ' ')}")
            found = Results({need: folders[need] for need in step.needs})
            records.write(record, partial(step.run, study, found, **step.settings), key)
        keys[step.name] = key
        folders[step.name] = records.folder(record)
    return folders


def write_inputs(study: Study, found: Results, out: Path, **inputs: Any) -> None:
    """The fingerprints of the model and of the rows; every other step builds on it."""
    (out / "inputs.json").write_bytes(json_bytes(inputs))


def evaluate(study: Study, found: Results, out: Path) -> None:
    """The full model in domain and on every case out of domain."""
    scores = hc.evaluate(study.model, study.data, progress=study.progress)
    table = scores.drop(columns=["subnetwork", "kl", "agreement"])
    kinds = table["side"].where(table["side"] == FRIENDLY, "other")
    kinds = kinds.mask(table["case"].isin(study.cases), ADVERSARIAL)
    kinds = kinds.mask(table["dataset"] != "ood", "in domain")
    _write_tables(out, evaluation=table.assign(kind=kinds))


def collect_means(study: Study, found: Results, out: Path) -> None:
    """The mean activations over the training rows."""
    means = hc.collect_means(study.model, study.train, progress=study.progress)
    means.save(out / "means.safetensors")


def prune(study: Study, found: Results, out: Path, sweep: hc.SweepConfig) -> None:
    """The subnetworks of a sweep, kept in ``runs``, and their accuracies."""
    shown = study.progress or study.say is not None
    engine = Local(study.workers, device=study.device or "cpu")
    runs = hc.sweep(sweep, str(study.runs), engine=engine, progress=shown, say=study.say)
    runs.check_finished()
    kept = [(*key, " ".join(network.kept)) for key, network in runs.subnetworks.items()]
    _write_tables(
        out,
        runs=runs.table.drop(columns="run"),
        full=runs.full,
        subnetworks=pd.DataFrame(kept, columns=["checkpoint", "sparsity", "seed", "kept"]),
    )


def find_core(
    study: Study,
    found: Results,
    out: Path,
    final: str,
    early: str | None,
    sparsities: tuple[float, ...],
    core_fraction: float,
    cases: tuple[str, ...],
) -> None:
    """Which heads the subnetworks share, and how far their accuracies lie apart."""
    space = hc.UnitSpace.of(study.model)
    networks: dict[subnetworks.Key, hc.Subnetwork] = {}
    rows: Any = found.table("subnetworks/subnetworks").itertuples(index=False)
    for checkpoint, sparsity, seed, kept in rows:
        keep = torch.tensor([label in kept.split() for label in space.labels])
        networks[checkpoint, sparsity, seed] = hc.Subnetwork(space, keep, "")
    chosen = subnetworks.select(networks, checkpoint=final)
    table = subnetworks.frequencies(chosen)
    heads = subnetworks.core(chosen, core_fraction)
    often: Any = table.groupby("unit", sort=False)["count"].sum()
    often = often.sort_values(ascending=False, kind="stable")
    about: dict[str, Any] = {
        "core": heads,
        "fraction": core_fraction,
        "looked_at": heads if len(heads) > 1 else list(often.index[:FEW_HEADS]),
        "chance": dataclasses.asdict(subnetworks.chance(chosen, core_fraction)),
        "spearman": subnetworks.spearman(table, sparsities[0], sparsities[-1])._asdict(),
    }
    if early is not None:
        before = subnetworks.select(networks, checkpoint=early)
        about["early"] = dataclasses.asdict(subnetworks.early_core(before, chosen, core_fraction))
    (out / "core.json").write_bytes(json_bytes(about))
    runs = found.table("subnetworks/runs")
    of_final = runs.loc[runs["checkpoint"] == final]
    full = one_case_in_domain(found.table("subnetworks/full"), ["checkpoint"])
    spread = subnetworks.spread(one_case_in_domain(of_final, RUN), full)
    followed = of_final["case"].isin(cases) | (of_final["side"] == FRIENDLY)
    outside = of_final.loc[(of_final["dataset"] == "ood") & followed]
    outside = outside.assign(side=outside["side"].mask(outside["case"].isin(cases), ADVERSARIAL))
    sides = by_side(outside, ["checkpoint", "sparsity", "seed"])
    _write_tables(
        out, frequencies=table, jaccard=subnetworks.jaccard(chosen), spread=spread, sides=sides
    )


def ablate(study: Study, found: Results, out: Path, scan_rows: int) -> None:
    """Each head alone, and the core together; super-additivity."""
    ablated = superadditive.analyse(
        study.model,
        study.adversarial(scan_rows),
        found.means,
        found.heads,
        superadditive.SuperAdditiveConfig(pool=tuple(found.heads[:MOST_HEADS])),
        progress=study.progress,
    )
    _write_tables(out, scan=ablated.rows.table(), excess=ablated.excess, minimal=ablated.minimal)


def score_attention(
    study: Study,
    found: Results,
    out: Path,
    evaluation: Mapping[str, DataSpec],
    attention_rows: int,
    examples: int,
) -> None:
    """What each head looks at, and the patterns of the core on a few rows."""
    if not evaluation["id"].is_prompts:
        _write_tables(out, attention=_overlap(study, evaluation["id"], attention_rows))
    shown = _first_rows(study)
    figures: list[Attention] = []
    for case in [case for case in study.cases if case in shown][:examples]:
        figure = _pattern(study, evaluation["ood"], shown[case], found.heads[:MOST_HEADS])
        figures.append(dataclasses.replace(figure, title=case.replace("_", " ")))
    save_figures(figures, out)


def _overlap(study: Study, spec: DataSpec, attention_rows: int) -> pd.DataFrame:
    """How much each head looks at the same word in the other sentence."""
    rows = hc.word_batches(
        study.model,
        spec.read_task(),
        spec.split,
        limit=min(attention_rows, spec.limit or attention_rows),
        seed=spec.seed,
        max_length=spec.max_length,
    )
    # Function words stand in every sentence; what matters is the copy of a content word.
    content = lexical_overlap.WordRule(stop_words=lexical_overlap.STOP_WORDS)
    return lexical_overlap.scores(study.model, rows, words=content, progress=study.progress)


def _first_rows(study: Study) -> dict[str, int]:
    """The number in its split of the first evaluated row of each case that fits a page."""
    first: dict[str, int] = {}
    for batch in study.data["ood"]:
        lengths = batch.mask.sum(1).tolist()
        for case, row, length in zip(batch.cases, batch.rows.tolist(), lengths, strict=True):
            if length <= MOST_TOKENS:
                first.setdefault(case, row)
    return first


def _pattern(study: Study, spec: DataSpec, row: int, heads: Sequence[str]) -> Attention:
    """The attention of some heads on a row out of domain."""
    if spec.is_prompts:
        batches = study.data["ood"]
        shown = batches.gather([batches.rows.tolist().index(row)])
        return cast(Page, hc.show.attention(study.model, shown, heads=heads))[0]
    task = spec.read_task()
    cells = task.dataset(spec.split)[row]
    texts = [cells[column] for column in task.columns]
    return cast(Attention, hc.show.attention(study.model, *texts, heads=heads))


def trace(study: Study, found: Results, out: Path, trace_rows: int) -> None:
    """Who reads the core."""
    traced = composition.trace(
        study.model,
        study.adversarial(trace_rows),
        found.means,
        found.heads[:MOST_TRACED],
        composition.TraceConfig(),
        progress=study.progress,
    )
    traced.save(out)
    _write_tables(out, strongest=traced.strongest(40, "ood"))


def measure_sizes(
    study: Study,
    found: Results,
    out: Path,
    margin: float,
    floors: Mapping[str, float],
    cases: tuple[str, ...],
) -> None:
    """The effective size of every checkpoint."""
    runs, full = found.table("grid/runs"), found.table("grid/full")
    config = effective_size.SizeConfig(margin=margin, cases=cases, chance=floors)
    chosen = runs.loc[(runs["dataset"] != "ood") | runs["case"].isin(cases)]
    _write_tables(
        out,
        effective_size=effective_size.effective_size(runs, full, config),
        by_sparsity=subnetworks.by_sparsity(chosen, full),
    )


def write_report(study: Study, found: Results, out: Path, config: StudyConfig) -> None:
    """The page, its numbers and the settings."""
    facts = findings.collect(found, config)
    page = build(found, facts, config, study.command)
    (out / PAGE).write_text(page.html(), encoding="utf-8")
    (out / FACTS).write_bytes(findings.facts_json(facts))
    (out / SETTINGS).write_text(config.to_toml(), encoding="utf-8")


def _write_tables(folder: Path, **tables: pd.DataFrame) -> None:
    """Each table as CSV under its name."""
    for name, table in tables.items():
        (folder / f"{name}.csv").write_bytes(table_bytes(table))
