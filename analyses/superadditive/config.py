"""The settings of the super-additivity analysis and of its screen of pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from hc_lens.errors import HcLensError, check_choice

Measure = Literal["accuracy", "probability", "logit"]
"""What a drop is a drop of: being right, the gold label's probability, or its log-odds."""
Smooth = Literal["probability", "logit"]
"""The measures that have a gradient."""
Method = Literal["gradient", "hessian"]
"""How an interaction is estimated."""


@dataclass(frozen=True)
class ExcessConfig:
    """How the excess of a set is measured, and its interval."""

    measure: Measure = "accuracy"
    """What a drop is a drop of: accuracy, the gold label's probability, or its log-odds."""
    n_resamples: int = 2000
    """Number of bootstrap resamples."""
    level: float = 0.95
    """Coverage of the interval."""
    seed: int = 0
    """Seed of the bootstrap; each case has its own stream, so that cases do not change others."""

    def __post_init__(self) -> None:
        check_choice("a measure", self.measure, get_args(Measure))
        if self.n_resamples < 100 or not 0 < self.level < 1:
            raise HcLensError(
                "expected at least 100 resamples and a level between 0 and 1, got "
                f"{self.n_resamples} and {self.level}; the defaults are 2000 and 0.95"
            )


@dataclass(frozen=True)
class SuperAdditiveConfig(ExcessConfig):
    """Which sets of units are ablated together, and how their excess is measured."""

    joint: tuple[str, ...] = ()
    """Sets to ablate together, such as L2.H5+L3.H7; without any, all core heads at once."""
    pool: tuple[str, ...] = ()
    """Units within which minimal super-additive subsets are looked for."""
    max_size: int = 3
    """Largest subset of the pool."""
    limit: int | None = None
    """Number of rows of each dataset to use, always the same sample; without it, all rows."""
    memory: int | str = "1GB"
    """Most bytes to hold beside the model and the results, such as 500_000_000 or 2GB."""


@dataclass(frozen=True)
class ScreenConfig:
    """How the interactions of pairs are estimated, and which pairs are measured."""

    case: str | None = None
    """Use the rows of this case alone; without it, all rows."""
    method: Method = "gradient"
    """How an interaction is estimated: exact in one unit of the pair, or second order in both."""
    measure: Smooth = "probability"
    """What the interaction is in: the gold label's probability, or its log-odds."""
    top: int = 20
    """Number of pairs with the largest estimates to measure."""
    check: int | None = 40
    """Number of random pairs to measure, drawn from all; None measures every pair."""
    n_resamples: int = 2000
    """Number of bootstrap resamples of the measured excess."""
    seed: int = 0
    """Seed of the random pairs and of the bootstrap."""
    memory: int | str = "1GB"
    """Most bytes to hold beside the model and the results, such as 500_000_000 or 2GB."""

    def __post_init__(self) -> None:
        check_choice("a method", self.method, get_args(Method))
        check_choice("a measure", self.measure, get_args(Smooth))
        if self.top < 0 or (self.check is not None and self.check < 3):
            raise HcLensError(
                f"expected top of at least 0 and check of at least 3 pairs, got {self.top} and "
                f"{self.check}; an estimate is not given without its rank correlation with the "
                "truth"
            )
