"""Settings of the scores, of training and of the desk-scale study.

This module imports nothing heavy, so that a command line can be made from it at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from hc_lens.errors import HcLensError, check_choice, check_count

Score = Literal["informative", "downstream", "upstream"]
Method = Literal["linear", "exact"]
Level = Literal["component", "position"]
SCORES: tuple[Score, ...] = get_args(Score)
SetName = Literal["first-hop", "second-hop", "invented"]
"""Names of the sets of facts that `facts.named_set` makes."""


@dataclass(frozen=True)
class ScoreConfig:
    """Which scores to compute, and how."""

    method: Method = "linear"
    """linear takes gradients, exact makes every change and runs the model again."""
    by: Level = "component"
    """Score each component as a whole, or each token position of it alone."""
    which: tuple[Score, ...] = SCORES
    """The scores to compute."""
    gradient_at_z: bool = False
    """Take the gradients of heads' linear upstream scores at z, before W_O, as the authors' code
    does; the one of the model after fine-tuning then passes through its new W_O."""
    n_counterfactuals: int = 10
    """Counterfactual prompts per question, for the upstream score; a small set may have fewer."""
    seed: int = 0
    """Seed of the draw of counterfactual prompts."""
    max_rows: int = 512
    """Largest number of prompts to run at once."""

    def __post_init__(self) -> None:
        check_choice("method", self.method, get_args(Method))
        check_choice("by", self.by, get_args(Level))
        for score in self.which:
            check_choice("which", score, SCORES)
        check_count("the number of scores in which", len(self.which))
        check_count("max_rows", self.max_rows)
        if self.gradient_at_z and self.method != "linear":
            raise HcLensError(
                "expected gradient_at_z with method='linear', which takes gradients, got "
                f"method={self.method!r}; leave gradient_at_z out"
            )


@dataclass(frozen=True)
class TrainConfig:
    """How to fine-tune on questions."""

    steps: int = 60
    """Number of gradient steps."""
    lr: float = 1e-3
    """Largest learning rate."""
    batch_size: int = 32
    """Largest number of questions per step."""
    warmup: int = 20
    """Steps over which the learning rate rises from 0."""
    seed: int = 0
    """Seed of the order of the questions."""

    def __post_init__(self) -> None:
        check_count("steps", self.steps)
        check_count("batch_size", self.batch_size)
        if self.lr <= 0:
            raise HcLensError(f"expected lr above 0, got {self.lr}; try 1e-5")


@dataclass(frozen=True)
class DeskConfig:
    """Sizes and training of the desk-scale study."""

    n_layers: int = 4
    """Layers of the model."""
    d_model: int = 64
    """Width of the model; its MLPs are four times as wide."""
    n_heads: int = 4
    """Heads per layer."""
    n_cities: int = 20
    """Cities in the tests, and so the number of options."""
    n_known_cities: int = 40
    """Further cities, whose mayors the second-hop corpus names."""
    n_known_people: int = 400
    """People in the first-hop corpus."""
    n_invented_people: int = 200
    """People to train the invented relation on; its test has one more person for every city."""
    pretraining: TrainConfig = TrainConfig(steps=500, lr=3e-3, batch_size=64)
    """Training on the corpus."""
    facts: TrainConfig = TrainConfig(steps=60, lr=1e-3, batch_size=20)
    """Fine-tuning on new facts."""
    invented: TrainConfig = TrainConfig(steps=120, lr=1e-3, batch_size=64)
    """Each phase of the ordering and grafting experiments."""
    n_counterfactuals: int = 10
    """Counterfactual prompts per question, for the upstream score."""
