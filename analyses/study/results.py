"""What the steps of a study wrote: its tables, the core, the means."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

import hc_lens as hc
from hc_lens.metrics import over_cases
from hc_lens.records import read_table


@dataclass(frozen=True, eq=False)
class Results:
    """The files of some steps."""

    folders: Mapping[str, Path]
    """The folder of each step."""

    def table(self, name: str) -> pd.DataFrame:
        """A table by its step and its name, such as ``core/spread``."""
        step, _, file = name.partition("/")
        return read_table(self.folders[step] / f"{file}.csv")

    @cached_property
    def inputs(self) -> dict[str, Any]:
        """The fingerprints of the model and of the rows, and the adversarial cases."""
        return json.loads((self.folders["inputs"] / "inputs.json").read_bytes())

    @cached_property
    def core(self) -> dict[str, Any]:
        """The core, its size against chance, and the early core."""
        return json.loads((self.folders["core"] / "core.json").read_bytes())

    @property
    def heads(self) -> list[str]:
        """The heads that the steps after the core look at."""
        return self.core["looked_at"]

    @property
    def means(self) -> hc.Means:
        """The mean activations."""
        return hc.Means.load(self.folders["means"] / "means.safetensors")


def one_case_in_domain(table: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """Accuracies of runs or full models with all rows in domain as one case, as most tasks have.

    The keys are the columns that name a run or a model.
    """
    inside = table["dataset"] == "id"
    if table.loc[inside, "case"].nunique() < 2:
        return table
    joined = over_cases(table.loc[inside], [*keys, "dataset"], ["accuracy"])
    return pd.concat([joined.assign(case="all", side=""), table.loc[~inside]], ignore_index=True)
