"""Composition scores from the weights alone (Elhage et al. 2021), with layer norms on the way.

1. Head A writes ``S = W_V W_O M``, where M is the path to the receiver: for a post-norm encoder
   the norms of the layers between, each linearised as ``C diag(w) / s`` with the centring C and the
   mean scale s of the data; for a pre-norm decoder the receiver's own norm, folded in.
2. Head B reads with ``R``: ``W_Q W_K^T`` for its queries, ``W_K W_Q^T`` for its keys,
   ``W_V W_O`` for its values; an MLP with ``W_in``, an encoder's classifier with its pooler, a
   masked language model with the dense layer of its head, a decoder with W_U: that of its labels,
   or of a language model's whole vocabulary, not of some rows' answers. Only the norm of a product
   with W_U matters, so a vocabulary's is ``U sqrt(L)`` with ``W_U W_U^T = U L U^T``.
3. ``score = |S R| / (|S| |R|)`` in Frobenius norms, between 0 and 1; ``strength = |S R|``.
4. ``baseline`` is the mean score of two matrices with the singular values of S and R and random
   orthogonal bases. Only the overlap O of the two bases matters:
   ``|S R|^2 = sum_ij sigma_i^2 O_ij^2 rho_j^2``, so all pairs share the draws of O.
5. What scores owe to positions beside the embeddings (rotary positions, DeBERTa's terms, MPNet's
   numbers) is no part of W_Q and W_K: the scores of q and k leave it out, with a warning.
6. ``mlps=True`` adds paths through one MLP: S becomes ``S W_in diag(g) W_out`` with g the MLP's
   mean activation gradient on the data; the column `via` names the MLP.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from hc_lens.analyses.composition.engine import PathEngine
from hc_lens.analyses.composition.passes import Pass, PathView
from hc_lens.analyses.composition.receivers import (
    INPUTS,
    Receiver,
    as_senders,
    reads_after,
)
from hc_lens.blocks import Mlp, Norm, Resid
from hc_lens.errors import HcLensError, HcLensWarning, check_count, warn
from hc_lens.models.inputs import is_encoder
from hc_lens.models.lens import known_parts
from hc_lens.models.reading import is_classifier
from hc_lens.protocols import BatchesLike, Model
from hc_lens.scans.scan import limited_batches
from hc_lens.units import Unit, UnitSet, set_label


class PositionsWarning(HcLensWarning):
    """The scores of queries and keys leave out what attention owes to positions."""


Matrix = Float[Tensor, "_ _"]
Draw = Callable[[int, int], Float[Tensor, "draws rows columns"]]
"""Random overlaps of two bases of so many vectors."""
Arrivals = dict[tuple[int | None, bool], Matrix]
"""What a matrix that was written has become where it is read: by layer (None behind the last)
and whether the MLP reads it; all heads of a layer read the same."""


def weight_scores(
    model: Model,
    batches: BatchesLike | None = None,
    senders: Iterable[UnitSet] | None = None,
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
        model, limit, progress: as in `edge_effects`.
        batches: rows that give the norms' mean scales and the MLPs' mean gradients; without rows
            both are 1. A norm's scale changes the strength of a path, never its score.
        senders: heads; default all.
        mlps: also paths through one MLP.
        draws, seed: number of random bases for the baseline, and their seed.
    """
    engine = PathEngine(model, "zero")
    check_count("draws", draws)
    found = as_senders(model, senders)
    other = [sender for sender in found if [unit.is_head for unit in sender] != [True]]
    if other:
        raise HcLensError(
            f"expected single heads as senders, got {set_label(other[0])}; an MLP has no "
            "one matrix: use edge_effects or edge_attribution for it"
        )
    linear = _Linear(engine.view, mlps)
    heads = [block.heads for block in engine.view.blocks]
    if any(each.rotate is not None or each.bias is not None for each in heads):
        warn(
            "composition by weights leaves out what this model's attention scores owe to positions "
            "(rotary positions, or terms for the distance of two tokens): read the scores of q and "
            "k as those of contents alone; edge_effects has the whole",
            PositionsWarning,
        )
    if batches is not None:
        named = limited_batches(batches, engine.source, limit)
        for _, _, clean in engine.passes(named, progress, "scales"):
            linear.add(clean)
    # All edges with matrices of the same ranks share the draws.
    overlaps = cache(partial(_draw, model.cfg.d_model, draws, seed))
    readers = list(_readers(linear))
    rows = [row for (unit,) in found for row in _scores(linear, overlaps, readers, unit)]
    columns = ["sender", "receiver", "kind", "via", "score", "baseline", "strength"]
    table = pd.DataFrame(rows, columns=columns)
    table.insert(6, "excess", table["score"] - table["baseline"])
    table.insert(7, "ratio", table["score"] / table["baseline"])
    return table


