"""How the reward moves with what a model writes: two ways to tell, and the three scores.

1. A way answers two questions about a change: what a site adds once a component has its new weights
   (`moved`), and how much the reward R then rises (`rises`). The change is made to what the site
   adds, to its output before any norm of it, or to that output with everything after the site
   "late", that of the fine-tuned model W'.
2. `Exact` makes the change and runs the rest of the model again. Changes are stacked along the
   batch. By position only one position of the change is made at a time; these scores need not sum
   to the whole one, as positions interact.
3. `Linear` takes directional derivatives in the weights and multiplies a change by dR/dy, the
   gradient at what the site wrote, position by position. Late is the gradient at W'.
4. Informative: the component's weights change, R[W_C <- W'_C] - R; its input stays. Linear scores
   sum to <dW, grad R> over all components and positions.
5. Downstream: R[y_C <- f_C(z'_C, W_C)] - R, the component's old weights on the residual stream of
   W' (the layer norm in front of the component stays old as well).
6. Upstream: (R_late - R_late[y_C <- y*_C]) - (R - R[y_C <- y*_C]), y* the output on a
   counterfactual prompt, mean over the counterfactuals. Late are the heads, MLPs and norms of the
   blocks that come after C. The read-out stays that of W, so nothing comes after the last MLP.
Feng, Russell and Steinhardt 2024 (arXiv 2412.04614), section 4; R in place of minus the loss.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import jvp

from analyses.extractive.component import Component, Site, sites, swap, writers
from analyses.extractive.models import parameters
from analyses.extractive.passes import (
    Parts,
    Record,
    Stream,
    blocks_of,
    normed,
    record,
    resume,
    write,
)
from analyses.extractive.prompts import Encoded
from analyses.extractive.settings import ScoreConfig
from hc_lens.blocks import forward_mode
from hc_lens.protocols import LanguageModel

Effect = Float[Tensor, "batch copies"]
"""Rise of the reward of each prompt, for a whole change or for each position that it is made at."""
Where = Literal["added", "output", "late"]
"""What a change is made to."""


@dataclass(eq=False, repr=False)
class Way(ABC):
    """One way to tell how the rewards of a batch move with what W writes."""

    model: LanguageModel
    """W."""
    after: LanguageModel
    """W'."""
    batch: Encoded
    """The prompts."""
    config: ScoreConfig
    """How to score."""
    kept: Record = field(init=False)
    """The pass of W on the prompts."""
    tuned: Record = field(init=False)
    """The pass of W' on the prompts."""

    @abstractmethod
    def __post_init__(self) -> None:
        """Run both models."""

    @abstractmethod
    def moved(self, component: Component) -> Stream:
        """Change of what the component's site adds when the component has its new weights."""

    @abstractmethod
    def rises(self, site: Site, changes: Sequence[Stream], where: Where) -> list[Effect]:
        """The effect of each change of what a site writes."""

    def new_weights(self, component: Component) -> dict[str, Tensor]:
        """The component's parameters: its own part from W', the rest from W."""
        swapped = swap(parameters(self.model), parameters(self.after), [component])
        return {name: swapped[name] for name in component.parameters}


