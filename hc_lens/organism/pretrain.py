"""Pretraining of the organism: which words of one sentence also occur in the other?

Matching a word across two sentences is hard to learn from one label for each pair. A pretrained
BERT has heads that can do it; this takes the role of its pretraining.

1. A batch is half pairs of the grammar, half random word lists, in which every second word of the
   second list is copied from the first.
2. The target of each token that is not special: is the same word in the other sentence?
3. A linear read-out of the last layer, binary cross-entropy, AdamW, linear warm-up and decay. The
   read-out is discarded afterwards.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from tqdm.auto import trange
from transformers import BertForSequenceClassification

from hc_lens.models.inputs import pad
from hc_lens.organism.grammar import Row
from hc_lens.organism.vocabulary import SPECIAL, WORDS

Pair = tuple[list[int], list[int]]
_ID = {word: index for index, word in enumerate(WORDS)}


@dataclass(frozen=True)
class PretrainConfig:
    """Settings of the word-matching pretraining."""

    steps: int = 1000
    """Optimizer steps."""
    warmup_steps: int = 100
    """Steps over which the learning rate rises."""
    batch_size: int = 64
    """Pairs in each step."""
    learning_rate: float = 1e-3
    """Highest learning rate."""
    seed: int = 0
    """Decides the pairs of every step."""


def pretrain(
    classifier: BertForSequenceClassification, rows: Sequence[Row], config: PretrainConfig
) -> None:
    """Train a BERT classifier's encoder, in place, on word matching."""
    rng = random.Random(f"word matching {config.seed}")
    with torch.random.fork_rng():
        torch.manual_seed(config.seed)
        readout = nn.Linear(classifier.config.hidden_size, 1)
    parameters = [*classifier.bert.parameters(), *readout.parameters()]
    optimizer = torch.optim.AdamW(parameters)
    classifier.train()
    for step in (bar := trange(config.steps, desc="word matching")):
        rate = min((step + 1) / config.warmup_steps, 1 - step / config.steps)
        optimizer.param_groups[0]["lr"] = config.learning_rate * rate
        pairs = [
            _grammar_pair(rng.choice(rows)) if index % 2 else random_pair(rng)
            for index in range(config.batch_size)
        ]
        inputs, targets = matching(pairs)
        guesses = readout(classifier.bert(**inputs).last_hidden_state).squeeze(-1)
        asked = inputs["input_ids"] >= len(SPECIAL)
        loss = nn.functional.binary_cross_entropy_with_logits(guesses[asked], targets[asked])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        bar.set_postfix(loss=f"{loss.item():.4f}", refresh=False)
    classifier.eval()


def _grammar_pair(row: Row) -> Pair:
    first, second = (
        [_ID[word] for word in row[side].split()] for side in ("premise", "hypothesis")
    )
    return first, second


def random_pair(rng: random.Random) -> Pair:
    """Two lists of random words; about half of the second comes from the first."""
    ids = range(len(SPECIAL), len(WORDS))
    first = [rng.choice(ids) for _ in range(rng.randrange(4, 18))]
    second = [
        rng.choice(first) if rng.random() < 0.5 else rng.choice(ids)
        for _ in range(rng.randrange(3, 9))
    ]
    return first, second


def matching(
    pairs: Sequence[Pair],
) -> tuple[dict[str, Int[Tensor, "batch pos"]], Float[Tensor, "batch pos"]]:
    """BERT's inputs for pairs of id lists, and 1 for each token that the other list has too."""
    start, end = _ID["[CLS]"], _ID["[SEP]"]
    ids = [[start, *first, end, *second, end] for first, second in pairs]
    types = [[0] * (len(first) + 2) + [1] * (len(second) + 1) for first, second in pairs]
    found = [
        [0, *(word in second for word in first), 0, *(word in first for word in second), 0]
        for first, second in pairs
    ]
    inputs = {
        "input_ids": pad(ids, _ID["[PAD]"], "right"),
        "token_type_ids": pad(types, 0, "right"),
        "attention_mask": pad([[1] * len(row) for row in ids], 0, "right"),
    }
    return inputs, pad(found, 0, "right").float()
