"""The Hugging Face checkpoint that training begins from, and those that it leaves.

1. A directory or Hub id is read as it is if it holds a classifier; anything else under it (a
   pretrained encoder, a language model) gets a new classifier with the task's labels. A
   configuration makes a fresh model; a model object is copied, so the caller's stays as it is.
2. Label names come from the checkpoint. Only where it has none (``LABEL_0``) they are the task's.
3. A run is a folder of records (`hc_lens.records`). A checkpoint is the record ``step-00500``: a
   folder as Hugging Face's ``save_pretrained`` writes it, which ``hc.load`` reads, with
   ``history.csv`` beside the weights.
4. The optimizer's state, from which training continues, is a record of its own. It is written
   before its checkpoint; then the states of older checkpoints are removed.
5. A run continues only from what is as it was written: where a checkpoint is damaged, training
   begins before it, and checkpoints that are whole stay as they are.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hc_lens.data.labels import is_placeholder
from hc_lens.errors import HcLensError
from hc_lens.models.loading import read_config, read_tokenizer, read_weights, with_pad
from hc_lens.models.quiet import quiet
from hc_lens.records import Records, table_bytes

KIND = "finetune"
HISTORY = "history.csv"
STATES = "optimizer"
"""Records of the optimizer's states stand below this name."""
OPTIMIZER = "optimizer.safetensors"
_STEP = re.compile(r"step-(\d{5,})")
_CLASSIFIER = "ForSequenceClassification"


def trainable(
    source: str | Path | PreTrainedModel | PretrainedConfig,
    labels: Sequence[str],
    tokenizer: PreTrainedTokenizerBase | None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The classifier and its tokenizer; float32, with a pad token.

    New weights are drawn from torch's generator: the caller seeds and forks it.
    """
    with quiet():
        if isinstance(source, (str, Path)):
            model = _read(source, labels)
            tokenizer = read_tokenizer(source) if tokenizer is None else tokenizer
        elif isinstance(source, PretrainedConfig):
            model = _fresh(source, labels)
        else:
            model = _copied(source)
    if _unnamed(model.config) and model.config.num_labels == len(labels):
        _name_labels(model.config, labels)
    if tokenizer is None:
        raise HcLensError(
            f"expected a tokenizer beside a {type(source).__name__}, got none; pass tokenizer=..."
        )
    padding = with_pad(tokenizer)
    if model.config.pad_token_id is None:
        model.config.pad_token_id = padding.pad_token_id
    return model, padding


def _read(source: str | Path, labels: Sequence[str]) -> PreTrainedModel:
    config = read_config(source)
    classifier = (config.architectures or [""])[0].endswith(_CLASSIFIER)
    if not classifier:
        _name_labels(config, labels)
    auto = AutoModelForSequenceClassification
    model, missing = read_weights(auto, source, config, torch.float32)
    if classifier and missing:
        raise HcLensError(
            f"expected every weight of {type(model).__name__} in {source}, missing {missing[:3]}; "
            "save the checkpoint again"
        )
    return model


def _fresh(config: PretrainedConfig, labels: Sequence[str]) -> PreTrainedModel:
    config = copy.deepcopy(config)
    if _unnamed(config):
        _name_labels(config, labels)
    try:
        return AutoModelForSequenceClassification.from_config(
            config, dtype=torch.float32, trust_remote_code=False
        )
    except ValueError as error:
        raise HcLensError(
            f"expected the configuration of a model family with a sequence classifier, got "
            f"{type(config).__name__}; use for instance transformers.BertConfig"
        ) from error


def _copied(source: PreTrainedModel) -> PreTrainedModel:
    if not type(source).__name__.endswith(_CLASSIFIER):
        raise HcLensError(
            "expected a directory, a Hub id, a configuration or a Hugging Face "
            f"...ForSequenceClassification, got {type(source).__name__}; save the model and pass "
            "its directory to get a new classifier on it"
        )
    return copy.deepcopy(source).float().requires_grad_(True)


def _unnamed(config: PretrainedConfig) -> bool:
    return all(map(is_placeholder, (config.id2label or {}).values()))


def _name_labels(config: PretrainedConfig, labels: Sequence[str]) -> None:
    config.id2label = dict(enumerate(labels))
    config.label2id = {name: index for index, name in enumerate(labels)}


def name_of(step: int) -> str:
    """Name of a step's checkpoint."""
    return f"step-{step:05d}"


def steps(run: Path | Records) -> tuple[int, ...]:
    """The steps of a run that have a checkpoint, in order."""
    records = Records.existing(run, KIND) if isinstance(run, Path) else run
    names = (_STEP.fullmatch(name) for name in records.names())
    return tuple(sorted(int(name[1]) for name in names if name))


def last_usable(records: Records, end: int) -> int | None:
    """The last step from which a run can continue, or None to begin again.

    No checkpoint up to it is damaged, and it has the optimizer's state, which the step 0 and the
    end of the run do without.
    """
    usable = None
    for step in steps(records):
        if records.find(name_of(step)) is None:
            break
        if step in (0, end) or records.find(f"{STATES}/{name_of(step)}"):
            usable = step
    return usable


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
    remove_older_states(records, step)


def remove_older_states(records: Records, step: int) -> None:
    """Remove the optimizer's states of the steps before one."""
    own = name_of(step)
    for name in records.names(STATES):
        if (len(name), name) < (len(own), own):
            records.remove(f"{STATES}/{name}")


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
