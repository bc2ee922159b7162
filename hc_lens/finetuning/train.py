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
   evaluation tasks, and a checkpoint (`hc_lens.finetuning.checkpoints`).

On one machine and one thread count, a run that was killed and started again ends with the same
bits as one that was not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from hc_lens.data.batches import Batches
from hc_lens.data.task import Task
from hc_lens.errors import HcLensError, check_choice
from hc_lens.evaluation import evaluate
from hc_lens.finetuning import checkpoints
from hc_lens.finetuning.config import FinetuneConfig
from hc_lens.models.fingerprint import same_version
from hc_lens.models.inputs import mask_of
from hc_lens.models.loading import HookedModel, load
from hc_lens.records import Records, read_table, seed_of

EvaluationTask = Task | tuple[Task, str]


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
        """The steps that have a checkpoint, in order."""
        return tuple(dict.fromkeys(self.history["step"].tolist()))

    def checkpoint(self, step: int | None = None) -> Path:
        """Folder of a checkpoint, by default the last."""
        known = self.steps
        chosen = known[-1] if step is None else step
        check_choice("a step with a checkpoint", chosen, known)
        found = Records.existing(self.folder, checkpoints.KIND).find(checkpoints.name_of(chosen))
        if found is None:
            raise HcLensError(
                f"expected the checkpoint of step {chosen} in {self.folder} as it was written, got "
                "a damaged one; fine-tune again in this folder, which repeats what is needed"
            )
        return found

    def load(self, step: int | None = None, **settings: Any) -> HookedModel:
        """A checkpoint as ``hc.load`` gives it, by default the last."""
        return load(self.checkpoint(step), **settings)


def finetune(
    model: str | Path | PreTrainedModel | PretrainedConfig,
    task: Task,
    folder: str | Path,
    config: FinetuneConfig,
    *,
    evaluation: Mapping[str, EvaluationTask] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    device: str | torch.device | None = None,
    progress: bool = True,
) -> FinetuneResult:
    """Fine-tune a sequence classifier on a task; continue where an earlier call was stopped.

    Args:
        model: a directory, a Hub id, a Hugging Face model object (which stays as it is) or a
            Hugging Face configuration for a fresh model.
        task: what to train on; labels are matched to the model's by name.
        folder: where the run goes. If it holds this run, training resumes from its last
            checkpoint; a folder with another run is an HcLensError.
        evaluation: tasks to score at every checkpoint, by name; ``(task, split)`` picks a split.
        tokenizer: needed with a model object or a configuration, else the checkpoint's own.
        device: where to train; by default TransformerLens's choice.
    """
    if not task.labels:
        raise HcLensError(
            f"expected a task with labels to train on, got {task.name} without; "
            "name its label column with label=..."
        )
    with torch.random.fork_rng():
        torch.manual_seed(_seed(config, "weights", 0))
        hf_model, tokenizer = checkpoints.trainable(model, task.labels, tokenizer)
    hooked = load(hf_model, tokenizer=tokenizer, device=device)
    train = task.batches(hooked, config.split, max_length=config.max_length)
    scored: dict[str, Batches] = {}
    for name, given in (evaluation or {}).items():
        held_out, split = given if isinstance(given, tuple) else (given, None)
        limit, length = config.evaluation_rows, config.max_length
        scored[name] = held_out.batches(
            hooked, split, limit=limit, seed=config.seed, max_length=length
        )
    about = {
        "config": asdict(config),
        "model": hooked.fingerprint,
        "data": train.fingerprint,
        "evaluation": {name: batches.fingerprint for name, batches in scored.items()},
    }
    with same_version(hooked.fingerprint):
        records = Records(Path(folder), checkpoints.KIND, about, owner=True, alone=True)
    with records:
        start = checkpoints.last_usable(records, config.steps)
        if start is not None:
            checkpoints.remove_older_states(records, start)  # a kill may have left an older one
            at = records.folder(checkpoints.name_of(start))
            hf_model, tokenizer = checkpoints.trainable(at, task.labels, tokenizer)
        cast(nn.Module, hf_model).to(hooked.cfg.device)
        del hooked  # a second copy of the weights
        trainer = _Trainer(records, config, hf_model, tokenizer, train, scored)
        with torch.random.fork_rng():
            history = trainer.run(start, progress)
    return FinetuneResult(Path(folder), history)


