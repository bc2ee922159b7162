"""What replaces the activation of a removed unit.

Every function that ablates takes a `Source`. The mean over the training tokens is the paper's and
the default (`hc_lens.masks.means.Means`); here are the others:

- `Zero`: the zero vector.
- `Resample`: the activation of another row of the batch, drawn from a seed (Chan et al. 2022).
- `Counterfactual`: the activation of a paired row, as in activation patching.

A source that depends on the batch is bound to it first: ``source.on(batch)``.

A source of your own is a subclass with `value`. What it does not say of itself is assumed to be the
harder case, so the numbers are right all the same.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hc_lens.errors import HcLensError
from hc_lens.models.inputs import mask_of, pieces
from hc_lens.models.reading import read_units
from hc_lens.protocols import BatchLike, Model
from hc_lens.units import UnitSpace


class Source(ABC):
    """What to put in place of a removed unit's activation."""

    @property
    def constant(self) -> bool:
        """Whether a unit has one replacement, whatever the activation, the batch and the token."""
        return False

    @property
    def row_wise(self) -> bool:
        """Whether a batch may be cut along its rows without changing any replacement."""
        return self.constant

    @property
    def fingerprint(self) -> str | None:
        """Names all that decides the replacements; without it results cannot be kept on disk."""
        return None

    def bytes_per_token(self, cfg: Any) -> int:
        """Memory that the replacements need for each token of a batch on a model of this `cfg`."""
        # A replacement at one hook point, the activation and their mixture are held at once.
        return 0 if self.constant else 3 * cfg.d_model * cfg.dtype.itemsize

    def check(self, model: Model, space: UnitSpace) -> None:  # noqa: B027
        """Raise an HcLensError if this source does not fit the model."""

    def on(self, batch: BatchLike) -> Source:
        """This source for one batch."""
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    @abstractmethod
    def value(self, name: str, activation: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """The replacement at hook point `name`, of a shape that broadcasts to `activation`."""


class Zero(Source):
    """Zero ablation."""

    @property
    def constant(self) -> bool:
        """Always."""
        return True

    @property
    def fingerprint(self) -> str:
        """The same for every model."""
        return "zero"

    def value(self, name: str, activation: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Zeros."""
        return activation.new_zeros(())


class _OfBatch(Source):
    """A source that depends on the batch, and is of use only once it is bound to one."""

    _bound: Callable[[str, Tensor], Tensor] | None = None

    def _with(self, value: Callable[[str, Tensor], Tensor]) -> Source:
        bound = copy.copy(self)
        bound._bound = value
        return bound

    def __repr__(self) -> str:
        bound = "" if self._bound is None else ", bound to a batch"
        return f"{type(self).__name__}({self._shown}{bound})"

    @property
    @abstractmethod
    def _shown(self) -> str:
        """What tells this source from another of its kind."""

    def value(self, name: str, activation: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """The replacement in the batch that it is bound to."""
        if self._bound is None:
            raise HcLensError(
                f"expected a {type(self).__name__} bound to the batch it runs on, got an unbound "
                "one; pass source.on(batch)"
            )
        return self._bound(name, activation)


class Resample(_OfBatch):
    """The activation of another row of the batch, at the same position in its sentence.

    The k-th token of a row gets the k-th token of its donor; where the donor is shorter its tokens
    are used again from the first. No row donates to itself.
    """

    def __init__(self, seed: int):
        self.seed = seed

    @property
    def _shown(self) -> str:
        return f"seed {self.seed}"

    @property
    def fingerprint(self) -> str:
        """The seed decides the donors of a batch."""
        return f"resample {self.seed}"

    def on(self, batch: BatchLike) -> Source:
        """Draw a donor for each row of the batch, from the seed and the batch's rows."""
        mask = mask_of(batch.inputs).bool()
        if len(mask) < 2:
            raise HcLensError(
                "expected at least 2 rows in the batch to resample from another row, got 1; "
                "use larger batches or mean ablation"
            )
        seed = hash((self.seed, *batch.rows.tolist())) % 2**63
        order = torch.randperm(len(mask), generator=torch.Generator().manual_seed(seed))
        # A cyclic shift along a random order is a permutation without a fixed point.
        donors = torch.empty_like(order).scatter_(0, order, order.roll(1)).to(mask.device)
        # Real positions first, in order, so that column k is the position of the k-th token.
        positions = torch.argsort((~mask).long(), dim=1, stable=True)
        wrapped = rank_in_row(mask.long()) % mask.sum(1)[donors].clamp(min=1)[:, None]
        at = (donors[:, None], positions[donors].gather(1, wrapped))
        return self._with(lambda name, activation: activation[at])


class Counterfactual(_OfBatch):
    """The activations of paired rows at the same position: the rows in a counterfactual version.

    Batches of `hc.Prompts` bring their counterfactuals along: ``hc.Counterfactual(model)``. For
    others both sides are given, batches in the same order with the same shape and mask. The model
    runs on the counterfactual side once when a batch is bound, and only that batch's activations
    are held.
    """

    def __init__(
        self,
        model: Model,
        batches: Iterable[BatchLike] | None = None,
        counterfactuals: Iterable[BatchLike] | None = None,
    ):
        self.model = model
        if (batches is None) != (counterfactuals is None):
            raise HcLensError(
                "expected batches and their counterfactuals, got one side alone; pass both, or "
                "neither for batches of hc.Prompts with counterfactuals"
            )
        self._pairs: dict[tuple[int, ...], BatchLike] | None = None if batches is None else {}
        if self._pairs is None:
            return
        ours, theirs = list(batches or ()), list(counterfactuals or ())
        if len(ours) != len(theirs):
            raise HcLensError(
                f"expected one counterfactual batch per batch, got {len(theirs)} for {len(ours)}; "
                "make both with the same rows and settings"
            )
        for index, (batch, other) in enumerate(zip(ours, theirs, strict=True)):
            mask, other_mask = mask_of(batch.inputs), mask_of(other.inputs)
            if not torch.equal(mask, other_mask):
                raise HcLensError(
                    f"expected aligned batches, got batch {index} of shape {tuple(mask.shape)} "
                    f"with a counterfactual of shape {tuple(other_mask.shape)} or another mask; "
                    "rewrite the rows so that both versions have the same number of tokens"
                )
            self._pairs[_key(batch)] = other

    @property
    def _shown(self) -> str:
        if self._pairs is None:
            return "of each prompt"
        return f"{len(self._pairs)} paired batches"

    @property
    def row_wise(self) -> bool:
        """Where a batch brings its counterfactuals along, they are cut with it."""
        return self._pairs is None

    @property
    def fingerprint(self) -> str | None:
        """The counterfactuals that batches bring along belong to the batches' own fingerprint."""
        return "counterfactual" if self._pairs is None else None

    def bytes_per_token(self, cfg: Any) -> int:
        """The activations of every unit, beside what every source needs."""
        return super().bytes_per_token(cfg) + 2 * cfg.n_layers * cfg.d_model * cfg.dtype.itemsize

    def check(self, model: Model, space: UnitSpace) -> None:
        """The source must have been made with this model."""
        if model is not self.model:
            raise HcLensError(
                "expected the model that the counterfactuals were made with, got another one; "
                "make hc.Counterfactual(model, ...) with the model that is ablated"
            )

    def on(self, batch: BatchLike) -> Source:
        """Run the model on the counterfactual of this batch and keep its activations."""
        parts: dict[str, list[Tensor]] = defaultdict(list)
        for inputs in pieces(self.model, self._inputs(batch)):
            read_units(self.model, inputs, lambda name, value: parts[name].append(value))
        # Of one hook point after another, so that both copies of all of them are never there.
        cache = {name: torch.cat(parts.pop(name)) for name in list(parts)}
        return self._with(lambda name, activation: cache[name])

    def _inputs(self, batch: BatchLike) -> Mapping[str, Tensor]:
        """The model's inputs for the counterfactuals of a batch."""
        if self._pairs is None:
            given = getattr(batch, "counterfactual", None)
            if given is None:
                raise HcLensError(
                    "expected batches with counterfactuals, got rows without them; give each "
                    "prompt a counterfactual of the same number of tokens, or pass "
                    "hc.Counterfactual both sides"
                )
            return given
        pair = self._pairs.get(_key(batch))
        if pair is None:
            raise HcLensError(
                f"expected a batch that was paired, got rows {batch.rows[:3].tolist()}...; make "
                "hc.Counterfactual with the batches that are run"
            )
        return pair.inputs


def rank_in_row(mask: Int[Tensor, "batch pos"]) -> Int[Tensor, "batch pos"]:
    """Position of each token in its sentence, counted over the tokens that are not pads."""
    return (mask.cumsum(1) - 1).clamp(min=0)


def _key(batch: BatchLike) -> tuple[int, ...]:
    return tuple(batch.rows.tolist())


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
