"""The steps of a study, in the order of the paper.

1. `evaluate`: the full model on ``id`` and on every case of ``ood``.
2. `means`: mean activations over the training rows.
3. `subnetworks`: seeds at two sparsities or more, for the final and the early checkpoint.
4. `core`: how often each head is kept, the heads in all subnetworks, chance, the early core.
5. `ablation`: every head, and the core together; super-additivity.
6. `attention`: what each head looks at, and the patterns of the core on a few pairs.
7. `composition`: who reads the core.
8. `effective_size`: the sparsity grid over the checkpoints, if there is a series.

Each step reads the files of the steps before it and writes its own tables as CSV
(`analyses.study.folder`).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import torch

import hc_lens as hc
from analyses import composition, effective_size, lexical_overlap, subnetworks, superadditive
from analyses.composition.layers import check_supported
from analyses.interactions import CaseBatches
from analyses.study.config import StudyConfig
from analyses.study.folder import RunFolder, pick, read_table, write_table
from hc_lens.errors import HcLensError
from hc_lens.models import fingerprint
from hc_lens.spec import read_model
from hc_lens.sweepconfig import SweepConfig

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


class Steps:
    """The steps of one study in one run folder."""

    def __init__(
        self,
        config: StudyConfig,
        path: str | Path,
        *,
        workers: int | None = None,
        progress: bool = True,
        say: Callable[[str], None] = lambda line: None,
    ):
        self.config, self.workers, self.progress, self.say = config, workers, progress, say
        self.model = read_model(config.model)
        self.folder = RunFolder(path, fingerprint(self.model))

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
    def adversarial(self) -> dict[str, Any]:
        """The evaluation rows, of ``ood`` the adversarial cases only."""
        return {**self.data, "ood": CaseBatches(self.data["ood"], *self.cases)}

    @cached_property
    def series(self) -> dict[str, str]:
        """The fingerprint of each checkpoint."""
        return {
            name: fingerprint(self.model) if given == self.config.model else _fingerprint(given)
            for name, given in self.config.checkpoints.items()
        }

    def run(self) -> None:
        """Run what is not there yet."""
        # What cannot work is told before the long steps, not after them.
        check_supported(self.model)
        _ = self.adversarial, self.series
        rows = {"train": self.train.fingerprint}
        rows |= {name: batches.fingerprint for name, batches in self.data.items()}
        inputs = {"model": fingerprint(self.model), **rows, "adversarial": list(self.cases)}
        self._step("inputs", inputs, (), lambda place: None)
        self.evaluate()
        self.means()
        self.subnetworks()
        self.core()
        self.ablation()
        self.attention()
        self.composition()
        self.effective_size()

    def evaluate(self) -> Path:
        """The full model on every case."""

        def run(place: Path) -> None:
            found = hc.evaluate(self.model, self.data, progress=self.progress)
            table = found[["dataset", "case", "n", "accuracy"]]
            kinds = [_kind(row.dataset, row.case, self.cases) for row in table.itertuples()]
            write_table(place, "evaluation", table.assign(kind=kinds))

        return self._step("evaluate", {}, ("inputs",), run)

    def means(self) -> Path:
        """The mean activations."""

        def run(place: Path) -> None:
            hc.collect_means(self.model, self.train, progress=self.progress).save(
                place / "means.safetensors"
            )

        return self._step("means", {}, ("inputs",), run)

    def subnetworks(self) -> Path:
        """Subnetworks of all seeds at the chosen sparsities."""
        return self._sweep("subnetworks", self.config.sweep())

    def core(self) -> Path:
        """Which heads the subnetworks share."""
        place = self.subnetworks()

        def run(out: Path) -> None:
            write_core(self.config, read_subnetworks(place), out)
            table, full = read_table(place, "runs"), read_table(place, "full")
            final = pick(table, table["checkpoint"] == self.config.final)
            write_table(out, "spread", subnetworks.spread(final, full))

        settings = {"final": self.config.final, "early": self.config.early,
                    "fraction": self.config.core_fraction}  # fmt: skip
        return self._step("core", settings, ("subnetworks",), run)

    @property
    def heads(self) -> list[str]:
        """The heads that the later steps look at."""
        return json.loads((self.core() / "core.json").read_text())["looked_at"]

    def ablation(self) -> Path:
        """Each head alone, and the core together."""

        def run(place: Path) -> None:
            found = superadditive.analyse(
                self.model,
                self.adversarial,
                self._means,
                self.heads,
                pool=self.heads[:MOST_HEADS],
                limit=self.config.scan_rows,
                progress=self.progress,
            )
            write_table(place, "scan", found.rows.table())
            write_table(place, "excess", found.excess)
            write_table(place, "minimal", found.minimal)

        settings = {"rows": self.config.scan_rows}
        return self._step("ablation", settings, ("core", "means"), run)

    def attention(self) -> Path:
        """What each head looks at, and patterns on a few pairs."""
        spec = self.config.evaluation["id"]

        def run(place: Path) -> None:
            limit = min(self.config.attention_rows, spec.limit or self.config.attention_rows)
            rows = hc.word_batches(
                self.model,
                spec.read(),
                spec.split,
                limit=limit,
                seed=spec.seed,
                max_length=spec.max_length,
            )
            # Function words stand in every sentence; what matters is the copy of a content word.
            content = lexical_overlap.WordRule(stop_words=lexical_overlap.STOP_WORDS)
            table = lexical_overlap.scores(self.model, rows, words=content, progress=self.progress)
            write_table(place, "attention", table)
            for at, shown in enumerate(self._examples()):
                text = shown.fragment(f"pattern-{at}")
                (place / f"pattern-{at}.html").write_text(text, encoding="utf-8")

        settings = {"rows": self.config.attention_rows, "examples": self.config.examples}
        return self._step("attention", settings, ("core",), run)

    def composition(self) -> Path:
        """Who reads the core."""

        def run(place: Path) -> None:
            found = composition.trace(
                self.model,
                self.adversarial,
                self._means,
                core=self.heads[:MOST_TRACED],
                limit=self.config.trace_rows,
                progress=self.progress,
            )
            found.save(place)
            write_table(place, "strongest", found.strongest(SHOWN_EDGES, "ood"))
            for name in ("explained", "dependents", "agreement"):
                write_table(place, name, getattr(found, name))

        settings = {"rows": self.config.trace_rows}
        return self._step("composition", settings, ("core", "means"), run)

    def effective_size(self) -> Path | None:
        """The effective size of every checkpoint; None without a series."""
        sweep = self.config.grid_sweep()
        if sweep is None:
            return None
        grid = self._sweep("grid", sweep)

        def run(place: Path) -> None:
            table, full = read_table(grid, "runs"), read_table(grid, "full")
            sizes = effective_size.effective_size(
                table,
                full,
                margin=self.config.margin,
                cases=self.cases,
                chance=self._floors(),
            )
            write_table(place, "effective_size", sizes)
            chosen = pick(table, (table["dataset"] != "ood") | table["case"].isin(self.cases))
            write_table(place, "by_sparsity", subnetworks.by_sparsity(chosen, full))

        settings = {"margin": self.config.margin, "floors": self._floors()}
        return self._step("effective_size", settings, ("grid",), run)

    def _floors(self) -> dict[str, float]:
        """The accuracy of knowing nothing; on adversarial cases that of the heuristic: none."""
        floors = {name: 1 / len(batches.labels) for name, batches in self.data.items()}
        return floors | ({"ood": 0.0} if self.config.adversarial else {})

    def _step(
        self, name: str, settings: dict[str, Any], needs: tuple[str, ...], run: Callable
    ) -> Path:
        def told(place: Path) -> None:
            if name != "inputs":
                self.say(f"{name.replace('_', ' ')} ...")
            run(place)

        return self.folder.step(name, settings, needs, told)

    def _sweep(self, name: str, sweep: SweepConfig) -> Path:
        # Checkpoints count for the steps that prune them: a longer series redoes nothing else.
        models = {given: self.series[given] for given in sweep.checkpoints if given in self.series}
        settings = sweep.describe() | {"fingerprints": models}
        return self._step(name, settings, ("inputs",), self._sweeper(sweep))

    def _sweeper(self, sweep: SweepConfig) -> Callable[[Path], None]:
        def run(place: Path) -> None:
            runs = hc.sweep(
                sweep,
                store=str(self.folder.path / "runs"),
                workers=self.workers,
                progress=self.progress,
            )
            if len(runs.failed):
                first = runs.failed.iloc[0]
                raise HcLensError(
                    f"expected every run of the sweep to end, {len(runs.failed)} failed, the first "
                    f"(checkpoint {first['checkpoint']}) with: {first['why']}; the same command "
                    "tries them again"
                )
            write_table(place, "runs", runs.table.drop(columns="run"))
            write_table(place, "full", runs.full)
            kept = [(*key, " ".join(found.kept)) for key, found in runs.subnetworks.items()]
            names = ["checkpoint", "sparsity", "seed", "kept"]
            write_table(place, "subnetworks", pd.DataFrame(kept, columns=names))
            space = hc.UnitSpace.of(self.model)
            (place / "units.json").write_text(json.dumps(dataclasses.asdict(space)))

        return run

    @property
    def _means(self) -> hc.Means:
        return hc.Means.load(self.means() / "means.safetensors")

    def _examples(self) -> list[Any]:
        """The first evaluated row of each adversarial case that fits a page, with its patterns."""
        spec = self.config.evaluation["ood"]
        task = spec.read()
        table = task.dataset(spec.split)
        found: dict[str, int] = {}
        for batch in self.data["ood"]:
            lengths = batch.mask.sum(1).tolist()
            for case, row, length in zip(batch.cases, batch.rows.tolist(), lengths, strict=True):
                if case in self.cases and length <= MOST_TOKENS:
                    found.setdefault(case, row)
        shown = []
        for case in [case for case in self.cases if case in found][: self.config.examples]:
            texts = [table[found[case]][column] for column in task.columns]
            figure: Any = hc.show.attention(self.model, *texts, heads=self.heads[:MOST_HEADS])
            shown.append(dataclasses.replace(figure, title=case.replace("_", " ")))
        return shown


def write_core(config: StudyConfig, found: dict[Any, hc.Subnetwork], out: Path) -> None:
    """The tables of the core, from subnetworks by (checkpoint, sparsity, seed)."""
    final = subnetworks.select(found, checkpoint=config.final)
    table = subnetworks.frequencies(final)
    heads = subnetworks.core(final, config.core_fraction)
    often: Any = table.groupby("unit", sort=False)["count"].sum()
    often = often.sort_values(ascending=False, kind="stable")
    first, second = config.sparsities[0], config.sparsities[-1]
    write_table(out, "frequencies", table)
    write_table(out, "jaccard", subnetworks.jaccard(final))
    about: dict[str, Any] = {
        "core": heads,
        "fraction": config.core_fraction,
        "looked_at": heads if len(heads) > 1 else list(often.index[:FEW_HEADS]),
        "chance": dataclasses.asdict(subnetworks.chance(final, config.core_fraction)),
        "spearman": subnetworks.spearman(table, first, second)._asdict(),
    }
    if config.early is not None:
        early = subnetworks.select(found, checkpoint=config.early)
        compared = subnetworks.early_core(early, final, config.core_fraction)
        about["early"] = dataclasses.asdict(compared)
    (out / "core.json").write_text(json.dumps(about, indent=1))


def read_subnetworks(place: Path) -> dict[tuple[str, float, int], hc.Subnetwork]:
    """The subnetworks that the step wrote, by (checkpoint, sparsity, seed)."""
    about = json.loads((place / "units.json").read_text())
    space = hc.UnitSpace(tuple(about["n_heads"]), tuple(about["mlps"]))
    found = {}
    rows: Any = read_table(place, "subnetworks").itertuples()
    for row in rows:
        kept = set(str(row.kept).split())
        keep = torch.tensor([label in kept for label in space.labels])
        config = {"sparsity": row.sparsity, "seed": row.seed}
        found[row.checkpoint, row.sparsity, row.seed] = hc.Subnetwork(
            space, keep, "", config=config
        )
    return found


def _fingerprint(name: str) -> str:
    return fingerprint(read_model(name))


def _kind(dataset: str, case: str, adversarial: tuple[str, ...]) -> str:
    if dataset != "ood":
        return "in domain"
    return "adversarial" if case in adversarial else "other"
