"""The settings of the effective size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from hc_lens.errors import HcLensError, check_choice

Average = Literal["seeds-first", "seeds-last"]
"""Accuracies averaged over seeds and compared once, or each seed compared and sizes averaged."""


@dataclass(frozen=True)
class SizeConfig:
    """When a subnetwork does what the model does, and on which rows."""

    margin: float = 0.03
    """How far from the full model a subnetwork may be, as a fraction."""
    average: Average = "seeds-first"
    """What is averaged over seeds: accuracies (as in the paper), or sizes."""
    monotone: bool = False
    """Stop at the first sparsity that fails, or that no run measured."""
    one_sided: bool = False
    """Let a better subnetwork always pass; by default, one better by more than the margin fails."""
    id: str = "id"
    """Name of the in-domain dataset."""
    ood: str | None = "ood"
    """Name of the out-of-domain dataset; None for the in-domain dataset alone."""
    cases: tuple[str, ...] = ()
    """Cases of the out-of-domain dataset to use, such as the adversarial ones; by default all."""
    chance: Mapping[str, float] = field(default_factory=dict)
    """Chance level of each dataset, 1 / labels, by its name; that of mix is their mean."""

    def __post_init__(self) -> None:
        check_choice("average", self.average, get_args(Average))
        if not 0 <= self.margin < 1:
            raise HcLensError(
                "expected the margin as a fraction of 0 or more and below 1, got "
                f"{self.margin}; 3 points are 0.03"
            )
        unknown = [name for name in self.chance if name not in (self.id, self.ood)]
        if unknown:
            raise HcLensError(
                f"expected chance levels of the datasets {[self.id, self.ood]}, got one of "
                f"{unknown[0]!r}; name the datasets as in the table"
            )
