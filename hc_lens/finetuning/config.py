"""The settings of fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hc_lens.errors import HcLensError, check_choice


@dataclass(frozen=True)
class FinetuneConfig:
    """Settings of a fine-tuning run; the defaults are BERT's usual ones (Devlin et al. 2019)."""

    steps: int
    """Number of optimizer steps."""
    batch_size: int = 32
    """Rows of a step."""
    learning_rate: float = 2e-5
    """Highest learning rate."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises from 0."""
    weight_decay: float = 0.0
    """AdamW's weight decay, on weight matrices and embeddings."""
    clip: float = 1.0
    """Largest norm of the gradient."""
    max_length: int | None = None
    """Cut longer rows to this many tokens; without it they are an error."""
    checkpoint_every: int = 500
    """Steps from one evaluation and checkpoint to the next."""
    checkpoint_at: tuple[int, ...] = ()
    """Further steps with an evaluation and a checkpoint."""
    evaluation_rows: int | None = None
    """At most this many rows of each evaluation task, drawn with the seed."""
    seed: int = 42
    """Decides the new classifier's weights, the order of the rows and dropout."""
    split: str = "train"
    """Split of the task to train on."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "learning_rate", "clip", "checkpoint_every"):
            if getattr(self, name) <= 0:
                raise HcLensError(f"expected {name} above 0, got {getattr(self, name)}; raise it")
        for name, given in (
            ("warmup_steps", [self.warmup_steps]),
            ("checkpoint_at", self.checkpoint_at),
        ):
            strange = [step for step in given if not 0 <= step <= self.steps]
            if strange:
                raise HcLensError(
                    f"expected {name} from 0 to steps ({self.steps}), got {strange}; correct it"
                )

    @classmethod
    def paper(cls, task: str = "mnli", **changes: Any) -> FinetuneConfig:
        """How The Heuristic Core fine-tuned bert-base-cased on MNLI, or on QQP.

        From the authors' released ``scripts/ft.sh``: seed 42, learning rate 2e-5, at most 128
        tokens, a checkpoint every 500 steps; MNLI 61,360 steps of 32 rows (5 epochs), QQP 40,000
        steps of 128 rows. The script leaves the rest to Hugging Face's Trainer, whose defaults
        are: no warm-up, no weight decay, gradient norm at most 1. `changes` replaces single
        fields.
        """
        scales = {"mnli": (61_360, 32), "qqp": (40_000, 128)}
        check_choice("a task that the paper fine-tunes on", task, scales)
        steps, batch_size = scales[task]
        return replace(cls(steps, batch_size, max_length=128), **changes)

    def saves_at(self, step: int) -> bool:
        """Whether a step has an evaluation and a checkpoint."""
        regular = step % self.checkpoint_every == 0
        return regular or step == self.steps or step in self.checkpoint_at

    def rate(self, step: int) -> float:
        """Learning rate of a step, counted from 0."""
        if step < self.warmup_steps:
            return self.learning_rate * step / self.warmup_steps
        return self.learning_rate * (self.steps - step) / max(1, self.steps - self.warmup_steps)
