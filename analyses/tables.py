"""The two tables of a sweep, checked: accuracies of its runs and of the full models.

1. A run's row has checkpoint, sparsity, seed, dataset, case and accuracy; side and n are kept if
   they are there, other columns are not read. A full model's row has checkpoint, dataset, case and
   accuracy. Either table may be the path of a CSV file.
2. Another `measure` is read instead of the accuracy where it is asked for, such as the logit
   difference of a sweep with ``metrics``. The KL divergence and the agreement compare a run with
   its full model, whose own are 0 and 1.
3. Sparsities and accuracies are fractions, not percent. No cell appears twice in a table. The
   sparsity is the one that was asked for: seeds of one sparsity are runs with equal numbers there.
4. A cell without a row, or with NaN as its accuracy, is missing: analyses say so, none fills it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from hc_lens.errors import HcLensError
from hc_lens.records import read_table

RUN = ("checkpoint", "sparsity", "seed")
"""What names a run."""
CELL = ("dataset", "case")
"""What names a measurement of a run or of a full model."""
ABOUT = ("side", "n")
"""What else is kept of a run's row: the side of its case (friendly, adversarial or neither) and its
number of labelled rows."""
ACCURACY = "accuracy"
"""What is read of the tables unless another measure is asked for."""
OF_FULL = {"kl": 0.0, "agreement": 1.0}
"""What a full model has of the measures that compare with it."""
SHARES = (ACCURACY, "agreement", "probability")
"""Measures that are fractions."""
MISSING = -1
"""What some published tables write for the accuracy of a run that is missing."""

RunTable = pd.DataFrame | str | Path
"""Accuracies of runs: a table, or the path of a CSV file."""
FullModels = RunTable | Mapping[tuple[Any, str, str], float]
"""Accuracies of the full models: a table, the path of a CSV file, or a mapping from (checkpoint,
dataset, case)."""


def run_table(table: object, measure: str = ACCURACY) -> pd.DataFrame:
    """The columns of a table of runs that the analyses read, checked; missing cells are NaN."""
    return _checked(table, [*RUN, *CELL], "runs", measure)


def full_table(full: object, measure: str = ACCURACY) -> pd.DataFrame:
    """The accuracies of the full models as a checked table: checkpoint, dataset, case, accuracy."""
    names = ["checkpoint", *CELL]
    if isinstance(full, Mapping):
        wrong = [key for key in full if not (isinstance(key, tuple) and len(key) == len(names))]
        if wrong:
            raise HcLensError(
                "expected full-model accuracies by (checkpoint, dataset, case), got the key "
                f"{wrong[0]!r}; use such triples, or a DataFrame with these columns"
            )
        rows = [(*key, value) for key, value in full.items()]
        full = pd.DataFrame(rows, columns=[*names, measure])
    known = _checked(full, names, "full models", measure).dropna(subset=[measure])
    return known.loc[:, [*names, measure]]


def with_full(table: object, full: object, measure: str = ACCURACY) -> pd.DataFrame:
    """The checked runs with the column `full`; a cell without a full model is an error."""
    whole = full_table(full, measure).rename(columns={measure: "full"})
    joined = run_table(table, measure).merge(whole, on=["checkpoint", *CELL], how="left")
    lacking = joined.loc[joined["full"].isna()]
    if len(lacking):
        checkpoint, dataset, case = lacking[["checkpoint", *CELL]].to_numpy()[0]
        known = list(whole["checkpoint"].unique())
        raise HcLensError(
            f"expected the full model's {measure} for every checkpoint, dataset and case of the "
            f"runs, missing {checkpoint!r} on {dataset}/{case} (known checkpoints: {known[:6]}); "
            "evaluate the full model there, or drop those runs"
        )
    return joined


def _checked(table: object, keys: list[str], what: str, measure: str) -> pd.DataFrame:
    names = [*keys, measure]
    if isinstance(table, (str, Path)):
        if not Path(table).is_file():
            raise HcLensError(
                f"expected a CSV file of {what}, got {str(table)!r}, which is no file; write one "
                f"with the columns {', '.join(names)}"
            )
        table = read_table(Path(table))
    if not isinstance(table, pd.DataFrame):
        raise HcLensError(
            f"expected a DataFrame of {what}, got {type(table).__name__}; pass one with the "
            f"columns {', '.join(names)}, or the path of a CSV file"
        )
    if "sparsity" not in keys and measure in OF_FULL:
        table = table.assign(**{measure: OF_FULL[measure]})
    missing = [name for name in names if name not in table]
    if missing:
        raise HcLensError(
            f"expected the columns {', '.join(names)} in the table of {what}, missing "
            f"{', '.join(missing)} (it has {', '.join(map(str, table.columns))}); add them"
        )
    if table.empty:
        raise HcLensError(f"expected rows in the table of {what}, got none; is the sweep done?")
    for column in ("sparsity", measure):
        if column in names:
            _check_numbers(table[column], f"column {column} of the table of {what}", measure)
    if "sparsity" in keys:
        # A grid made by adding steps has 0.30000000000000004 beside 0.3: the first stands for both.
        alike: Any = table["sparsity"].groupby(table["sparsity"].round(9).to_numpy())
        table = table.assign(sparsity=alike.transform("first"))
    twice = table.loc[table.duplicated(keys, keep=False)]
    if len(twice):
        cell = ", ".join(f"{key} {twice[key].iloc[0]}" for key in keys)
        raise HcLensError(
            f"expected each cell once in the table of {what}, got {len(twice)} rows of cells that "
            f"appear twice or more, such as {cell}; select the rows of one sweep"
        )
    about = [name for name in ABOUT if name in table]
    return table.loc[:, [*names, *about]].reset_index(drop=True)


def _check_numbers(values: pd.Series, where: str, measure: str) -> None:
    """Numbers, and fractions where the sparsity or a share is meant."""
    if not pd.api.types.is_numeric_dtype(values) or pd.api.types.is_bool_dtype(values):
        raise HcLensError(
            f"expected numbers in the {where}, got {values.iloc[0]!r}; convert them, such as "
            f"table['{values.name}'].astype(float)"
        )
    if values.name == measure and measure not in SHARES:
        return
    # An accuracy may be missing: the run was not measured there.
    known = values.dropna() if values.name == measure else values
    outside = known.loc[~known.between(0, 1)]
    if values.name == ACCURACY and (outside == MISSING).any():
        raise HcLensError(
            f"expected NaN in the {where} for a run that is missing, got {MISSING} in "
            f"{int((outside == MISSING).sum())} rows; write NaN there, such as with "
            f"table.replace({{'accuracy': {{{MISSING}: float('nan')}}}}), or leave the value of a "
            "CSV file empty"
        )
    if len(outside):
        raise HcLensError(
            f"expected the {where} as fractions between 0 and 1 in every row, got "
            f"{outside.iloc[0]}; divide percents by 100, and drop rows without a number"
        )