class _Linear:
    """A model with linear norms and MLPs: at their mean scales and gradients on some rows."""

    def __init__(self, view: PathView, through_mlps: bool):
        """Begin without rows: all scales and gradients are 1."""
        self.view, self.through_mlps = view, through_mlps
        self.mlps: dict[int, Mlp] = {}
        for index, block in enumerate(view.blocks):
            mlp = block.mlp
            if isinstance(mlp, Mlp) and (mlp.W_gate is None or not through_mlps):
                self.mlps[index] = mlp
            elif mlp is not None:
                raise HcLensError(
                    "expected MLPs without gates for paths through them, and with one matrix that "
                    f"reads the stream for any score, got another kind in layer {index}; leave "
                    "mlps=False, or use edge_effects or edge_attribution"
                )
        self._count = 0
        self._slopes: defaultdict[int, Tensor | float] = defaultdict(float)
        # By the norm's id, as two norms without weights are equal.
        self._scales: defaultdict[int, float] = defaultdict(float)

    @torch.no_grad()
    def add(self, clean: Pass) -> None:
        """Add the tokens of a batch."""
        mask = clean.stream.context.mask
        real = torch.ones_like(clean.stream.tokens) if mask is None else mask
        self._count += int(real.sum())
        inputs = [(self.view.final, clean.final)]
        for index, run in enumerate(clean.runs):
            block = run.block
            inputs.append((block.norm1, run.before_mlp if block.post_norm else run.x))
            if index in self.mlps:
                inputs.append((block.norm2, run.out if block.post_norm else run.before_mlp))
                if self.through_mlps:
                    slope = _slope(self.mlps[index], run.mlp_in)
                    self._slopes[index] += (slope * real[..., None]).sum((0, 1)).double()
        for norm, at in inputs:
            if not norm.identity:
                scale = norm.scale(at)[..., 0].double()
                self._scales[id(norm)] += float((scale * real).sum())

    def arrivals(self, unit: Unit, written: Matrix) -> Arrivals:
        """What a unit's written matrix has become wherever it is read."""
        found, stream = {}, written
        for index, block in enumerate(self.view.blocks[unit.layer :], unit.layer):
            if not block.post_norm:
                found[index, False] = self._behind(block.norm1, stream)
                found[index, True] = self._behind(block.norm2, stream)
                continue
            found[index, False] = stream
            if unit != Unit(index):
                stream = self._behind(block.norm1, stream)
            found[index, True] = stream
            stream = self._behind(block.norm2, stream)
        found[None, False] = self._behind(self.view.final, stream)
        return found

    def through_mlp(self, index: int, arrived: Matrix) -> Matrix:
        """What the MLP of a layer writes of a matrix that it reads."""
        mlp = self.mlps[index]
        slope = self._slopes[index] / self._count if self._count else 1.0
        return (arrived @ mlp.W_in.double() * slope) @ mlp.W_out.double()

    def _behind(self, norm: Norm, matrix: Matrix) -> Matrix:
        """Rows of a matrix behind a norm."""
        if norm.identity:
            return matrix
        scale = self._scales[id(norm)] / self._count if self._count else 1.0
        weight = 1.0 if norm.weight is None else norm.weight.double()
        return norm.centred(matrix) * weight / scale


