"""The steps of a study, in the order of the paper.

1. `inputs`: the fingerprints of the model and of the rows; every other step builds on it.
2. `evaluate`: the full model on ``id`` and on every case of ``ood``.
3. `means`: mean activations over the training rows.
4. `subnetworks`: seeds at two sparsities or more, for the final and the early checkpoint.
5. `core`: how often each head is kept, the heads in all subnetworks, chance, the early core.
6. `ablation`: every head, and the core together; super-additivity.
7. `attention`: what each head looks at, and the patterns of the core on a few pairs.
8. `composition`: who reads the core.
9. `grid` and `effective_size`: a grid of sparsities over the checkpoints, if there is a series.
10. `report`: the page, its numbers and the settings.

Each step states once, in `list_steps`, which settings it reads and which steps it builds on. Its
function gets these beside the model and the rows, and writes its files into an empty folder.
`run_steps` keeps them as a record (`hc_lens.records`) whose key is made of the same settings and of
the keys of the steps that it builds on: a step runs again exactly when one of them has changed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import pandas as pd
import torch

import hc_lens as hc
from analyses import composition, effective_size, lexical_overlap, subnetworks, superadditive
from analyses.composition.passes import check_supported
from analyses.findings import facts_json
from analyses.study.config import StudyConfig
from analyses.study.findings import collect
from analyses.study.page import build
from analyses.study.results import FACTS, PAGE, REPORT, SETTINGS, Results
from hc_lens.data.specs import DataSpec, read_model
from hc_lens.errors import HcLensError
from hc_lens.models import fingerprint
from hc_lens.models.loading import HookedModel
from hc_lens.protocols import BatchesLike
from hc_lens.records import Records, digest, json_bytes, table_bytes
from hc_lens.settings import plain_value
from hc_lens.show import Attention

METHOD = 2
"""Goes up when a step computes something else than before."""
MOST_HEADS = 6
"""Heads among which subsets are scanned and whose patterns are shown."""
MOST_TRACED = 12
"""Heads whose readers are traced; a larger core is cut, in order of the layers."""
SHOWN_EDGES = 40
"""Edges in the table of the strongest."""
MOST_TOKENS = 100
"""Longer rows are not shown as patterns."""
FEW_HEADS = 3
"""Heads that stand in for a core of fewer than two."""


@dataclass(frozen=True, eq=False)
class Study:
    """A model and its rows, each read when it is first asked for, and how to run."""

    config: StudyConfig
    """Which model, rows and sizes."""
    command: str = ""
    """How the study was started, for the report."""
    workers: int | None = None
    """Processes that prune at the same time; None for one per core."""
    progress: bool = True
    """Whether progress bars are shown."""

    @cached_property
    def model(self) -> HookedModel:
        """The final model."""
        return read_model(self.config.model)

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the final model."""
        return fingerprint(self.model)

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
        """The adversarial cases."""
        return self.config.adversarial or tuple(
            dict.fromkeys(case for batch in self.data["ood"] for case in batch.cases)
        )

    @cached_property
    def adversarial(self) -> dict[str, BatchesLike]:
        """The evaluation rows, of ``ood`` the adversarial cases only."""
        return {**self.data, "ood": self.data["ood"].of_cases(*self.cases)}

    @cached_property
    def checkpoints(self) -> dict[str, str]:
        """The fingerprint of each checkpoint."""
        return {
            name: fingerprint(self.model if model == self.config.model else read_model(model))
            for name, model in self.config.checkpoints.items()
        }

    @property
    def floors(self) -> dict[str, float]:
        """The accuracy of knowing nothing; on adversarial cases that of the heuristic: none."""
        floors = {name: 1 / len(batches.labels) for name, batches in self.data.items()}
        return floors | ({"ood": 0.0} if self.config.adversarial else {})


