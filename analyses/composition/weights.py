"""Composition scores from the weights alone (Elhage et al. 2021), with layer norms on the way.

1. Head A writes ``S = W_V W_O M``, where M is the path to the receiver: for a post-norm encoder
   the norms of the layers between, each linearised as ``C diag(w) / s`` with the centring C and the
   mean scale s of the data; for a pre-norm decoder the receiver's own norm, folded in.
2. Head B reads with ``R``: ``W_Q W_K^T`` for its queries, ``W_K W_Q^T`` for its keys,
   ``W_V W_O`` for its values; an MLP with ``W_in``, an encoder's classifier with its pooler, a
   decoder's with W_U.
3. ``score = |S R| / (|S| |R|)`` in Frobenius norms, between 0 and 1; ``strength = |S R|``.
4. ``baseline`` is the mean score of two matrices with the singular values of S and R and random
   orthogonal bases. Only the overlap O of the two bases matters:
   ``|S R|^2 = sum_ij sigma_i^2 O_ij^2 rho_j^2``, so all pairs share the draws of O.
5. ``mlps=True`` adds paths through one MLP: S goes on as ``S W_in diag(g) W_out`` with g the MLP's
   mean activation gradient on the data; the column `via` names the MLP.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from analyses.composition.layers import Norm, check_supported
from analyses.composition.measures import each_batch
from analyses.composition.passes import Pass, Trunk
from analyses.composition.receivers import CLASSIFIER, INPUTS, Receiver, as_senders, reads_after
from hc_lens.errors import HcLensError
from hc_lens.sources import Zero
from hc_lens.units import Unit

Matrix = Float[Tensor, "_ _"]


@dataclass(frozen=True)
class Reader:
    """A receiver's matrix R = left right."""

    receiver: Receiver
    left: Matrix
    """[d_model, rank]: what it reads."""
    right_gram: Matrix | None
    """right right^T; None where right is the identity."""
    squares: Float[Tensor, "singular"]
    """Squared singular values of R."""

    @classmethod
    def of(cls, receiver: Receiver, left: Matrix, right: Matrix | None = None) -> Reader:
        """A reader, with its singular values."""
        if right is None:
            return cls(receiver, left, None, torch.linalg.svdvals(left) ** 2)
        gram = right @ right.T
        return cls(receiver, left, gram, _squares(left.T @ left, gram))


def weight_scores(
    model: Any,
    batches: Any = None,
    senders: Iterable[Any] | None = None,
    *,
    mlps: bool = False,
    draws: int = 64,
    seed: int = 0,
    limit: int | None = None,
    progress: bool = True,
) -> pd.DataFrame:
    """The composition score of every edge from a head.

    Columns: sender, receiver, kind, via (the MLP between, or ``""``), score, baseline, excess
    (score - baseline), ratio (score / baseline), strength (not normalised).

    Args:
        model: a classifier of `hc.load`.
        batches: rows that give the norms' mean scales and the MLPs' mean gradients; without rows
            both are 1. A norm's scale changes the strength of a path, never its score.
        senders: heads; default all.
        mlps: also paths through one MLP.
        draws: random bases for the baseline.
        seed: of these.
        limit: use at most so many rows.
        progress: show a progress bar.
    """
    check_supported(model)
    if isinstance(draws, bool) or not isinstance(draws, int) or draws < 1:
        raise HcLensError(f"expected draws as a number of at least 1, got {draws!r}; raise it")
    trunk = Trunk(model)
    found = as_senders(trunk.space, senders)
    other = [sender for sender in found if len(sender) > 1 or not all(u.is_head for u in sender)]
    if other:
        raise HcLensError(
            f"expected single heads as senders, got {'+'.join(map(str, other[0]))}; an MLP has no "
            "one matrix: use edge_effects or edge_attribution for it"
        )
    between = [model.blocks[layer].mlp for layer in trunk.space.mlps] if mlps else []
    gated = [mlp for mlp in between if hasattr(mlp, "W_gate")]
    if gated:
        raise HcLensError(
            f"expected MLPs without gates for paths through them, got a {type(gated[0]).__name__}; "
            "leave mlps=False"
        )
    scales = _Scales(trunk, batches, limit, progress, mlps)
    overlaps = _Overlaps(model.cfg.d_model, draws, seed)
    readers = list(_readers(trunk))
    rows = [
        (*keys, *values)
        for (unit,) in found
        for keys, values in _scores(trunk, scales, overlaps, readers, unit, mlps)
    ]
    columns = ["sender", "receiver", "kind", "via", "score", "baseline", "strength"]
    table = pd.DataFrame(rows, columns=columns)
    table["excess"] = table["score"] - table["baseline"]
    table["ratio"] = table["score"] / table["baseline"]
    return table.reindex(columns=[*columns[:6], "excess", "ratio", "strength"])