class Reader:
    """A receiver's matrix R = left right; without a right one it is left."""

    def __init__(self, receiver: Receiver, left: Matrix, right: Matrix | None = None):
        """Take what a score needs: right right^T and the squared singular values of R."""
        self.receiver, self._left = receiver, left
        self._right_gram = None if right is None else right @ right.T
        if self._right_gram is None:
            self._squares = torch.linalg.svdvals(left) ** 2
        else:
            self._squares = _squares(left.T @ left, self._right_gram)

    def score(
        self, gram: Matrix, arrived: Matrix, sent: Float[Tensor, "singular"], overlaps: Draw
    ) -> tuple[float, float, float]:
        """Score, baseline and strength of one edge, from matrices of the heads' rank.

        The matrix S is W_V, of which `gram` is W_V^T W_V, times what has `arrived` of W_O; `sent`
        are its squared singular values.
        """
        met = arrived @ self._left
        inner = met.T @ gram @ met
        right = self._right_gram
        squared = torch.trace(inner) if right is None else (inner * right).sum()
        strength = float(squared.clamp(min=0).sqrt())
        size = float((sent.sum() * self._squares.sum()).sqrt())
        if size == 0:
            # A matrix of zeros composes with nothing, and no more by chance.
            return 0.0, 0.0, 0.0
        drawn = overlaps(len(sent), len(self._squares)).to(sent)
        squares = torch.einsum("i,nij,j->n", sent, drawn, self._squares)
        baseline = (squares / (sent.sum() * self._squares.sum())).sqrt().mean()
        return strength / size, float(baseline), strength


def _draw(
    d_model: int, draws: int, seed: int, rows: int, columns: int
) -> Float[Tensor, "draws rows columns"]:
    """Squared overlaps of random orthogonal bases of the residual stream."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(draws):
        frame = torch.randn((d_model, columns), generator=generator, dtype=torch.float64)
        # By symmetry one of the two bases may be the axes.
        made.append(torch.linalg.qr(frame).Q[:rows] ** 2)
    return torch.stack(made)


def _readers(linear: _Linear) -> Iterator[Reader]:
    """The matrix of every receiver."""
    for index, block in enumerate(linear.view.blocks):
        heads = block.heads
        groups = (heads.expanded(weight, dim=0) for weight in (heads.W_K, heads.W_V))
        q, k, v, o = (weight.double() for weight in (heads.W_Q, *groups, heads.W_O))
        for head in range(len(q)):
            matrices = ((q[head], k[head].T), (k[head], q[head].T), (v[head], o[head]))
            for kind, (left, right) in zip(INPUTS, matrices, strict=True):
                yield Reader(Receiver(Unit(index, head), kind), left, right)
        if index in linear.mlps:
            yield Reader(Receiver(Unit(index), "mlp"), linear.mlps[index].W_in.double())
    yield Reader(linear.view.last, _last_matrix(linear.view.model))


@torch.no_grad()
def _last_matrix(model: Model) -> Matrix:
    """What reads the stream behind the last layer."""
    matrix = known_parts(model).last_matrix().double()
    if is_classifier(model) or is_encoder(model):
        return matrix
    squares, basis = torch.linalg.eigh(matrix @ matrix.T)
    return basis * squares.clamp(min=0).sqrt()


def _scores(
    linear: _Linear, overlaps: Draw, readers: list[Reader], unit: Unit
) -> Iterator[tuple[str | float, ...]]:
    """The rows of the table for every edge of one head."""
    model, heads = linear.view.model, linear.view.blocks[unit.layer].heads
    left = heads.expanded(heads.W_V, dim=0)[unit.head].double()
    gram = left.T @ left
    written = linear.arrivals(unit, heads.W_O[unit.head].double())
    paths = [("", unit, written)]
    for index in linear.mlps if linear.through_mlps else ():
        mlp = Receiver(Unit(index), "mlp")
        if reads_after(model, mlp, (unit,)):
            sent = linear.through_mlp(index, written[index, True])
            paths.append((str(mlp), Unit(index), linear.arrivals(Unit(index), sent)))
    for via, begin, arrivals in paths:
        squares = {key: _squares(gram, arrived @ arrived.T) for key, arrived in arrivals.items()}
        for reader in readers:
            receiver = reader.receiver
            if reads_after(model, receiver, (begin,)):
                key = (receiver.layer, receiver.kind == "mlp")
                values = reader.score(gram, arrivals[key], squares[key], overlaps)
                yield str(unit), receiver.name, receiver.kind, via, *values


def _squares(one: Matrix, other: Matrix) -> Float[Tensor, "rank"]:
    """Squared singular values of A B from A^T A and B B^T."""
    return torch.linalg.eigvals(one @ other).real.clamp(min=0)


def _slope(mlp: Mlp, mlp_in: Resid) -> Float[Tensor, "rows pos d_mlp"]:
    """The derivative of an MLP's activation at every hidden unit."""
    with torch.enable_grad():
        hidden = (mlp_in @ mlp.W_in + mlp.b_in).requires_grad_()
        (gradient,) = torch.autograd.grad(mlp.act(hidden).sum(), hidden)
    return gradient
