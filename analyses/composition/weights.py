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

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from analyses.composition.config import check_count
from analyses.composition.effects import Rows
from analyses.composition.passes import Pass, Trunk
from analyses.composition.receivers import CLASSIFIER, INPUTS, Receiver, as_senders, reads_after
from hc_lens.blocks import Mlp, Norm, Resid
from hc_lens.errors import HcLensError
from hc_lens.masks.replacements import Zero
from hc_lens.models.classifiers import EncoderClassifier
from hc_lens.protocols import BatchesLike, BatchLike, Model
from hc_lens.units import Unit, UnitSet, set_label

Matrix = Float[Tensor, "_ _"]
Overlaps = Float[Tensor, "draws rows columns"]
NormName = tuple[int | None, str]
"""A norm by its layer and its name in `hc_lens.blocks.Block`; (None, "final") is the last one."""


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
    trunk = Trunk(model)
    check_count("draws as a number", draws, 1)
    found = as_senders(trunk.space, senders)
    other = [sender for sender in found if [unit.is_head for unit in sender] != [True]]
    if other:
        raise HcLensError(
            f"expected single heads as senders, got {set_label(other[0])}; an MLP has no "
            "one matrix: use edge_effects or edge_attribution for it"
        )
    _check_mlps(trunk, mlps)
    scales = _Scales(trunk, mlps)
    if batches is not None:
        for _, batch in Rows.of(model, batches, Zero(), limit).pieces(progress, "scales"):
            scales.add(batch)
    # All edges with matrices of the same ranks share the draws.
    overlaps = cache(partial(_draw, model.cfg.d_model, draws, seed))
    readers = list(_readers(trunk))
    rows = [row for (unit,) in found for row in _scores(scales, overlaps, readers, unit)]
    columns = ["sender", "receiver", "kind", "via", "score", "baseline", "strength"]
    table = pd.DataFrame(rows, columns=columns)
    table["excess"] = table["score"] - table["baseline"]
    table["ratio"] = table["score"] / table["baseline"]
    return table.reindex(columns=[*columns[:6], "excess", "ratio", "strength"])


def _check_mlps(trunk: Trunk, between: bool) -> None:
    """MLPs must have one first matrix to be read, and no gate to lie between heads."""
    for block in trunk.blocks:
        if block.mlp is not None and not isinstance(block.mlp, Mlp):
            raise HcLensError(
                "expected MLPs with one matrix that reads the stream, got MLPs of another kind; "
                "use edge_effects or edge_attribution for this model"
            )
        if between and isinstance(block.mlp, Mlp) and block.mlp.W_gate is not None:
            raise HcLensError(
                "expected MLPs without gates for paths through them, got gated MLPs; leave "
                "mlps=False"
            )


class _Scales:
    """Mean scales of every norm and mean gradients of every MLP's activation on some rows."""

    def __init__(self, trunk: Trunk, mlps: bool):
        """Begin without rows: all scales and gradients are 1."""
        self.trunk, self.mlps = trunk, mlps
        self.sums: dict[NormName, Tensor] = {}
        self.gates: dict[int, Tensor] = {}
        self.count = 0

    @torch.no_grad()
    def add(self, batch: BatchLike) -> None:
        """Add the tokens of a batch."""
        trunk = self.trunk
        clean = Pass(trunk, trunk.stream(batch, Zero()))
        clean.run()
        mask = clean.stream.context.mask
        real = torch.ones_like(clean.stream.tokens) if mask is None else mask
        self.count += int(real.sum())
        inputs: dict[NormName, Resid] = {(None, "final"): clean.final}
        for index, run in enumerate(clean.runs):
            post_norm = run.block.post_norm
            inputs[index, "norm1"] = run.before_mlp if post_norm else run.x
            if run.block.mlp is None:
                continue
            inputs[index, "norm2"] = run.out if post_norm else run.before_mlp
            if self.mlps:
                gate = _activation_gradient(_mlp(trunk, index), run.mlp_in)
                total = (gate * real[..., None]).sum((0, 1)).double()
                self.gates[index] = self.gates.get(index, torch.zeros_like(total)) + total
        for name, at in inputs.items():
            norm = self._norm(name)
            if not norm.identity:
                scale = norm.scale(at)[..., 0].double()
                self.sums[name] = self.sums.get(name, torch.zeros(())) + (scale * real).sum().cpu()

    def fold(self, name: NormName, matrix: Matrix) -> Matrix:
        """Rows of a matrix behind the linearised norm."""
        norm = self._norm(name)
        if norm.identity:
            return matrix
        scale = float(self.sums[name]) / self.count if self.count else 1.0
        weight = 1.0 if norm.weight is None else norm.weight.double()
        return norm.centred(matrix) * weight / scale

    def gate(self, index: int) -> Tensor | float:
        """The mean gradient of an MLP's activation."""
        return self.gates[index] / self.count if self.count else 1.0

    def _norm(self, name: NormName) -> Norm:
        layer, attribute = name
        return getattr(self.trunk if layer is None else self.trunk.blocks[layer], attribute)


