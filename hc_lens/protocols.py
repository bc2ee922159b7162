"""What hc_lens asks of a model and of batches: the least that its functions rely on.

`Model` is a HookedEncoder, a HookedTransformer or a TransformerBridge, however it was loaded;
`LanguageModel` one with a logit for every token of its vocabulary. `BatchLike` and `BatchesLike`
are `hc.Batch` and `hc.Batches`, or a user's own with the same parts. All are protocols, so that a
module can name them without importing TransformerLens, which takes seconds. `check_batch` refuses
what is no batch where a function first meets it.
"""

# The members of a protocol have no bodies.
# pyright: reportReturnType=false

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor, nn

from hc_lens.errors import HcLensError


@runtime_checkable
class Model(Protocol):
    """A model with TransformerLens's configuration and hook points."""

    @property
    def cfg(self) -> Any:
        """TransformerLens's configuration: n_layers, n_heads, d_model, dtype, device and more."""

    @property
    def hook_dict(self) -> Mapping[str, Any]:
        """The hook points by name."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """The weights."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The weights by name."""

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """The parts by name."""

    def modules(self) -> Iterator[nn.Module]:
        """The model and all its parts."""

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        """The logits."""


@runtime_checkable
class LanguageModel(Model, Protocol):
    """A hooked causal language model with its blocks and its tokenizer."""

    tokenizer: Any
    """The checkpoint's own tokenizer; None if the model has none."""

    @property
    def blocks(self) -> Any:
        """The transformer blocks, in order."""

    @property
    def to_tokens(self) -> Callable[..., Int[Tensor, "batch pos"]]:
        """Token ids of a text."""


@runtime_checkable
class BatchLike(Protocol):
    """Rows of about equal length, ready for ``model(**batch.inputs)``."""

    @property
    def inputs(self) -> Mapping[str, Tensor]:
        """Keyword arguments of the model: token ids, attention mask, token types."""

    @property
    def labels(self) -> Int[Tensor, " batch"]:
        """Index of each row's label among the task's; -1 for a row without one."""

    @property
    def cases(self) -> tuple[str, ...]:
        """Name of each row's case."""

    @property
    def rows(self) -> Int[Tensor, " batch"]:
        """Position of each row in its split."""

    def take(self, indices: Sequence[int]) -> BatchLike:
        """Some rows of the batch, by their indices."""


@runtime_checkable
class BatchesLike(Protocol):
    """Batches in the same order at every pass, with the labels of their task.

    They may also have `name`, `labels` (the task's label names; empty for a task without labels),
    `heuristic` (the label that the heuristic answers) and `fingerprint`, which results on disk
    need.
    """

    def __iter__(self) -> Iterator[BatchLike]: ...

    def __getitem__(self, index: int, /) -> BatchLike: ...

    def __len__(self) -> int: ...

    def predictions(
        self, logits: Float[Tensor, "*runs batch out"], batch: BatchLike, /
    ) -> Int[Tensor, "*runs batch"]:
        """The task's label of each row's largest logit."""

    def log_probs(
        self, logits: Float[Tensor, "*runs batch out"], batch: BatchLike, /
    ) -> Float[Tensor, "*runs batch labels"]:
        """Log-probabilities of the task's labels."""


def check_batch(given: object, *parts: str) -> None:
    """Refuse what lacks some of the parts of a batch, such as token ids alone."""
    missing = [part for part in parts if not hasattr(given, part)]
    if missing:
        raise HcLensError(
            f"expected batches with {' and '.join(missing)}, got a {type(given).__name__}; make "
            "batches with task.batches(model, ...), from texts with [hc.word_batch(model, texts)], "
            "from token ids with [hc.Batch({'input': ids}, labels, cases, rows)]"
        )
