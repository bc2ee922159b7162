"""What an ablation changes, step by step: the unit itself, the norms, then each later unit.

1. Where a row is read the stream is made of what the units write there: in a pre-norm model it is
   their sum, in a post-norm encoder the sum passes the norms on its way (`Written.read`). So a run
   in which some units write as in the clean run and the others as in the ablated run needs no layer
   to be run again.
2. The steps from the clean run to the ablated one:
   *frozen*: the set writes its replacement, everything else writes as in the clean run, and every
   norm on the way keeps its clean scale;
   *direct*: the same, with the norms' own scales;
   then one step for each later unit, in the order in which the model runs them: from here on it
   writes what it wrote in the ablated run. After the last of them the run is the ablated one.
3. What a step changes of the measure belongs to it: the set's direct effect, the norms, each later
   unit. The steps add up to the total effect, exactly, whatever the model and the measure are.

Of a later unit that is no linear map a step is what its changed output does *given* the steps
before; in another order the parts would be others, with the same sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hc_lens.analyses.composition.engine import PathEngine
from hc_lens.analyses.composition.passes import Pass, carry
from hc_lens.blocks import Norm
from hc_lens.errors import HcLensError
from hc_lens.masks.attached import warn_if_masked
from hc_lens.masks.replacements import Source
from hc_lens.metrics import (
    NAMED,
    OF_LABELLED,
    Metric,
    Metrics,
    check_metrics,
    held_metrics,
    try_metrics,
)
from hc_lens.models.reading import Readout
from hc_lens.protocols import BatchesLike, BatchLike, Model
from hc_lens.scans.scan import limited_batches
from hc_lens.units import Unit, UnitSet, UnitSpace, as_units, resolve_sets, set_label

AtReads = Float[Tensor, "rows d_model"]
"""What stands at the read position of each row."""


@dataclass(frozen=True)
class RepairRows:
    """The effects of some sets row by row; a change is the ablated run's value minus the clean."""

    sets: tuple[str, ...]
    """Labels of the sets."""
    units: tuple[str, ...]
    """Labels of all units, in the order in which the model runs them."""
    rows: pd.DataFrame
    """What each row is: dataset, case, row."""
    full: Float[np.ndarray, "rows"]
    """The measure of the full model."""
    direct: Float[np.ndarray, "sets rows"]
    """Change by the set's own output alone, with the norms' scales of the clean run."""
    norm: Float[np.ndarray, "sets rows"]
    """What the norms' own scales add to that."""
    later: Float[np.ndarray, "sets units rows"]
    """What the changed output of each later unit adds; zero for units that read nothing of it."""

    @property
    def total(self) -> Float[np.ndarray, "sets rows"]:
        """Change by the ablation."""
        return self.direct + self.norm + self.later.sum(1)


class Written:
    """What every unit wrote at the read positions, in a clean run and in an ablated one."""

    def __init__(self, clean: Pass, ablated: Pass):
        self._clean, self._view = clean, clean.view
        at = clean.stream.context.at_reads
        self._start = at(clean.stream.resid).squeeze(1)
        self._layers = list(zip(clean.runs, ablated.runs, strict=True))
        self._heads, self._mlps = [], []
        for ours, theirs in self._layers:
            moved = ours.block.written_by_heads(at(theirs.z) - at(ours.z))
            self._heads.append(moved.squeeze(1))
            mlp = None if ours.block.mlp is None else at(theirs.mlp_out) - at(ours.mlp_out)
            self._mlps.append(None if mlp is None else mlp.squeeze(1))

    def read(
        self, use: Bool[Tensor, "runs units"], places: Mapping[Unit, int], frozen: bool = False
    ) -> Float[Tensor, "runs rows width"]:
        """What is left to read if the units of each run that are in use write as in the ablated.

        `places` has the column of each unit. With `frozen` scales every norm keeps that of the
        clean run.
        """
        at, share = self._clean.stream.context.at_reads, use.to(self._start.dtype)
        x = self._start.expand(len(use), *self._start.shape)
        for layer, (run, _) in enumerate(self._layers):
            block, heads = run.block, self._heads[layer]
            columns = [places[Unit(layer, head)] for head in range(heads.shape[1])]
            attention = at(run.attention).squeeze(1)
            x = x + attention + torch.einsum("mh,rhd->mrd", share[:, columns], heads)
            mlp = self._mlps[layer]
            if mlp is None:
                continue
            if block.post_norm:
                x = _normed(block.norm1, x, at(run.before_mlp).squeeze(1), frozen)
            out = at(run.mlp_out).squeeze(1)
            x = x + out + share[:, places[Unit(layer)], None, None] * mlp
            if block.post_norm:
                x = _normed(block.norm2, x, at(run.out).squeeze(1), frozen)
        x = _normed(self._view.final, x, at(self._clean.final).squeeze(1), frozen)
        return self._view.held(x.flatten(0, 1)[:, None]).unflatten(0, x.shape[:2])


def _normed(
    norm: Norm, x: Float[Tensor, "runs rows d_model"], clean: AtReads, frozen: bool
) -> Float[Tensor, "runs rows d_model"]:
    """What stands behind a norm, with its own scale or with that of its clean input."""
    if not frozen:
        return norm(x)
    same = clean.expand_as(x)
    return norm(same) + carry(norm, same, x - same, same, "frozen")


