"""What a sweep runs: checkpoints x sparsities x seeds, as settings that go through a file.

The sparsities of a seed are runs of their own, or all come from one run: a path.

Models and rows are named by text (`hc_lens.data.specs`), so another process or machine reads the
same ones. Everything is checked when the settings are made (`hc_lens.settings`): a sweep of many
hours does not find a wrong sparsity at its end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from hc_lens.data.specs import DataSpec
from hc_lens.errors import HcLensError, check_choice
from hc_lens.pruning.config import LossName, PathConfig, PruneConfig
from hc_lens.settings import check, make, plain, read_settings

PRESETS = {"reference": PruneConfig.reference}
"""Named sets of pruning settings."""


@dataclass(frozen=True)
class SweepConfig:
    """Which runs a sweep holds."""

    checkpoints: Mapping[str, str]
    """Name -> model string of `hc_lens.data.specs.read_model`, in order of training."""
    train: DataSpec
    """Rows to prune on."""
    evaluation: Mapping[str, DataSpec]
    """Name -> rows that every subnetwork is evaluated on, such as ``id`` and ``ood``."""
    sparsities: tuple[float, ...]
    """Fractions of the units to remove."""
    seeds: tuple[int, ...]
    """Seeds of the pruning."""
    prune: Mapping[str, Any] = field(default_factory=dict)
    """`PruneConfig` settings other than sparsity and seed, or those of `PathConfig`;
    ``preset = "reference"`` starts from those of the public code, which has no paths."""
    metrics: tuple[str, ...] = ()
    """What else every subnetwork and full model is scored by, such as ``logit_difference``."""
    means: DataSpec | None = None
    """Rows of the mean activations; None for those of `train`."""
    model_labels: tuple[str, ...] = ()
    """Names of the checkpoints' logits in order, where their own are placeholders (``LABEL_0``)."""
    as_paths: bool = False
    """Whether all sparsities of a seed come from one run (`hc.prune_path`), with `PathConfig`
    settings in `prune`; else each is a run of its own."""

    def __post_init__(self) -> None:
        check(self, "the sweep")
        for name in ("checkpoints", "evaluation", "sparsities", "seeds"):
            if not getattr(self, name):
                raise HcLensError(f"expected at least one entry in {name}, got none; add one")
        for name, listed in (("sparsity", "sparsities"), ("seed", "seeds")):
            numbers = getattr(self, listed)
            twice = sorted({number for number in numbers if numbers.count(number) > 1})
            if twice:
                raise HcLensError(
                    f"expected each of {listed} once, got {twice} more than once; a run is the "
                    "same each time, so leave the repetition out"
                )
            if name in self.prune:
                raise HcLensError(
                    f"expected {name} among the sweep's own lists, got it in the prune settings; "
                    f"write {listed} = [...]"
                )
        if self.prune.get("preset") is not None:
            check_choice("a preset", self.prune["preset"], () if self.as_paths else PRESETS)
        if callable(self.prune.get("loss")):
            raise HcLensError(
                f"expected a loss with a name ({', '.join(get_args(LossName))}) in a sweep, got a "
                "function, which another process cannot read; call hc.prune for each run instead"
            )
        if self.metrics:
            from hc_lens.metrics import check_metrics

            check_metrics(self.metrics)
        for sparsity in self.sparsities:
            self.prune_config(sparsity, self.seeds[0])

    def groups(self) -> list[tuple[float, ...]]:
        """The sparsities that come from one pruning: each alone, or all of a path."""
        return [self.sparsities] if self.as_paths else [(each,) for each in self.sparsities]

    def prune_config(self, sparsity: float, seed: int) -> PruneConfig | PathConfig:
        """The pruning settings of one run; those of a path are the same for all its sparsities."""
        if self.as_paths:
            described = {**self.prune, "sparsities": self.sparsities, "seed": seed}
            return make(PathConfig, described, "the prune settings of a path")
        start = PRESETS.get(self.prune.get("preset", ""), PruneConfig)(sparsity, seed)
        given = {name: value for name, value in self.prune.items() if name != "preset"}
        return make(PruneConfig, {**plain(start), **given}, "the prune settings")

    @property
    def n_runs(self) -> int:
        """Number of subnetworks: checkpoints x sparsities x seeds."""
        return len(self.checkpoints) * len(self.sparsities) * len(self.seeds)

    @classmethod
    def from_dict(cls, described: Mapping[str, Any]) -> SweepConfig:
        """The sweep that plain values describe, such as those of a settings file."""
        return make(cls, described, "the sweep")

    @classmethod
    def from_file(cls, path: str | Path) -> SweepConfig:
        """The sweep that a ``.toml``, ``.yaml`` or ``.yml`` file describes."""
        return make(cls, read_settings(Path(path)), Path(path).name)

    def describe(self) -> dict[str, Any]:
        """The settings as plain values, which `from_dict` reads."""
        return plain(self)
