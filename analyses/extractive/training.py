"""Fine-tuning on questions, and the mean rank of their answers.

1. The loss is the cross-entropy of the answer's tokens given the prompt.
2. A batch holds questions of one length, so nothing is padded; batches come in a seeded order.
3. Adam, a short linear warm-up, then linear decay to 0; gradients clipped at norm 1.
4. By default only the blocks are trained, as in the paper: embeddings and read-out stay.
`train` returns the new weights and leaves the model as it was.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from analyses.extractive.models import State, copied, loaded
from analyses.extractive.prompts import Question, by_length, continuation, encode
from analyses.extractive.settings import TrainConfig
from hc_lens.errors import HcLensError
from hc_lens.protocols import LanguageModel

_IGNORE = -100
Trainable = Callable[[str], bool]
"""Which parameters are trained, by name."""
Group = tuple[Int[Tensor, "_ _"], ...]
"""Token ids and targets of questions of one length."""


def in_blocks(name: str) -> bool:
    """Whether a parameter belongs to a block: the default of what is trained."""
    return name.startswith("blocks.")


def in_layers(layers: Sequence[int]) -> Trainable:
    """Train only the blocks of these layers."""
    starts = tuple(f"blocks.{layer}." for layer in layers)
    return lambda name: name.startswith(starts)


def train(
    model: LanguageModel,
    questions: Sequence[Question],
    config: TrainConfig,
    *,
    start: State | None = None,
    trainable: Trainable = in_blocks,
) -> dict[str, Tensor]:
    """Weights after training on the questions from `start` (by default the model's own)."""
    if not questions:
        raise HcLensError("expected at least one question to train on, got none; check the set")
    rows = []
    for question in questions:
        prompt, answer = continuation(model, question.prompt, question.answer)
        rows.append((prompt + answer[:-1], [_IGNORE] * (len(prompt) - 1) + answer))
    groups = by_length(model, rows)
    own = {parameter: parameter.requires_grad for parameter in model.parameters()}
    chosen = []
    with loaded(model, start), torch.enable_grad():
        try:
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(trainable(name))
                chosen += [parameter] if parameter.requires_grad else []
            _run(model, _batches(groups, config), chosen, config)
            return copied(model)
        finally:
            for parameter, flag in own.items():
                parameter.requires_grad_(flag)
                parameter.grad = None


def _batches(groups: Sequence[Group], config: TrainConfig) -> Iterator[Group]:
    """Endless batches; each round holds every question once."""
    generator = torch.Generator().manual_seed(config.seed)
    while True:
        batches = []
        for tokens, targets in groups:
            order = torch.randperm(len(tokens), generator=generator)
            batches += [(tokens[part], targets[part]) for part in order.split(config.batch_size)]
        for index in torch.randperm(len(batches), generator=generator).tolist():
            yield batches[index]


def _run(
    model: LanguageModel,
    batches: Iterator[Group],
    chosen: Sequence[nn.Parameter],
    config: TrainConfig,
) -> None:
    optimizer = torch.optim.Adam(chosen, lr=config.lr, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(1.0, (step + 1) / max(1, config.warmup)) * (1 - step / config.steps),
    )
    for tokens, targets in itertools.islice(batches, config.steps):
        loss = cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=_IGNORE)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(chosen, 1.0)
        optimizer.step()
        schedule.step()


@torch.no_grad()
def mean_rank(
    model: LanguageModel,
    questions: Sequence[Question],
    options: Sequence[str],
    state: State | None = None,
) -> float:
    """Mean rank of the right answer among the options: 0 is perfect, (options - 1) / 2 chance."""
    with loaded(model, state):
        ranks = [
            batch.rank(model(batch.tokens)[:, -1]) for batch in encode(model, questions, options)
        ]
    return float(torch.cat(ranks).double().mean())
