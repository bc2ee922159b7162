"""The numbers of a study's text, from tables small enough to read."""

from __future__ import annotations

import pandas as pd
import pytest

from analyses.study import facts

HEADS = ("L0.H0", "L1.H1")


def excess(**cases: tuple[float, float, float]) -> pd.DataFrame:
    """Rows of joint ablation: drop, sum of the single drops and p by case; 5 points in domain."""
    rows = [
        {
            "dataset": "id" if case == "all" else "ood",
            "case": case,
            "size": 2,
            "n": 500,
            "drop": drop,
            "sum_of_drops": alone,
            "excess": drop - alone,
            "low": drop - alone - 0.05,
            "high": drop - alone + 0.05,
            "p": p,
        }
        for case, (drop, alone, p) in {"all": (0.05, 0.05, 1.0), **cases}.items()
    ]
    return pd.DataFrame(rows)


def scan() -> pd.DataFrame:
    """Change of accuracy by head."""
    changes = {"L0.H0": -0.2, "L1.H1": -0.4, "L1.H0": -0.1, "L0.H0+L1.H1": -0.9}
    rows = [
        {"dataset": "ood", "set": name, "accuracy_change": change}
        for name, change in changes.items()
    ]
    return pd.DataFrame(rows)


def test_the_case_with_the_largest_sure_excess_is_shown() -> None:
    table = excess(swap=(0.6, 0.2, 0.0), passive=(0.5, 0.4, 0.001), relative=(0.9, 0.1, 0.5))
    found = facts.of_ablation(table, scan(), HEADS)
    assert (found["joint_case"], found["superadditive_cases"]) == ("swap", 2)
    assert found["joint_excess"] == pytest.approx(0.4)
    assert found["joint_id_drop"] == pytest.approx(0.05)
    assert found["core_head_change"] == pytest.approx(-0.3)
    assert found["other_head_change"] == pytest.approx(-0.1)


def test_an_excess_does_not_count_where_removing_the_heads_together_costs_nothing() -> None:
    # Alone the two heads gain 67 points in sum, together they change nothing: an excess of 67.
    table = excess(relative=(0.0, -0.67, 0.0), swap=(0.6, 0.2, 0.0))
    found = facts.of_ablation(table, scan(), HEADS)
    assert (found["joint_case"], found["superadditive_cases"]) == ("swap", 1)
    table = excess(relative=(0.0, -0.67, 0.0), swap=(0.6, 0.7, 1.0))
    assert facts.of_ablation(table, scan(), HEADS)["superadditive_cases"] == 0
