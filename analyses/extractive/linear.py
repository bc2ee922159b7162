"""Linear scores: three gradients instead of one run per component.

1. Run W with gradients: R and dR/dy for what every head, MLP and the embeddings wrote.
2. Informative: a component's weights move by dW while its input stays. Its output then moves by the
   directional derivative df/dW . dW, and R by that times dR/dy, position by position. Over all
   components and positions this sums to <dW, grad R>.
3. Downstream: the component's output on the inputs it gets in W', with its old weights, minus its
   output in W, times dR/dy at W.
4. Upstream: (dR/dy at W' - dR/dy at W) . (y - y*), y* the output on a counterfactual prompt (mean
   over the counterfactuals, the score being linear in y*).
Feng, Russell and Steinhardt 2024 (arXiv 2412.04614), section 4; R in place of minus the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import jvp

from analyses.extractive.parts import Component, State, parameters
from analyses.extractive.prompts import Encoded
from analyses.extractive.streams import (
    Record,
    after_attention,
    after_mlp,
    attention,
    embedding,
    feed_forward,
    read_out,
    record,
)

PositionScores = dict[str, Float[Tensor, "batch pos"]]
"""A score per prompt and position, by component name."""


@dataclass(frozen=True)
class Slopes:
    """dR/dy at what every place wrote, in one model on one batch."""

    kept: Record
    """The forward pass."""
    embed: Float[Tensor, "batch pos d_model"]
    """Slope at the embeddings."""
    attention: tuple[Float[Tensor, "batch pos d_model"], ...]
    """Slope at each attention's output; every head's share has the same one."""
    mlps: tuple[Float[Tensor, "batch pos d_model"], ...]
    """Slope at each MLP's output."""
    attention_adds: tuple[Float[Tensor, "batch pos d_model"], ...]
    """Slope at what each attention adds to the stream (the same without post-norm)."""
    mlp_adds: tuple[Float[Tensor, "batch pos d_model"], ...]
    """Slope at what each MLP adds to the stream."""


def slopes(model: Any, batch: Encoded) -> Slopes:
    """Run the model on the batch and differentiate the rewards."""
    with torch.enable_grad():
        kept = record(model, batch.tokens, differentiable=True)
        groups = (kept.attention, kept.mlps, kept.attention_adds, kept.mlp_adds)
        places = [kept.streams[0], *(place for group in groups for place in group)]
        found = list(torch.autograd.grad(batch.reward(kept.logits).sum(), places))
    embed = found.pop(0)
    parts = [tuple(found.pop(0) for _ in group) for group in groups]
    return Slopes(kept.detach(), embed, *parts)


def informative(
    model: Any, after: State, chosen: list[Component], batch: Encoded, at: Slopes
) -> PositionScores:
    """<df/dW . dW, dR/dy> of every component, by the position it writes to."""
    before = parameters(model)
    values = {}
    for component in chosen:
        delta = {name: torch.zeros_like(before[name]) for name in component.parameters}
        for name, change in delta.items():
            component.part(change).copy_(component.part(after[name] - before[name]))
        start = {name: before[name] for name in delta}
        run, slope = _place(model, component, batch, at)
        moved: Any = jvp(run, (start,), (delta,))[1]
        if slope is None:
            # The read-out acts at the last position only, and R is linear in the logits.
            here = torch.zeros(batch.tokens.shape, dtype=moved.dtype, device=moved.device)
            here[:, -1] = batch.reward(moved)
            values[component.name] = here
        else:
            values[component.name] = (moved * slope).sum(-1)
    return values


def _place(
    model: Any, component: Component, batch: Encoded, at: Slopes
) -> tuple[Callable[[dict[str, Tensor]], Tensor], Tensor | None]:
    """What the component's place writes as a function of its weights, and the slope of R there.

    The read-out writes logits: no slope.
    """
    layer, kept = component.layer, at.kept
    if component.place == "embed":
        return lambda weights: embedding(model, batch.tokens, weights), at.embed
    if layer is None:
        return lambda weights: read_out(model, kept.streams[-1], weights), None
    if component.place == "mlp":
        read = kept.mlp_input(layer, model.cfg.parallel_attn_mlp)

        def mlp(weights: dict[str, Tensor]) -> Tensor:
            return after_mlp(model, layer, feed_forward(model, layer, read, weights), weights)

        return mlp, at.mlp_adds[layer]

    def attend(weights: dict[str, Tensor]) -> Tensor:
        output = attention(model, layer, kept.streams[layer], weights)[1]
        return after_attention(model, layer, output, weights)

    return attend, at.attention_adds[layer]


def downstream(model: Any, at: Slopes, new: Record) -> PositionScores:
    """(f(z', W) - y) . dR/dy of every head and MLP; `new` is the pass of W' on the batch."""
    values: PositionScores = {}
    for layer in range(model.cfg.n_layers):
        heads, _ = attention(model, layer, new.streams[layer], {})
        for head in range(model.cfg.n_heads):
            moved = heads[:, :, head] - at.kept.heads[layer][:, :, head]
            values[f"L{layer}.H{head}"] = (moved * at.attention[layer]).sum(-1)
        if not model.cfg.attn_only:
            read = new.mlp_input(layer, model.cfg.parallel_attn_mlp)
            moved = feed_forward(model, layer, read, {}) - at.kept.mlps[layer]
            values[f"L{layer}.MLP"] = (moved * at.mlps[layer]).sum(-1)
    return values


def upstream(model: Any, at: Slopes, new: Slopes, other: Record) -> PositionScores:
    """(dR/dy at W' - dR/dy at W) . (y - y*); `other` holds y*, aligned and averaged."""
    kept = at.kept
    values = {"embed": ((new.embed - at.embed) * (kept.streams[0] - other.streams[0])).sum(-1)}
    for layer in range(model.cfg.n_layers):
        slope = new.attention[layer] - at.attention[layer]
        away = kept.heads[layer] - other.heads[layer]
        for head in range(model.cfg.n_heads):
            values[f"L{layer}.H{head}"] = (slope * away[:, :, head]).sum(-1)
        if not model.cfg.attn_only:
            slope = new.mlps[layer] - at.mlps[layer]
            values[f"L{layer}.MLP"] = (slope * (kept.mlps[layer] - other.mlps[layer])).sum(-1)
    return values
