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

from hc_lens.errors import HcLensError
from hc_lens.models.load import read_tokenizer
from hc_lens.models.quiet import quiet

_PLACEHOLDER = re.compile(r"LABEL_\d+")


def trainable(source: Any, labels: Sequence[str], tokenizer: Any) -> tuple[Any, Any]:
    """The classifier and its tokenizer; float32, with a pad token."""
    from transformers import PretrainedConfig

    with quiet():
        if isinstance(source, (str, Path)):
            model = _read(source, labels)
            tokenizer = read_tokenizer(source) if tokenizer is None else tokenizer
        elif isinstance(source, PretrainedConfig):
            model = _fresh(copy.deepcopy(source), labels)
        else:
            model = _copied(source, labels)
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


def reopen(checkpoint: Path) -> Any:
    """The classifier of a checkpoint that `hc_lens.checkpoints` wrote."""
    from transformers import AutoModelForSequenceClassification

    with quiet():
        return cast(Any, AutoModelForSequenceClassification).from_pretrained(
            str(checkpoint), dtype=torch.float32
        )


def _read(source: str | Path, labels: Sequence[str]) -> Any:
    from transformers import AutoConfig, AutoModelForSequenceClassification

    place = Path(source).expanduser()
    name = str(place if place.is_dir() else source)
    try:
        config = AutoConfig.from_pretrained(name)
        classifier = _is_classifier(config)
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
    return _checked(model, labels)


def _fresh(config: Any, labels: Sequence[str]) -> Any:
    from transformers import AutoModelForSequenceClassification

    if _unnamed(config):
        _name_labels(config, labels)
    try:
        model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    except ValueError as error:
        raise HcLensError(
            f"expected the configuration of a model family with a sequence classifier, got "
            f"{type(config).__name__}; use for instance transformers.BertConfig"
        ) from error
    return model


def _copied(source: Any, labels: Sequence[str]) -> Any:
    if not type(source).__name__.endswith("ForSequenceClassification"):
        raise HcLensError(
            "expected a directory, a Hub id, a configuration or a Hugging Face "
            f"...ForSequenceClassification, got {type(source).__name__}; save the model and pass "
            "its directory to get a new classifier on it"
        )
    return _checked(copy.deepcopy(source).float().requires_grad_(True), labels)


def _checked(model: Any, labels: Sequence[str]) -> Any:
    """Name the labels of a classifier that has only placeholders."""
    if _unnamed(model.config) and model.config.num_labels == len(labels):
        _name_labels(model.config, labels)
    return model


def _is_classifier(config: Any) -> bool:
    return (config.architectures or [""])[0].endswith("ForSequenceClassification")


def _unnamed(config: Any) -> bool:
    return all(_PLACEHOLDER.fullmatch(name) for name in config.id2label.values())


def _name_labels(config: Any, labels: Sequence[str]) -> None:
    config.id2label = dict(enumerate(labels))
    config.label2id = {name: place for place, name in enumerate(labels)}
