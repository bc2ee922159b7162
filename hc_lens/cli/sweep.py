"""``hc-lens sweep``: many subnetworks, over checkpoints, sparsities and seeds.

1. The sweep comes from a TOML or YAML file (``hc.SweepConfig.from_file``), or from the options.
2. Its runs go to ``--store``, by default ``runs`` below ``--out``. A run that is there is not run
   again: the same command continues after a stop, and sweeps that share a store share their runs.
3. The table of this sweep and its settings go to ``--out``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hc_lens.cli import options
from hc_lens.cli.prune import Preset, Pruning
from hc_lens.cli.work import Work
from hc_lens.data.specs import DataSpec
from hc_lens.errors import HcLensError
from hc_lens.sweeps.config import SweepConfig
from hc_lens.sweeps.sizes import SIZES, SizeName

if TYPE_CHECKING:
    import pandas as pd

    from hc_lens.sweeps import engines

FREE = (
    *("checkpoints", "sparsity", "seeds"),
    *("store", "engine", "workers", "cpus", "gpus", "address", "device"),
)
"""What may change when a sweep is continued in its folder: more runs, or elsewhere."""


@options.section("Rows")
class SweepRows(options.Rows):
    """The rows to prune on; a file may describe them instead."""

    task: str = ""


@options.section("Rows")
class Evaluation:
    """The rows to evaluate on."""

    held_out: str | None = None
    """Split of --task to evaluate on; by default the validation or test split."""
    evaluation_limit: int | None = None
    """Most rows to evaluate on, of each task."""

    def specs(self, inside: DataSpec, outside: DataSpec | None) -> dict[str, DataSpec]:
        """The rows in domain, and those out of domain if there are any, of held-out splits."""
        limits = {"limit": self.evaluation_limit, "limit_per_case": None}
        found = {"id": replace(inside, split=self.held_out, **limits)}
        found |= {} if outside is None else {"ood": outside}
        return {name: spec.held_out() for name, spec in found.items()}


@options.section()
class Settings:
    """Which runs, and where."""

    file: Path | None = field(default=None, kw_only=False)
    """TOML or YAML file of the sweep, instead of options."""
    checkpoints: options.Names = ()
    """Checkpoints, each as MODEL or NAME=MODEL."""
    rows: SweepRows = field(default_factory=SweepRows)
    size: SizeName | None = None
    """How much is done, where an option does not say it: quick, standard or paper."""
    as_paths: bool = False
    """Find all sparsities of a seed in one run."""
    sparsity: options.Numbers = ()
    """Fractions of the units to remove, such as 0.5,0.7."""
    seeds: options.Seeds = ()
    """Seeds of the pruning, such as 0,1,2 or 0-11."""
    loading: options.Loading = field(default_factory=options.Loading)
    evaluation: Evaluation = field(default_factory=Evaluation)
    ood: options.Ood = field(default_factory=options.Ood)
    more: options.Metrics = field(default_factory=options.Metrics)
    preset: Preset = field(default_factory=Preset)
    pruning: Pruning = field(default_factory=Pruning)
    store: str | None = None
    """Store of the runs: a folder or an address; by default the folder runs in --out."""
    engine: Literal["local", "ray"] = "local"
    """What runs them: processes of this machine, or a Ray cluster."""
    workers: options.Workers = None
    """Processes at once; by default one for each core."""
    cpus: float = 1
    """Ray: processors of each run."""
    gpus: float = 0
    """Ray: GPUs of each run."""
    address: str | None = None
    """Ray: address of the cluster."""
    output: options.Folder
    table: options.Table = field(default_factory=options.Table)

    def config(self) -> SweepConfig:
        """The sweep of the options."""
        size = None if self.size is None else SIZES[self.size]
        amount = None if size is None else size.paths if self.as_paths else size.apart
        needed: dict[str, Any] = {
            "checkpoints": self.checkpoints,
            "task": self.rows.task,
            "sparsity": self.sparsity or (amount and amount.sparsities),
            "seeds": self.seeds or (amount and amount.seeds),
        }
        missing = [f"--{name}" for name, value in needed.items() if not value]
        if missing:
            raise HcLensError(
                f"expected a file, or all of --{', --'.join(needed)}, missing "
                f"{', '.join(missing)}; see hc-lens sweep --help"
            )
        inside, evaluation = self.rows.spec(), self.evaluation
        limit = outside_limit = evaluation.evaluation_limit
        if size and limit is None:
            limit, outside_limit = size.evaluation_rows, size.ood_rows
        if size and inside.limit is None and inside.limit_per_case is None:
            inside = replace(inside, limit=size.rows)
        outside = self.ood.spec(self.rows, limit=outside_limit)
        steps = {} if self.preset.reference or amount is None else {"steps": amount.steps}
        return SweepConfig(
            checkpoints=named_models(self.checkpoints),
            train=inside,
            evaluation=replace(evaluation, evaluation_limit=limit).specs(inside, outside),
            sparsities=needed["sparsity"],
            seeds=needed["seeds"],
            prune={**steps, **self.preset.prune(self.pruning)},
            as_paths=self.as_paths,
            metrics=self.more.checked(),
            model_labels=self.loading.model_labels,
        )

    def placed(self) -> engines.Engine:
        """The engine of the options."""
        from hc_lens.sweeps import engines

        device = self.loading.device
        if self.engine == "local":
            return engines.Local(self.workers, device=device or "cpu")
        resources = {"cpus": self.cpus, "gpus": self.gpus, "address": self.address}
        return engines.Ray(self.workers, **resources, device=device)


def run(settings: Settings, work: Work) -> None:
    """Find subnetworks for many checkpoints, sparsities and seeds."""
    from hc_lens.sweeps.sweep import sweep

    engine = settings.placed()
    if settings.file is None:
        config = settings.config()
        if settings.size is not None:
            work.note(SIZES[settings.size].announced(settings.size))
    else:
        work.check_alone(settings.file, FREE[3:])
        config = SweepConfig.from_file(settings.file)
    work.begin(by_seed, free=FREE, resumes=True)
    store = settings.store or str(work.folder / "runs")
    if settings.size is not None:
        work.note(_expected(config, settings))
    work.note(f"{config.n_runs} runs in {store}; what is there is not run again")
    runs = sweep(config, store=store, engine=engine, progress=True, say=work.note)
    work.finish(
        runs.table,
        runs=len(runs.subnetworks),
        failed=len(runs.failed),
        checkpoints=list(runs.checkpoints),
        store=store,
    )
    runs.check_finished()


def _expected(config: SweepConfig, settings: Settings) -> str:
    from hc_lens.sweeps.estimate import expected
    from hc_lens.sweeps.perform import Loaded

    one = Loaded(config, next(iter(config.checkpoints)), settings.loading.device)
    return expected([config], one.model, one.train, one.data, settings.workers)


def named_models(given: Sequence[str]) -> dict[str, str]:
    """Checkpoints by name, from MODEL or NAME=MODEL."""
    found = {}
    for text in given:
        name, equals, model = text.partition("=")
        named = equals and not os.path.exists(text)
        found[name if named else text] = model if named else text
    return found


def by_seed(table: pd.DataFrame) -> pd.DataFrame:
    """One line per checkpoint, sparsity and dataset: means over seeds, and the accuracy's range.

    A seed's numbers are means over the `n` rows of all cases. Where cases have sides, the mean
    accuracy of the friendly and of the adversarial ones follows, the balanced accuracy, which is
    the mean of both, and the label that is said most often.
    """
    from hc_lens.metrics import NAMED, by_side, over_cases

    keys = ["checkpoint", "sparsity", "dataset"]
    further = [name for name in table.columns if name in NAMED and name != "accuracy"]
    each: Any = over_cases(table, [*keys, "seed"], ("accuracy", *further))
    means = (
        each.groupby(keys, sort=False)
        .agg(
            seeds=("seed", "size"),
            n=("n", "first"),
            accuracy=("accuracy", "mean"),
            lowest=("accuracy", "min"),
            highest=("accuracy", "max"),
            **{name: (name, "mean") for name in further},
        )
        .reset_index()
    )
    return means.merge(by_side(table, keys).dropna(axis=1, how="all"), on=keys)
