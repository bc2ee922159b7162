"""What a model repairs of an ablation: tables from the effects of single rows.

1. `effects`: for each set the means over the rows of a case. What is given back is total minus
   direct; its interval is a percentile bootstrap over rows.
2. `givers`: the same by unit. Of a set that hurts, a later unit gives back if it adds to the
   measure, and passes the damage on if it takes from it.
3. `backup`: how much of an interaction is backup. Let D, N and g_u be the three parts of the total
   of a set S, and of each member i alone. The interaction ``drop(S) - sum of drop(i)`` is then
   ``(sum D_i - D_S) + (sum N_i - N_S) + sum over u of (sum g_u(i) - g_u(S))``, exactly. What a unit
   u gives back to the members alone and not to the set is its backup; a member gives nothing back
   to a set that it belongs to.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float

from hc_lens.analyses.self_repair.engine import RepairRows
from hc_lens.analyses.statistics import bootstrap_means
from hc_lens.errors import HcLensError
from hc_lens.metrics import COSTS
from hc_lens.units import UnitSet, as_units, set_label

NAMED_GIVERS = 3
"""Most units that a table names in one cell."""
TINY = 1e-9
"""Effects below it are rounding."""


def effects(
    rows: RepairRows, n_resamples: int = 2000, level: float = 0.95, seed: int = 0
) -> pd.DataFrame:
    """One line for each set and case.

    Columns: dataset, case, set, n, full (the measure's mean), total, direct, norm, later (means of
    the changes; total is the sum of the other three), given_back (norm plus later), low and high
    (its interval), share (given_back as a share of what the direct effect took; NaN without a
    direct effect), helpers (the later units that give back most).
    """
    records = []
    for about, at, rng in _cases(rows, seed):
        given_back = rows.norm[:, at] + rows.later[:, :, at].sum(1)
        resampled = bootstrap_means(given_back, n_resamples, rng)
        ends = np.quantile(resampled, [(1 - level) / 2, (1 + level) / 2], axis=0)
        for index, label in enumerate(rows.sets):
            direct, norm = rows.direct[index, at].mean(), rows.norm[index, at].mean()
            by_unit = rows.later[index][:, at].mean(1)
            back = norm + by_unit.sum()
            records.append(
                about
                | {
                    "set": label,
                    "full": rows.full[at].mean(),
                    "total": direct + back,
                    "direct": direct,
                    "norm": norm,
                    "later": by_unit.sum(),
                    "given_back": back,
                    "low": ends[0, index],
                    "high": ends[1, index],
                    "share": -back / direct if abs(direct) > TINY else np.nan,
                    "helpers": _named(rows.units, -np.sign(direct) * by_unit),
                }
            )
    columns = ["dataset", "case", "set", "n"]
    table = pd.DataFrame(records)
    return table.reindex(columns=[*columns, *(name for name in table if name not in columns)])


def givers(
    rows: RepairRows, n_resamples: int = 2000, level: float = 0.95, seed: int = 0
) -> pd.DataFrame:
    """One line for each set, case and later unit: dataset, case, set, unit, n, change, low, high.

    The change is what the unit's new output adds to the measure; units that add nothing are left
    out.
    """
    parts = []
    for about, at, rng in _cases(rows, seed):
        for index, label in enumerate(rows.sets):
            own = rows.later[index][:, at]
            moved = np.flatnonzero(np.abs(own).max(1) > TINY)
            resampled = bootstrap_means(own[moved], n_resamples, rng)
            ends = np.quantile(resampled, [(1 - level) / 2, (1 + level) / 2], axis=0)
            part = pd.DataFrame({"unit": [rows.units[unit] for unit in moved]})
            part = part.assign(change=own[moved].mean(1), low=ends[0], high=ends[1])
            part = part.assign(**about, set=label)
            parts.append(part.sort_values("change", key=np.abs, ascending=False, kind="stable"))
    columns = ["dataset", "case", "set", "unit", "n", "change", "low", "high"]
    return pd.concat(parts, ignore_index=True).reindex(columns=columns)


def backup(rows: RepairRows, sets: Iterable[UnitSet], measure: str = "logit") -> pd.DataFrame:
    """How much of each set's interaction is backup, and of which units.

    Columns: dataset, case, set, n, interaction (drop of the set minus the drops of its members; of
    a cost such as KL the rises), and its parts: backup_direct, backup_norm and backup (of later
    units and members); backup_share (backup as a share of the interaction) and backup_units.

    Args:
        rows: what `repair_rows` gave for these sets and for each of their members alone.
        sets: sets of two or more units.
        measure: the measure of the rows, which says whether more is better.
    """
    sign = -1 if measure in COSTS else 1
    records = []
    for given in sets:
        units = as_units(given)
        wanted = [set_label(units), *map(str, units)]
        missing = [label for label in wanted if label not in rows.sets]
        if len(units) < 2 or missing:
            raise HcLensError(
                "expected sets of two or more units, each of them scanned together and each "
                f"member alone, got {set_label(units)}, missing {missing or 'a second unit'}; "
                "name them in sets=[...]"
            )
        joint, *alone = (rows.sets.index(label) for label in wanted)
        for about, at, _ in _cases(rows, 0):
            lost = [
                sign * (part[alone][..., at].mean(-1).sum(0) - part[joint][..., at].mean(-1))
                for part in (rows.direct, rows.norm, rows.later)
            ]
            direct, norm, by_unit = lost
            whole = float(direct + norm + by_unit.sum())
            records.append(
                about
                | {
                    "set": wanted[0],
                    "interaction": whole,
                    "backup_direct": float(direct),
                    "backup_norm": float(norm),
                    "backup": float(by_unit.sum()),
                    "backup_share": by_unit.sum() / whole if abs(whole) > TINY else np.nan,
                    "backup_units": _named(rows.units, by_unit),
                }
            )
    columns = ["dataset", "case", "set", "n"]
    table = pd.DataFrame(records)
    return table.reindex(columns=[*columns, *(name for name in table if name not in columns)])


def _cases(
    rows: RepairRows, seed: int
) -> Iterator[tuple[dict[str, object], np.ndarray, np.random.Generator]]:
    """Each dataset and case: its columns, where its rows are, and its own random stream."""
    indices: Any = rows.rows.groupby(["dataset", "case"], sort=False).indices
    for (dataset, case), at in indices.items():
        rng = np.random.default_rng([seed, zlib.crc32(f"{dataset}\n{case}".encode())])
        yield {"dataset": dataset, "case": case, "n": len(at)}, at, rng


def _named(units: Sequence[str], amounts: Float[np.ndarray, "units"]) -> str:
    """The units with the largest positive amounts, such as ``"L2.H1 0.31, L3.MLP 0.08"``."""
    best = np.argsort(-amounts, kind="stable")[:NAMED_GIVERS]
    return ", ".join(f"{units[unit]} {amounts[unit]:.3g}" for unit in best if amounts[unit] > TINY)
