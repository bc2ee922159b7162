"""A small classifier and labelled pairs of sentences for it, for tests of scans."""

from __future__ import annotations

import random

import torch

import hc_lens as hc
from tests import tiny

LABELS = ("entailment", "neutral", "contradiction")
WORDS = ("the", "a", "doctor", "lawyer", "saw", "helped", "old", "near", "did", "not")


def deep_model(family: str, dtype: torch.dtype = torch.float64, **changes):
    """A tiny hooked classifier of 4 layers, so that a suffix has something before and after it."""
    deeper = {"gpt2": "n_layer", "distilbert": "n_layers"}.get(family, "num_hidden_layers")
    checkpoint = tiny.tiny_hf(family, **{deeper: 4, **changes})
    return hc.load(checkpoint, dtype=dtype, tokenizer=tiny.tokenizer_for(family))


def pair_task(n_rows: int = 24, labels: tuple[str, ...] = LABELS) -> hc.Task:
    """Random sentences of unequal length with random labels and two cases."""
    draw = random.Random(0)

    def text(longest: int) -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(1, longest)))

    rows = [
        {
            "premise": text(5),
            "hypothesis": text(2),
            "label": draw.choice(labels),
            "case": draw.choice(["left", "right"]),
        }
        for _ in range(n_rows)
    ]
    columns = ("premise", "hypothesis")
    return hc.Task.from_rows(rows, columns=columns, labels=labels, case="case", name="pairs")


def pair_batches(model, n_rows: int = 24, labels=LABELS, **settings) -> hc.Batches:
    """Batches of `pair_task`, small enough that there are several."""
    settings = {"token_budget": 120, "max_length": 30, **settings}
    return pair_task(n_rows, labels).batches(model, **settings)


@torch.no_grad()
def brute_force(model, batch, means, sets) -> torch.Tensor:
    """One full forward pass per set, under the hooks of hc.ablate."""
    results = []
    for units in sets:
        with hc.ablate(model, units, means.on(batch)):
            results.append(model(**batch.inputs))
    return torch.stack(results)
