"""The numbers of every instrument on one model, and those of another TransformerLens beside them.

    python -m tests.versions parity
    python -m tests.versions numbers --out three.json [--checkpoint FOLDER --rows FILE]
    python -m tests.versions compare three.json four.json

`numbers` runs in the environment of one version of TransformerLens, `compare` in any. Without a
checkpoint the model is the organism.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import torch

import hc_lens as hc
from hc_lens.analyses import composition, lexical_overlap
from hc_lens.attention.patterns import visit, word_batches
from hc_lens.models.inputs import mask_name
from hc_lens.models.installed import INSTALLED
from tests import tiny

SILENT: Any = {"progress": False}
GATES = {"steps": 60, "warmup": 0.5, "lr": 0.1}
Numbers = dict[str, Any]


def weighted(values: torch.Tensor) -> float:
    """One number that every entry has a part in, with a weight of its own."""
    flat = values.double().flatten()
    return float((flat * torch.arange(1, len(flat) + 1).cos()).mean())


def columns(table: pd.DataFrame, keys: list[str], values: list[str]) -> Numbers:
    """Some columns of a table by its rows' labels."""
    labels = table[keys].astype(str).agg(" ".join, axis=1)
    return {
        f"{label} {value}": float(number)
        for value in values
        for label, number in zip(labels, table[value], strict=True)
    }


def numbers(model, batches, words, gates: dict[str, Any] | None = None) -> Numbers:
    """What the instruments say of a model: lists of units are to be equal, numbers close."""
    means = hc.collect_means(model, batches, **SILENT)
    patterns: Numbers = {}
    visit(model, batches[0], lambda layer, seen: patterns.update({str(layer): weighted(seen)}))
    scan = hc.scan(model, batches, means, **SILENT)
    effects = composition.edge_effects(model, batches, means, ["L0.H1"], **SILENT)
    scores = composition.weight_scores(model, batches, ["L0.H1"], draws=8, **SILENT)
    importance = hc.importance(model, batches, means, **SILENT)
    overlap = lexical_overlap.scores(model, words, **SILENT)
    configs = {
        "gates": hc.PruneConfig(0.5, seed=1, **(gates or GATES)),
        "importance": hc.PruneConfig(0.5, method="importance"),
    }
    subs = {name: hc.prune(model, batches, means, each, **SILENT) for name, each in configs.items()}
    return {
        "units": {name: [str(unit) for unit in sub.removed] for name, sub in subs.items()},
        "means": {name: weighted(mean) for name, mean in means.at_token.items()},
        "patterns": patterns,
        "scan": columns(scan, ["set", "case"], ["accuracy_change", "kl", "logit_change"]),
        "importance": columns(importance, ["unit"], ["importance"]),
        "edges": columns(effects, ["sender", "receiver", "kind", "case"], ["kl"]),
        "weights": columns(scores, ["sender", "receiver", "kind"], ["score"]),
        "overlap": columns(overlap, ["unit", "score"], ["value", "chance"]),
    }


def differences(one: Numbers, other: Numbers) -> Numbers:
    """The largest difference of a number of each kind, and whether the units are the same."""
    if [*one] != [*other] or any([*one[kind]] != [*other[kind]] for kind in one):
        raise ValueError("the two files are of different models, rows or instruments")
    found: Numbers = {"units": one["units"] == other["units"]}
    for kind in [*one][1:]:
        pairs = zip(one[kind].values(), other[kind].values(), strict=True)
        apart = [abs(mine - theirs) for mine, theirs in pairs if mine == mine or theirs == theirs]
        found[kind] = max(apart)
    return found


def of_organism(limit: int = 40) -> Numbers:
    """The numbers of the organism."""
    model, task = hc.organism.load(), hc.organism.task()
    rows = {"split": "validation", "limit": limit}
    return numbers(model, task.batches(model, **rows), word_batches(model, task, **rows))


def of_checkpoint(checkpoint: str, rows: str, limit: int = 16) -> Numbers:
    """The numbers of a classifier on the rows of a file with premise, hypothesis and label."""
    model = hc.load(checkpoint)
    task = hc.Task.from_files({"validation": rows}, columns=("premise", "hypothesis"))
    made = {"split": "validation", "limit": limit, "max_length": 64}
    return numbers(model, task.batches(model, **made), word_batches(model, task, **made))


def parity() -> pd.DataFrame:
    """The largest difference of a logit from Hugging Face's, per family and side of the pads."""
    found = []
    for family in [*tiny.FAMILIES, *(f"{name} (language model)" for name in tiny.LANGUAGE_MODELS)]:
        name, _, kind = family.partition(" (")
        original = (tiny.tiny_language_model if kind else tiny.tiny_hf)(name)
        row: Numbers = {"family": family}
        model = hc.load(original)
        for side in ("right", "left"):
            inputs = tiny.tiny_inputs(original.config.pad_token_id, side)
            real, theirs = inputs["attention_mask"].bool(), dict(inputs)
            if name in tiny.DECODERS:
                theirs["position_ids"] = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
            with torch.no_grad():
                ours = model(inputs["input_ids"], **{mask_name(model): inputs["attention_mask"]})
                apart = (original(**theirs).logits - ours).abs()
            row[side] = float((apart[real] if kind else apart).max())
        found.append(row)
    return pd.DataFrame(found)


def main() -> None:
    """Run one of the three commands."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("parity")
    made = commands.add_parser("numbers")
    made.add_argument("--out", type=Path, required=True)
    made.add_argument("--checkpoint")
    made.add_argument("--rows")
    compared = commands.add_parser("compare")
    compared.add_argument("files", type=Path, nargs=2)
    options = parser.parse_args()
    if options.command == "parity":
        table = parity().to_string(index=False, float_format="{:.1e}".format)
        sys.stdout.write(f"TransformerLens {INSTALLED}, float32\n{table}\n")
    elif options.command == "numbers":
        given = options.checkpoint
        found = of_checkpoint(given, options.rows) if given else of_organism()
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    else:
        read = (json.loads(file.read_text(encoding="utf-8")) for file in options.files)
        for kind, apart in differences(*read).items():
            shown = apart if isinstance(apart, bool) else f"{apart:.1e}"
            sys.stdout.write(f"{kind:<12}{shown}\n")


if __name__ == "__main__":
    main()
