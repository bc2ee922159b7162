"""How well circuits of every size do, as the Mechanistic Interpretability Benchmark measures it.

1. m(C) is a measure of the model in which every unit outside C is replaced, its mean over rows.
   ``f(C) = (m(C) - m(none)) / (m(all) - m(none))``: 0 for no unit, 1 for all of them.
2. The curve of a ranking is f of its first k units. With k/n on the x axis, from 0 to 1:
   CPR is the area under f (how much circuits do; more is better), CMD the area between f and 1 (how
   far they are from the model; less is better), both by the trapezoid rule
   (Mueller et al. 2025, arXiv 2504.13151).
3. The sizes are those of the benchmark, 0.1 to 100% of the units, each at least the next whole
   number. Of two shares with the same number of units there is one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float
from scipy.integrate import trapezoid

from hc_lens.analyses.scorecard.circuits import Ranking, as_ranking, without
from hc_lens.analyses.superadditive.drops import measured, to_scan
from hc_lens.errors import HcLensError
from hc_lens.masks.replacements import Source
from hc_lens.metrics import OF_LABELLED, Metrics
from hc_lens.protocols import BatchesLike, Model
from hc_lens.scans.scan import scan_rows
from hc_lens.units import Unit, UnitSpace, as_units, set_label

SHARES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Shares of the units at which the benchmark measures."""
TINY = 1e-9
"""m(all) and m(none) this close are one."""
Units = frozenset[Unit]


class Measured:
    """The measure of circuits of one model, each run once.

    `values` has a number for each row; rows without a label do not count where the measure is of
    the right answer.
    """

    def __init__(
        self,
        model: Model,
        batches: BatchesLike,
        source: Source | str,
        measure: str = "logit",
        **options: Any,
    ):
        self.model, self.space = model, UnitSpace.of(model)
        self._batches, self._source, self._measure = batches, source, measure
        metrics: Metrics = options.pop("metrics", ())
        self._options = {"metrics": to_scan(measure, metrics), **options}
        self._known: dict[Units, Float[np.ndarray, "rows"]] = {}
        self.run([self.all, self.none])
        self.full, self.empty = self.mean(self.all), self.mean(self.none)
        if not abs(self.full - self.empty) > TINY:
            raise HcLensError(
                f"expected another {measure} of the model than of the model without any unit, got "
                f"{self.full:.6g} for both, so that no circuit is faithful or unfaithful; choose "
                "another measure, other rows or another replacement"
            )

    @property
    def all(self) -> Units:
        """Every unit."""
        return frozenset(self.space)

    @property
    def none(self) -> Units:
        """No unit."""
        return frozenset()

    def run(self, circuits: Iterable[Iterable[Unit]]) -> None:
        """Measure those that have not been."""
        new = [c for c in dict.fromkeys(map(frozenset, circuits)) if c not in self._known]
        removed = {c: set_label(without(self.space, c)) for c in new if len(c) < len(self.space)}
        if not removed:
            return
        sets = list(removed.values())
        rows = scan_rows(self.model, self._batches, self._source, sets, **self._options)
        values = measured(rows, self._measure)
        if self._measure in OF_LABELLED:
            values = values[:, (rows.rows["label"] >= 0).to_numpy()]
        if values.shape[1] == 0:
            raise HcLensError(
                f"expected rows with labels for {self._measure}, got none; score a task with "
                "labels, or choose 'margin' or 'kl'"
            )
        for circuit in new:
            label = removed.get(circuit)
            self._known[circuit] = values[0 if label is None else rows.index(as_units(label))]

    def values(self, circuit: Iterable[Unit]) -> Float[np.ndarray, "rows"]:
        """The measure of each row."""
        self.run([circuit])
        return self._known[frozenset(circuit)]

    def mean(self, circuit: Iterable[Unit]) -> float:
        """m(C)."""
        return float(self.values(circuit).mean())

    def faithfulness(self, circuit: Iterable[Unit]) -> float:
        """f(C)."""
        return (self.mean(circuit) - self.empty) / (self.full - self.empty)


def sizes(n_units: int, shares: Sequence[float] = SHARES) -> list[int]:
    """The numbers of units that stand for some shares, with 0 and all."""
    if not shares or any(not 0 < share <= 1 for share in shares):
        raise HcLensError(
            f"expected shares of the units above 0 and up to 1, got {list(shares)}; write 5% as "
            "0.05"
        )
    # A little less before rounding up, as 0.1 x 30 is not 3 to the last bit.
    found = {int(np.ceil(share * n_units - 1e-9)) for share in shares}
    return sorted({0, n_units, *found})


def curve(
    measure: Measured, ranking: Sequence[Unit], shares: Sequence[float] = SHARES
) -> pd.DataFrame:
    """f of the first units of a ranking: n_units, share, measure, faithfulness."""
    at = sizes(len(measure.space), shares)
    measure.run(ranking[:size] for size in at)
    return pd.DataFrame(
        {
            "n_units": at,
            "share": [size / len(measure.space) for size in at],
            "measure": [measure.mean(ranking[:size]) for size in at],
            "faithfulness": [measure.faithfulness(ranking[:size]) for size in at],
        }
    )


def areas(table: pd.DataFrame) -> tuple[float, float]:
    """CPR and CMD of a curve."""
    x, f = table["share"].to_numpy(), table["faithfulness"].to_numpy()
    return float(trapezoid(f, x)), float(trapezoid(np.abs(1 - f), x))


def curves(
    measure: Measured, rankings: Mapping[str, Ranking], shares: Sequence[float] = SHARES
) -> pd.DataFrame:
    """The curves of several rankings by name, in one table with their areas: ranker, cpr, cmd."""
    parts = []
    for name, given in rankings.items():
        table = curve(measure, as_ranking(measure.space, given), shares)
        cpr, cmd = areas(table)
        parts.append(table.assign(ranker=name, cpr=cpr, cmd=cmd))
    columns = ["ranker", "n_units", "share", "measure", "faithfulness", "cpr", "cmd"]
    return pd.concat(parts, ignore_index=True).reindex(columns=columns)