def _draw(d_model: int, draws: int, seed: int, rows: int, columns: int) -> Overlaps:
    """Squared overlaps of random orthogonal bases of the residual stream."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(draws):
        frame = torch.randn((d_model, columns), generator=generator, dtype=torch.float64)
        # By symmetry one of the two bases may be the axes.
        made.append(torch.linalg.qr(frame).Q[:rows] ** 2)
    return torch.stack(made)


def _mlp(trunk: Trunk, index: int) -> Mlp:
    """The MLP of a layer; `_check_mlps` has seen that it is one."""
    mlp = trunk.blocks[index].mlp
    assert isinstance(mlp, Mlp)
    return mlp


def _readers(trunk: Trunk) -> Iterator[Reader]:
    """The matrix of every receiver."""
    for index, block in enumerate(trunk.blocks):
        heads = block.heads
        groups = (heads.expanded(weight, dim=0) for weight in (heads.W_K, heads.W_V))
        q, k, v, o = (weight.double() for weight in (heads.W_Q, *groups, heads.W_O))
        for head in range(len(q)):
            matrices = ((q[head], k[head].T), (k[head], q[head].T), (v[head], o[head]))
            for kind, (left, right) in zip(INPUTS, matrices, strict=True):
                yield Reader.of(Receiver(Unit(index, head), kind), left, right)
        if block.mlp is not None:
            yield Reader.of(Receiver(Unit(index), "mlp"), _mlp(trunk, index).W_in.double())
    model = trunk.model
    last = model.pooler.W if isinstance(model, EncoderClassifier) else model.unembed.W_U
    yield Reader.of(Receiver(None, CLASSIFIER), last.detach().double())


def _scores(
    scales: _Scales, overlaps: Callable[[int, int], Overlaps], readers: list[Reader], unit: Unit
) -> Iterator[tuple[str | float, ...]]:
    """The rows of the table for every edge of one head."""
    trunk = scales.trunk
    heads = trunk.blocks[unit.layer].heads
    left = heads.expanded(heads.W_V, dim=0)[unit.head].double()
    written = heads.W_O[unit.head].double()
    gram = left.T @ left
    starts: list[tuple[str, Unit, Matrix]] = [("", unit, written)]
    if scales.mlps:
        starts += _through_mlps(scales, unit, written)
    for via, begin, matrix in starts:
        arrivals = _arrivals(scales, begin, matrix)
        squares = {key: _squares(gram, arrived @ arrived.T) for key, arrived in arrivals.items()}
        for reader in readers:
            receiver = reader.receiver
            if reads_after(receiver, (begin,), trunk.parallel):
                key = _reads_at(receiver)
                values = _score(gram, arrivals[key], squares[key], reader, overlaps)
                yield str(unit), receiver.name, receiver.kind, via, *values


def _reads_at(receiver: Receiver) -> tuple[int | None, bool]:
    """Where a receiver reads, by layer and whether it is the MLP; all heads of a layer alike."""
    return (None, False) if receiver.unit is None else (receiver.unit.layer, receiver.kind == "mlp")


def _arrivals(
    scales: _Scales, unit: Unit, written: Matrix
) -> dict[tuple[int | None, bool], Matrix]:
    """What a unit's written matrix has become wherever it is read; see `_reads_at`."""
    found, stream = {}, written
    for index in range(unit.layer, len(scales.trunk.blocks)):
        if not scales.trunk.blocks[index].post_norm:
            found[index, False] = scales.fold((index, "norm1"), stream)
            found[index, True] = scales.fold((index, "norm2"), stream)
            continue
        found[index, False] = stream
        if unit != Unit(index):
            stream = scales.fold((index, "norm1"), stream)
        found[index, True] = stream
        stream = scales.fold((index, "norm2"), stream)
    found[None, False] = scales.fold((None, "final"), stream)
    return found


def _through_mlps(
    scales: _Scales, unit: Unit, written: Matrix
) -> Iterator[tuple[str, Unit, Matrix]]:
    """What a head writes by way of each later MLP, linearised."""
    trunk, arrivals = scales.trunk, _arrivals(scales, unit, written)
    for index in trunk.space.mlps:
        receiver = Receiver(Unit(index), "mlp")
        if reads_after(receiver, (unit,), trunk.parallel):
            mlp = _mlp(trunk, index)
            hidden = arrivals[_reads_at(receiver)] @ mlp.W_in.double()
            sent = (hidden * scales.gate(index)) @ mlp.W_out.double()
            yield str(receiver.unit), Unit(index), sent


def _score(
    gram: Matrix,
    arrived: Matrix,
    sent: Float[Tensor, "singular"],
    reader: Reader,
    overlaps: Callable[[int, int], Overlaps],
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
    drawn = overlaps(len(sent), len(reader.squares)).to(sent)
    squares = torch.einsum("i,nij,j->n", sent, drawn, reader.squares)
    baseline = (squares / (sent.sum() * reader.squares.sum())).sqrt().mean()
    return strength / size, float(baseline), strength


def _squares(one: Matrix, other: Matrix) -> Float[Tensor, "rank"]:
    """Squared singular values of A B from A^T A and B B^T."""
    return torch.linalg.eigvals(one @ other).real.clamp(min=0)


def _activation_gradient(mlp: Mlp, mlp_in: Resid) -> Float[Tensor, "rows pos d_mlp"]:
    """The derivative of an MLP's activation at every hidden unit."""
    with torch.enable_grad():
        hidden = (mlp_in @ mlp.W_in + mlp.b_in).requires_grad_()
        (gradient,) = torch.autograd.grad(mlp.act(hidden).sum(), hidden)
    return gradient
