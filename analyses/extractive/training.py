"""Fine-tuning on questions, and the mean rank of their answers.

1. The loss is the cross-entropy of the answer's tokens given the prompt.
2. A batch holds questions of one length, so nothing is padded; batches come in a seeded order.
3. Adam, a short linear warm-up, then linear decay to 0; gradients clipped at norm 1.
4. By default only the blocks are trained, as in the paper: embeddings and read-out stay.
`train` returns the new weights and leaves the model as it was.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.functional import cross_entropy

from analyses.extractive.parts import State, parameters
from analyses.extractive.prompts import Question, continuation, encode
from hc_lens.errors import HcLensError

_IGNORE = -100
Trainable = Callable[[str], bool]
"""Which parameters are trained, by name."""


@dataclass(frozen=True)
class TrainConfig:
    """How to fine-tune."""

    steps: int = 60
    """Number of gradient steps."""
    lr: float = 1e-3
    """Largest learning rate."""
    batch_size: int = 32
    """Questions a step, at most."""
    warmup: int = 20
    """Steps over which the learning rate rises from 0."""
    seed: int = 0
    """Seed of the order of the questions."""

    def __post_init__(self) -> None:
        if self.steps < 1 or self.batch_size < 1 or self.lr <= 0:
            raise HcLensError(
                "expected steps and batch_size of at least 1 and lr above 0, got "
                f"steps={self.steps}, batch_size={self.batch_size}, lr={self.lr}"
            )


def in_blocks(name: str) -> bool:
    """Whether a parameter belongs to a block: the default of what is trained."""
    return name.startswith("blocks.")


def in_layers(layers: Sequence[int]) -> Trainable:
    """Train only the blocks of these layers."""
    starts = tuple(f"blocks.{layer}." for layer in layers)
    return lambda name: name.startswith(starts)


@contextmanager
def loaded(model: Any, state: State | None) -> Iterator[Any]:
    """The model with other weights; its own come back at the end. None changes nothing."""
    if state is None:
        yield model
        return
    own = {name: value.clone() for name, value in parameters(model).items()}
    try:
        fill(model, state)
        yield model
    finally:
        fill(model, own)


def fill(model: Any, state: State) -> None:
    """Copy weights into the model, in place."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(state[name])


def train(
    model: Any,
    questions: Sequence[Question],
    config: TrainConfig,
    *,
    start: State | None = None,
    trainable: Trainable = in_blocks,
) -> dict[str, Tensor]:
    """Weights after training on the questions from `start` (by default the model's own)."""
    if not questions:
        raise HcLensError("expected at least one question to train on, got none")
    groups = _groups(model, questions)
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    own = {name: value.clone() for name, value in parameters(model).items()}
    try:
        if start is not None:
            fill(model, start)
        chosen = []
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trainable(name))
            chosen += [parameter] if parameter.requires_grad else []
        with torch.enable_grad():
            _run(model, groups, chosen, config)
        return {name: value.clone() for name, value in parameters(model).items()}
    finally:
        fill(model, own)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(flags[name])
            parameter.grad = None


def _groups(model: Any, questions: Sequence[Question]) -> list[tuple[Tensor, Tensor]]:
    """Token ids and targets, one pair of tensors for every length."""
    rows = defaultdict(list)
    for question in questions:
        prompt, answer = continuation(model, question.prompt, question.answer)
        targets = [_IGNORE] * (len(prompt) - 1) + answer
        rows[len(targets)].append((prompt + answer[:-1], targets))
    device = model.cfg.device
    groups = []
    for length in sorted(rows):
        tokens, targets = zip(*rows[length], strict=True)
        groups.append((torch.tensor(tokens, device=device), torch.tensor(targets, device=device)))
    return groups


def _order(
    groups: list[tuple[Tensor, Tensor]], config: TrainConfig
) -> Iterator[tuple[Int[Tensor, "batch pos"], Int[Tensor, "batch pos"]]]:
    """Endless batches, every question once a round."""
    generator = torch.Generator().manual_seed(config.seed)
    while True:
        batches = []
        for tokens, targets in groups:
            order = torch.randperm(len(tokens), generator=generator)
            batches += [(tokens[part], targets[part]) for part in order.split(config.batch_size)]
        for place in torch.randperm(len(batches), generator=generator).tolist():
            yield batches[place]


def _run(
    model: Any, groups: list[tuple[Tensor, Tensor]], chosen: list[Any], config: TrainConfig
) -> None:
    optimizer = torch.optim.Adam(chosen, lr=config.lr, betas=(0.9, 0.99))
    batches = _order(groups, config)
    for step in range(config.steps):
        pace = min(1.0, (step + 1) / config.warmup) * (1 - step / config.steps)
        for group in optimizer.param_groups:
            group["lr"] = config.lr * pace
        tokens, targets = next(batches)
        loss = cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=_IGNORE)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(chosen, 1.0)
        optimizer.step()


@torch.no_grad()
def mean_rank(
    model: Any, questions: Sequence[Question], options: Sequence[str], state: State | None = None
) -> float:
    """Mean rank of the right answer among the options: 0 is perfect, (options - 1) / 2 chance."""
    with loaded(model, state):
        ranks = [
            batch.rank(model(batch.tokens)[:, -1]) for batch in encode(model, questions, options)
        ]
    return float(torch.cat(ranks).double().mean())