class RepairEngine:
    """The effects of some sets of units of one model."""

    def __init__(self, model: Model, means: Source | str, sets: Iterable[UnitSet] | None):
        warn_if_masked(model)
        self.paths, self.space = PathEngine(model, means), UnitSpace.of(model)
        self.sets = resolve_sets(self.space, sets)
        if self.paths.view.parts.reads_mean:
            raise HcLensError(
                "expected a model that is read at one position of each row, got a "
                f"{type(model).__name__} that is read at the mean of all tokens; use hc.scan or "
                "the analysis of composition, which run it as a whole"
            )

    @cached_property
    def order(self) -> tuple[Unit, ...]:
        """All units in the order in which the model runs them."""
        return as_units(self.space)

    @cached_property
    def places(self) -> dict[Unit, int]:
        """The place of each unit in that order."""
        return {unit: place for place, unit in enumerate(self.order)}

    def later(self, units: Sequence[Unit]) -> list[Unit]:
        """The units that may read what a set writes, in order."""
        first, parallel = units[0], self.paths.view.blocks[units[0].layer].parallel
        return [
            unit
            for unit in self.order
            if unit not in units
            and (
                unit.layer > first.layer
                or (unit.layer == first.layer and not unit.is_head and not parallel)
            )
        ]

    @torch.no_grad()
    def steps(self, clean: Pass, units: Sequence[Unit]) -> Float[Tensor, "steps rows width"]:
        """What is left to read: clean, frozen, direct, then after each later unit."""
        ablated = Pass(clean.view, clean.stream, clean.runs[: units[0].layer], tuple(units))
        end = ablated.run()
        written, later = Written(clean, ablated), self.later(units)
        use = torch.zeros(1 + len(later), len(self.order), dtype=torch.bool, device=end.device)
        use[:, [self.places[unit] for unit in units]] = True
        for step, unit in enumerate(later, start=1):
            use[step:, self.places[unit]] = True
        frozen = written.read(use[:1], self.places, frozen=True)
        runs = written.read(use, self.places)
        # The last one is the ablated run itself, not the same sums in another order.
        return torch.cat([clean.held[None], frozen, runs[:-1], end[None]])

    def passes(
        self, named: Mapping[str, BatchesLike], progress: bool
    ) -> Iterator[tuple[str, BatchLike, Pass]]:
        """The clean pass over every batch."""
        return self.paths.passes(named, progress, "self-repair")


def measured(measure: str, metrics: Metrics) -> dict[str, Metric | str]:
    """The one metric that a measure names, among the named ones or a user's own."""
    asked = check_metrics(metrics)
    if measure in asked:
        return {measure: asked[measure]}
    if measure not in NAMED:
        raise HcLensError(
            f"expected a measure among {[*NAMED, *asked]}, got {measure!r}; choose one, or pass "
            "metrics={'mine': function}"
        )
    return {measure: NAMED[measure]}


def repair_rows(
    model: Model,
    datasets: Mapping[str, BatchesLike] | BatchesLike,
    means: Source | str,
    sets: Iterable[UnitSet] | None = None,
    measure: str = "logit",
    *,
    metrics: Metrics = (),
    limit: int | None = None,
    progress: bool = True,
) -> RepairRows:
    """The direct effect of each set, what the norms absorb, and what later units give back.

    Args:
        model: a classifier or language model without hooks.
        datasets: batches by name, or batches alone.
        means: what replaces the set's activations: means, ``"zero"`` or another source.
        sets: the sets, by default every unit alone.
        measure: what a change is a change of: a metric by name, or one of `metrics`.
        metrics: functions of (logits, batch) by name.
        limit: at most so many rows of each dataset, always the same sample.
        progress: whether to show a progress bar.
    """
    engine, wanted = RepairEngine(model, means, sets), measured(measure, metrics)
    named = limited_batches(datasets, engine.paths.source, limit)
    try_metrics(wanted, named, Readout(model))
    frames, parts = [], []
    for name, batch, clean in engine.passes(named, progress):
        keep = torch.ones_like(batch.labels, dtype=torch.bool)
        if NAMED.get(measure, "") in OF_LABELLED:
            keep = batch.labels >= 0
        kept = np.flatnonzero(keep.cpu().numpy())
        cases = [batch.cases[index] for index in kept]
        frames.append(
            pd.DataFrame({"dataset": name, "case": cases, "row": batch.rows.cpu().numpy()[kept]})
        )
        of_sets = []
        for units in engine.sets:
            runs, read_out = engine.steps(clean, units), engine.paths.view.read_out
            found = held_metrics(named[name], batch, runs, read_out, wanted)
            of_sets.append(_split(found[measure][:, kept].cpu(), engine, units))
        full, direct, norm, later = map(torch.stack, zip(*of_sets, strict=True))
        parts.append((full[0], direct, norm, later))
    if sum(map(len, frames)) == 0:
        raise HcLensError(
            f"expected rows with labels for the measure {measure!r}, got none; score a task with "
            "labels, or choose 'margin' or 'kl'"
        )
    full, direct, norm, later = (
        torch.cat(part, dim=-1).double().numpy() for part in zip(*parts, strict=True)
    )
    labels = tuple(map(set_label, engine.sets))
    rows = pd.concat(frames, ignore_index=True)
    units = tuple(map(str, engine.order))
    return RepairRows(labels, units, rows, full, direct, norm, later)


def _split(
    values: Float[Tensor, "steps rows"], engine: RepairEngine, units: Sequence[Unit]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The clean value, the direct effect, the norms' part and each unit's, from the steps."""
    changes = values.diff(dim=0)
    later = values.new_zeros(len(engine.order), values.shape[1])
    later[[engine.places[unit] for unit in engine.later(units)]] = changes[2:]
    return values[0], changes[0], changes[1], later
