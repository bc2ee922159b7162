"""The command ``hc-lens analyse composition``, and its findings in words."""

from __future__ import annotations

from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hc_lens.analyses.composition.config import TraceConfig
from hc_lens.cli import options
from hc_lens.cli.work import Work
from hc_lens.data.known import WITH_ADVERSARIAL
from hc_lens.data.specs import ORGANISM

if TYPE_CHECKING:
    from hc_lens.analyses.composition.tracing import Trace


MOST_TOKENS = 128
"""Texts are cut to so many tokens, unless another number is given."""


@options.changes(TraceConfig, "limit")
class Tracing:
    """How edges are followed."""


@options.section("Model")
class TracedModel(options.Checkpoint):
    """Which model."""

    model: str = ORGANISM


@options.section("Rows")
class TracedRows(options.HeldOutRows):
    """Which rows, of a split that was held out."""

    task: str = ORGANISM
    limit: int | None = 200
    max_length: int | None = None
    """Most tokens of a text; 128 if not given. Prompts are never cut."""


@options.section("Out of domain")
class TracedOod(options.Ood):
    """A second task, of a split that was held out."""

    ood: str | None = None
    """Second task, out of domain; '' for none. By default agreement-ood for agreement, organism-ood
    for the organism, none for others."""
    ood_limit: int | None = 800


@options.section()
class Settings(options.OnRows):
    """Whose edges, on which rows."""

    core: options.Names
    """The core heads, such as L0.H6,L1.H1."""
    checkpoint: TracedModel = field(default_factory=TracedModel)
    rows: TracedRows = field(default_factory=TracedRows)
    ood: TracedOod = field(default_factory=TracedOod)
    tracing: Tracing = field(default_factory=Tracing)
    means_limit: int = 2000
    """Most training rows to collect means over."""
    threads: int = 0
    """CPU threads; 0 leaves the choice to PyTorch."""


def run(settings: Settings, work: Work) -> None:
    """Who reads the core heads: the edges from them, exactly, by gradient and by weights."""
    import torch

    from hc_lens.analyses.composition.tracing import trace
    from hc_lens.models.reading import is_classifier

    if settings.threads:
        torch.set_num_threads(settings.threads)
    config = TraceConfig(**options.given(settings.tracing))
    model = work.model(settings.checkpoint)
    rows, ood = settings.rows, settings.ood
    if ood.ood is None:
        ood = replace(ood, ood=WITH_ADVERSARIAL.get(rows.task))
    if is_classifier(model):
        rows = replace(rows, max_length=min(rows.max_length or MOST_TOKENS, model.cfg.n_ctx))
    datasets = {}
    for name, spec in {"id": rows.spec(), "ood": ood.spec(rows)}.items():
        if spec is not None:
            datasets[name] = work.rows(model, work.held_out(spec))
    if not work.begin():
        return
    means = work.means(model, settings.replacement, rows.spec(limit=settings.means_limit))
    core = [unit for part in settings.core for unit in part.replace("+", " ").split()]
    found = trace(model, datasets, means, core, config, progress=work.progress)

    def write(folder: Path) -> None:
        found.save(folder)
        found.figure().savefig(folder / "edges.png", dpi=150)

    work.keep(write)
    work.finish(found.strongest(15), text=summary(found))


def summary(found: Trace) -> str:
    """The strongest edges, what they explain, the dependents and the agreement, as text."""
    from hc_lens.metrics import over_cases

    weights = found.edges[["sender", "receiver", "kind", "weight_excess"]].drop_duplicates()
    edges = found.strongest(15).drop(columns="agreement").merge(weights, how="left")
    shares = found.explained
    names = {"total_kl": "kl_total", "total_margin_change": "margin_change_total"}
    measures = ["kl", "margin_change", *names]
    both = over_cases(shares, ["sender", "patched", "dataset"], measures).rename(columns=names)
    both["share"] = both["kl"] / both["kl_total"]
    tops = shares.loc[shares["patched"] == "top", ["sender", "receivers"]].drop_duplicates()
    parts = [
        f"strongest edges of {', '.join(found.core)} (norms {found.norms}), means over datasets",
        edges.round(3).to_string(index=False),
        "\npatched together, against ablating the sender; the top edges are",
        "\n".join(f"  {sender}: {heard}" for sender, heard in tops.itertuples(index=False)),
        both.round(3).to_string(index=False),
        "\nheads outside the core, cut off from all core heads",
        _dependents(found),
        f"\nrank correlation of attribution with the exact change of the {found.metric}",
        found.agreement.round(3).to_string(index=False),
    ]
    return "\n".join(parts)


def _dependents(found: Trace, n: int = 8) -> str:
    """The n heads that depend most on the core, as text."""
    from hc_lens.metrics import over_cases

    table = found.dependents
    if table.empty:
        return "none: no head outside the core reads after a core head"
    names = {"ablated_kl": "kl_ablated", "ablated_accuracy_change": "accuracy_change_ablated"}
    first = table.loc[table["head"].isin(table["head"].unique()[:n])]
    both = over_cases(first, ["head", "dataset"], ["kl", "accuracy_change", *names])
    return both.rename(columns=names).round(3).to_string(index=False)