@dataclass(frozen=True, eq=False)
class Inputs:
    """What a step reads."""

    study: Study
    """The model and the rows."""
    runs: Path
    """Where the runs of sweeps are kept."""
    settings: Mapping[str, Any]
    """The settings of the step, by name."""
    found: Results
    """The files of the steps that it builds on."""

    @property
    def means(self) -> hc.Means:
        """The mean activations."""
        return hc.Means.load(self.found.folders["means"] / "means.safetensors")


@dataclass(frozen=True)
class Step:
    """A function from inputs to files, and what its inputs are."""

    name: str
    """Name of its folder."""
    run: Callable[[Inputs, Path], object]
    """Writes the files into an empty folder."""
    needs: tuple[str, ...] = ()
    """The steps that it builds on."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The settings that it reads, by name; dataclasses count with all their fields."""


def list_steps(study: Study) -> list[Step]:
    """The steps of a study, each after those that it builds on."""
    # What cannot work is told before the long steps, not after them.
    check_supported(study.model)
    _ = study.adversarial
    config, grid = study.config, study.config.grid_sweep()
    rows = {"train": study.train.fingerprint}
    rows |= {name: batches.fingerprint for name, batches in study.data.items()}
    inputs = {"model": study.fingerprint, **rows, "adversarial": list(study.cases)}
    steps = [
        Step("inputs", write_inputs, settings=inputs),
        Step("evaluate", evaluate, ("inputs",)),
        Step("means", collect_means, ("inputs",)),
        Step("subnetworks", prune, ("inputs",), _sweep(study, config.sweep())),
        Step(
            "core",
            find_core,
            ("subnetworks",),
            _some(config, "final", "early", "sparsities", "core_fraction"),
        ),
        Step("ablation", ablate, ("core", "means"), _some(config, "scan_rows")),
        Step(
            "attention",
            score_attention,
            ("core",),
            _some(config, "evaluation", "attention_rows", "examples"),
        ),
        Step("composition", trace, ("core", "means"), _some(config, "trace_rows")),
    ]
    if grid is not None:
        sizes = {"margin": config.margin, "floors": study.floors, "cases": study.cases}
        steps += [
            Step("grid", prune, ("inputs",), _sweep(study, grid)),
            Step("effective_size", measure_sizes, ("grid",), sizes),
        ]
    about = {"config": config, "version": hc.__version__}
    return [*steps, Step(REPORT, report, tuple(step.name for step in steps), about)]


def run_steps(
    records: Records, steps: Iterable[Step], study: Study, say: Callable[[str], None]
) -> dict[str, Path]:
    """Run what is not there yet; the folder of each step."""
    keys: dict[str, str] = {}
    folders: dict[str, Path] = {}
    for step in steps:
        needed = [keys[need] for need in step.needs]
        keys[step.name] = digest(METHOD, step.name, plain_value(step.settings), needed)
        record = f"steps/{step.name}"
        if records.find(record, keys[step.name]) is None:
            # What was built on the old results is no longer whole: no report is made of it.
            records.remove(f"steps/{REPORT}")
            say(f"{step.name.replace('_', ' ')} ...")
            found = Results({need: folders[need] for need in step.needs})
            given = Inputs(study, records.folder("runs"), step.settings, found)
            records.write(record, partial(step.run, given), keys[step.name])
        folders[step.name] = records.folder(record)
    return folders


def write_inputs(given: Inputs, out: Path) -> None:
    """The fingerprints of the model and of the rows."""
    (out / "inputs.json").write_bytes(json_bytes(given.settings))


def evaluate(given: Inputs, out: Path) -> None:
    """The full model on every case."""
    study = given.study
    found = hc.evaluate(study.model, study.data, progress=study.progress)
    table = found[["dataset", "case", "n", "accuracy"]]
    kinds = [
        "in domain" if dataset != "ood" else "adversarial" if case in study.cases else "other"
        for dataset, case in zip(table["dataset"], table["case"], strict=True)
    ]
    _write_tables(out, evaluation=table.assign(kind=kinds))


