"""What an attention score owes to the distance of its two tokens, in encoders that say so.

1. A `Bias` is what is added to the scores, which are divided by their scale already. It is given
   the queries and keys, so that it may depend on them, and at reads the positions of the queries.
2. `Disentangled` (DeBERTa, He et al. 2021): with r(d) the row of a distance d = i - j in a table of
   relative embeddings, projected to keys K(r) and queries Q(r),
   ``bias[i, j] = (q_i . K(r(i - j)) + k_j . Q(r(i - j))) / scale``, each term where it is asked
   for. Distances beyond the half of ``buckets`` share a row with their like (`log_bucket`).
3. `Bucketed` (MPNet, as in T5): one number for each head and bucket of the distance j - i.
4. Only the 2 L distances of rows of L tokens are ever projected. The product of queries and those
   rows is [query, distance]; `skew` reads it as [query, key], without a copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hc_lens.blocks import PerHead, repeated

Queries = Float[Tensor, "rows queries heads d_head"]
"""Of every token, or of one of each row."""
Scores = Float[Tensor, "#rows heads queries pos"]
"""What is added to attention scores."""
Table = Float[Tensor, "heads distances d_head"]
"""The projected relative embeddings of each distance."""


def log_bucket(distance: Int[Tensor, "..."], buckets: int, farthest: int) -> Int[Tensor, "..."]:
    """DeBERTa's bucket of a distance: exact near by, logarithmic from ``buckets // 2`` on.

    Without buckets (``buckets < 1``) a distance is its own. In float32, as Hugging Face rounds.
    """
    if buckets < 1 or farthest < 1:
        return distance
    middle = buckets // 2
    size = distance.abs().clamp(min=middle - 1)
    span = torch.log(torch.tensor((farthest - 1) / middle))
    far = torch.ceil(torch.log(size / middle) / span * (middle - 1)) + middle
    near = size <= middle
    return torch.where(near, distance, (far * distance.sign()).long())


def t5_bucket(
    offset: Int[Tensor, "..."], buckets: int = 32, farthest: int = 128
) -> Int[Tensor, "..."]:
    """T5's bucket of key minus query: half of them behind, exact near by, then logarithmic."""
    half, size = buckets // 2, offset.abs()
    exact = half // 2
    shown = torch.log(size.float().clamp(min=1) / exact) / math.log(farthest / exact)
    far = (exact + (shown * (half - exact)).long()).clamp(max=half - 1)
    return (offset > 0) * half + torch.where(size < exact, size, far)


def skew(x: Float[Tensor, "*rows tokens twice"]) -> Float[Tensor, "*rows tokens tokens"]:
    """``out[i, j] = x[i, j - i + L - 1]`` for L tokens, as a view; x has 2 L columns."""
    length = x.shape[-2]
    flat = x.flatten(-2)[..., length - 1 : 2 * length * length - 1]
    return flat.unflatten(-1, (length, 2 * length - 1))[..., :length]


@dataclass(frozen=True)
class Disentangled:
    """DeBERTa's two terms for rows of any length."""

    scale: float
    """The terms are divided by it."""
    keys: Callable[[Int[Tensor, "distances"]], Table] | None
    """Keys of some distances (content to position); None without this term."""
    queries: Callable[[Int[Tensor, "distances"]], Table] | None
    """Queries of some distances (position to content); None without this term."""
    keep: bool = False
    """Whether the last tables are kept for rows of the same length: the weights do not change."""
    _kept: dict[str, Table] = field(default_factory=dict, repr=False)

    def __call__(
        self, q: Queries, k: PerHead, at: Int[Tensor, "batch"] | None = None
    ) -> Float[Tensor, "rows heads queries pos"]:
        """The two terms of every pair, or of the queries at the positions `at`."""
        terms = [self._by_key(q, k, at), self._by_query(q, k, at)]
        first, *others = [term for term in terms if term is not None]
        return (first + others[0] if others else first) / self.scale

    def _by_key(self, q: Queries, k: PerHead, at: Int[Tensor, "batch"] | None) -> Tensor | None:
        """``q_i . K(r(i - j))``."""
        table = self._table("keys", k)
        if table is None:
            return None
        if at is None:
            return skew(_product(q, table))
        return torch.einsum("rohe,hrpe->rhop", q, table[:, _columns(at, k)])

    def _by_query(self, q: Queries, k: PerHead, at: Int[Tensor, "batch"] | None) -> Tensor | None:
        """``k_j . Q(r(i - j))``."""
        table = self._table("queries", k)
        if table is None:
            return None
        if at is None:
            return skew(_product(k, table)).transpose(-1, -2)
        # Here the columns are i - j, so they run the other way.
        columns = 2 * (k.shape[1] - 1) - _columns(at, k)
        return torch.einsum("rphe,hrpe->rhp", k, table[:, columns])[:, :, None]

    def _table(self, name: str, k: PerHead) -> Table | None:
        """Rows of the offsets from ``1 - L`` to ``L``: of j - i for keys, of i - j for queries."""
        project = self.keys if name == "keys" else self.queries
        if project is None:
            return None
        length = k.shape[1]
        table = self._kept.get(name)
        if table is None or table.shape[1] != 2 * length:
            offset = torch.arange(1 - length, length + 1, device=k.device)
            table = project(-offset if name == "keys" else offset)
            if self.keep:
                self._kept[name] = table
        return table


@dataclass(frozen=True)
class Bucketed:
    """One number for each head and bucket of a distance."""

    table: Float[Tensor, "buckets heads"]
    """The numbers."""

    def __call__(self, q: Queries, k: PerHead, at: Int[Tensor, "batch"] | None = None) -> Scores:
        """The numbers of every pair, or of the queries at the positions `at`."""
        keys = torch.arange(k.shape[1], device=k.device)
        if at is None:
            offset = (keys - keys[:, None])[None]
        else:
            offset = (keys - repeated(at, len(k))[:, None])[:, None]
        return self.table[t5_bucket(offset)].permute(0, 3, 1, 2)


def _product(x: PerHead, table: Table) -> Float[Tensor, "rows heads pos distances"]:
    """Every token's product with every row of a table, as one product for each head."""
    rows, pos = x.shape[:2]
    flat = x.permute(2, 0, 1, 3).reshape(x.shape[2], rows * pos, -1)
    return torch.bmm(flat, table.transpose(1, 2)).unflatten(1, (rows, pos)).transpose(0, 1)


def _columns(at: Int[Tensor, "batch"], k: PerHead) -> Int[Tensor, "rows pos"]:
    """The columns of the keys of a query at each row's position."""
    length = k.shape[1]
    keys = torch.arange(length, device=k.device)
    return keys - repeated(at.to(k.device), len(k))[:, None] + length - 1
