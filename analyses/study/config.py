"""The settings of a study: which model, which rows, how many subnetworks.

1. `StudyConfig` holds everything that decides the results. `to_toml` writes all of it, and
   `read_settings` reads it back unchanged.
2. `demo` is the study of the bundled organism.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hc_lens.data.specs import ORGANISM, DataSpec
from hc_lens.errors import HcLensError
from hc_lens.organism import steps as organism_steps
from hc_lens.organism.grammar import CONSTRUCTIONS
from hc_lens.pruning.config import PathConfig
from hc_lens.settings import make, plain_value, write_toml
from hc_lens.settings import read_settings as read_file
from hc_lens.sweeps.config import SweepConfig
from hc_lens.sweeps.sizes import PAPER_SEEDS, TWENTIETHS

PAPER_CASES = {
    "hans": (
        "lexical_overlap_ln_subject-object_swap",
        "lexical_overlap_ln_preposition",
        "constituent_cn_embedded_under_if",
        "constituent_cn_embedded_under_verb",
    ),
    "organism-ood": tuple(CONSTRUCTIONS),
}
"""The adversarial cases that the paper follows, and those of the organism."""
FINAL = "final"
"""Name of the model of the study among the checkpoints, if the series does not hold it."""


@dataclass(frozen=True)
class StudyConfig:
    """What a study does."""

    model: str
    """The final model: ``organism``, a directory or a Hub id."""
    train: DataSpec
    """Rows to prune on and to take means over."""
    evaluation: Mapping[str, DataSpec]
    """The rows ``id`` (in domain) and ``ood`` (out of domain)."""
    title: str = "The heuristic core"
    """Heading of the report."""
    adversarial: tuple[str, ...] = ()
    """Cases of ``ood`` that the heuristic gets wrong; empty for all that it does, or all."""
    checkpoints: Mapping[str, str] = field(default_factory=dict)
    """Checkpoints before the final model in order of training, name to model; may be empty."""
    model_labels: tuple[str, ...] = ()
    """What the models' logits mean, in order, if their checkpoints do not say it."""
    early: str | None = None
    """Checkpoint from before generalisation, whose core is compared with the final one."""
    sparsities: tuple[float, ...] = (0.5, 0.7)
    """Fractions of the units to remove."""
    seeds: tuple[int, ...] = PAPER_SEEDS
    """Seeds of the subnetworks at each sparsity."""
    prune: Mapping[str, Any] = field(default_factory=dict)
    """Other settings of ``hc.PruneConfig``."""
    grid: tuple[float, ...] = TWENTIETHS
    """Sparsities for the effective size of each checkpoint."""
    grid_seeds: tuple[int, ...] = PAPER_SEEDS[:3]
    """Seeds of the grid."""
    grid_as_paths: bool = True
    """Whether the grid's sparsities of a seed come from one path (`hc.prune_path`); separate runs
    where `prune` names a preset or another method, which have no paths."""
    grid_prune: Mapping[str, Any] = field(default_factory=dict)
    """What differs from `prune` for the grid: settings of ``hc.PathConfig``, which has its own
    number of updates, or of ``hc.PruneConfig`` for separate runs."""
    core_fraction: float = 1.0
    """A core head is in at least this share of the subnetworks."""
    margin: float = 0.03
    """How far from the full model a subnetwork may be to count for the effective size."""
    scan_rows: int = 4000
    """About how many rows of ``id`` and of the adversarial cases are in the ablation scan."""
    attention_rows: int = 500
    """Rows of ``id`` whose attention is scored; prompts are not."""
    trace_rows: int = 800
    """About how many rows of ``id`` and of the adversarial cases are in the composition trace."""
    examples: int = 3
    """Rows whose attention patterns are shown."""

    def __post_init__(self) -> None:
        if set(self.evaluation) != {"id", "ood"} or len(set(self.sparsities)) < 2:
            raise HcLensError(
                "expected evaluation rows named 'id' and 'ood' and two sparsities or more, got "
                f"{sorted(self.evaluation)} and {list(self.sparsities)}; give exactly these"
            )
        object.__setattr__(self, "sparsities", tuple(sorted(self.sparsities)))
        if self.checkpoints.get(FINAL, self.model) != self.model:
            raise HcLensError(
                f"expected no checkpoint named {FINAL!r} other than the model itself, got "
                f"{self.checkpoints[FINAL]!r}; give it another name"
            )
        if self.early is not None and self.early not in self.checkpoints:
            raise HcLensError(
                f"expected the early checkpoint to be one of the series {list(self.checkpoints)}, "
                f"got {self.early!r}; give its name, or name it among the checkpoints"
            )
        if not 0 < self.core_fraction <= 1:
            raise HcLensError(
                f"expected a core_fraction above 0 and at most 1, got {self.core_fraction}"
            )
        # Making the sweeps checks their settings.
        self.sweep()
        self.grid_sweep()

    @property
    def final(self) -> str:
        """The final model's name among the checkpoints."""
        known = [name for name, model in self.checkpoints.items() if model == self.model]
        return known[0] if known else FINAL

    def sweep(self) -> SweepConfig:
        """The subnetworks of the final model (and of the early one) at the chosen sparsities."""
        early = {} if self.early is None else {self.early: self.checkpoints[self.early]}
        return SweepConfig(
            checkpoints=early | {self.final: self.model},
            train=self.train,
            evaluation=self.evaluation,
            sparsities=self.sparsities,
            seeds=self.seeds,
            prune=self.prune,
            model_labels=self.model_labels,
        )

    @property
    def in_paths(self) -> bool:
        """Whether the grid consists of paths."""
        prune = {**self.prune, **self.grid_prune}
        return (
            self.grid_as_paths and "preset" not in prune and prune.get("method") in (None, "gates")
        )

    def grid_settings(self) -> Mapping[str, Any]:
        """Settings of the pruning of the grid."""
        if not self.in_paths:
            return {**self.prune, **self.grid_prune}
        shared = {each.name for each in dataclasses.fields(PathConfig)} - {"steps", "warmup"}
        of_both = {name: value for name, value in self.prune.items() if name in shared}
        return {**of_both, **self.grid_prune}

    def grid_sweep(self) -> SweepConfig:
        """The subnetworks of every checkpoint at all sparsities of the grid."""
        before = {name: model for name, model in self.checkpoints.items() if name != self.final}
        return dataclasses.replace(
            self.sweep(),
            checkpoints={**before, self.final: self.model},
            sparsities=self.grid,
            seeds=self.grid_seeds,
            prune=self.grid_settings(),
            as_paths=self.in_paths,
        )

    def to_toml(self) -> str:
        """All settings, defaults included, as a TOML file."""
        values = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        return write_toml(
            {name: plain_value(value) for name, value in values.items() if value not in (None, ())}
        )