def collect_means(given: Inputs, out: Path) -> None:
    """The mean activations."""
    study = given.study
    means = hc.collect_means(study.model, study.train, progress=study.progress)
    means.save(out / "means.safetensors")


def prune(given: Inputs, out: Path) -> None:
    """The subnetworks of a sweep, kept in ``runs``, and their accuracies."""
    runs = hc.sweep(
        given.settings["sweep"],
        store=str(given.runs),
        workers=given.study.workers,
        progress=given.study.progress,
    )
    if len(runs.failed):
        first = runs.failed.iloc[0]
        raise HcLensError(
            f"expected every run of the sweep to end, {len(runs.failed)} failed, the first "
            f"(checkpoint {first['checkpoint']}) with: {first['why']}; the same command tries them "
            "again"
        )
    kept = [(*key, " ".join(found.kept)) for key, found in runs.subnetworks.items()]
    _write_tables(
        out,
        runs=runs.table.drop(columns="run"),
        full=runs.full,
        subnetworks=pd.DataFrame(kept, columns=["checkpoint", "sparsity", "seed", "kept"]),
    )


def find_core(given: Inputs, out: Path) -> None:
    """Which heads the subnetworks share, and how far their accuracies lie apart."""
    settings, fraction = given.settings, given.settings["core_fraction"]
    kept = given.found.table("subnetworks/subnetworks")
    found = read_subnetworks(kept, hc.UnitSpace.of(given.study.model))
    final = subnetworks.select(found, checkpoint=settings["final"])
    table = subnetworks.frequencies(final)
    heads = subnetworks.core(final, fraction)
    often: Any = table.groupby("unit", sort=False)["count"].sum()
    often = often.sort_values(ascending=False, kind="stable")
    ends = settings["sparsities"][0], settings["sparsities"][-1]
    about: dict[str, Any] = {
        "core": heads,
        "fraction": fraction,
        "looked_at": heads if len(heads) > 1 else list(often.index[:FEW_HEADS]),
        "chance": dataclasses.asdict(subnetworks.chance(final, fraction)),
        "spearman": subnetworks.spearman(table, *ends)._asdict(),
    }
    if settings["early"] is not None:
        early = subnetworks.select(found, checkpoint=settings["early"])
        about["early"] = dataclasses.asdict(subnetworks.early_core(early, final, fraction))
    (out / "core.json").write_bytes(json_bytes(about))
    runs = given.found.table("subnetworks/runs")
    of_final = runs.loc[runs["checkpoint"] == settings["final"]]
    spread = subnetworks.spread(of_final, given.found.table("subnetworks/full"))
    _write_tables(out, frequencies=table, jaccard=subnetworks.jaccard(final), spread=spread)


def read_subnetworks(
    table: pd.DataFrame, space: hc.UnitSpace
) -> dict[tuple[str, float, int], hc.Subnetwork]:
    """The subnetworks of a table of kept units, by (checkpoint, sparsity, seed)."""
    found = {}
    rows: Any = table[["checkpoint", "sparsity", "seed", "kept"]].itertuples(index=False)
    for checkpoint, sparsity, seed, labels in rows:
        kept = set(str(labels).split())
        keep = torch.tensor([label in kept for label in space.labels])
        config = {"sparsity": sparsity, "seed": seed}
        found[checkpoint, sparsity, seed] = hc.Subnetwork(space, keep, "", config=config)
    return found


def ablate(given: Inputs, out: Path) -> None:
    """Each head alone, and the core together."""
    study = given.study
    found = superadditive.analyse(
        study.model,
        study.adversarial,
        given.means,
        given.found.heads,
        superadditive.SuperAdditiveConfig(
            pool=tuple(given.found.heads[:MOST_HEADS]), limit=given.settings["scan_rows"]
        ),
        progress=study.progress,
    )
    _write_tables(out, scan=found.rows.table(), excess=found.excess, minimal=found.minimal)


