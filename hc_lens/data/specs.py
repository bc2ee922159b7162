"""What a run reads, as text: models and rows named so that another process reads the same.

A model is a string: ``"organism"`` (the bundled model), ``"organism:400"`` (its checkpoint of that
step), or a directory or Hub id for ``hc.load``. Rows are a `DataSpec`: those of a task, for a
classifier, or prompts with their answers, for a language model. Both go through JSON and TOML
unchanged (`hc_lens.settings`), so a sweep's worker, a study's step and a command read them. Nothing
here imports torch or the libraries that read rows before a model or rows are asked for.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hc_lens.data.known import KNOWN, PROMPTS
from hc_lens.errors import HcLensError
from hc_lens.organism import checkpoint as organism_checkpoint
from hc_lens.organism import steps as organism_steps
from hc_lens.organism import task as organism_task

if TYPE_CHECKING:
    from hc_lens.data.batches import Batches
    from hc_lens.data.prompts import Prompts
    from hc_lens.data.task import Task
    from hc_lens.models.loading import HookedModel
    from hc_lens.protocols import Model

ORGANISM = "organism"


def checkpoint_of(name: str) -> str:
    """The directory or Hub id that a string names."""
    bundled, _, step = name.partition(":")
    if bundled != ORGANISM or os.path.exists(name):
        return name
    if step and not step.isdigit():
        raise HcLensError(
            f"expected {ORGANISM} or {ORGANISM}:STEP with a step of {list(organism_steps())}, "
            f"got {name!r}"
        )
    return str(organism_checkpoint(int(step) if step else None))


def read_model(name: str, **settings: Any) -> HookedModel:
    """The model that a string names; `settings` are those of ``hc.load``."""
    from hc_lens.models.loading import load

    return load(checkpoint_of(name), **settings)


@dataclass(frozen=True)
class DataSpec:
    """Which rows, enough to read them again elsewhere."""

    task: str
    """mnli, snli, qqp, hans, paws-qqp, organism, organism-ood; for language models ioi, agreement,
    agreement-ood, induction; or any name for rows of your own."""
    path: str | None = None
    """File or folder with the rows; None for the Hub, the organism's own, or prompts that are made.
    Rows of your own without `columns` are prompts: they have columns prompt and right, and may have
    wrong, counterfactual, case, side and read."""
    split: str | None = None
    """Split to read; None for the only one, or ``train`` of several."""
    limit: int | None = None
    """Most rows, drawn with the seed; by default all, of prompts that are made 2,000."""
    limit_per_case: int | None = None
    """Most rows of each case, drawn with the seed; instead of `limit`."""
    max_length: int | None = None
    """Longer rows are cut to this many tokens."""
    token_budget: int = 4096
    """Most tokens in a batch, padding included."""
    seed: int = 0
    """Decides the rows under a limit, prompts that are made, and the order of the batches."""
    columns: tuple[str, ...] | None = None
    """One or two text columns of rows of your own with labels; None for a named task or prompts."""
    label: str | None = "label"
    """Label column of rows of your own."""
    labels: tuple[str, ...] | None = None
    """Label names of rows of your own, if their labels are integers."""
    case: str | None = None
    """Column of rows of your own by which results are grouped."""
    heuristic: str | None = None
    """The label that the heuristic answers, for rows of your own."""

    @property
    def is_prompts(self) -> bool:
        """Whether these are prompts for a language model; else they are a task for a classifier."""
        named = self.task in PROMPTS and self.path is None
        own = self.path is not None and self.columns is None and self.task not in KNOWN
        return named or own

    def read(self) -> Task | Prompts:
        """The task itself, or the prompts."""
        return self._prompts() if self.is_prompts else self.read_task()

    def read_task(self) -> Task:
        """The task itself; prompts are an HcLensError."""
        if self.is_prompts:
            raise HcLensError(
                f"expected a task of texts with labels, got the prompts {self.task!r}; name "
                "another task, or give path= and columns= for rows of your own"
            )
        task = self._task()
        return task if self.heuristic is None else replace(task, heuristic=self.heuristic)

    def _task(self) -> Task:
        from hc_lens.data.task import Task

        if self.path is None and self.task in (ORGANISM, f"{ORGANISM}-ood"):
            return organism_task("id" if self.task == ORGANISM else "ood")
        if self.columns is None and self.task not in KNOWN:
            raise self._unknown()
        if self.columns is None:
            return Task.named(self.task, self.path, labels=self.labels)
        if self.path is None:
            raise HcLensError(
                f"expected files for the rows of {self.task!r}, got columns alone; name them with "
                "path="
            )
        return Task.from_files(
            self.path,
            columns=self.columns,
            label=self.label,
            labels=self.labels,
            case=self.case,
            name=self.task,
        )

    def _unknown(self) -> HcLensError:
        known = ", ".join((*KNOWN, ORGANISM, f"{ORGANISM}-ood"))
        return HcLensError(
            f"expected one of the tasks {known}, or of the prompts {', '.join(PROMPTS)}, got "
            f"{self.task!r}; name one of these, or give path= and columns= for rows of your own, "
            "path= alone for prompts with columns prompt and right"
        )

    def _prompts(self) -> Prompts:
        from hc_lens.data.prompts import NEEDED, Prompts
        from hc_lens.data.readers import read_files

        strange = [name for name in ("columns", "labels", "heuristic") if getattr(self, name)]
        if strange:
            raise HcLensError(
                f"expected prompts without {strange[0]}, which belong to a task of texts with "
                f"labels, got {getattr(self, strange[0])!r} for {self.task!r}; leave it out"
            )
        if self.path is None:
            # A limit that is none is told when the rows are drawn.
            made = {"n": self.limit} if self.limit and self.limit > 0 else {}
            return Prompts.named(self.task, seed=self.seed, **made)
        if any({*NEEDED} - {*table.column_names} for table in read_files(self.path).values()):
            raise self._unknown()
        columns = {} if self.case is None else {"case": self.case}
        return Prompts.from_files(self.path, name=self.task, **columns)

    def held_out(self) -> DataSpec:
        """These rows, of the task's held-out split unless a split is named."""
        return replace(self, split=self.split or self.read().held_out_split())

    def training(self) -> DataSpec:
        """The rows of the split that the task is trained on, read like these."""
        return replace(self, split=self.read().training_split())

    def batches(self, model: Model) -> Batches:
        """The rows in batches for a model; for one of the wrong kind an HcLensError."""
        rows = self.read()
        if not self.is_prompts and rows.labels and not getattr(model, "labels", None):
            raise HcLensError(
                f"expected a classifier for the task {self.task!r}, got a language model; load a "
                f"checkpoint with a classification head, or name prompts ({', '.join(PROMPTS)}, or "
                "path= alone for prompts of your own)"
            )
        return rows.batches(
            model,
            self.split,
            limit=self.limit,
            limit_per_case=self.limit_per_case,
            seed=self.seed,
            max_length=self.max_length,
            token_budget=self.token_budget,
        )