def read_settings(path: str | Path) -> StudyConfig:
    """The settings of a study, from its ``study.toml``."""
    return make(StudyConfig, read_file(Path(path)), str(path))


def demo(full: bool = False) -> StudyConfig:
    """The study of the organism: minutes on two cores, or the paper's size."""
    _, *series, last = organism_steps()
    chosen = [*series, last] if full else [400, 800, last]
    return StudyConfig(
        model=ORGANISM,
        title="The heuristic core of the organism",
        train=DataSpec(ORGANISM, split="train", limit=6000, token_budget=512),
        evaluation={
            "id": DataSpec(ORGANISM, split="validation", limit=2000 if full else 400),
            "ood": DataSpec("organism-ood", limit_per_case=None if full else 160),
        },
        adversarial=PAPER_CASES["organism-ood"],
        checkpoints={
            str(step): ORGANISM if step == last else f"{ORGANISM}:{step}" for step in chosen
        },
        early="400",
        seeds=PAPER_SEEDS if full else PAPER_SEEDS[:6],
        prune={"steps": 500 if full else 400},
        grid=TWENTIETHS[1:] if full else (0.2, 0.4, 0.6, 0.8),
        grid_seeds=PAPER_SEEDS[: 3 if full else 2],
        grid_prune={"steps": 1500 if full else 400},
        trace_rows=800 if full else 400,
    )
