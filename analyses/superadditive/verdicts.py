"""Is more lost together than alone? The excess of one set on one case, its tests, and the verdict.

1. The losses of the members are their positive drops: a member that helps when it is removed does
   not make up for one that hurts. ``excess(S) = drop(S) - sum of max(0, drop({i}))``.
2. Its interval is the percentile bootstrap over rows. For the lower end the members' mean drops are
   clipped at zero in each resample, which makes the sum of the losses larger than it is; for the
   upper end the members that lose are those of all rows. Both ends err outwards.
3. The sum of the losses is the largest that the drops of any of the members sum to. So the excess
   is above zero only if the drop exceeds the sum of the drops of every choice of members, from none
   to all. `p` is the largest p-value of these one-sided t tests over rows, since all have to hold
   (an intersection-union test, Berger 1982). `p_interaction` is that of the choice of all members.
4. Both are corrected over all rows of the table that are tested (Holm 1979), and `judge` gives each
   row one verdict. It is the only place where a row is judged.
"""

from __future__ import annotations

from itertools import product
from typing import Literal, get_args

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float
from scipy.special import stdtr

from hc_lens.analyses.statistics import holm

Verdict = Literal["super-additive", "additive or less", "interaction, not a loss", "cannot tell"]
"""What is said of a set on a case; `judge` says when."""
SUPERADDITIVE, ADDITIVE, INTERACTION, CANNOT_TELL = get_args(Verdict)
FEWEST_ROWS = 20
"""A case with fewer rows is not tested."""
MOST_IN_DOUBT = 8
"""So many members are tried as a loss and as none; further ones of a large set go by their sign."""
DECIMALS = 12
"""What is smaller than this decimal is rounding error, not a drop."""


def excess_of(
    drop: Float[np.ndarray, "rows"],
    alone: Float[np.ndarray, "members rows"],
    resampled_drop: Float[np.ndarray, "resamples"],
    resampled_alone: Float[np.ndarray, "members resamples"],
    level: float,
) -> dict[str, float]:
    """The excess of one set on one case, with its interval and the p-values of both tests.

    The drops of the set and of its members are given row by row, and as the means of bootstrap
    resamples. Keys: drop, sum_of_drops, sum_of_losses, excess, low, high, p, p_interaction.
    """
    each = alone.mean(1)
    loses = each.round(DECIMALS) > 0
    total, losses = drop.mean(), each[loses].sum()
    ends = (1 - level) / 2, (1 + level) / 2
    numbers = {
        "drop": total,
        "sum_of_drops": each.sum(),
        "sum_of_losses": losses,
        "excess": total - losses,
        "low": np.quantile(resampled_drop - resampled_alone.clip(min=0).sum(0), ends[0]),
        "high": np.quantile(resampled_drop - resampled_alone[loses].sum(0), ends[1]),
    }
    rounded = {name: round(float(value), DECIMALS) for name, value in numbers.items()}
    if len(drop) < FEWEST_ROWS:
        return {**rounded, "p": np.nan, "p_interaction": np.nan}
    tested = [drop - _choices(alone, loses) @ alone, (drop - alone.sum(0))[None]]
    p, p_interaction = (stdtr(len(drop) - 1, -_t(rows).min()) for rows in tested)
    return {**rounded, "p": float(p), "p_interaction": float(p_interaction)}


def judge(table: pd.DataFrame, level: float, *, has_floor: bool) -> pd.DataFrame:
    """The table with `p_holm` and `p_interaction` corrected over its rows, and with the `verdict`.

    The first of these that holds is the verdict:

    1. fewer than `FEWEST_ROWS` rows: cannot tell;
    2. `p_holm` below ``(1 - level) / 2`` and `low` above zero: super-additive;
    3. an excess above zero, so not beyond doubt: cannot tell;
    4. no drop, and `p_interaction` below ``(1 - level) / 2``: interaction, not a loss;
    5. losses that use up all that the full model has, so that no excess could show: cannot tell;
    6. otherwise: additive or less.

    In no resample is the drop below the excess, so a super-additive set has a drop whose own
    interval is above zero. The fifth is asked if the measure `has_floor`: if it cannot fall below
    zero.
    """
    tested = table["p"].notna()
    corrected = {
        name: pd.Series(holm(table.loc[tested, given].to_numpy()), table.index[tested])
        for name, given in (("p_holm", "p"), ("p_interaction", "p_interaction"))
    }
    table = table.drop(columns="p_interaction").assign(**corrected)
    error = (1 - level) / 2
    more_is_lost = (table["p_holm"] < error) & (table["low"] > 0)
    nothing_is_lost = (table["drop"] <= 0) & (table["p_interaction"] < error)
    rules = [
        (~tested, CANNOT_TELL),
        (more_is_lost, SUPERADDITIVE),
        (table["excess"] > 0, CANNOT_TELL),
        (nothing_is_lost, INTERACTION),
        (nothing_is_left(table) & has_floor, CANNOT_TELL),
    ]
    conditions, verdicts = zip(*rules, strict=True)
    return table.assign(verdict=np.select(conditions, verdicts, ADDITIVE))


def nothing_is_left(table: pd.DataFrame) -> pd.Series:
    """Whether the losses of the members use up all that the full model has, for each row."""
    return table["sum_of_losses"] >= table["full"]


def _choices(
    alone: Float[np.ndarray, "members rows"], loses: Bool[np.ndarray, "members"]
) -> Float[np.ndarray, "choices members"]:
    """Which members are counted, in every choice: 1 or 0."""
    doubtful = np.argsort(np.abs(_t(alone)), kind="stable")[:MOST_IN_DOUBT]
    choices = np.tile(loses.astype(float), (2 ** len(doubtful), 1))
    choices[:, doubtful] = list(product((0.0, 1.0), repeat=len(doubtful)))
    return choices


def _t(values: Float[np.ndarray, "series rows"]) -> Float[np.ndarray, "series"]:
    """Student's t of each series; without any spread its mean is above zero or it is not."""
    values = values.round(DECIMALS)
    mean, error = values.mean(1), values.std(1, ddof=1) / np.sqrt(values.shape[1])
    constant = error == 0
    return np.where(
        constant, np.where(mean > 0, np.inf, -np.inf), mean / np.where(constant, 1, error)
    )
