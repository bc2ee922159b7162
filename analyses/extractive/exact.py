"""Exact scores: every change is made and the rest of the model run again.

1. Informative: R[W_C <- W'_C] - R. The component's input is unchanged, so what its place then adds
   to the residual stream is computed once and the pass resumed from there. By position: only that
   position of the component's output changes.
2. Downstream: R[y_C <- f_C(z'_C, W_C)] - R, the component's old weights on the residual stream of
   W' (the layer norm in front of the component stays old as well).
3. Upstream: (R[late <- W'] - R[late <- W', y_C <- y*_C]) - (R - R[y_C <- y*_C]), late = the heads,
   MLPs and norms of the blocks that come after C. The read-out stays that of W, so that nothing
   comes after the last MLP. Mean over the counterfactuals.
Changes of one component are stacked along the batch. By position the scores of one component need
not sum to its whole score: positions interact.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from analyses.extractive.parts import Component, State, parameters, swap
from analyses.extractive.prompts import Encoded
from analyses.extractive.streams import (
    Record,
    after_attention,
    after_mlp,
    attention,
    embedding,
    feed_forward,
    read_out,
    resume,
)

Scores = dict[str, Float[Tensor, "batch copies"]]
"""A score per prompt, for the whole component (one copy) or for each position, by name."""


@dataclass(frozen=True)
class Runner:
    """Rewards under changes of one model's pass on one batch."""

    model: Any
    """The model W."""
    batch: Encoded
    """The prompts."""
    kept: Record
    """The pass of W on the prompts."""
    by_position: bool
    """Change one position at a time (one copy each) or all at once (one copy)."""
    max_rows: int
    """Largest number of rows to run at once."""

    def effects(
        self,
        place: str,
        layer: int,
        changes: Sequence[Float[Tensor, "batch pos d_model"]],
        late: Any,
    ) -> list[Float[Tensor, "batch copies"]]:
        """For each change, the rewards with it minus the reward without, on `late`'s blocks."""
        step = max(1, self.max_rows // len(self.batch.tokens))
        copies = self._copies(changes)
        rewards: list[Tensor] = []
        while part := list(itertools.islice(copies, step)):
            logits = resume(self.model, late, self.kept, place, layer, torch.stack(part))
            rewards.extend(self.batch.reward(each) for each in logits)
        base, *moved = rewards
        effects = torch.stack(moved, dim=1) - base[:, None]
        return list(effects.split(effects.shape[1] // len(changes), dim=1))

    def _copies(
        self, changes: Sequence[Float[Tensor, "batch pos d_model"]]
    ) -> Iterator[Float[Tensor, "batch pos d_model"]]:
        """No change, then each change at every position alone, or at all of them at once."""
        yield torch.zeros_like(changes[0])
        for change in changes:
            if not self.by_position:
                yield change
                continue
            for position in range(change.shape[1]):
                alone = torch.zeros_like(change)
                alone[:, position] = change[:, position]
                yield alone


def informative(runner: Runner, after: State, chosen: Sequence[Component]) -> Scores:
    """R[W_C <- W'_C] - R of every component."""
    model, before = runner.model, parameters(runner.model)
    values: Scores = {}
    changes: dict[tuple[str, int], dict[str, Tensor]] = {}
    for component in chosen:
        swapped = swap(before, after, [component])
        weights = {name: swapped[name] for name in component.parameters}
        place = component.place
        if place == "read-out":
            logits = read_out(model, runner.kept.streams[-1], weights)
            moved = runner.batch.reward(logits) - runner.batch.reward(runner.kept.logits)
            values[component.name] = _at_the_end(moved, runner)
        else:
            change = _with_new_weights(runner, component, weights)
            changes.setdefault((place, component.layer or 0), {})[component.name] = change
    for (place, layer), named in changes.items():
        found = runner.effects(place, layer, list(named.values()), model)
        values.update(zip(named, found, strict=True))
    return {component.name: values[component.name] for component in chosen}


def _with_new_weights(runner: Runner, component: Component, weights: dict[str, Tensor]) -> Tensor:
    """Change of what the component's place adds to the stream when it has other weights."""
    model, kept, layer = runner.model, runner.kept, component.layer
    if layer is None:
        return embedding(model, runner.batch.tokens, weights) - kept.streams[0]
    if component.place == "mlp":
        read = kept.mlp_input(layer, model.cfg.parallel_attn_mlp)
        output = feed_forward(model, layer, read, weights)
        return after_mlp(model, layer, output, weights) - kept.mlp_adds[layer]
    output = attention(model, layer, kept.streams[layer], weights)[1]
    return after_attention(model, layer, output, weights) - kept.attention_adds[layer]


def _at_the_end(moved: Float[Tensor, "batch"], runner: Runner) -> Float[Tensor, "batch copies"]:
    """A score of the read-out: all of it at the last position."""
    copies = runner.batch.tokens.shape[1] if runner.by_position else 1
    values = moved.new_zeros(len(moved), copies)
    values[:, -1] = moved
    return values


def downstream(runner: Runner, new: Record) -> Scores:
    """R[y_C <- f_C(z'_C, W_C)] - R of every head and MLP; `new` is the pass of W'."""
    model = runner.model
    values: Scores = {}
    for layer in range(model.cfg.n_layers):
        heads, _ = attention(model, layer, new.streams[layer], {})
        changes = _head_changes(runner, layer, heads)
        found = runner.effects("attention", layer, changes, model)
        values.update(zip(_names(model, layer), found, strict=True))
        if not model.cfg.attn_only:
            read = new.mlp_input(layer, model.cfg.parallel_attn_mlp)
            change = _mlp_change(runner, layer, feed_forward(model, layer, read, {}))
            (values[f"L{layer}.MLP"],) = runner.effects("mlp", layer, [change], model)
    return values


def upstream(runner: Runner, after: Any, others: Sequence[Record]) -> Scores:
    """The upstream score of the embeddings and of every head and MLP, mean over `others`.

    `others` are passes of W on counterfactual prompts, aligned with the runner's.
    """
    model, kept = runner.model, runner.kept

    def mean(place: str, layer: int, changes: list[Tensor]) -> Tensor:
        old = runner.effects(place, layer, changes, model)
        new = runner.effects(place, layer, changes, after)
        return torch.stack([x - y for x, y in zip(old, new, strict=True)]).mean(0)

    values: Scores = {
        "embed": mean("embed", 0, [other.streams[0] - kept.streams[0] for other in others])
    }
    for layer in range(model.cfg.n_layers):
        per_head = [_head_changes(runner, layer, other.heads[layer]) for other in others]
        for name, changes in zip(_names(model, layer), zip(*per_head, strict=True), strict=True):
            values[name] = mean("attention", layer, list(changes))
        if not model.cfg.attn_only:
            changes = [_mlp_change(runner, layer, other.mlps[layer]) for other in others]
            values[f"L{layer}.MLP"] = mean("mlp", layer, changes)
    return values


def _names(model: Any, layer: int) -> list[str]:
    return [f"L{layer}.H{head}" for head in range(model.cfg.n_heads)]


def _head_changes(
    runner: Runner, layer: int, heads: Float[Tensor, "batch pos head d_model"]
) -> list[Float[Tensor, "batch pos d_model"]]:
    """Change of what the attention adds when one head's share is replaced, head by head."""
    kept = runner.kept
    shares = (heads - kept.heads[layer]).unbind(2)
    return [
        after_attention(runner.model, layer, kept.attention[layer] + share)
        - kept.attention_adds[layer]
        for share in shares
    ]


def _mlp_change(
    runner: Runner, layer: int, output: Float[Tensor, "batch pos d_model"]
) -> Float[Tensor, "batch pos d_model"]:
    return after_mlp(runner.model, layer, output) - runner.kept.mlp_adds[layer]
