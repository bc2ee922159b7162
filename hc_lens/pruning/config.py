"""The settings of pruning: of one sparsity, and of a path through several.

1. `GateSettings` is what both share: how gates are trained.
2. `PruneConfig` finds one subnetwork. `PruneConfig.reference(...)` makes the choices of the
   Heuristic Core's public code, so that its results can be compared with ours.
3. `PathConfig` finds one subnetwork a sparsity in a single run (`hc_lens.pruning.path`).

Nothing here imports torch, so that a command line can read the settings at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from hc_lens.errors import HcLensError, check_choice, check_count
from hc_lens.metric_names import SmoothName
from hc_lens.settings import plain_value

Method = Literal["gates", "random", "importance", "greedy", "top-k"]
"""Ways to find a subnetwork; `hc_lens.pruning.train.METHODS` has their functions."""
LossName = Literal[SmoothName, "cross-entropy"]
"""What a subnetwork can be found by, by name."""
BETA = 2 / 3
"""Temperature of the hard-concrete gates."""
STRETCH = (-0.1, 1.1)
"""Interval of the gates before clamping."""


def n_removed(sparsity: float, n_units: int) -> int:
    """round(sparsity x units); a sparsity that removes nothing or everything is an HcLensError."""
    if not 0.0 < sparsity < 1.0:
        raise HcLensError(
            f"expected a sparsity between 0 and 1 (the fraction of units removed), got {sparsity}; "
            "write 5% as 0.05"
        )
    removed = round(sparsity * n_units)
    if not 0 < removed < n_units:
        raise HcLensError(
            f"expected a sparsity that removes between 1 and {n_units - 1} of {n_units} units, got "
            f"{sparsity}, which rounds to {removed}; choose another"
        )
    return removed


@dataclass(frozen=True, kw_only=True)
class GateSettings:
    """How gates are trained, to one sparsity or through several."""

    steps: int
    """Number of updates."""
    accumulate: int = 1
    """Batches per update."""
    warmup: float
    """Share of the steps over which the target sparsity rises."""
    loss: LossName | Callable[..., Any] = "kl"
    """KL to the full model, cross-entropy with the labels, the squared change of a metric (see
    `hc_lens.metrics`), or a function of (logits, batch) that gives one loss per row, from the
    logits where the row is read. Gates and greedy minimise it. Importance takes the gradient of the
    metric itself; KL has none at the full model, so with "kl" it takes that of the cross-entropy.
    Random units need no loss."""
    lr: float = 0.1
    """Learning rate of log_alpha."""
    lambda_lr: float = 0.05
    """Learning rate of the first multiplier."""
    lambda_2_lr: float = 2.0
    """Learning rate of the second multiplier; high against the first, it holds the sparsity to
    within lambda_1 / (2 lambda_2) of the target."""
    lr_warmup: float = 0.02
    """Share of the steps over which the learning rate rises."""
    lr_hold: float = 0.8
    """Share of the steps after which the learning rate begins to fall, linearly to zero."""
    decay_lambdas: bool = False
    """Whether the multipliers' learning rate follows that schedule too."""
    weight_decay: float = 0.0
    """AdamW's weight decay, on log_alpha and on the multipliers."""
    momentum_2: float = 0.99
    """AdamW's second decay rate."""
    clip: float | None = None
    """Largest norm of the gradient of log_alpha and the multipliers together."""
    init_mean: float = 2.5
    """Mean of log_alpha at the start."""
    init_std: float = 0.01
    """Standard deviation of log_alpha at the start."""
    warm_start: float = 0.0
    """How far apart log_alpha starts for units that matter and units that do not, by a few batches
    (`hc_lens.pruning.warm`); 0 for none."""
    beta: float = BETA
    """Temperature of the gates."""
    stretch: tuple[float, float] = STRETCH
    """Interval of the gates before clamping."""
    per_row: bool = True
    """Whether each row of a batch gets its own draw of the gates."""
    expected_sparsity: bool = True
    """Whether the penalty uses the expected sparsity, or that of the draw."""
    by_module: bool = False
    """Whether the units that the public code zeroes module by module are removed first."""
    keep: tuple[str, ...] = ()
    """Labels of units that are never removed."""
    bfloat16: bool = False
    """Whether the model runs in bfloat16 under the gates (``torch.autocast``); faster where the
    processor has the instructions for it."""
    heads_only: bool = False
    """Whether all MLPs are kept; the sparsity still counts all units."""

    def check(self) -> None:
        """Refuse settings that cannot be trained with."""
        if not callable(self.loss):
            names = get_args(LossName)
            check_choice("loss as a function of (logits, batch), or one", self.loss, names)
        check_count("steps", self.steps)
        check_count("accumulate", self.accumulate)
        for name in ("warmup", "lr_warmup", "lr_hold"):
            if not 0 <= getattr(self, name) <= 1:
                raise HcLensError(
                    f"expected {name} as a share of the steps between 0 and 1, got "
                    f"{getattr(self, name)}; divide the number of steps by steps={self.steps}"
                )
        if self.warm_start < 0:
            raise HcLensError(
                f"expected a warm_start of 0 or more, got {self.warm_start}; 1 moves the start of "
                "a unit that is one standard deviation above the mean up by 1"
            )

    @property
    def warmup_steps(self) -> int:
        """Steps over which the target sparsity rises."""
        return round(self.warmup * self.steps)

    @property
    def top(self) -> float:
        """The sparsity to which the target rises."""
        raise NotImplementedError

    def target(self, step: int) -> float:
        """Scheduled sparsity at a step: up linearly over the warm-up, then flat."""
        return self.top * (1.0 if step >= self.warmup_steps else step / self.warmup_steps)

    def rate(self, step: int) -> float:
        """Factor on the learning rate at a step: up linearly, flat, down linearly."""
        rise, hold = self.lr_warmup * self.steps, self.lr_hold * self.steps
        if step <= rise:
            return step / rise
        return 1.0 if step <= hold else (self.steps - step + 1) / (self.steps - hold + 1)

    def describe(self) -> dict[str, Any]:
        """Every setting as a plain value, also those at their defaults; a loss by its name."""
        return {name: plain_value(value) for name, value in vars(self).items()}