class _Scales:
    """Mean scales of every norm and mean gradients of every MLP's activation on some rows."""

    def __init__(self, trunk: Trunk, batches: Any, limit: int | None, progress: bool, mlps: bool):
        self.trunk = trunk
        self.sums: dict[tuple[int | None, str], Tensor] = {}
        self.gates: dict[int, Tensor] = {}
        self.count = 0
        if batches is None:
            return
        named = {getattr(batches, "name", "rows"): batches}
        for _, _, batch in each_batch(named, Zero(), limit, progress, "scales"):
            self._add(batch, mlps)

    @torch.no_grad()
    def _add(self, batch: Any, mlps: bool) -> None:
        trunk = self.trunk
        clean = Pass(trunk, trunk.blocks.start(batch, Zero()))
        clean.run()
        stream = clean.stream
        real = torch.ones_like(stream.tokens) if stream.mask is None else stream.mask
        self.count += int(real.sum())
        for index, (layer, run) in enumerate(zip(trunk.layers, clean.runs, strict=True)):
            ends = {"norm1": (layer.norm1, run.before_mlp if layer.post_norm else run.x)}
            if layer.has_mlp:
                ends["norm2"] = (layer.norm2, run.out if layer.post_norm else run.before_mlp)
            for name, (norm, at) in ends.items():
                self._sum((index, name), norm, at, real)
            if mlps and layer.has_mlp:
                gate = _activation_gradient(trunk.model.blocks[index].mlp, run.mlp_in)
                total = (gate * real[..., None]).sum((0, 1)).double()
                self.gates[index] = self.gates.get(index, torch.zeros_like(total)) + total
        if trunk.final is not None:
            self._sum((None, "final"), trunk.final, clean.final, real)

    def _sum(self, key: tuple[int | None, str], norm: Norm, at: Any, real: Tensor) -> None:
        scale = norm.scale(at)[..., 0].double() if not norm.identity else real.double()
        self.sums[key] = self.sums.get(key, torch.zeros(())) + (scale * real).sum().cpu()

    def fold(self, norm: Norm, key: tuple[int | None, str], matrix: Matrix) -> Matrix:
        """Rows of a matrix behind the linearised norm."""
        if norm.identity:
            return matrix
        scale = float(self.sums[key]) / self.count if self.count else 1.0
        weight = norm.weight.double() if isinstance(norm.weight, Tensor) else norm.weight
        return norm.centred(matrix) * weight / scale

    def gate(self, index: int) -> Tensor | float:
        """The mean gradient of an MLP's activation."""
        return self.gates[index] / self.count if self.count else 1.0


class _Overlaps:
    """Squared overlaps of random orthogonal bases of the residual stream."""

    def __init__(self, d_model: int, draws: int, seed: int):
        self.d_model, self.draws, self.seed = d_model, draws, seed
        self._kept: dict[tuple[int, int], Tensor] = {}

    def baseline(self, sent: Tensor, read: Tensor) -> float:
        """The mean score of random matrices with these squared singular values."""
        sizes = (len(sent), len(read))
        if sizes not in self._kept:
            self._kept[sizes] = self._draw(*sizes)
        squares = torch.einsum("i,nij,j->n", sent, self._kept[sizes].to(sent), read)
        return float((squares / (sent.sum() * read.sum())).sqrt().mean())

    def _draw(self, rows: int, columns: int) -> Float[Tensor, "draws rows columns"]:
        generator = torch.Generator().manual_seed(self.seed)
        made = []
        for _ in range(self.draws):
            shape = (self.d_model, columns)
            frame = torch.randn(shape, generator=generator, dtype=torch.float64)
            # By symmetry one of the two bases may be the axes.
            made.append(torch.linalg.qr(frame).Q[:rows] ** 2)
        return torch.stack(made)


def _readers(trunk: Trunk) -> Iterator[Reader]:
    """The matrix of every receiver."""
    for index, layer in enumerate(trunk.layers):
        attn: Any = layer.attn
        q, k, v, o = (getattr(attn, f"W_{name}").detach().double() for name in "QKVO")
        for head in range(trunk.space.n_heads[index]):
            matrices = ((q[head], k[head].T), (k[head], q[head].T), (v[head], o[head]))
            for kind, (left, right) in zip(INPUTS, matrices, strict=True):
                yield Reader.of(Receiver(Unit(index, head), kind), left, right)
        if layer.has_mlp:
            w_in = trunk.model.blocks[index].mlp.W_in.detach().double()
            yield Reader.of(Receiver(Unit(index), "mlp"), w_in)
    last = trunk.model.pooler.W if trunk.encoder else trunk.model.unembed.W_U
    yield Reader.of(Receiver(None, CLASSIFIER), last.detach().double())