@dataclass
class _Trainer:
    """One run in memory."""

    records: Records
    config: FinetuneConfig
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    train: Batches
    scored: Mapping[str, Batches]
    history: pd.DataFrame = field(default_factory=pd.DataFrame)

    def __post_init__(self) -> None:
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        decay = self.config.weight_decay
        groups = [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": decay},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=self.config.learning_rate)

    def run(self, start: int | None, progress: bool) -> pd.DataFrame:
        """Train from a checkpoint's step, or from the beginning, to the end; the history."""
        if start is None:
            start = 0
            self._save(0, math.nan)
        else:
            at = self.records.folder(checkpoints.name_of(start))
            self.history = read_table(at / checkpoints.HISTORY)
            if 0 < start < self.config.steps:
                checkpoints.restore_optimizer(self.records, start, self.model, self.optimizer)
        losses: list[float] = []
        with tqdm(total=self.config.steps, initial=start, disable=not progress) as bar:
            for step in range(start, self.config.steps):
                losses.append(self._step(step))
                bar.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
                bar.update()
                if self.config.saves_at(step + 1):
                    self._save(step + 1, sum(losses) / len(losses))
                    losses = []
        return self.history

    def _step(self, step: int) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.rate(step)
        torch.manual_seed(_seed(self.config, "dropout", step))
        batch = self.train.gather(rows_of(step, self.train.n_rows, self.config))
        inputs = {"input_ids": batch.tokens, "attention_mask": mask_of(batch.inputs)}
        if "token_type_ids" in batch.inputs:
            inputs["token_type_ids"] = batch.inputs["token_type_ids"]
        self.model.train()
        logits = self.model(**inputs).logits
        loss = nn.functional.nll_loss(self.train.log_probs(logits, batch), batch.labels)
        if not torch.isfinite(loss):
            raise HcLensError(
                f"expected a finite loss, got {loss.item()} at step {step + 1}; lower the learning "
                f"rate ({self.config.learning_rate}) or lengthen the warm-up, in a new folder"
            )
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        self.optimizer.step()
        return loss.item()

    def _save(self, step: int, loss: float) -> None:
        self.model.eval()
        table = pd.DataFrame({"dataset": [""], "case": [""], "n": [0], "accuracy": [math.nan]})
        if self.scored:
            hooked = load(self.model, tokenizer=self.tokenizer, device=self.model.device)
            table = evaluate(hooked, self.scored, progress=False).loc[:, table.columns]
        table.insert(0, "step", step)
        table.insert(1, "loss", loss)
        self.history = pd.concat([self.history, table], ignore_index=True) if step else table
        checkpoints.write(
            self.records, step, self.model, self.tokenizer, self.optimizer, self.history
        )


def rows_of(step: int, n_rows: int, config: FinetuneConfig) -> list[int]:
    """The rows of a step: the next `batch_size` of an endless series of seeded permutations."""
    first = step * config.batch_size
    rows: list[int] = []
    while len(rows) < config.batch_size:
        epoch, index = divmod(first + len(rows), n_rows)
        wanted = config.batch_size - len(rows)
        rows += _permutation(config, n_rows, epoch)[index : index + wanted].tolist()
    return rows


@lru_cache(maxsize=2)
def _permutation(config: FinetuneConfig, n_rows: int, epoch: int) -> Int[Tensor, " rows"]:
    generator = torch.Generator().manual_seed(_seed(config, "rows", epoch))
    return torch.randperm(n_rows, generator=generator)


def _seed(config: FinetuneConfig, purpose: str, number: int) -> int:
    return seed_of(f"{config.seed} {purpose} {number}")
