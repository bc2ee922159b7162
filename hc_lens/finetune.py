"""Fine-tuning of a Hugging Face sequence classifier, with a checkpoint series.

1. The model is a directory, a Hub id, a model object or a configuration (a fresh model). A model
   without a classifier gets one with the task's labels.
2. Row order: epoch e is a permutation drawn from (seed, e); step s takes the next `batch_size`
   rows. Dropout at step s is drawn from (seed, s). Both depend on nothing else, so that a resumed
   run repeats them exactly.
3. Loss: negative log of the probability of the gold label (cross-entropy); where several model
   labels mean one task label, of their summed probability.
4. AdamW without weight decay on biases and norms, gradients clipped by norm, learning rate linear
   from 0 over the warm-up and then down to 0.
5. At step 0, every `checkpoint_every` steps and at the end: accuracy of every case of the
   evaluation tasks, and a checkpoint (`hc_lens.checkpoints`).

On one machine and one thread count, a run that was killed and started again ends with the same
bits as one that was not.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor, nn
from tqdm.auto import tqdm

from hc_lens import checkpoints
from hc_lens.data import Batch, Batches, Task
from hc_lens.errors import HcLensError
from hc_lens.evaluate import evaluate
from hc_lens.models import load, mask_of
from hc_lens.trainable import reopen, trainable

EvaluationTask = Task | tuple[Task, str]


@dataclass(frozen=True)
class FinetuneConfig:
    """Settings of a fine-tuning run; the defaults are BERT's usual ones (Devlin et al. 2019)."""

    steps: int
    """Number of optimizer steps."""
    batch_size: int = 32
    """Rows a step."""
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

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "learning_rate", "clip", "checkpoint_every"):
            if getattr(self, name) <= 0:
                raise HcLensError(
                    f"expected {name} above 0, got {getattr(self, name)}; see FinetuneConfig"
                )
        if not 0 <= self.warmup_steps <= self.steps:
            raise HcLensError(
                f"expected warmup_steps from 0 to steps ({self.steps}), got {self.warmup_steps}; "
                "the warm-up is part of the steps"
            )
        strange = [step for step in self.checkpoint_at if not 0 <= step <= self.steps]
        if strange:
            raise HcLensError(
                f"expected checkpoint_at between 0 and steps ({self.steps}), got {strange}; "
                "leave these out"
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
        if task not in scales:
            raise HcLensError(
                f"expected a task that the paper fine-tunes on, {list(scales)}, got {task!r}; "
                "write FinetuneConfig(steps=...) for another"
            )
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


@dataclass(frozen=True)
class FinetuneResult:
    """What a run left behind."""

    folder: Path
    """Folder of the run."""
    history: pd.DataFrame = field(repr=False)
    """One row per checkpoint, dataset and case: step, loss (mean training loss since the last
    checkpoint, NaN at step 0), dataset, case, n, accuracy."""

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that have a checkpoint."""
        return checkpoints.steps(self.folder)

    def checkpoint(self, step: int | None = None) -> Path:
        """Folder of a checkpoint, by default the last."""
        known = self.steps
        if step is not None and step not in known:
            raise HcLensError(
                f"expected a step with a checkpoint, {list(known)}, got {step}; pick one of these"
            )
        return checkpoints.place(self.folder, known[-1] if step is None else step)

    def load(self, step: int | None = None, **settings: Any) -> Any:
        """A checkpoint as ``hc.load`` gives it, by default the last."""
        return load(self.checkpoint(step), **settings)


def finetune(
    model: Any,
    task: Task,
    folder: str | Path,
    config: FinetuneConfig,
    *,
    split: str = "train",
    evaluation: Mapping[str, EvaluationTask] | None = None,
    tokenizer: Any = None,
    device: str | torch.device | None = None,
    progress: bool = True,
) -> FinetuneResult:
    """Fine-tune a sequence classifier on a task; go on where an earlier call was stopped.

    Args:
        model: a directory, a Hub id, a Hugging Face model object (which stays as it is) or a
            Hugging Face configuration for a fresh model.
        task: what to train on; labels are matched to the model's by name.
        folder: where the run goes. If it holds this run, training resumes from its last
            checkpoint; a folder with another run is an HcLensError.
        config: the settings.
        split: the task's split to train on.
        evaluation: tasks to score at every checkpoint, by name; ``(task, split)`` picks a split.
        tokenizer: needed with a model object or a configuration, else the checkpoint's own.
        device: where to train; by default TransformerLens's choice.
        progress: show a progress bar.
    """
    if not task.labels:
        raise HcLensError(
            f"expected a task with labels to train on, got {task.name} without; "
            "name its label column with label=..."
        )
    folder = Path(folder)
    with torch.random.fork_rng():
        torch.manual_seed(_seed(config, "weights", 0))
        hf_model, tokenizer = trainable(model, task.labels, tokenizer)
    hooked = load(hf_model, tokenizer=tokenizer, device=device)
    train = task.batches(hooked, split, max_length=config.max_length)
    scored = {
        name: _evaluation_batches(hooked, given, config)
        for name, given in (evaluation or {}).items()
    }
    run = {
        "format": "hc_lens.finetune.1",
        "config": asdict(config),
        "model": hooked.fingerprint,
        "data": train.fingerprint,
        "evaluation": {name: batches.fingerprint for name, batches in scored.items()},
    }
    checkpoints.open_run(folder, run)
    done = checkpoints.steps(folder)
    if done:
        hf_model = reopen(checkpoints.place(folder, done[-1]))
    hf_model.to(hooked.cfg.device)
    del hooked  # a second copy of the weights
    trainer = _Trainer(folder, config, hf_model, tokenizer, train, scored)
    with torch.random.fork_rng():
        history = trainer.run(done[-1] if done else None, progress)
    return FinetuneResult(folder, history)


@dataclass
class _Trainer:
    """One run in memory."""

    folder: Path
    config: FinetuneConfig
    model: Any
    tokenizer: Any
    train: Batches
    scored: dict[str, Batches]

    def run(self, start: int | None, progress: bool) -> pd.DataFrame:
        """Train from a checkpoint's step, or from the beginning, to the end."""
        optimizer = _optimizer(self.model, self.config)
        if start is None:
            start, history = 0, self._save(0, math.nan, optimizer, pd.DataFrame())
        else:
            checkpoint = checkpoints.place(self.folder, start)
            history = checkpoints.read_history(checkpoint)
            if start < self.config.steps:
                checkpoints.restore_optimizer(checkpoint, self.model, optimizer)
        losses: list[float] = []
        steps = range(start, self.config.steps)
        with tqdm(total=self.config.steps, initial=start, disable=not progress) as bar:
            for step in steps:
                losses.append(self._step(step, optimizer))
                bar.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
                bar.update()
                if self.config.saves_at(step + 1):
                    loss = sum(losses) / len(losses)
                    history = self._save(step + 1, loss, optimizer, history)
                    losses = []
        return history

    def _step(self, step: int, optimizer: torch.optim.Optimizer) -> float:
        for group in optimizer.param_groups:
            group["lr"] = self.config.rate(step)
        torch.manual_seed(_seed(self.config, "dropout", step))
        batch = self.train.gather(rows_of(step, self.train.n_rows, self.config))
        self.model.train()
        logits = self.model(**_hf_inputs(batch)).logits
        loss = nn.functional.nll_loss(self.train.log_probs(logits), batch.labels)
        if not torch.isfinite(loss):
            raise HcLensError(
                f"expected a finite loss, got {loss.item()} at step {step + 1}; lower the learning "
                f"rate ({self.config.learning_rate}) or lengthen the warm-up, in a new folder"
            )
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        optimizer.step()
        return loss.item()

    def _save(
        self, step: int, loss: float, optimizer: torch.optim.Optimizer, history: pd.DataFrame
    ) -> pd.DataFrame:
        self.model.eval()
        if self.scored:
            hooked = load(self.model, tokenizer=self.tokenizer, device=self.model.device)
            table = evaluate(hooked, self.scored, progress=False)
            table = table.loc[:, ["dataset", "case", "n", "accuracy"]]
        else:
            table = pd.DataFrame({"dataset": [""], "case": [""], "n": [0], "accuracy": [math.nan]})
        table.insert(0, "step", step)
        table.insert(1, "loss", loss)
        history = pd.concat([history, table], ignore_index=True) if len(history) else table
        checkpoints.write(self.folder, step, self.model, self.tokenizer, optimizer, history)
        return history


def _evaluation_batches(model: Any, given: EvaluationTask, config: FinetuneConfig) -> Batches:
    task, split = given if isinstance(given, tuple) else (given, None)
    return task.batches(
        model,
        split,
        limit=config.evaluation_rows,
        seed=config.seed,
        max_length=config.max_length,
    )


def rows_of(step: int, n_rows: int, config: FinetuneConfig) -> list[int]:
    """The rows of a step: the next `batch_size` of an endless row of seeded permutations."""
    first = step * config.batch_size
    rows: list[int] = []
    while len(rows) < config.batch_size:
        epoch, place = divmod(first + len(rows), n_rows)
        wanted = config.batch_size - len(rows)
        rows += _permutation(config, n_rows, epoch)[place : place + wanted].tolist()
    return rows


@lru_cache(maxsize=2)
def _permutation(config: FinetuneConfig, n_rows: int, epoch: int) -> Int[Tensor, " rows"]:
    generator = torch.Generator().manual_seed(_seed(config, "rows", epoch))
    return torch.randperm(n_rows, generator=generator)


def _seed(config: FinetuneConfig, purpose: str, number: int) -> int:
    digest = hashlib.sha256(f"{config.seed} {purpose} {number}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _optimizer(model: nn.Module, config: FinetuneConfig) -> torch.optim.Optimizer:
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate)


def _hf_inputs(batch: Batch) -> dict[str, Tensor]:
    inputs = {"input_ids": batch.tokens, "attention_mask": mask_of(batch.inputs)}
    if "token_type_ids" in batch.inputs:
        inputs["token_type_ids"] = batch.inputs["token_type_ids"]
    return inputs