def _scores(
    trunk: Trunk,
    scales: _Scales,
    overlaps: _Overlaps,
    readers: list[Reader],
    unit: Unit,
    mlps: bool,
) -> Iterator[tuple[tuple[str, str, str, str], tuple[float, float, float]]]:
    """Keys and values of every edge of one head."""
    attn: Any = trunk.layers[unit.layer].attn
    left = attn.W_V[unit.head].detach().double()
    written = attn.W_O[unit.head].detach().double()
    gram = left.T @ left
    starts: list[tuple[str, Unit, Matrix]] = [("", unit, written)]
    if mlps:
        starts += _through_mlps(trunk, scales, unit, written)
    for via, begin, matrix in starts:
        arrivals = _Arrivals(trunk, scales, begin, matrix)
        squares: dict[Any, Tensor] = {}
        for reader in readers:
            if not reads_after(trunk.space, reader.receiver, begin, trunk.parallel):
                continue
            arrived = arrivals.at(reader.receiver)
            place = (reader.receiver.unit and reader.receiver.unit.layer, reader.receiver.kind)
            place = place if place[1] in ("mlp", CLASSIFIER) else (place[0], "head")
            if place not in squares:
                squares[place] = _squares(gram, arrived @ arrived.T)
            values = _score(gram, arrived, squares[place], reader, overlaps)
            keys = (str(unit), reader.receiver.name, reader.receiver.kind, via)
            yield keys, values


class _Arrivals:
    """What a unit's written matrix has become at each later place, kept by place."""

    def __init__(self, trunk: Trunk, scales: _Scales, unit: Unit, written: Matrix):
        self.trunk, self.scales = trunk, scales
        self._unit, self._streams = unit, {(unit.layer, not unit.is_head): written}

    def at(self, receiver: Receiver) -> Matrix:
        """The matrix that the receiver's own weights multiply."""
        trunk, scales = self.trunk, self.scales
        if receiver.unit is None:
            stream = self._behind(len(trunk.layers) - 1)
            if trunk.final is None:
                return stream
            return scales.fold(trunk.final, (None, "final"), stream)
        index = receiver.unit.layer
        layer = trunk.layers[index]
        is_mlp = receiver.kind == "mlp"
        if layer.post_norm:
            return self._inside(index) if is_mlp else self._behind(index - 1)
        same = index == self._unit.layer
        stream = next(iter(self._streams.values())) if same else self._behind(index - 1)
        norm, name = (layer.norm2, "norm2") if is_mlp else (layer.norm1, "norm1")
        return scales.fold(norm, (index, name), stream)

    def _inside(self, index: int) -> Matrix:
        """Behind the first norm of a post-norm layer."""
        key = (index, True)
        if key not in self._streams:
            own = index == self._unit.layer
            stream = self._streams[index, False] if own else self._behind(index - 1)
            norm = self.trunk.layers[index].norm1
            self._streams[key] = self.scales.fold(norm, (index, "norm1"), stream)
        return self._streams[key]

    def _behind(self, index: int) -> Matrix:
        """Behind a layer."""
        layer = self.trunk.layers[index]
        if not layer.post_norm:
            return next(iter(self._streams.values()))
        key = (index + 1, False)
        if key not in self._streams:
            inside = self._inside(index)
            self._streams[key] = self.scales.fold(layer.norm2, (index, "norm2"), inside)
        return self._streams[key]


def _through_mlps(
    trunk: Trunk, scales: _Scales, unit: Unit, written: Matrix
) -> Iterator[tuple[str, Unit, Matrix]]:
    """What a head writes by way of each later MLP, linearised."""
    arrivals = _Arrivals(trunk, scales, unit, written)
    for index in trunk.space.mlps:
        receiver = Receiver(Unit(index), "mlp")
        if reads_after(trunk.space, receiver, unit, trunk.parallel):
            mlp: Any = trunk.model.blocks[index].mlp
            hidden = arrivals.at(receiver) @ mlp.W_in.detach().double()
            sent = (hidden * scales.gate(index)) @ mlp.W_out.detach().double()
            yield str(receiver.unit), Unit(index), sent


def _score(
    gram: Matrix,
    arrived: Matrix,
    sent: Float[Tensor, "singular"],
    reader: Reader,
    overlaps: _Overlaps,
) -> tuple[float, float, float]:
    """Score, baseline and strength of one edge, from matrices of the heads' rank."""
    met = arrived @ reader.left
    inner = met.T @ gram @ met
    squared = torch.trace(inner) if reader.right_gram is None else (inner * reader.right_gram).sum()
    strength = float(squared.clamp(min=0).sqrt())
    size = float((sent.sum() * reader.squares.sum()).sqrt())
    if size == 0:
        # A matrix of zeros composes with nothing, and no more by chance.
        return 0.0, 0.0, 0.0
    return strength / size, overlaps.baseline(sent, reader.squares), strength


def _squares(one: Matrix, other: Matrix) -> Float[Tensor, "rank"]:
    """Squared singular values of A B from A^T A and B B^T."""
    return torch.linalg.eigvals(one @ other).real.clamp(min=0)


def _activation_gradient(mlp: Any, mlp_in: Any) -> Float[Tensor, "batch pos d_mlp"]:
    """The derivative of an MLP's activation at every hidden unit."""
    with torch.enable_grad():
        hidden = (mlp_in @ mlp.W_in.detach() + mlp.b_in.detach()).requires_grad_()
        (gradient,) = torch.autograd.grad(mlp.act_fn(hidden).sum(), hidden)
    return gradient
