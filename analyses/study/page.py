"""The report of a study, from the files of its run folder alone.

1. Read the tables of every step.
2. Compute the facts (`analyses.study.facts`) and keep them in ``facts.json``.
3. Put the sentences (`analyses.study.sentences`), the paper's figures and the tables into sections
   (`hc_lens.show.report`).
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd

from analyses import (
    composition,
    effective_size_figures,
    lexical_overlap_figures,
    subnetworks_figures,
    superadditive,
)
from analyses.study import facts as numbers
from analyses.study import sentences
from analyses.study.config import StudyConfig
from analyses.study.folder import pick, read_table
from hc_lens import __version__
from hc_lens.show.report import Drawing, Html, Report, Section, Table

PACKAGES = ("hc-lens", "torch", "transformer-lens", "transformers", "datasets")
SHARES = ("accuracy", "frequency", "full", "min", "max", "mean", "std", "sparsity")


class Results:
    """The files of a finished run folder."""

    def __init__(self, path: Path, config: StudyConfig):
        self.path, self.config = Path(path), config
        self.core = json.loads((self.place("core") / "core.json").read_text())
        self.cases = json.loads((self.place("inputs") / "done.json").read_text())
        self.cases = self.cases["settings"]["adversarial"]

    def place(self, step: str) -> Path:
        """The folder of a step."""
        return self.path / "steps" / step

    def table(self, step: str, name: str) -> pd.DataFrame:
        """A table of a step."""
        return read_table(self.place(step), name)

    @property
    def has_series(self) -> bool:
        """Whether checkpoints were compared."""
        return self.config.grid_sweep() is not None

    def trace(self) -> composition.Trace:
        """Who reads the core."""
        return composition.Trace.load(self.place("composition"))

    def facts(self) -> numbers.Facts:
        """All numbers of the sentences."""
        heads = self.core["looked_at"]
        found = {"cases": "adversarial" if self.config.adversarial else "out-of-domain"}
        found |= numbers.of_evaluation(self.table("evaluate", "evaluation"))
        found |= numbers.of_spread(self.table("core", "spread"), self.cases, self.config.sparsities)
        found |= numbers.of_core(self.core, self.table("core", "jaccard"))
        excess, scan = self.table("ablation", "excess"), self.table("ablation", "scan")
        found |= numbers.of_ablation(excess, scan, heads)
        found |= numbers.of_attention(self.table("attention", "attention"), heads)
        names = ("strongest", "explained", "dependents")
        found |= numbers.of_trace(*(self.table("composition", name) for name in names))
        if self.has_series:
            found |= numbers.of_sizes(self.table("effective_size", "effective_size"))
        return found


def _sections(results: Results) -> list[Section]:
    parts = [_model, _subnetworks, _core, _ablation, _attention, _composition]
    return [make(results) for make in (*parts, *([_sizes] if results.has_series else []))]


def build(results: Results, facts: numbers.Facts, settings: str, command: str, made: str) -> Report:
    """The whole report."""
    summary = Section(
        "summary",
        "Summary",
        sentences.findings(facts),
        notes=[
            "✓ the numbers show what the paper describes, ✗ they do not. Each number in bold leads "
            "back to a file of the run folder."
        ],
    )
    done = json.loads((results.place("inputs") / "done.json").read_text())["settings"]
    about = {
        "Command": command,
        "Versions": ", ".join(f"{name} {version(name)}" for name in PACKAGES)
        + f", Python {platform.python_version()}",
        "Seeds": ", ".join(map(str, results.config.seeds)),
        "Model": f"{results.config.model} (fingerprint {done['model']})",
        "Rows": ", ".join(f"{name} {done[name]}" for name in ("train", "id", "ood")),
    }
    lead = (
        f"The subnetworks of {results.config.model}: what they share, what they do outside the "
        f"training domain, and why. Made with hc_lens {__version__} after Bhaskar, Friedman and "
        "Chen, The Heuristic Core (ACL 2024)."
    )
    return Report(results.config.title, lead, [summary, *_sections(results)], settings, about, made)


def _model(results: Results) -> Section:
    table = results.table("evaluate", "evaluation")
    return Section(
        "model",
        "The full model",
        items=[_table(table, "evaluate/evaluation.csv", "Accuracy by case")],
    )


def _subnetworks(results: Results) -> Section:
    config = results.config
    spread = results.table("core", "spread")
    runs, full = results.table("subnetworks", "runs"), results.table("subnetworks", "full")
    final = pick(runs, runs["checkpoint"] == config.final)
    shown = pick(final, (final["dataset"] == "id") | final["case"].isin(results.cases))
    items: list[Any] = [
        Drawing.of(
            subnetworks_figures.spread_figure(shown, full),
            "Accuracy of every subnetwork by case: a dot for each seed, a line for the full model",
        )
    ]
    if results.has_series:
        grid = results.table("grid", "runs")
        of_final = grid["checkpoint"] == config.final
        looked_at = (grid["dataset"] == "id") | grid["case"].isin(results.cases)
        grid = pick(grid, of_final & looked_at)
        drawing = subnetworks_figures.sparsity_figure(grid, results.table("grid", "full"))
        items.append(Drawing.of(drawing, "Accuracy against sparsity, final model"))
    items.append(_table(spread, "core/spread.csv", "Accuracy over seeds"))
    return Section("subnetworks", "Subnetworks of many seeds", items=items)


def _core(results: Results) -> Section:
    first, second = results.config.sparsities[0], results.config.sparsities[-1]
    table = results.table("core", "frequencies")
    drawing = subnetworks_figures.frequency_scatter(table, first, second, results.core["core"])
    items = [
        Drawing.of(
            drawing, "How often each head is kept, at the two sparsities; the core is marked"
        ),
        _table(table, "core/frequencies.csv", "How often each head is kept"),
    ]
    return Section("core", "The core", items=items)


def _ablation(results: Results) -> Section:
    excess, scan = results.table("ablation", "excess"), results.table("ablation", "scan")
    heads = results.core["looked_at"]
    joint = pick(excess, excess["size"] == len(heads))
    percents = dict.fromkeys(("drop", "sum_of_drops", "excess", "low", "high"), "points")
    styles = percents | {"p": "probability", "p_holm": "probability"}
    columns = [name for name in joint if name not in ("set", "size")]
    single = pick(scan, ["set", "dataset", "case", "n", "accuracy", "accuracy_change", "kl"])
    items = [
        Drawing.of(
            superadditive.figure(joint, joint["set"].iloc[0]),
            "Loss of accuracy: the heads together, and the sum of each alone",
        ),
        _table(
            pick(joint, columns), "ablation/excess.csv", "The heads together, in points", styles
        ),
        _table(single, "ablation/scan.csv", "Every ablation", {"accuracy_change": "points"}),
    ]
    if len(minimal := results.table("ablation", "minimal")):
        items.append(
            _table(minimal, "ablation/minimal.csv", "Smallest super-additive sets", styles)
        )
    return Section("ablation", "Ablation", items=items)


def _attention(results: Results) -> Section:
    table = results.table("attention", "attention")
    heads = results.core["looked_at"]
    drawing = lexical_overlap_figures.figure(table, heads, mark=results.core["core"])
    maps = lexical_overlap_figures.heat_maps(table, ["overlap"], mark=results.core["core"])
    chosen = pick(table, table["unit"].isin(heads))
    columns = ["unit", "score", "value", "low", "high", "chance", "permuted", "n", "role"]
    shares = dict.fromkeys(columns[2:7], "percent")
    items: list[Any] = [
        Drawing.of(drawing, "What these heads look at"),
        Drawing.of(maps, "Attention to the same word in the other sentence, every head"),
        _table(
            pick(chosen, columns), "attention/attention.csv", "Attention of these heads", shares
        ),
    ]
    for path in sorted(results.place("attention").glob("pattern-*.html")):
        items.append(Html(path.read_text(encoding="utf-8")))
    return Section("attention", "What the core looks at", items=items)


def _composition(results: Results) -> Section:
    tables = {
        "strongest": "The strongest edges, mean over the adversarial cases",
        "explained": "Edges patched together, against removing the head",
        "dependents": "Heads cut off from the core",
        "agreement": "Rank agreement of the gradient's edges with the exact ones",
    }
    changes = ("accuracy_change", "total_accuracy_change", "ablated_accuracy_change")
    styles = dict.fromkeys(changes, "points") | {"share": "percent", "spearman": "two"}
    drawing = composition.figure(results.trace())
    items: list[Any] = [Drawing.of(drawing, "Who reads the core: the strongest edges")]
    for name, title in tables.items():
        table = results.table("composition", name)
        items.append(_table(table, f"composition/{name}.csv", title, styles))
    return Section("composition", "Who reads the core", items=items)


def _sizes(results: Results) -> Section:
    table = results.table("effective_size", "effective_size")
    items = [
        Drawing.of(effective_size_figures.figure(table), "Effective size by checkpoint"),
        _table(table, "effective_size/effective_size.csv", "Effective size, percent of the units"),
    ]
    return Section("effective_size", "Effective size", items=items)


def _table(
    frame: pd.DataFrame, source: str, title: str, styles: Mapping[str, str] | None = None
) -> Table:
    shares = dict.fromkeys([name for name in SHARES if name in frame], "percent")
    return Table(frame, f"steps/{source}", title, shares | dict(styles or {}))
