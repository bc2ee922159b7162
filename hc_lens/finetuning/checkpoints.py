"""The checkpoints of a training run on disk, as records (`hc_lens.records`).

1. The folder of a run is about its settings, its model and its data. A folder of another run is
   refused, never mixed with this one.
2. A checkpoint is the record ``step-00500``: a folder as Hugging Face's ``save_pretrained`` writes
   it, which ``hc.load`` reads, with ``history.csv`` beside the weights.
3. The optimizer's state, from which training continues, is a record of its own. It is written
   before its checkpoint; then the states of older checkpoints are removed.
"""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hc_lens.errors import HcLensError
from hc_lens.models.quiet import quiet
from hc_lens.records import Records, read_table, table_bytes

KIND = "finetune"
HISTORY = "history.csv"
STATES = "optimizer"
"""Records of the optimizer's states stand below this name."""
OPTIMIZER = "optimizer.safetensors"
_STEP = re.compile(r"step-(\d{5,})")


def name_of(step: int) -> str:
    """Name of a step's checkpoint."""
    return f"step-{step:05d}"


def steps(run: Path | Records) -> tuple[int, ...]:
    """The steps of a run that have a checkpoint, in order."""
    records = Records.existing(run, KIND) if isinstance(run, Path) else run
    names = (_STEP.fullmatch(name) for name in records.names())
    return tuple(sorted(int(name[1]) for name in names if name))


def newest(records: Records) -> int | None:
    """The last step that has a complete checkpoint, from which a run continues."""
    return next((step for step in reversed(steps(records)) if records.find(name_of(step))), None)


def write(
    records: Records,
    step: int,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    optimizer: torch.optim.Optimizer,
    history: pd.DataFrame,
) -> None:
    """Write a checkpoint and the optimizer's state, each completely or not at all."""

    def save(folder: Path) -> None:
        with quiet():
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        (folder / HISTORY).write_bytes(table_bytes(history))

    state = {
        f"{name}/{key}": value.detach().cpu().contiguous()
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }
    own = f"{STATES}/{name_of(step)}"
    records.write(own, lambda folder: save_file(state, folder / OPTIMIZER))
    records.write(name_of(step), save)
    for older in records.names(STATES):
        if older != name_of(step):
            records.remove(f"{STATES}/{older}")


def restore_optimizer(
    records: Records, step: int, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Put the optimizer's moments of a step back."""
    found = records.find(f"{STATES}/{name_of(step)}")
    if found is None:
        raise HcLensError(
            f"expected {OPTIMIZER} for {name_of(step)}, the last complete checkpoint in "
            f"{records.address}, to continue from, found none; delete the folder of the run to "
            "begin again"
        )
    parameters = dict(model.named_parameters())
    for label, value in load_file(found / OPTIMIZER).items():
        name, key = label.rsplit("/", 1)
        parameter = parameters[name]
        # Adam counts its steps on the CPU; the moments live beside their parameter.
        device = value.device if key == "step" else parameter.device
        optimizer.state[parameter][key] = value.to(device)


def read_history(records: Records, step: int) -> pd.DataFrame:
    """The history table up to a step."""
    return read_table(records.folder(name_of(step)) / HISTORY)
