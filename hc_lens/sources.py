"""What stands in for the activation of a removed unit.

Every function that ablates takes a `Source`. The mean over the training tokens is the paper's and
the default (`hc_lens.means.Means`); here are the others:

- `Zero`: the zero vector.
- `Resample`: the activation of another row of the batch, drawn from a seed (Chan et al. 2022).
- `Counterfactual`: the activation of a paired row, as in activation patching.

A source that depends on the batch is bound to it first: ``source.on(batch)``. For the others `on`
returns the source itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hc_lens.errors import HcLensError
from hc_lens.hooks import Handle, check_hook_names, unit_hook_names
from hc_lens.models.inputs import mask_of
from hc_lens.units import UnitSpace


class Source(ABC):
    """What to put in place of a removed unit's activation."""

    def check(self, model: Any, space: UnitSpace) -> None:  # noqa: B027
        """Raise an HcLensError if this source does not fit the model."""

    def on(self, batch: Any) -> Source:
        """This source for one batch."""
        return self

    @abstractmethod
    def value(self, name: str, activation: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """The replacement at hook point `name`, of a shape that broadcasts to `activation`."""


class Zero(Source):
    """Zero ablation."""

    def value(self, name: str, activation: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Zeros."""
        return activation.new_zeros(())


class Resample(Source):
    """The activation of another row of the batch, at the same place in its sentence.

    The k-th token of a row gets the k-th token of its donor; where the donor is shorter its tokens
    are used again from the first. No row donates to itself.
    """

    def __init__(self, seed: int):
        self.seed = seed
        self._from: tuple[Int[Tensor, "batch 1"], Int[Tensor, "batch pos"]] | None = None

    def on(self, batch: Any) -> Resample:
        """Draw a donor for each row of the batch, from the seed and the batch's rows."""
        mask = mask_of(batch.inputs).bool()
        rows = len(mask)
        if rows < 2:
            raise HcLensError(
                "expected at least 2 rows in the batch to resample from another row, got 1; "
                "use larger batches or mean ablation"
            )
        seed = hash((self.seed, *batch.rows.tolist())) % 2**63
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(rows, generator=generator)
        # A cyclic shift along a random order is a permutation without a fixed point.
        donors = torch.empty_like(order)
        donors[order] = order.roll(1)
        donors = donors.to(mask.device)
        # Real positions first, in order, so that column k is the place of the k-th token.
        places = torch.argsort((~mask).long(), dim=1, stable=True)
        rank = (mask.cumsum(1) - 1).clamp(min=0)
        wrapped = rank % mask.sum(1)[donors].clamp(min=1)[:, None]
        bound = Resample(self.seed)
        bound._from = (donors[:, None], places[donors].gather(1, wrapped))
        return bound

    def value(self, name: str, activation: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """The donors' activations."""
        if self._from is None:
            raise HcLensError(
                "expected a Resample bound to the batch it runs on, got an unbound one; "
                "pass source.on(batch)"
            )
        rows, positions = self._from
        return activation[rows, positions]


class Counterfactual(Source):
    """The activations of paired rows: the same rows in a counterfactual version.

    Both sides are batches in the same order with the same shape and mask; the model runs on the
    counterfactual side once when a batch is bound, and only that batch's activations are held.
    """

    def __init__(self, model: Any, batches: Iterable[Any], counterfactuals: Iterable[Any]):
        self.model = model
        self._pairs = _pair(list(batches), list(counterfactuals))
        self._cache: dict[str, Tensor] | None = None

    def check(self, model: Any, space: UnitSpace) -> None:
        """The source must have been made with this model."""
        if model is not self.model:
            raise HcLensError(
                "expected the model that the counterfactuals were made with, got another one; "
                "make hc.Counterfactual(model, ...) with the model that is ablated"
            )

    def on(self, batch: Any) -> Counterfactual:
        """Run the model on the counterfactual of this batch and keep its activations."""
        pair = self._pairs.get(_key(batch))
        if pair is None:
            raise HcLensError(
                f"expected a batch that was paired, got rows {batch.rows[:3].tolist()}...; make "
                "hc.Counterfactual with the batches that are run"
            )
        space = UnitSpace.of(self.model)
        check_hook_names(self.model, space)
        cache: dict[str, Tensor] = {}
        edits = {name: _keep(cache, name) for name in unit_hook_names(space)}
        with torch.no_grad(), Handle(self.model, edits):
            self.model(**pair.inputs)
        bound = Counterfactual(self.model, [], [])
        bound._cache = cache
        return bound

    def value(self, name: str, activation: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """The counterfactual activations."""
        if self._cache is None:
            raise HcLensError(
                "expected a Counterfactual bound to the batch it runs on, got an unbound one; "
                "pass source.on(batch)"
            )
        return self._cache[name]


def _key(batch: Any) -> tuple[int, ...]:
    return tuple(batch.rows.tolist())


def _keep(cache: dict[str, Tensor], name: str) -> Any:
    def edit(activation: Tensor) -> None:
        cache[name] = activation

    return edit


def _pair(batches: list[Any], counterfactuals: list[Any]) -> dict[tuple[int, ...], Any]:
    if len(batches) != len(counterfactuals):
        raise HcLensError(
            f"expected one counterfactual batch per batch, got {len(counterfactuals)} for "
            f"{len(batches)}; make both with the same rows and settings"
        )
    for place, (batch, other) in enumerate(zip(batches, counterfactuals, strict=True)):
        mask, other_mask = mask_of(batch.inputs), mask_of(other.inputs)
        if mask.shape != other_mask.shape or not torch.equal(mask, other_mask):
            raise HcLensError(
                f"expected aligned batches, got batch {place} of shape {tuple(mask.shape)} with a "
                f"counterfactual of shape {tuple(other_mask.shape)} or another mask; rewrite the "
                "rows so that both versions have the same number of tokens"
            )
    return {_key(batch): other for batch, other in zip(batches, counterfactuals, strict=True)}


def as_source(given: Source | str) -> Source:
    """A `Source` from what a user passes: a source, or ``"zero"``."""
    if isinstance(given, Source):
        return given
    if given == "zero":
        return Zero()
    raise HcLensError(
        "expected means from hc.collect_means, 'zero', or another hc_lens source, got "
        f"{(given if isinstance(given, str) else type(given).__name__)!r}; "
        "collect means with hc.collect_means(model, batches)"
    )
