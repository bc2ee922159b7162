"""A Hugging Face classifier to train, from whatever a user has.

1. A directory or Hub id is read as it is if it holds a classifier; anything else under it (a
   pretrained encoder, a language model) gets a new classifier with the task's labels.
2. A configuration makes a fresh model; a model object is copied, so the caller's stays as it is.
3. Label names come from the checkpoint. Only where it has none (``LABEL_0``) they are the task's.
4. New weights are drawn from torch's generator: the caller seeds and forks it.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hc_lens.errors import HcLensError
from hc_lens.models.loading import read_tokenizer
from hc_lens.models.quiet import quiet

_PLACEHOLDER = re.compile(r"LABEL_\d+")
_CLASSIFIER = "ForSequenceClassification"


def trainable(
    source: str | Path | PreTrainedModel | PretrainedConfig,
    labels: Sequence[str],
    tokenizer: PreTrainedTokenizerBase | None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The classifier and its tokenizer; float32, with a pad token."""
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
    tokenizer = copy.deepcopy(tokenizer)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id
    return model, tokenizer


def reopen(checkpoint: Path) -> PreTrainedModel:
    """The classifier of a checkpoint that `hc_lens.finetuning.checkpoints` wrote."""
    with quiet():
        return cast(Any, AutoModelForSequenceClassification).from_pretrained(
            str(checkpoint), dtype=torch.float32
        )


def _read(source: str | Path, labels: Sequence[str]) -> PreTrainedModel:
    folder = Path(source).expanduser()
    name = str(folder if folder.is_dir() else source)
    try:
        config = AutoConfig.from_pretrained(name)
        classifier = (config.architectures or [""])[0].endswith(_CLASSIFIER)
        if not classifier:
            _name_labels(config, labels)
        model, report = cast(Any, AutoModelForSequenceClassification).from_pretrained(
            name, config=config, dtype=torch.float32, output_loading_info=True
        )
    except (OSError, ValueError) as error:
        raise HcLensError(
            f"expected a checkpoint directory or a reachable Hub id, got {name!r}: "
            f"{str(error).strip().splitlines()[0]}; without a network, pass the path of a "
            "downloaded checkpoint"
        ) from error
    if classifier and report["missing_keys"]:
        raise HcLensError(
            f"expected every weight of {type(model).__name__} in {name}, missing "
            f"{sorted(report['missing_keys'])[:3]}; save the checkpoint again"
        )
    return model


def _fresh(config: PretrainedConfig, labels: Sequence[str]) -> PreTrainedModel:
    config = copy.deepcopy(config)
    if _unnamed(config):
        _name_labels(config, labels)
    try:
        return AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
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
    return all(_PLACEHOLDER.fullmatch(name) for name in (config.id2label or {}).values())


def _name_labels(config: PretrainedConfig, labels: Sequence[str]) -> None:
    config.id2label = dict(enumerate(labels))
    config.label2id = {name: index for index, name in enumerate(labels)}