def score_attention(given: Inputs, out: Path) -> None:
    """What each head looks at, and patterns on a few pairs."""
    study, most = given.study, given.settings["attention_rows"]
    spec: DataSpec = given.settings["evaluation"]["id"]
    rows = hc.word_batches(
        study.model,
        spec.read(),
        spec.split,
        limit=min(most, spec.limit or most),
        seed=spec.seed,
        max_length=spec.max_length,
    )
    # Function words stand in every sentence; what matters is the copy of a content word.
    content = lexical_overlap.WordRule(stop_words=lexical_overlap.STOP_WORDS)
    table = lexical_overlap.scores(study.model, rows, words=content, progress=study.progress)
    _write_tables(out, attention=table)
    for index, (case, texts) in enumerate(_examples(given).items()):
        figure = hc.show.attention(study.model, *texts, heads=given.found.heads[:MOST_HEADS])
        titled = dataclasses.replace(cast(Attention, figure), title=case.replace("_", " "))
        text = titled.fragment(f"pattern-{index}")
        (out / f"pattern-{index}.html").write_text(text, encoding="utf-8")


def _examples(given: Inputs) -> dict[str, list[str]]:
    """The first evaluated row of each adversarial case that fits a page."""
    study, spec = given.study, given.settings["evaluation"]["ood"]
    task = spec.read()
    table = task.dataset(spec.split)
    found: dict[str, int] = {}
    for batch in study.data["ood"]:
        lengths = batch.mask.sum(1).tolist()
        for case, row, length in zip(batch.cases, batch.rows.tolist(), lengths, strict=True):
            if length <= MOST_TOKENS:
                found.setdefault(case, row)
    shown = [case for case in study.cases if case in found][: given.settings["examples"]]
    return {case: [table[found[case]][column] for column in task.columns] for case in shown}


def trace(given: Inputs, out: Path) -> None:
    """Who reads the core."""
    found = composition.trace(
        given.study.model,
        given.study.adversarial,
        given.means,
        given.found.heads[:MOST_TRACED],
        composition.TraceConfig(limit=given.settings["trace_rows"]),
        progress=given.study.progress,
    )
    found.save(out)
    _write_tables(out, strongest=found.strongest(SHOWN_EDGES, "ood"))


def measure_sizes(given: Inputs, out: Path) -> None:
    """The effective size of every checkpoint."""
    cases = given.settings["cases"]
    runs, full = given.found.table("grid/runs"), given.found.table("grid/full")
    config = effective_size.SizeConfig(
        margin=given.settings["margin"], cases=cases, chance=given.settings["floors"]
    )
    chosen = runs.loc[(runs["dataset"] != "ood") | runs["case"].isin(cases)]
    _write_tables(
        out,
        effective_size=effective_size.effective_size(runs, full, config),
        by_sparsity=subnetworks.by_sparsity(chosen, full),
    )


def report(given: Inputs, out: Path) -> None:
    """The page, its numbers and the settings."""
    config: StudyConfig = given.settings["config"]
    facts = collect(given.found, config)
    page = build(given.found, facts, config, given.study.command)
    (out / PAGE).write_text(page.html(), encoding="utf-8")
    (out / FACTS).write_bytes(facts_json(facts))
    (out / SETTINGS).write_text(config.to_toml(), encoding="utf-8")


def _some(config: StudyConfig, *names: str) -> dict[str, Any]:
    return {name: getattr(config, name) for name in names}


def _sweep(study: Study, sweep: hc.SweepConfig) -> dict[str, Any]:
    # Checkpoints count for the steps that prune them: a longer series redoes nothing else.
    models = {name: key for name, key in study.checkpoints.items() if name in sweep.checkpoints}
    return {"sweep": sweep, "models": models}


def _write_tables(folder: Path, **tables: pd.DataFrame) -> None:
    """Each table as CSV under its name."""
    for name, table in tables.items():
        (folder / f"{name}.csv").write_bytes(table_bytes(table))