class Exact(Way):
    """Every change is made, and the rest of the model run again."""

    def __post_init__(self) -> None:
        models = self.model, self.after
        self.kept, self.tuned = (record(model, self.batch.tokens) for model in models)
        self._blocks, self._late_blocks = map(blocks_of, models)

    def moved(self, component: Component) -> Stream:
        """What the site adds with the new weights, minus what it adds with the old ones."""
        kept, weights = self.kept[component.site], self.new_weights(component)
        return write(self.model, component.site, kept.reads, weights).adds - kept.adds

    def rises(self, site: Site, changes: Sequence[Stream], where: Where) -> list[Effect]:
        """The rewards with each change minus the reward without."""
        if where != "added" and site.kind != "embed":
            kept, block = self.kept[site], self._blocks[site.layer]
            changes = [normed(block, site, kept.output + each) - kept.adds for each in changes]
        blocks = self._late_blocks if where == "late" else self._blocks
        step = max(1, self.config.max_rows // len(self.batch.tokens))
        copies = self._copies(changes)
        rewards: list[Tensor] = []
        while part := list(itertools.islice(copies, step)):
            logits = resume(self.model, blocks, self.kept, site, torch.stack(part))
            rewards.extend(self.batch.reward(each) for each in logits)
        base, *moved = rewards
        rises = torch.stack(moved, dim=1) - base[:, None]
        return list(rises.split(rises.shape[1] // len(changes), dim=1))

    def _copies(self, changes: Sequence[Stream]) -> Iterator[Stream]:
        """No change, then each change at every position alone, or at all of them at once."""
        yield torch.zeros_like(changes[0])
        for change in changes:
            if self.config.by == "component":
                yield change
            else:
                alone = torch.eye(change.shape[1]).to(change)
                yield from (change * chosen[:, None] for chosen in alone)


class Linear(Way):
    """Gradients instead of one run per component."""

    def __post_init__(self) -> None:
        self.kept, output, added = slopes(self.model, self.batch)
        self.tuned, late, _ = slopes(self.after, self.batch)
        self._slopes = {"added": added, "output": output, "late": late}

    def moved(self, component: Component) -> Stream:
        """The directional derivative of what the site adds along the change of the weights."""
        site, new, own = component.site, self.new_weights(component), parameters(self.model)
        old = {name: own[name] for name in new}
        delta = {name: new[name] - old[name] for name in new}
        reads = self.kept[site].reads
        with forward_mode():
            made = jvp(lambda given: write(self.model, site, reads, given).adds, (old,), (delta,))
        return cast("Tensor", made[1])

    def rises(self, site: Site, changes: Sequence[Stream], where: Where) -> list[Effect]:
        """Each change times the slope of R there, position by position."""
        return [(change * self._slopes[where][site]).sum(-1) for change in changes]


def slopes(
    model: LanguageModel, batch: Encoded
) -> tuple[Record, dict[Site, Stream], dict[Site, Stream]]:
    """A model's pass, and the slope of R at every site's output and at what it adds."""
    with torch.enable_grad():
        kept = record(model, batch.tokens, differentiable=True)
        values = [each.output for each in kept.values()] + [each.adds for each in kept.values()]
        *_, read_out = kept.values()
        found = torch.autograd.grad(batch.reward(read_out.adds[:, -1]).sum(), values)
    halves = found[: len(kept)], found[len(kept) :]
    outputs, adds = (dict(zip(kept, half, strict=True)) for half in halves)
    return {site: each.detach() for site, each in kept.items()}, outputs, adds


def informative(way: Way, chosen: Sequence[Component]) -> dict[str, Effect]:
    """The effect of each component's new weights, by the component's name."""
    changes: dict[Site, dict[str, Stream]] = {}
    for component in chosen:
        changes.setdefault(component.site, {})[component.name] = way.moved(component)
    values: dict[str, Effect] = {}
    for site, named in changes.items():
        values.update(zip(named, way.rises(site, list(named.values()), "added"), strict=True))
    return values


def downstream(way: Way) -> dict[str, Effect]:
    """The effect of the new inputs on every head and MLP with its old weights, by name."""
    values: dict[str, Effect] = {}
    for site in sites(way.model)[1:-1]:
        moved = write(way.model, site, way.tuned[site].reads).parts - way.kept[site].parts
        effects = way.rises(site, moved.unbind(2), "output")
        values.update(zip(writers(way.model, site), effects, strict=True))
    return values


def upstream(way: Way, others: Sequence[Mapping[Site, Parts]]) -> dict[str, Effect]:
    """How much more counterfactual outputs matter to the fine-tuned model, by component name.

    `others` holds what the embeddings, heads and MLPs of W wrote on counterfactual prompts, aligned
    with the batch. The score is the mean over them.
    """
    values: dict[str, Effect] = {}
    for site in sites(way.model)[:-1]:
        own = way.kept[site].parts
        for index, name in enumerate(writers(way.model, site)):
            changes = [other[site][:, :, index] - own[:, :, index] for other in others]
            old, new = way.rises(site, changes, "output"), way.rises(site, changes, "late")
            values[name] = (torch.stack(old) - torch.stack(new)).mean(0)
    return values
