"""The sizes: what they contain, and that a larger one contains more."""

from __future__ import annotations

from typing import get_args

import pytest

from hc_lens.sweeps.sizes import SIZES, SizeName


def test_every_name_has_a_size():
    assert tuple(SIZES) == get_args(SizeName)


@pytest.mark.parametrize(("smaller", "larger"), [("quick", "standard"), ("standard", "paper")])
def test_a_larger_size_is_larger_in_everything(smaller, larger):
    few, many = SIZES[smaller], SIZES[larger]
    for name in ("apart", "paths"):
        less, more = getattr(few, name), getattr(many, name)
        assert set(less.sparsities) <= set(more.sparsities)
        assert set(less.seeds) <= set(more.seeds)
        assert less.steps < more.steps
    for name in ("rows", "evaluation_rows", "ood_rows", "scan_rows", "attention_rows"):
        assert getattr(few, name) < (getattr(many, name) or float("inf"))


def test_a_size_says_what_it_contains():
    lines = SIZES["quick"].announced("quick").splitlines()
    assert lines == [
        "size quick, where no option says otherwise; for each checkpoint:",
        "  3 seeds at sparsity 0.5 and 0.7, separate runs of 200 updates",
        "  1 path through 9 sparsities from 0.1 to 0.9, 500 updates each",
        "  2,000 rows at most to prune on; 300 in and 900 out of domain to evaluate every "
        "subnetwork on",
    ]
    assert "all in and all out of domain" in SIZES["paper"].announced("paper")
