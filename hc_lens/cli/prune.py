"""``hc-lens prune``: find one subnetwork.

The folder of ``--out`` gets the subnetwork (``hc.Subnetwork.load`` reads it) and the means that
replace its removed units, unless ``--means`` names others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hc_lens.cli import options
from hc_lens.cli.run import MEANS, Run
from hc_lens.cli.settings import Context
from hc_lens.errors import HcLensError
from hc_lens.spec import check_keys

if TYPE_CHECKING:
    from hc_lens.pruneconfig import PruneConfig

FILES = ("subnetwork.json", "subnetwork.safetensors")

Reference = Annotated[
    bool, typer.Option("--reference", help="Begin from the choices of the paper's public code.")
]
Method = Annotated[str | None, typer.Option(help="gates, random, importance or greedy.")]
Steps = Annotated[int | None, typer.Option(help="Number of updates.")]
Keep = Annotated[
    list[str] | None,
    typer.Option(
        callback=options.split,
        metavar="A,B,...",
        help="Units that are never removed, such as L0.H1.",
    ),
]
HeadsOnly = Annotated[bool, typer.Option("--heads-only", help="Keep all MLPs.")]


def command(
    context: Context,
    model: options.Model,
    task: options.TaskName,
    sparsity: Annotated[float, typer.Option(help="Fraction of the units to remove.")],
    out: options.Out,
    seed: options.Seed = 0,
    steps: Steps = None,
    method: Method = None,
    keep: Keep = None,
    heads_only: HeadsOnly = False,
    reference: Reference = False,
    settings: options.Settings = None,
    means: options.MeansFile = None,
    path: options.RowsPath = None,
    split: options.Split = None,
    limit: options.Limit = None,
    max_length: options.MaxLength = None,
    token_budget: options.TokenBudget = 4096,
    rows_seed: options.RowsSeed = 0,
    columns: options.Columns = None,
    label: options.Label = "label",
    labels: options.Labels = None,
    case: options.Case = None,
    device: options.Device = None,
    force: options.Force = False,
    as_json: options.Json = False,
    config: options.Config = None,
) -> None:
    """Find a subnetwork that does what the model does."""
    from hc_lens.prune import prune

    changes = prune_settings(context.params)
    chosen = prune_config(sparsity, seed, changes)
    run = Run(context, writes=(*FILES, MEANS))
    hooked = run.model()
    batches = run.rows(hooked, options.rows(run.values))
    if not run.begin():
        return
    source = run.means(hooked, batches)
    run.screen.note(f"pruning with {chosen.method} to sparsity {sparsity:g}, seed {seed}")
    try:
        found = prune(hooked, batches, source, chosen, progress=run.progress)
    except HcLensError as error:
        if error.finished is not None:
            place = error.finished.save(run.folder / "last-good")
            run.screen.note(f"the last good subnetwork is in {place}")
        raise
    found.save(run.folder)
    run.finish(
        units=len(found.space),
        kept=found.kept,
        removed=found.removed,
        sparsity=found.sparsity,
        seed=seed,
        **_last_step(found.history),
    )


def _last_step(history: Any) -> dict[str, float]:
    if history is None or history.empty or "loss" not in history:
        return {}
    return {"loss": float(history["loss"].iloc[-1])}


def prune_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a pruning other than sparsity and seed, as the options give them."""
    given = {name: values[name] for name in ("keep", "heads_only") if values.get(name)}
    given |= {name: values[name] for name in ("steps", "method") if values.get(name) is not None}
    given |= read_settings(values.get("settings") or ())
    return {**({"preset": "reference"} if values.get("reference") else {}), **given}


def prune_config(sparsity: float, seed: int, changes: Mapping[str, Any]) -> PruneConfig:
    """The PruneConfig of some settings."""
    from hc_lens.pruneconfig import PruneConfig

    given: dict[str, Any] = {key: value for key, value in changes.items() if key != "preset"}
    if "keep" in given:
        given["keep"] = tuple(given["keep"])
    make = PruneConfig.reference if "preset" in changes else PruneConfig
    return make(sparsity=sparsity, seed=seed, **given)


def read_settings(given: Sequence[str]) -> dict[str, Any]:
    """The settings of ``--set lr=0.05``; each must be one of PruneConfig, of its kind."""
    from hc_lens.pruneconfig import PruneConfig

    fields = {field.name: field for field in dataclasses.fields(PruneConfig)}
    known = [name for name in fields if name not in ("sparsity", "seed")]
    found = {}
    for text in given:
        name, equals, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if not equals:
            raise HcLensError(f"expected --set NAME=VALUE, got {text!r}; write --set lr=0.05")
        check_keys([name], known, "--set")
        found[name] = _read(name, value.strip(), fields[name].default)
    return found


def _read(name: str, text: str, default: Any) -> Any:
    """A value of the kind of the setting's default."""
    kind = {"clip": float, "patience": int}.get(name, type(default))
    try:
        if kind is bool:
            return {"true": True, "false": False}[text.lower()]
        if kind is tuple:
            parts = [part.strip() for part in text.strip("()[]").split(",") if part.strip()]
            return tuple(map(float, parts)) if name == "stretch" else tuple(parts)
        return kind(text)
    except (ValueError, KeyError):
        raise HcLensError(
            f"expected {name} as {kind.__name__}, such as {default!r}, got {text!r}; "
            "see hc.PruneConfig"
        ) from None