@dataclass(frozen=True)
class PruneConfig(GateSettings):
    """How to find a subnetwork."""

    sparsity: float
    """Fraction of the units to remove, between 0 and 1."""
    seed: int = 0
    """Seed of the gates and of the order of the batches; 0 as in ``hc-lens prune``. The paper's
    seeds are 42 to 53."""
    method: Method = "gates"
    """Hard-concrete gates, the top k units by a straight-through mask (`hc_lens.pruning.topk`), or
    one of the baselines of `hc_lens.pruning.baselines`."""
    steps: int = field(default=400, kw_only=True)
    """Number of updates."""
    warmup: float = field(default=0.6, kw_only=True)
    """Share of the steps over which the target sparsity rises."""
    patience: int | None = field(default=None, kw_only=True)
    """Stop when the binary mask has not changed for so many steps after the warm-up."""

    def __post_init__(self) -> None:
        n_removed(self.sparsity, 10**9)
        check_choice("a method", self.method, get_args(Method))
        self.check()

    @property
    def wanted(self) -> tuple[float, ...]:
        """The sparsities at which a mask is read off."""
        return (self.sparsity,)

    @property
    def top(self) -> float:
        """The sparsity to which the target rises."""
        return self.sparsity

    @classmethod
    def reference(cls, sparsity: float, seed: int = 0, **changes: Any) -> PruneConfig:
        """The choices of the public code, where they change results.

        - log_alpha starts at N(10, 0.01), where almost every gate is 1 and hardly any gradient
          flows; AdamW's default weight decay of 0.01, on log_alpha and on the multipliers, is what
          first pulls the gates down.
        - The current sparsity is that of one draw of the gates, shared by the batch.
        - lambda_2 only grows; the multipliers' learning rate rises and decays with that of
          log_alpha, so the target is reached with the rate at a few percent.
        - log_alpha and the multipliers are clipped together at norm 1.
        - 6500 + 50 p steps of target warm-up and 6 p more, for p percent, 200 of them of learning
          rate warm-up; `steps` keeps these shares at another total.
        - The units that the expected counts zero in each module are removed first. The count is
          exact here all the same; `HardConcrete.binarize_by_module` has the code's own threshold.
        Left out, so that equal numbers are not to be expected:
        - An update there sees 128 rows, as 4 batches of 32 with a draw of the gates each. Here it
          sees one of the given batches: pass ``accumulate=4`` with batches of about 32 rows.
        - Rows are shuffled anew in every epoch there. Here the batches come in a new order, but
          the rows of a batch stay together, and they are of about equal length.
        - The learning rate is 0 at the first update there, and one update behind ours after it.
        - Dropout in the pruned model, a reference model that is itself gated, pads in the means and
          rows padded to 128.
        """
        percent = 100 * sparsity
        warmup, total = 6500 + 50 * percent, 6500 + 56 * percent
        choices: dict[str, Any] = {
            "steps": round(total),
            "warmup": warmup / total,
            "lambda_lr": 1.0,
            "lambda_2_lr": 1.0,
            "lr_warmup": 200 / total,
            "lr_hold": 200 / total,
            "decay_lambdas": True,
            "weight_decay": 0.01,
            "momentum_2": 0.999,
            "clip": 1.0,
            "init_mean": 10.0,
            "per_row": False,
            "expected_sparsity": False,
            "by_module": True,
        }
        return cls(sparsity=sparsity, seed=seed, **{**choices, **changes})


