"""Super-additivity on rows made by hand, and on a small model."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

import hc_lens as hc
from hc_lens.analyses.superadditive import (
    ExcessConfig,
    SuperAdditiveConfig,
    analyse,
    excess,
    figure,
    layout,
    minimal,
    subsets,
)
from hc_lens.scans.scan import ScanRows, scan
from tests.hc_lens.pairs import deep_model, pair_batches
from tests.unchecked import checked_again


def rows_with(drops: dict[str, list[int]], n: int, case: str = "swap") -> ScanRows:
    """A scan in which the full model is always right and each set is wrong on the given rows."""
    sets = ("full", *drops)
    correct = np.ones((len(sets), n), dtype=bool)
    for index, wrong in enumerate(drops.values(), start=1):
        correct[index, wrong] = False
    frame = pd.DataFrame({"dataset": "hans", "case": case, "row": range(n), "label": 0})
    zeros = np.zeros(correct.shape)
    logit = np.where(correct, 2.0, -1.0)
    return ScanRows(sets, frame, np.zeros((*correct.shape, 3)), correct, correct, zeros, logit)


def first(count: int, start: int = 0) -> list[int]:
    return list(range(start, start + count))


def test_the_example_of_the_paper_is_super_additive_by_seven_points():
    # SO-Swap: 16.4 + 18.1 + 41.3 = 75.8 points one by one, 83.1 together.
    drops = {"L2.H5": first(164), "L3.H7": first(181), "L4.H0": first(413)}
    rows = rows_with({**drops, "L2.H5+L3.H7+L4.H0": first(831)}, n=1000)
    (found,) = excess(rows).to_dict("records")
    assert found["size"] == 3
    assert found["n"] == 1000
    assert found["drop"] == pytest.approx(0.831)
    assert found["sum_of_drops"] == pytest.approx(0.758)
    assert found["excess"] == pytest.approx(0.073)
    assert found["sum_of_losses"] == pytest.approx(0.758)
    assert found["low"] < 0.073 < found["high"]
    assert found["verdict"] == "super-additive"


def test_the_interval_is_that_of_the_mean_over_rows():
    # Disjoint rows: alone 10 and 10 of 100, together 60; the excess is 1 on 40 rows, 0 on the rest.
    drops = {"L0.H0": first(10), "L0.H1": first(10, 10), "L0.H0+L0.H1": first(60)}
    (found,) = excess(rows_with(drops, 100), config=ExcessConfig(n_resamples=20_000)).to_dict(
        "records"
    )
    error = np.sqrt(0.4 * 0.6 / 100)
    assert found["excess"] == pytest.approx(0.4)
    assert found["low"] == pytest.approx(0.4 - 1.96 * error, abs=0.01)
    assert found["high"] == pytest.approx(0.4 + 1.96 * error, abs=0.01)
    assert found["verdict"] == "super-additive"
    assert found["p"] < 1e-10


def test_the_sum_of_the_parts_is_not_super_additive():
    drops = {"L0.H0": first(10), "L0.H1": first(10, 10), "L0.H0+L0.H1": first(20)}
    (found,) = excess(rows_with(drops, 100)).to_dict("records")
    assert found["excess"] == found["low"] == found["high"] == 0
    assert found["verdict"] == "additive or less"
    assert found["p"] == 1


def test_overlapping_damage_is_sub_additive():
    drops = {"L0.H0": first(30), "L0.H1": first(30), "L0.H0+L0.H1": first(30)}
    (found,) = excess(rows_with(drops, 100)).to_dict("records")
    assert found["excess"] == pytest.approx(-0.3)
    assert found["high"] < 0
    assert found["verdict"] == "additive or less"


def test_the_log_odds_tell_an_interaction_from_a_boundary():
    drops = {"L0.H0": [], "L0.H1": [], "L0.H0+L0.H1": first(50)}
    rows = rows_with(drops, 100)
    # Each alone moves the log-odds by half of what both do: no interaction before the boundary.
    rows.logit[0] = 2.0
    rows.logit[1:3, :50], rows.logit[3, :50] = 0.5, -1.0
    rows.logit[1:, 50:] = 2.0
    assert excess(rows)["excess"][0] == pytest.approx(0.5)
    assert excess(rows, config=ExcessConfig(measure="logit"))["excess"][0] == pytest.approx(0.0)


def test_a_seed_gives_the_same_interval_whatever_other_cases_there_are():
    drops = {"L0.H0": first(10), "L0.H1": first(5, 7), "L0.H0+L0.H1": first(30)}
    one, other = rows_with(drops, 100), rows_with(drops, 60, case="if")
    both = ScanRows(
        one.sets,
        pd.concat([other.rows, one.rows], ignore_index=True),
        *(
            np.concatenate([getattr(other, name), getattr(one, name)], axis=1)
            for name in ("logits", "correct", "agreement", "kl", "logit")
        ),
    )
    alone, within = excess(one), excess(both)
    assert list(within["case"]) == ["if", "swap"]
    for column in ("excess", "low", "high", "p"):
        assert within[column][1] == alone[column][0]
    assert excess(one, config=ExcessConfig(seed=1))["low"][0] != pytest.approx(
        alone["low"][0], abs=1e-12
    )


def test_rows_without_a_label_do_not_count():
    drops = {"L0.H0": first(10), "L0.H1": first(10), "L0.H0+L0.H1": first(60)}
    rows = rows_with(drops, 100)
    rows.rows.loc[50:, "label"] = -1
    assert excess(rows)["n"][0] == 50
    rows.rows["label"] = -1
    with pytest.raises(hc.HcLensError, match="expected rows with labels, got none"):
        excess(rows)


def test_a_super_additive_set_is_minimal_if_none_within_it_is():
    a, b, c = "L0.H0", "L0.H1", "L1.H0"
    drops = {a: [], b: [], c: [], f"{a}+{b}": first(60), f"{a}+{c}": [], f"{b}+{c}": []}
    drops[f"{a}+{b}+{c}"] = first(90)
    table = excess(rows_with(drops, 100))
    assert (table["verdict"] == "super-additive").sum() == 2
    assert list(minimal(table)["set"]) == [f"{a}+{b}"]
    drops[f"{a}+{b}"] = []
    table = excess(rows_with(drops, 100))
    assert list(minimal(table)["set"]) == [f"{a}+{b}+{c}"]


def test_subsets_are_listed_small_ones_first():
    labels = ["+".join(map(str, units)) for units in subsets(["L1.H0", "L0.H2", "L0.MLP"], 2)]
    assert labels == [
        *("L1.H0", "L0.H2", "L0.MLP"),
        *("L0.H2+L1.H0", "L0.MLP+L1.H0", "L0.H2+L0.MLP"),
    ]


@pytest.mark.parametrize("pool", [["L0.H0"], ["L0.H0", "L0.H0"], []])
def test_a_pool_needs_two_different_units(pool):
    with pytest.raises(hc.HcLensError, match="expected a pool of two or more different units"):
        subsets(pool)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_resamples": 5}, "expected at least 100 resamples"),
        ({"level": 1.5}, "a level between 0 and 1"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    for config in (ExcessConfig(), SuperAdditiveConfig()):
        with pytest.raises(hc.HcLensError, match=message):
            checked_again(config, **settings)


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ([], "expected sets of two or more units"),
        (["L0.H0"], "expected sets of two or more units"),
        (["L0.H0+L1.H1"], r"expected a set that was scanned, got L0.H0\+L1.H1"),
    ],
)
def test_sets_without_an_excess_are_refused(sets, message):
    rows = rows_with({"L0.H0": [], "L0.H1": [], "L0.H0+L0.H1": []}, 10)
    with pytest.raises(hc.HcLensError, match=message):
        excess(rows, sets)


def test_a_set_whose_members_were_not_scanned_is_refused():
    with pytest.raises(hc.HcLensError, match=r"expected a set that was scanned, got L0.H0;"):
        excess(rows_with({"L0.H0+L0.H1": []}, 10))


def test_the_layout_of_the_paper_has_changes_beside_values():
    drops = {"L0.H0": first(10), "L0.H1": first(20), "L1.H0": first(30), "L0.MLP": first(99)}
    rows = rows_with({**drops, "L0.H0+L0.H1": first(50)}, 100)
    table = layout(rows.table(), core=["L0.H0"], joint=["L0.H0+L0.H1"])
    assert list(table.index) == ["None", "Avg. (non-core, 2 heads)", "L0.H0", "L0.H0+L0.H1"]
    assert list(table.columns) == [("hans", "swap", "accuracy"), ("hans", "swap", "change")]
    assert np.allclose(table.to_numpy(), [[100, 0], [75, -25], [90, -10], [50, -50]])
    with pytest.raises(hc.HcLensError, match=r"missing \['L3.H3'\]"):
        layout(rows.table(), core=["L3.H3"])
    with pytest.raises(hc.HcLensError, match="all heads outside the core"):
        layout(rows.table(), core=["L0.H0", "L0.H1", "L1.H0"])


def test_the_figure_draws_the_sum_and_the_joint_drop():
    drops = {"L0.H0": first(10), "L0.H1": first(20), "L0.H0+L0.H1": first(50)}
    table = excess(rows_with(drops, 100))
    drawing = figure(table, ["L0.H1", "L0.H0"])
    assert isinstance(drawing, Figure)
    heights = [bar.get_height() for bar in drawing.axes[0].patches]
    assert heights == pytest.approx([0.3, 0.5])
    with pytest.raises(hc.HcLensError, match=r"expected a set of the table among .*, got 'L3.H3'"):
        figure(table, "L3.H3")


def test_analyse_goes_from_a_model_to_tables_and_a_figure():
    model = deep_model("bert")
    batches = pair_batches(model)
    means = hc.collect_means(model, batches, progress=False)
    found = analyse(
        model,
        {"pairs": batches},
        means,
        ["L0.H0", "L2.H1"],
        SuperAdditiveConfig(pool=("L0.H0", "L1.MLP", "L3.H2")),
        progress=False,
    )
    assert list(found.layout.index) == [
        *("None", "Avg. (non-core, 14 heads)", "L0.H0", "L2.H1", "L0.H0+L2.H1")
    ]
    # One joint set, three pairs and one triple of the pool, on two cases.
    assert len(found.excess) == 2 * 5
    single = scan(model, batches, means, ["L2.H1"], progress=False)
    by_case = single[single["set"] == "L2.H1"].set_index("case")["accuracy"]
    for case, accuracy in by_case.items():
        assert found.layout.loc["L2.H1", ("pairs", case, "accuracy")] == 100 * accuracy
    assert isinstance(found.figure(["L0.H0", "L2.H1"]), Figure)
    with pytest.raises(hc.HcLensError, match="expected at least two units in a joint set"):
        analyse(model, batches, means, ["L0.H0"], progress=False)


def test_joint_sets_are_named_by_their_labels():
    model = deep_model("bert")
    batches = pair_batches(model)
    config = SuperAdditiveConfig(joint=("L0.H0+L1.MLP", "L2.H1+L0.H0"), n_resamples=100)
    found = analyse(model, batches, "zero", ["L0.H0"], config, progress=False)
    assert list(found.layout.index)[2:] == ["L0.H0", "L0.H0+L1.MLP", "L0.H0+L2.H1"]
    assert found.minimal.empty
