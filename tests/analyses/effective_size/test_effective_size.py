"""Effective size on tables made by hand."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import pytest
from matplotlib.figure import Figure

from hc_lens.analyses.effective_size import SizeConfig, compare, effective_size
from hc_lens.analyses.effective_size.figures import figure, flagged
from hc_lens.analyses.tables import full_table, run_table
from hc_lens.errors import HcLensError
from tests.unchecked import checked_again

COLUMNS = ["checkpoint", "sparsity", "seed", "dataset", "case", "accuracy"]


def runs(
    cells: dict[tuple[float, int], tuple[float, float]], checkpoint: str = "a"
) -> pd.DataFrame:
    """(sparsity, seed) -> accuracy in-domain and accuracy on each of two OOD cases."""
    rows = []
    for (sparsity, seed), (inside, outside) in cells.items():
        rows.append((checkpoint, sparsity, seed, "id", "all", inside))
        rows += [(checkpoint, sparsity, seed, "ood", case, outside) for case in ("if", "swap")]
    return pd.DataFrame(rows, columns=COLUMNS)


def full(inside: float, outside: float, checkpoint: str = "a") -> dict[tuple[str, str, str], float]:
    cells = {("id", "all"): inside, ("ood", "if"): outside, ("ood", "swap"): outside}
    return {(checkpoint, *cell): value for cell, value in cells.items()}


def found(table: pd.DataFrame, **settings: Any) -> dict[str, dict[str, Any]]:
    """The rows of one checkpoint, by target."""
    given = settings.pop("full", full(0.9, 0.8))
    return {
        row["target"]: row
        for row in effective_size(table, given, SizeConfig(**settings)).to_dict("records")
    }


def test_the_size_is_what_the_largest_passing_sparsity_leaves():
    cells = {(0.2, 1): (0.9, 0.8), (0.4, 1): (0.88, 0.6), (0.6, 1): (0.5, 0.5)}
    by = found(runs(cells))
    assert by["id"]["sparsity"] == 0.4
    assert by["id"]["effective_size"] == pytest.approx(60)
    assert by["id"]["accuracy"] == 0.88
    assert by["ood"]["effective_size"] == pytest.approx(80)
    # Mix: 0.85 in full; 0.85, 0.74, 0.5.
    assert by["mix"]["full"] == pytest.approx(0.85)
    assert by["mix"]["effective_size"] == pytest.approx(80)
    assert not any(by[target][flag] for target in by for flag in ("ceiling", "none_passes"))


def test_a_drop_of_exactly_the_margin_passes():
    cells = {(0.5, 1): (0.87, 0.77), (0.75, 1): (0.8699, 0.7699)}
    by = found(runs(cells))
    assert by["id"]["sparsity"] == by["ood"]["sparsity"] == 0.5
    assert found(runs(cells), margin=0.04)["id"]["sparsity"] == 0.75


def test_seeds_averaged_first_and_last_differ_as_by_hand():
    # Full 0.9. At 0.2 both pass; at 0.4 seed 1 is at 0.9, seed 2 at 0.85: the mean 0.875 passes,
    # seed 2 alone does not.
    cells = {
        (0.2, 1): (0.9, 0.8),
        (0.2, 2): (0.9, 0.8),
        (0.4, 1): (0.9, 0.8),
        (0.4, 2): (0.85, 0.8),
        (0.6, 1): (0.5, 0.5),
        (0.6, 2): (0.5, 0.5),
    }
    first, last = found(runs(cells)), found(runs(cells), average="seeds-last")
    assert first["id"]["effective_size"] == pytest.approx(60)
    assert math.isnan(first["id"]["std"])
    assert last["id"]["effective_size"] == pytest.approx((60 + 80) / 2)
    assert last["id"]["std"] == pytest.approx(math.sqrt(200))
    assert last["id"]["seeds"] == first["id"]["seeds"] == 2
    assert last["ood"]["effective_size"] == pytest.approx(60)


def test_the_ceiling_of_the_grid_is_flagged():
    by = found(runs({(0.2, 1): (0.9, 0.8), (0.4, 1): (0.9, 0.1)}))
    assert by["id"]["ceiling"]
    assert by["id"]["effective_size"] == pytest.approx(60)
    assert not by["ood"]["ceiling"]


def test_a_model_that_no_subnetwork_follows_has_size_100_and_a_flag():
    by = found(runs({(0.2, 1): (0.1, 0.1), (0.4, 1): (0.1, 0.1)}))
    assert by["id"]["effective_size"] == 100
    assert by["id"]["sparsity"] == 0
    assert by["id"]["none_passes"]
    assert by["id"]["accuracy"] == 0.9


def test_a_model_at_chance_is_flagged_when_the_level_is_known():
    table = runs({(0.2, 1): (0.9, 0.4)})
    assert pd.isna(found(table, full=full(0.9, 0.53))["ood"]["floor"])
    by = found(table, full=full(0.9, 0.53), chance={"id": 1 / 3, "ood": 1 / 2})
    assert by["ood"]["floor"] is True
    assert by["id"]["floor"] is False
    assert by["mix"]["floor"] is False
    assert found(table, full=full(0.9, 0.54), chance={"ood": 1 / 2})["ood"]["floor"] is False
    assert found(table, full=full(0.9, 0.54), chance={"ood": 0.6})["ood"]["floor"] is True
    levels = {"id": 1 / 3, "ood": 1 / 2}
    assert found(table, full=full(0.36, 0.5), chance=levels)["mix"]["floor"] is True


def test_passing_after_failing_is_flagged_and_the_monotone_rule_stops_before():
    cells = {(0.2, 1): (0.9, 0.8), (0.4, 1): (0.5, 0.8), (0.6, 1): (0.9, 0.8), (0.8, 1): (0.1, 0.1)}
    by, strict = found(runs(cells)), found(runs(cells), monotone=True)
    assert by["id"]["non_monotone"]
    assert by["id"]["effective_size"] == pytest.approx(40)
    assert strict["id"]["non_monotone"]
    assert strict["id"]["effective_size"] == pytest.approx(80)
    assert not by["ood"]["non_monotone"]
    assert strict["ood"]["effective_size"] == by["ood"]["effective_size"]


def test_a_missing_run_is_left_out_and_counted():
    cells = {(0.2, 1): (0.9, 0.8), (0.2, 2): (0.9, 0.8), (0.4, 1): (0.9, 0.8)}
    by = found(runs(cells))
    assert by["id"]["missing"] == 1
    assert by["id"]["seeds"] == 1
    assert by["id"]["effective_size"] == pytest.approx(60)


def test_a_run_with_a_missing_case_is_left_out_of_that_target_only():
    table = runs({(0.2, 1): (0.9, 0.8), (0.2, 2): (0.9, 0.2), (0.4, 1): (0.9, 0.8)})
    table = pd.concat([table, runs({(0.4, 2): (0.9, 0.8)})])
    lost = table[~((table["seed"] == 2) & (table["case"] == "swap") & (table["sparsity"] == 0.2))]
    by = found(lost)
    assert (by["id"]["missing"], by["ood"]["missing"], by["mix"]["missing"]) == (0, 1, 1)
    # Seed 2 would have pulled the mean at 0.2 down to 0.5.
    assert not by["ood"]["non_monotone"]
    table.loc[(table["seed"] == 2) & (table["sparsity"] == 0.2), "accuracy"] = math.nan
    assert found(table)["id"]["missing"] == 1


def test_a_gap_in_the_grid_is_no_failure_but_stops_the_monotone_rule():
    two = pd.concat(
        [
            runs({(0.2, 1): (0.9, 0.8), (0.6, 1): (0.9, 0.8)}),
            runs({(s, 1): (0.9, 0.8) for s in (0.2, 0.4, 0.6)}, "b"),
        ]
    )
    models = {**full(0.9, 0.8), **full(0.9, 0.8, "b")}
    (row, *_) = effective_size(two, models, SizeConfig(ood=None)).to_dict("records")
    assert (row["effective_size"], row["missing"]) == (pytest.approx(40), 1)
    assert not row["non_monotone"]
    (row, *_) = effective_size(two, models, SizeConfig(ood=None, monotone=True)).to_dict("records")
    assert row["effective_size"] == pytest.approx(80)


def test_a_checkpoint_without_a_complete_run_has_no_size():
    inside = runs({(0.2, 1): (0.9, 0.8)}, "b")
    table = pd.concat([runs({(0.2, 1): (0.9, 0.8)}), inside[inside["dataset"] == "id"]])
    models = {**full(0.9, 0.8), **full(0.9, 0.8, "b")}
    for average in ("seeds-first", "seeds-last"):
        sizes = effective_size(table, models, SizeConfig(average=average))
        sizes = sizes.set_index(["checkpoint", "target"])
        assert math.isnan(sizes.loc[("b", "ood"), "effective_size"])
        assert not sizes.loc[("b", "ood"), "none_passes"]
        assert sizes.loc[("b", "ood"), "missing"] == 1
        assert sizes.loc[("b", "id"), "effective_size"] == pytest.approx(80)


def test_better_than_the_model_by_more_than_the_margin_fails_unless_one_side_counts():
    table = runs({(0.2, 1): (0.9, 0.8), (0.4, 1): (0.9, 0.95)})
    assert found(table)["ood"]["sparsity"] == 0.2
    assert found(table, one_sided=True)["ood"]["sparsity"] == 0.4


def test_cases_choose_what_ood_means():
    table = runs({(0.2, 1): (0.9, 0.8)})
    table.loc[table["case"] == "swap", "accuracy"] = 0.1
    assert found(table)["ood"]["none_passes"]
    assert found(table, cases=("if",))["ood"]["effective_size"] == pytest.approx(80)


def test_checkpoints_come_in_the_order_of_the_full_models():
    table = pd.concat([runs({(0.2, 1): (0.9, 0.8)}, name) for name in ("10", "2")])
    models = {**full(0.9, 0.8, "2"), **full(0.9, 0.8, "10"), **full(0.9, 0.8, "unused")}
    sizes = effective_size(table, models)
    assert sizes["checkpoint"].tolist() == ["2"] * 3 + ["10"] * 3
    assert sizes["target"].tolist() == ["id", "ood", "mix"] * 2


def test_full_models_may_be_a_table_and_runs_may_have_other_columns():
    table = runs({(0.2, 1): (0.9, 0.8)}).assign(kl=0.1, run="x")
    rows = [(*key, value) for key, value in full(0.9, 0.8).items()]
    frame = pd.DataFrame(rows, columns=["checkpoint", "dataset", "case", "accuracy"])
    pd.testing.assert_frame_equal(
        effective_size(table, frame), effective_size(table, full(0.9, 0.8))
    )


def test_compare_shows_every_run_of_the_grid():
    cells = {(0.2, 1): (0.9, 0.8), (0.4, 2): (0.8, 0.8)}
    table = compare(runs(cells), full(0.9, 0.8), SizeConfig(ood=None))
    assert table["passes"].tolist() == [True, False, False, False]
    assert table["drop"].round(6).fillna(-1).tolist() == [0, -1, -1, 0.1]


def test_bad_tables_are_errors_that_say_what_to_do():
    table, models = runs({(0.2, 1): (0.9, 0.8)}), full(0.9, 0.8)
    with pytest.raises(HcLensError, match=r"missing seed, case \(it has checkpoint, sparsity"):
        effective_size(table.drop(columns=["seed", "case"]), models)
    with pytest.raises(HcLensError, match=r"missing 'a' on id/all \(known checkpoints: \['b'\]\)"):
        effective_size(table, full(0.9, 0.8, "b"))
    with pytest.raises(HcLensError, match="each cell once in the table of runs, got 6 rows"):
        effective_size(pd.concat([table, table]), models)
    with pytest.raises(HcLensError, match=r"accuracy of the table of runs as fractions.*got 90"):
        effective_size(table.assign(accuracy=90.0), models)
    with pytest.raises(HcLensError, match="accuracy of the table of full models as fractions"):
        effective_size(table, full(90, 80))
    with pytest.raises(HcLensError, match=r"numbers in the column sparsity .* got '50%'"):
        effective_size(table.assign(sparsity="50%"), models)
    with pytest.raises(HcLensError, match=r"sparsity of the table of runs as fractions.* got 50"):
        effective_size(table.assign(sparsity=50), models)
    with pytest.raises(HcLensError, match=r"column sparsity .* in every row, got nan"):
        effective_size(table.assign(sparsity=math.nan), models)
    with pytest.raises(HcLensError, match="got none; is the sweep done"):
        effective_size(table.iloc[:0], models)
    with pytest.raises(HcLensError, match="a DataFrame of runs, got list"):
        run_table([])
    with pytest.raises(HcLensError, match="by \\(checkpoint, dataset, case\\), got the key 'a'"):
        full_table({"a": 0.9})


def test_bad_settings_are_errors_that_say_what_to_do():
    table, models = runs({(0.2, 1): (0.9, 0.8)}), full(0.9, 0.8)
    with pytest.raises(HcLensError, match=r"margin as a fraction .* got 3; 3 points are 0.03"):
        SizeConfig(margin=3)
    with pytest.raises(HcLensError, match=r"the dataset for ood among \['id', 'ood'\], got 'hans'"):
        effective_size(table, models, SizeConfig(ood="hans"))
    with pytest.raises(HcLensError, match=r"cases of 'ood' among \['if', 'swap'\], got 'passive'"):
        effective_size(table, models, SizeConfig(cases=("passive",)))
    with pytest.raises(HcLensError, match=r"chance levels of the datasets .* got one of 'hans'"):
        SizeConfig(chance={"hans": 0.5})
    with pytest.raises(HcLensError, match=r"average among \['seeds-first', 'seeds-last'\], got"):
        checked_again(SizeConfig(), average="seeds")


def test_the_figure_has_a_line_for_each_target_and_hollow_marks_for_flags():
    cells = {(0.2, 1): (0.9, 0.8), (0.4, 1): (0.9, 0.1)}
    sizes = effective_size(runs(cells), full(0.9, 0.8), SizeConfig(chance={"ood": 0.5}))
    assert flagged(sizes).tolist() == [True, False, False]
    drawing = figure(sizes)
    assert isinstance(drawing, Figure)
    labels = drawing.axes[0].get_legend_handles_labels()[1]
    assert labels == ["in domain", "out of domain", "mix", "flagged"]
    with pytest.raises(HcLensError, match="expected the table of effective_size"):
        figure(sizes.drop(columns="target"))
