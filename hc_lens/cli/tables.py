"""Shorter tables for the eye."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd


def over_cases(table: Any, keys: Sequence[str], numbers: Sequence[str]) -> pd.DataFrame:
    """One line for each value of the keys: the mean of each number over the rows of all cases.

    A case where a number is missing does not count for it.
    """
    names = list(numbers)
    rows = table[names].notna().mul(table["n"], axis=0)
    totals = (table[names].fillna(0) * rows).join(table[[*keys, "n"]])
    counts = rows.join(table[list(keys)])
    summed = totals.groupby(list(keys), sort=False)[["n", *names]].sum()
    counted = counts.groupby(list(keys), sort=False)[names].sum()
    summed[names] = summed[names] / counted.where(counted > 0)
    return summed.reset_index()
