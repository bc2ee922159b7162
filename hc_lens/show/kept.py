"""Attention figures on disk: numbers and texts, from which a page draws them, and never markup.

1. ``patterns.safetensors`` holds the patterns of each figure under its number, ``patterns.json``
   the rest of it.
2. What is read is checked to be a figure. Its texts may be anything: they are escaped when drawn.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from hc_lens.attention.words import NONE
from hc_lens.errors import HcLensError, first_line
from hc_lens.records import json_bytes, write_file
from hc_lens.show.attention import Attention

PATTERNS, ABOUT = "patterns.safetensors", "patterns.json"
"""The two files."""
TEXTS = [field.name for field in fields(Attention) if field.name != "patterns"]
LISTS = ("tokens", "heads", "sentences")
"""Fields that the JSON file holds, and those of them that have several entries."""


def save_figures(figures: Sequence[Attention], folder: Path) -> None:
    """Write figures, also none, into a folder."""
    numbers = {str(index): figure.patterns for index, figure in enumerate(figures)}
    about = [{name: getattr(figure, name) for name in TEXTS} for figure in figures]
    write_file(folder / PATTERNS, save({name: one.contiguous() for name, one in numbers.items()}))
    write_file(folder / ABOUT, json_bytes(about))


def load_figures(folder: Path) -> list[Attention]:
    """Read what `save_figures` wrote, and no other file of the folder."""
    try:
        numbers = load((folder / PATTERNS).read_bytes())
        about = json.loads((folder / ABOUT).read_bytes())
        return [_figure(one, numbers[str(index)]) for index, one in enumerate(about)]
    except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
        raise HcLensError(
            f"expected the attention patterns of a study in {folder / PATTERNS} and {ABOUT}, got "
            f"{first_line(error)}; repeat the command that made them, in the same folder"
        ) from error


def _figure(about: dict[str, Any], patterns: Tensor) -> Attention:
    """A figure, or an error if it is none."""
    kinds = {"tokens": str, "heads": str, "sentences": int, "title": str, "causal": bool}
    for name, kind in kinds.items():
        given = about[name] if name in LISTS else [about[name]]
        if not all(isinstance(each, kind) for each in given):
            raise ValueError(f"{name} of another type than {kind.__name__}")
    tokens, sentences = about["tokens"], about["sentences"]
    expected = [len(about["heads"]), len(tokens), len(tokens)]
    if not tokens or list(patterns.shape) != expected or len(sentences) != len(tokens):
        raise ValueError(f"{list(patterns.shape)} patterns for {expected} heads and tokens")
    if not set(sentences) <= {NONE, 0, 1} or not torch.isfinite(patterns).all():
        raise ValueError("sentences other than the two, or patterns that are not finite")
    lists = {name: tuple(about[name]) for name in LISTS}
    return Attention(patterns=patterns, **{**about, **lists})