@dataclass(frozen=True)
class PathConfig(GateSettings):
    """How to find one subnetwork a sparsity in a single run."""

    sparsities: tuple[float, ...]
    """Fractions of the units to remove, from the lowest to the highest."""
    seed: int = 0
    """Seed of the gates and of the order of the batches."""
    steps: int = field(default=1500, kw_only=True)
    """Number of updates, over all sparsities."""
    warmup: float = field(default=0.9, kw_only=True)
    """Share of the steps over which the target sparsity rises."""
    lead: float = field(default=0.04, kw_only=True)
    """How far the target is above a sparsity when its mask is read off: the gates follow the target
    with a delay, and a unit that has only begun to close may open again."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "sparsities", tuple(self.sparsities))
        if not self.sparsities:
            raise HcLensError("expected at least one sparsity in a path, got none; name some")
        for sparsity in self.sparsities:
            n_removed(sparsity, 10**9)
        if list(self.sparsities) != sorted(set(self.sparsities)):
            raise HcLensError(
                "expected the sparsities of a path from the lowest to the highest and each once, "
                f"got {list(self.sparsities)}; give sorted(set(sparsities))"
            )
        if not 0 <= self.lead < 1 or self.warmup <= 0:
            raise HcLensError(
                "expected a lead of at least 0 and below 1 and a warmup above 0, got "
                f"lead={self.lead}, warmup={self.warmup}; the target of a path has to rise"
            )
        self.check()

    @property
    def wanted(self) -> tuple[float, ...]:
        """The sparsities at which a mask is read off."""
        return self.sparsities

    @property
    def top(self) -> float:
        """The sparsity to which the target rises: a lead above the highest, all units at most."""
        return min(self.sparsities[-1] + self.lead, 1.0)

    def passed(self, sparsity: float, step: int) -> bool:
        """Whether the mask of a sparsity is read off after a step: the highest at the end."""
        if sparsity == self.sparsities[-1]:
            return step == self.steps
        # A little less, as 0.1 + 0.1 and 0.9 * 20 / 90 are not the same to the last bit.
        return self.target(step) >= min(sparsity + self.lead, self.top) - 1e-9
