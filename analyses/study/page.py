"""The report of a study, from the files of its run folder alone.

The summary says what the facts show (`hc_lens.analyses.study.findings`). A section for
each step follows, with the paper's figures and the tables (`hc_lens.show.report`).
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib.metadata import version
from typing import Any

import pandas as pd

from hc_lens import __version__
from hc_lens.analyses import composition, superadditive
from hc_lens.analyses.effective_size import figures as effective_size_figures
from hc_lens.analyses.lexical_overlap import figures as lexical_overlap_figures
from hc_lens.analyses.study.config import StudyConfig
from hc_lens.analyses.study.findings import Facts, say
from hc_lens.analyses.study.results import Results, one_case_in_domain
from hc_lens.analyses.subnetworks import figures as subnetworks_figures
from hc_lens.analyses.tables import RUN
from hc_lens.data.known import FRIENDLY
from hc_lens.metrics import SHARE
from hc_lens.show import Attention
from hc_lens.show.kept import load_figures
from hc_lens.show.report import Drawing, Report, Section, Table

PACKAGES = ("hc-lens", "torch", "transformer-lens", "transformers", "datasets")
"""The packages whose versions the report names."""
COLUMNS = {
    "percent": "accuracy frequency full min max mean std sparsity share value chance permuted "
    "friendly adversarial balanced said_share joint",
    "points": "drop sum_of_drops excess low high accuracy_change total_accuracy_change "
    "ablated_accuracy_change sum_of_losses",
    "probability": "p p_holm p_interaction",
    "two": "spearman",
}
"""The columns that are shown in each style, in every table."""
LABELS = ["said", "said_share"]
"""The columns of both sides that tell which label is said most."""
STYLES = {column: style for style, columns in COLUMNS.items() for column in columns.split()}


def build(results: Results, facts: Facts, config: StudyConfig, command: str) -> Report:
    """The whole report."""
    inputs = results.inputs
    packages = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    about = {
        "Command": command,
        "Versions": f"{packages}, Python {platform.python_version()}",
        "Seeds": ", ".join(map(str, config.seeds)),
        "Model": f"{config.model} (fingerprint {inputs['model']})",
        "Rows": ", ".join(f"{name} {inputs[name]}" for name in ("train", "id", "ood")),
    }
    domain = "rows that they are found on" if config.train.is_prompts else "training domain"
    lead = (
        f"The subnetworks of {config.model}: what they share, what they do outside the "
        f"{domain}, and why. Made with hc_lens {__version__} after Bhaskar, Friedman and Chen, The "
        "Heuristic Core (ACL 2024)."
    )
    note = (
        "✓ the numbers show what the paper describes, ✗ they do not, · they cannot tell. Each "
        "number in bold leads back to a file of the run folder."
    )
    evaluation = _table(
        results,
        "evaluate/evaluation",
        "Accuracy by case"
        + (
            " and its 95% interval"
            if config.train.is_prompts
            else ", its 95% interval, and how often each label is predicted"
        ),
        low="percent",
        high="percent",
    )
    sections = [
        Section("summary", "Summary", say(facts), notes=[note]),
        Section("model", "The full model", items=[evaluation]),
        _subnetworks(results, config),
        _core(results, config.sparsities),
        _ablation(results),
        _attention(results, config),
        _composition(results),
        *([_sizes(results)] if config.checkpoints else []),
    ]
    made = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    return Report(config.title, lead, sections, config.to_toml(), about, made)


def _subnetworks(results: Results, config: StudyConfig) -> Section:
    def shown(step: str) -> tuple[pd.DataFrame, pd.DataFrame]:
        """The runs of the final model, and the full models, on the cases that the page follows."""
        runs = results.table(f"{step}/runs")
        runs = runs.loc[runs["checkpoint"] == config.final]
        cases = results.inputs["adversarial"]
        full = _followed(results.table(f"{step}/full"), ["checkpoint"], cases)
        return _followed(runs, list(RUN), cases), full

    items: list[Table | Drawing | Attention] = [
        Drawing.of(
            subnetworks_figures.spread_figure(*shown("subnetworks")),
            "Accuracy of every subnetwork by case: a dot for each seed, a line for the full model",
        )
    ]
    if config.checkpoints:
        drawing = subnetworks_figures.sparsity_figure(*shown("grid"))
        items.append(Drawing.of(drawing, "Accuracy against sparsity, final model"))
    both = "The cases that the heuristic gets right (friendly) and wrong (adversarial), by seed"
    # Of prompts no label is said.
    told = results.table("core/sides").drop(columns=LABELS if config.train.is_prompts else [])
    sides = _table(results, "core/sides", both, told)
    items += [sides] if sides.frame["balanced"].notna().any() else []
    items.append(_table(results, "core/spread", "Accuracy over seeds"))
    return Section("subnetworks", "Subnetworks of many seeds", items=items)


def _followed(table: pd.DataFrame, keys: list[str], cases: Sequence[str]) -> pd.DataFrame:
    """The accuracies in domain and on the adversarial cases, and the mean of the friendly ones."""
    table = one_case_in_domain(table, keys)
    friendly = table.loc[table["side"] == FRIENDLY]
    mean: Any = friendly.groupby([*keys, "dataset"], sort=False)["accuracy"].mean().reset_index()
    chosen = table.loc[(table["dataset"] == "id") | table["case"].isin(list(cases))]
    together = pd.concat([chosen, mean.assign(case="friendly cases, mean")])
    return together.loc[:, [*keys, "dataset", "case", "accuracy"]]


def _core(results: Results, sparsities: tuple[float, ...]) -> Section:
    table = _table(results, "core/frequencies", "How often each head is kept")
    figure = subnetworks_figures.frequency_scatter(
        table.frame, sparsities[0], sparsities[-1], results.core["core"]
    )
    title = "How often each head is kept, at the two sparsities; the core is marked"
    return Section("core", "The core", items=[Drawing.of(figure, title), table])


def _ablation(results: Results) -> Section:
    excess, scan = results.table("ablation/excess"), results.table("ablation/scan")
    joint = excess.loc[excess["size"] == len(results.heads)]
    # The verdict goes by what is corrected; both corrections are over all rows of the file.
    together = joint.drop(columns=["set", "size", "p"])
    together.insert(2, "verdict", together.pop("verdict"))
    title = "The heads together, in points; p corrected over every set and case that was tested"
    each = scan.loc[:, ["set", "dataset", "case", "n", "accuracy", "accuracy_change", "kl"]]
    items = [
        Drawing.of(
            superadditive.figure(joint, joint["set"].iloc[0]),
            "Loss of accuracy: the heads together, and the sum of what each loses alone",
        ),
        _table(results, "ablation/excess", title, together),
        _table(results, "ablation/scan", "Every ablation", each),
    ]
    minimal = _table(results, "ablation/minimal", "Smallest super-additive sets")
    items += [minimal] if len(minimal.frame) else []
    return Section("ablation", "Ablation", items=items)


def _attention(results: Results, config: StudyConfig) -> Section:
    title, patterns = "What the core looks at", load_figures(results.folders["attention"])
    if config.train.is_prompts:
        note = "Patterns on a few prompts. Scores of lexical overlap need pairs of sentences."
        return Section("attention", title, items=patterns, notes=[note])
    name, core = "attention/attention", results.core["core"]
    table = results.table(name)
    shown = ["unit", "score", "value", "low", "high", "chance", "permuted", "n"]
    chosen = table.loc[table["unit"].isin(results.heads), shown]
    items = [
        Drawing.of(
            lexical_overlap_figures.figure(table, results.heads, mark=core),
            "What these heads look at",
        ),
        Drawing.of(
            lexical_overlap_figures.heat_maps(table, ["overlap"], mark=core),
            "Attention to the same word in the other sentence, every head",
        ),
        _table(results, name, "Attention of these heads", chosen, low="percent", high="percent"),
        *patterns,
    ]
    return Section("attention", title, items=items)


def _composition(results: Results) -> Section:
    titles = {
        "strongest": "The strongest edges, mean over the adversarial cases",
        "explained": "Edges patched together, against removing the head",
        "dependents": "Heads cut off from the core",
        "agreement": "Rank agreement of the gradient's edges with the exact ones",
    }
    trace = composition.Trace.load(results.folders["composition"])
    items = [
        Drawing.of(composition.figure(trace), "Who reads the core: the strongest edges"),
        *(_table(results, f"composition/{name}", title) for name, title in titles.items()),
    ]
    return Section("composition", "Who reads the core", items=items)


def _sizes(results: Results) -> Section:
    title = "Effective size, percent of the units"
    table = _table(results, "effective_size/effective_size", title)
    drawing = Drawing.of(effective_size_figures.figure(table.frame), "Effective size by checkpoint")
    return Section("effective_size", "Effective size", items=[drawing, table])


def _table(
    results: Results, name: str, title: str, shown: pd.DataFrame | None = None, **styles: str
) -> Table:
    """A table of a step, or the rows and columns of it that are shown."""
    frame = results.table(name) if shown is None else shown
    shares = {column: "percent" for column in frame if column.startswith(SHARE)}
    return Table(frame, f"steps/{name}.csv", title, STYLES | shares | styles)
