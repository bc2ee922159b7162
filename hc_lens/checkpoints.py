"""The checkpoints of a training run on disk.

1. ``run.json`` says which run a folder holds: settings, model, data. A folder of another run is an
   error, never mixed with this one.
2. A checkpoint is a folder ``step-00500`` as Hugging Face's ``save_pretrained`` writes it, which
   ``hc.load`` reads, with ``history.json`` beside the weights. The newest also holds
   ``optimizer.safetensors``, from which training goes on; older ones give theirs up.
3. A checkpoint is written under another name and renamed when it is complete, so a folder of that
   name is never half-written.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from hc_lens.errors import HcLensError
from hc_lens.models.quiet import quiet

RUN = "run.json"
HISTORY = "history.json"
OPTIMIZER = "optimizer.safetensors"
_STEP = re.compile(r"step-(\d{5,})")
_UNFINISHED = ".unfinished"


def open_run(folder: Path, run: Mapping[str, Any]) -> None:
    """Make a folder for a run, or check that it holds this very run, and clear what is unfinished.

    A folder that holds anything else is an HcLensError.
    """
    if folder.exists() and not folder.is_dir():
        raise HcLensError(f"expected a folder for the run, got the file {folder}; name another")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HcLensError(
            f"expected a folder that can be made, got {error}; name another"
        ) from error
    for place in folder.glob(f"*{_UNFINISHED}"):
        shutil.rmtree(place) if place.is_dir() else place.unlink()
    given = json.loads(json.dumps(run))
    if (folder / RUN).is_file():
        _check_same(folder, json.loads((folder / RUN).read_text()), given)
        return
    found = sorted(place.name for place in folder.iterdir())
    if found:
        raise HcLensError(
            f"expected an empty folder or one with a run, got {folder} with {found[:3]} and no "
            f"{RUN}; name another folder"
        )
    unfinished = folder / f"{RUN}{_UNFINISHED}"
    unfinished.write_text(json.dumps(given, indent=1))
    os.replace(unfinished, folder / RUN)


def _check_same(folder: Path, there: dict[str, Any], given: dict[str, Any]) -> None:
    there, given = _flat(there), _flat(given)
    differing = [key for key in {**there, **given} if there.get(key) != given.get(key)]
    if differing:
        key = differing[0]
        raise HcLensError(
            f"expected to go on with the run in {folder}, whose {key} is {there.get(key)!r}, got "
            f"{given.get(key)!r} (differing: {', '.join(differing)}); repeat the call that began "
            "it, or name another folder for a new run"
        )


def _flat(run: dict[str, Any]) -> dict[str, Any]:
    """Nested settings under dotted names, so that a message can name the one that differs."""
    flat = {}
    for key, value in run.items():
        inner = value if isinstance(value, dict) else {}
        flat |= {f"{key}.{name}": one for name, one in inner.items()} or {key: value}
    return flat


def steps(folder: Path) -> tuple[int, ...]:
    """The steps of a run that have a checkpoint, in order."""
    names = (_STEP.fullmatch(place.name) for place in folder.iterdir() if place.is_dir())
    return tuple(sorted(int(name[1]) for name in names if name))


def place(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step stands."""
    return folder / f"step-{step:05d}"


def write(
    folder: Path,
    step: int,
    model: Any,
    tokenizer: Any,
    optimizer: torch.optim.Optimizer,
    history: pd.DataFrame,
) -> None:
    """Write one checkpoint, complete or not at all."""
    final = place(folder, step)
    unfinished = folder / f"{final.name}{_UNFINISHED}"
    with quiet():
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
    state = {
        f"{name}/{key}": value.detach().cpu().contiguous()
        for name, key, value in _state(model, optimizer)
    }
    save_file(state, unfinished / OPTIMIZER)
    (unfinished / HISTORY).write_text(json.dumps(history.to_dict("list")))
    os.replace(unfinished, final)
    for older in steps(folder):
        if older < step:
            (place(folder, older) / OPTIMIZER).unlink(missing_ok=True)


def _state(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, str, torch.Tensor]]:
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            yield name, key, value


def restore_optimizer(checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put the optimizer's moments of a checkpoint back."""
    if not (checkpoint / OPTIMIZER).is_file():
        raise HcLensError(
            f"expected {OPTIMIZER} in {checkpoint}, the last checkpoint of the run, to go on from, "
            "found none; delete the folder of the run to begin again"
        )
    saved = load_file(checkpoint / OPTIMIZER)
    parameters = dict(model.named_parameters())
    for place, value in saved.items():
        name, key = place.rsplit("/", 1)
        parameter = parameters[name]
        # Adam counts its steps on the CPU; the moments live beside their parameter.
        device = value.device if key == "step" else parameter.device
        optimizer.state[parameter][key] = value.to(device)


def read_history(checkpoint: Path) -> pd.DataFrame:
    """The history table up to a checkpoint."""
    return pd.DataFrame(json.loads((checkpoint / HISTORY).read_text()))
