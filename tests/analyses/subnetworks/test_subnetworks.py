"""Subnetworks made by hand: frequencies, cores, chance and spreads that can be counted."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.figure import Figure
from scipy.stats import hypergeom

from hc_lens.analyses import subnetworks as analysis
from hc_lens.analyses.subnetworks import at_least, intersection, simulated
from hc_lens.analyses.subnetworks.figures import frequency_scatter, sparsity_figure, spread_figure
from hc_lens.errors import HcLensError
from hc_lens.pruning.subnetwork import Subnetwork
from hc_lens.units import UnitSpace

SPACE = UnitSpace((3, 2), (0, 1))
"""Five heads and two MLPs."""


def network(*kept: str, space: UnitSpace = SPACE) -> Subnetwork:
    keep = torch.zeros(len(space), dtype=torch.bool)
    keep[space.indices(kept)] = True
    return Subnetwork(space, keep, model="m")


def four_runs() -> dict[analysis.Key, Subnetwork]:
    """Two seeds at each of two sparsities."""
    return {
        ("end", 0.4, 1): network("L0.H0", "L0.H1", "L1.H0", "L0.MLP"),
        ("end", 0.4, 2): network("L0.H0", "L0.H2", "L1.H0", "L1.MLP"),
        ("end", 0.6, 1): network("L0.H0", "L1.H0", "L0.MLP"),
        ("end", 0.6, 2): network("L0.H0", "L0.H1", "L0.MLP"),
    }


def random_runs(n: int, kept: list[int], seed: int) -> dict[analysis.Key, Subnetwork]:
    space, rng = UnitSpace((n,), ()), random.Random(seed)
    return {
        ("end", 0.5, run): network(*rng.sample(space.labels, k), space=space)
        for run, k in enumerate(kept)
    }


def accuracies(**by_seed: float) -> pd.DataFrame:
    """Runs at sparsity 0.5 on one case; the names are s1, s2, ..."""
    rows = [("end", 0.5, int(seed[1:]), "ood", "swap", value) for seed, value in by_seed.items()]
    columns = ["checkpoint", "sparsity", "seed", "dataset", "case", "accuracy"]
    return pd.DataFrame(rows, columns=columns)


FULL = {("end", "ood", "swap"): 0.8}


def test_frequencies_count_the_runs_of_each_sparsity_that_keep_a_head():
    table = analysis.frequencies(four_runs())
    assert list(table.columns) == ["unit", "sparsity", "count", "runs", "frequency"]
    at = table.set_index(["sparsity", "unit"])["count"]
    assert at[0.4].to_dict() == {"L0.H0": 2, "L0.H1": 1, "L0.H2": 1, "L1.H0": 2, "L1.H1": 0}
    assert at[0.6].to_dict() == {"L0.H0": 2, "L0.H1": 1, "L0.H2": 0, "L1.H0": 1, "L1.H1": 0}
    assert set(table["runs"]) == {2}
    assert table["frequency"].tolist() == [1, 0.5, 0.5, 1, 0, 1, 0.5, 0, 0.5, 0]


def test_mlps_are_counted_when_asked_for():
    table = analysis.frequencies(four_runs(), "mlps").set_index(["sparsity", "unit"])["count"]
    assert table[0.4].to_dict() == {"L0.MLP": 1, "L1.MLP": 1}
    assert table[0.6].to_dict() == {"L0.MLP": 2, "L1.MLP": 0}
    assert len(analysis.frequencies(four_runs(), "all")) == 2 * 7


def test_the_frequency_table_places_each_head_once():
    counted = analysis.frequency_table(analysis.frequencies(four_runs()), 0.4, 0.6)
    # Rows: count at 0.4, columns: count at 0.6. L1.H1 (0, 0), L0.H2 (1, 0), L0.H1 (1, 1),
    # L1.H0 (2, 1), L0.H0 (2, 2).
    assert counted.to_numpy().tolist() == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    assert counted.index.name == "count at 0.4"


def test_spearman_is_the_correlation_of_the_ranks_with_ties():
    found = analysis.spearman(analysis.frequencies(four_runs()), 0.4, 0.6)
    # Ranks by hand, in the order H0 H1 H2 of layer 0, H0 H1 of layer 1.
    ours, theirs = np.array([4.5, 2.5, 2.5, 4.5, 1]), np.array([5, 3.5, 1.5, 3.5, 1.5])
    expected = np.corrcoef(ours, theirs)[0, 1]
    assert found.rho == pytest.approx(expected)
    t = expected * math.sqrt(3 / (1 - expected**2))
    from scipy.stats import t as student

    assert found.p == pytest.approx(2 * student.sf(t, 3))
    assert found.n == 5


def test_spearman_of_a_constant_side_is_not_a_number():
    same = {("end", sparsity, 1): network("L0.H0") for sparsity in (0.4, 0.6)}
    same["end", 0.6, 1] = network(*SPACE.labels)
    found = analysis.spearman(analysis.frequencies(same), 0.4, 0.6)
    assert math.isnan(found.rho)
    assert math.isnan(found.p)


def test_the_core_is_what_all_subnetworks_keep():
    runs = four_runs()
    assert analysis.core(runs) == ["L0.H0"]
    assert analysis.core(runs, 0.75) == ["L0.H0", "L1.H0"]
    assert analysis.core(runs, 0.5) == ["L0.H0", "L0.H1", "L1.H0"]
    assert analysis.core(runs, 0.75, "all") == ["L0.H0", "L1.H0", "L0.MLP"]


def test_seven_of_ten_is_a_fraction_of_seven_tenths():
    space = UnitSpace((2,), ())
    runs = {
        ("end", 0.5, seed): network("L0.H0" if seed < 7 else "L0.H1", space=space)
        for seed in range(10)
    }
    assert analysis.core(runs, 0.7) == ["L0.H0"]
    assert analysis.core(runs, 0.71) == []


def test_chance_of_two_sets_is_hypergeometric():
    runs = random_runs(10, [4, 6], seed=0)
    found = analysis.chance(runs)
    assert found.expected == pytest.approx(10 * 0.4 * 0.6)
    assert found.tail == pytest.approx(hypergeom.sf(found.size - 1, 10, 4, 6))
    assert found.exact
    assert found.kept == (4, 6)
    assert found.units == 10


def test_chance_of_three_sets_equals_counting_all_choices():
    n, kept = 5, (2, 3, 4)
    choices = [list(itertools.combinations(range(n), k)) for k in kept]
    sizes = np.zeros(n + 1)
    for sets in itertools.product(*choices):
        sizes[len(set.intersection(*map(set, sets)))] += 1
    np.testing.assert_allclose(intersection(n, kept), sizes / sizes.sum(), atol=1e-12)


def test_chance_equals_a_brute_force_simulation():
    n, kept, draws, rng = 32, [18, 15, 20, 17], 20_000, random.Random(5)
    sizes = [
        len(set.intersection(*(set(rng.sample(range(n), k)) for k in kept))) for _ in range(draws)
    ]
    exact = intersection(n, kept)
    assert (exact * np.arange(n + 1)).sum() == pytest.approx(n * math.prod(k / n for k in kept))
    assert np.mean(sizes) == pytest.approx((exact * np.arange(n + 1)).sum(), abs=0.03)
    for size in range(1, 8):
        tail = exact[size:].sum()
        error = 4 * math.sqrt(tail * (1 - tail) / draws)
        assert np.mean(np.array(sizes) >= size) == pytest.approx(tail, abs=error)


def test_chance_holds_for_runs_that_keep_nothing_or_everything():
    np.testing.assert_allclose(intersection(4, [4, 4]), [0, 0, 0, 0, 1])
    np.testing.assert_allclose(intersection(4, [4, 0]), [1, 0, 0, 0, 0])
    np.testing.assert_allclose(intersection(4, [4, 3]), [0, 0, 0, 1, 0])


def test_chance_counts_the_heads_that_were_kept_and_not_the_mlps():
    found = analysis.chance(four_runs())
    assert found.kept == (3, 3, 2, 2)
    assert found.expected == pytest.approx(5 * (3 / 5) ** 2 * (2 / 5) ** 2)
    assert found.size == 1


def test_chance_within_layers_keeps_each_layers_numbers():
    # Every run keeps one of two heads of layer 0 and both of layer 1: only layer 0 is left to
    # chance, and of the three shared heads two were certain.
    space = UnitSpace((2, 2), ())
    runs = {
        ("end", 0.25, seed): network("L0.H0", "L1.H0", "L1.H1", space=space) for seed in range(3)
    }
    found = analysis.chance(runs, within="layer")
    assert found.size == 3
    assert found.expected == pytest.approx(2 * 0.5**3 + 2)
    assert found.tail == pytest.approx(0.25)
    assert analysis.chance(runs).tail == pytest.approx((1 / 4) ** 2)


def test_chance_of_a_fraction_has_an_exact_mean_and_a_simulated_tail():
    runs = random_runs(12, [6, 6, 8], seed=3)
    found = analysis.chance(runs, fraction=0.6, n_draws=20_000)
    # In two of three or more, by hand: p = 1/2, 1/2, 2/3.
    p = 0.5 * 0.5 * (1 / 3) + 2 * 0.5 * 0.5 * (2 / 3) + 0.5 * 0.5 * (2 / 3)
    assert at_least([0.5, 0.5, 2 / 3], 2) == pytest.approx(p)
    assert found.expected == pytest.approx(12 * p)
    assert not found.exact
    drawn = simulated(12, [6, 6, 8], 2, 20_000, np.random.default_rng(1))
    assert drawn.mean() == pytest.approx(12 * p, abs=0.05)
    assert found.tail == pytest.approx((drawn >= found.size).mean(), abs=0.02)


def test_simulated_tails_agree_with_exact_ones():
    drawn = simulated(20, [12, 12, 14], 3, 20_000, np.random.default_rng(0))
    exact = intersection(20, [12, 12, 14])
    for size in range(1, 10):
        assert (drawn >= size).mean() == pytest.approx(exact[size:].sum(), abs=0.015)


def test_jaccard_is_shared_over_all_with_its_chance_level():
    table = analysis.jaccard(four_runs())
    assert len(table) == 6
    first = table.iloc[0]
    assert first[["sparsity_a", "seed_a", "sparsity_b", "seed_b"]].tolist() == [0.4, 1, 0.4, 2]
    assert (first["both"], first["either"]) == (2, 4)
    assert first["jaccard"] == 0.5
    # Two random sets of 3 of 5: 1 shared with chance 3/10, 2 with 6/10, 3 with 1/10.
    assert first["expected"] == pytest.approx(0.3 / 5 + 0.6 * 2 / 4 + 0.1 * 3 / 3)


def test_two_empty_subnetworks_are_the_same():
    empty = {("end", 0.9, seed): network("L0.MLP") for seed in (1, 2)}
    table = analysis.jaccard(empty)
    assert table["jaccard"].tolist() == [1.0]
    assert table["expected"].tolist() == [1.0]


def test_an_early_core_inside_the_final_one_survives():
    early = {("early", 0.6, 1): network("L0.H0", "L1.H0")}
    final = {("end", 0.4, 1): network("L0.H0", "L0.H1", "L1.H0")}
    found = analysis.early_core(early, final)
    assert found.shared == ("L0.H0", "L1.H0")
    assert found.share == 1
    assert found.expected == pytest.approx(3 / 5)
    assert found.tail == pytest.approx((3 / 5) * (2 / 4))


def test_an_early_core_that_is_partly_lost_does_not_survive():
    early = {("early", 0.6, 1): network("L0.H0", "L1.H1")}
    final = {("end", 0.4, 1): network("L0.H0", "L0.H1", "L1.H0")}
    found = analysis.early_core(early, final)
    assert found.share == 0.5
    assert found.tail == pytest.approx(1 - (2 / 5) * (1 / 4))
    nothing = analysis.early_core({("early", 0.9, 1): network("L0.MLP")}, final)
    assert math.isnan(nothing.share)


def test_spread_has_the_columns_of_the_papers_tables():
    table = analysis.spread(accuracies(s1=0.2, s2=0.4, s3=0.9), FULL)
    (row,) = table.to_dict("records")
    assert row["full"] == 0.8
    assert (row["min"], row["max"], row["seeds"]) == (0.2, 0.9, 3)
    assert row["mean"] == pytest.approx(0.5)
    assert row["std"] == pytest.approx(math.sqrt((0.09 + 0.01 + 0.16) / 2))


def test_spread_keeps_the_order_of_checkpoints_and_leaves_out_missing_cells():
    late, soon = accuracies(s1=0.5), accuracies(s1=0.3, s2=math.nan)
    soon["checkpoint"] = "begin"
    both = pd.concat([soon.assign(sparsity=0.7), soon, late], ignore_index=True)
    full = {(name, "ood", "swap"): 0.8 for name in ("begin", "end")}
    table = analysis.spread(both, full)
    assert table["checkpoint"].tolist() == ["begin", "begin", "end"]
    assert table["sparsity"].tolist() == [0.5, 0.7, 0.5]
    assert table["seeds"].tolist() == [1, 1, 1]
    assert table["std"].isna().all()


def test_curves_against_sparsity_begin_with_the_full_model():
    runs = pd.concat([accuracies(s1=0.6, s2=0.8), accuracies(s1=0.1).assign(sparsity=0.3)])
    table = analysis.by_sparsity(runs, FULL)
    assert table["sparsity"].tolist() == [0, 0.3, 0.5]
    assert table["mean"].tolist() == pytest.approx([0.8, 0.1, 0.7])


def test_the_spread_of_another_measure():
    table = accuracies(s1=0.9, s2=0.5).assign(kl=[0.5, 2.5])
    found = analysis.spread(table, FULL, "kl")
    (row,) = found.to_dict("records")
    assert (row["full"], row["min"], row["max"], row["mean"]) == (0, 0.5, 2.5, 1.5)
    curve = analysis.by_sparsity(table, FULL, "kl")
    assert curve["mean"].tolist() == [0, 1.5]


def test_spread_groups_by_the_sparsity_that_was_asked_for():
    # The counts that were reached differ by a unit, and one grid was made by adding steps.
    runs = accuracies(s1=0.2, s2=0.4, s3=0.9)
    runs["sparsity"] = [0.3, 0.1 + 0.2, 0.3]
    runs["reached"] = [0.2987, 0.3052, 0.3]
    (row,) = analysis.spread(runs, FULL).to_dict("records")
    assert (row["sparsity"], row["seeds"]) == (0.3, 3)


def test_a_missing_run_does_not_count_as_a_seed_and_does_not_vanish():
    table = analysis.spread(
        pd.concat([accuracies(s1=0.2, s2=math.nan), accuracies(s1=math.nan).assign(sparsity=0.7)]),
        FULL,
    )
    assert table["sparsity"].tolist() == [0.5, 0.7]
    assert table["seeds"].tolist() == [1, 0]
    assert table["mean"].tolist() == pytest.approx([0.2, math.nan], nan_ok=True)


def sided() -> pd.DataFrame:
    """Two seeds on three cases of one dataset and on one of another; seed 2 says one thing."""
    rows = [
        (1, "id", "all", "", 0.9, 0.5),
        (1, "ood", "swap", "adversarial", 0.6, 0.4),
        (1, "ood", "before", "friendly", 0.8, 0.8),
        (1, "ood", "after", "friendly", 1.0, 1.0),
        (2, "id", "all", "", 0.7, 0.2),
        (2, "ood", "swap", "adversarial", 1.0, 0.0),
        (2, "ood", "before", "friendly", 0.1, 0.1),
        (2, "ood", "after", "friendly", 0.1, 0.1),
    ]
    columns = ["seed", "dataset", "case", "side", "accuracy", "share_yes"]
    table = pd.DataFrame(rows, columns=columns).assign(checkpoint="end", sparsity=0.5, n=25)
    return table.assign(share_no=1 - table["share_yes"])


SIDED_FULL = {
    ("end", "id", "all"): 0.95,
    ("end", "ood", "swap"): 0.7,
    ("end", "ood", "before"): 0.9,
    ("end", "ood", "after"): 1.0,
}


def test_spread_and_curves_keep_the_side_and_the_number_of_rows():
    for table in (analysis.spread(sided(), SIDED_FULL), analysis.by_sparsity(sided(), SIDED_FULL)):
        cells = table.drop_duplicates("case").set_index("case")
        assert cells["side"].to_dict() == {
            "all": "",
            "swap": "adversarial",
            "before": "friendly",
            "after": "friendly",
        }
        assert set(table["n"]) == {25}


def test_friendly_cases_stand_beside_adversarial_ones_for_every_run():
    table = analysis.by_side(sided(), SIDED_FULL)
    assert table["dataset"].tolist() == ["ood", "ood"]  # id has no sides
    assert table["friendly"].tolist() == pytest.approx([0.9, 0.1])
    assert table["adversarial"].tolist() == pytest.approx([0.6, 1.0])
    assert table["balanced"].tolist() == pytest.approx([0.75, 0.55])
    full = table[["full_friendly", "full_adversarial", "full_balanced"]].to_numpy()
    assert full.tolist() == [pytest.approx([0.95, 0.7, 0.825])] * 2
    # Yes: 0.9 of the friendly and 0.4 of the adversarial rows of seed 1. No: 0.9 and 1 of seed 2.
    assert table["said"].tolist() == ["yes", "no"]
    assert table["said_share"].tolist() == pytest.approx([0.65, 0.95])
    assert len(analysis.by_side(sided().assign(side=""), SIDED_FULL)) == 0


def test_sides_that_nobody_named_are_an_error():
    with pytest.raises(HcLensError, match="expected the column side in the table of runs"):
        analysis.by_side(sided().drop(columns="side"), SIDED_FULL)


def test_figures_show_friendly_cases_before_adversarial_ones():
    wanted = ["id", "before (friendly)", "after (friendly)", "swap (adversarial)"]
    spread = spread_figure(sided(), SIDED_FULL)
    assert [tick.get_text() for tick in spread.axes[0].get_yticklabels()] == wanted
    curves = sparsity_figure(sided(), SIDED_FULL)
    assert curves.axes[0].get_legend_handles_labels()[1] == wanted
    chosen = spread_figure(sided(), SIDED_FULL, cases=["swap", "before"])
    labels = [tick.get_text() for tick in chosen.axes[0].get_yticklabels()]
    assert labels == ["swap (adversarial)", "before (friendly)"]


def test_select_chooses_checkpoint_sparsity_and_seed():
    runs = {**four_runs(), ("early", 0.1 + 0.2, 1): network("L0.H0")}
    assert list(analysis.select(runs, checkpoint="early")) == [("early", 0.1 + 0.2, 1)]
    assert len(analysis.select(runs, sparsities=[0.3])) == 1
    assert len(analysis.select(runs, checkpoint="end", seeds=[2])) == 2
    with pytest.raises(HcLensError, match="got none among"):
        analysis.select(runs, checkpoint="middle")


def test_subnetworks_that_cannot_be_compared_are_errors():
    runs = four_runs()
    with pytest.raises(HcLensError, match=r"one checkpoint, got those of \['end', 'early'\]"):
        analysis.core({**runs, ("early", 0.4, 1): network("L0.H0")})
    other = UnitSpace((2, 2), (0, 1))
    with pytest.raises(HcLensError, match="one architecture, got 2 layers, 5 heads"):
        analysis.core({**runs, ("end", 0.4, 3): network("L0.H0", space=other)})
    with pytest.raises(HcLensError, match="one architecture, got one with 5 heads and one with 4"):
        analysis.early_core(runs, {("b", 0.4, 3): network("L0.H0", space=other)})
    with pytest.raises(HcLensError, match="got none; is the sweep done"):
        analysis.frequencies({})
    with pytest.raises(HcLensError, match="by \\(checkpoint, sparsity, seed\\), got the key 'a'"):
        analysis._kept({"a": network("L0.H0")}, "heads")


def test_settings_that_do_not_exist_are_errors():
    runs = four_runs()
    with pytest.raises(HcLensError, match="fraction above 0 and at most 1, got 100"):
        analysis.core(runs, 100)
    with pytest.raises(HcLensError, match=r"a sparsity of the table, got 0.5; it has \[0.4, 0.6\]"):
        analysis.spearman(analysis.frequencies(runs), 0.4, 0.5)


def test_figures_are_drawn_from_the_tables():
    table = analysis.frequencies(four_runs())
    drawings = [
        frequency_scatter(table, 0.4, 0.6, mark=["L0.H0"]),
        spread_figure(accuracies(s1=0.2, s2=0.4), FULL),
        sparsity_figure(accuracies(s1=0.2, s2=0.4), FULL),
    ]
    assert all(isinstance(drawing, Figure) for drawing in drawings)
    dots = drawings[1].axes[0].lines[0]
    assert sorted(dots.get_xdata()) == [20, 40]
    assert [text.get_text() for text in drawings[0].axes[0].texts] == ["1"] * 5
    with pytest.raises(HcLensError, match="expected cases"):
        spread_figure(accuracies(s1=0.2), FULL, cases=["passive"])
    with pytest.raises(HcLensError, match="expected cases"):
        sparsity_figure(accuracies(s1=0.2), FULL, cases=["passive"])
    two = pd.concat([accuracies(s1=0.2), accuracies(s1=0.2).assign(checkpoint="begin")])
    with pytest.raises(HcLensError, match="runs of one checkpoint"):
        spread_figure(two, {**FULL, ("begin", "ood", "swap"): 0.1})
