"""The scorecard on planted circuits: identities, verdicts that are known, and bad input."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
import torch

import hc_lens as hc
from hc_lens.analyses import scorecard
from hc_lens.analyses.scorecard import Measured, ScorecardConfig, areas, curve, sizes
from hc_lens.errors import HcLensError
from tests.commands import invoke

SMALL = ScorecardConfig(
    size=3, n_random=12, n_rankings=4, n_added=8, n_permutations=60, n_resamples=100
)


@pytest.fixture(scope="module")
def known():
    config = hc.circuits.PlantedConfig("gpt2", n_layers=2, n_true=3, noise=0.5, n_rows=60)
    return hc.circuits.planted(config)


@pytest.fixture(scope="module")
def measure(known):
    return Measured(known.model, known.batches, "zero", progress=False)


@pytest.fixture(scope="module")
def card(known):
    scores = {str(unit): float(unit in known.units) for unit in known.space}
    others = [hc.Subnetwork.from_units(known.model, known.units) for _ in range(2)]
    return scorecard.analyse(
        known.model, known.batches, scores, "zero", SMALL, others=others, progress=False
    )


def lines(card) -> pd.DataFrame:
    return card.summary.set_index("question")


def test_faithfulness_is_one_for_all_units_and_zero_for_none(measure) -> None:
    assert measure.faithfulness(measure.all) == 1.0
    assert measure.faithfulness(measure.none) == 0.0


def test_the_measure_of_a_circuit_is_that_of_the_model_without_the_others(known, measure) -> None:
    others = [unit for unit in known.space if unit not in known.units]
    with hc.ablate(known.model, others, "zero"):
        rows = []
        for batch in known.batches:
            logits = known.model(**batch.inputs).double()
            sign = 2 * batch.labels - 1
            rows.append(sign * (logits[:, 1] - logits[:, 0]))
    assert measure.mean(known.units) == pytest.approx(torch.cat(rows).mean().item(), abs=1e-5)


def test_sizes_are_those_of_the_benchmark_and_areas_those_of_trapezoids(measure) -> None:
    assert sizes(1000) == [0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]
    assert sizes(10) == [0, 1, 2, 5, 10]
    assert sizes(30, (0.1,)) == [0, 3, 30]
    table = pd.DataFrame({"share": [0.0, 0.5, 1.0], "faithfulness": [0.0, 1.2, 1.0]})
    assert areas(table) == pytest.approx((0.85, 0.35))
    order = tuple(measure.space)
    found = curve(measure, order, (0.5,))
    assert found["faithfulness"].tolist()[::2] == [0.0, 1.0]
    assert found["n_units"].tolist() == [0, 5, 10]


def test_a_planted_circuit_is_faithful_complete_and_minimal(known, card) -> None:
    assert set(card.circuit) == set(known.units)
    found = lines(card)
    assert found.loc["faithfulness", "value"] > 0.9
    assert abs(found.loc["completeness", "value"]) < 0.1
    for question in ("faithfulness", "completeness"):
        line = found.loc[question]
        assert line["low"] <= line["value"] <= line["high"]
        # The best of twelve random circuits and itself.
        assert line["p"] == pytest.approx(1 / 13)
    assert found.loc["completeness", "random"] > 0.3 > found.loc["faithfulness", "random"] - 0.4
    assert (card.units["change"] < -0.2).all()
    # Each does more than all seven units outside.
    assert (card.units["p"] == 1 / 8).all()
    assert found.loc["cpr", "value"] > found.loc["cpr", "random"]
    assert found.loc["cmd", "value"] < found.loc["cmd", "random"]
    assert found.loc["cmd", "p"] == pytest.approx(1 / 5)


def test_the_same_circuit_from_every_seed_is_stable(card) -> None:
    found = lines(card)
    assert found.loc["stability", "value"] == 1.0 > found.loc["stability", "random"]
    assert found.loc["stability", "p"] < 0.02
    table = card.stability.units
    assert sorted(table["n"].unique()) == [0, 3]
    assert (table["low"] <= table["share"]).all()
    assert (table["share"] <= table["high"]).all()


def test_without_a_size_a_ranking_begins_with_the_fewest_units_that_are_faithful(known) -> None:
    scores = {str(unit): float(unit in known.units) for unit in known.space}
    config = ScorecardConfig(**{**vars(SMALL), "size": None, "shares": (0.2, 0.3, 0.5)})
    card = scorecard.analyse(known.model, known.batches, scores, "zero", config, progress=False)
    assert card.circuit == known.units


def test_a_wrong_circuit_is_told_from_the_right_one(known) -> None:
    wrong = [unit for unit in known.space.heads if unit not in known.units][:3]
    card = scorecard.analyse(known.model, known.batches, wrong, "zero", SMALL, progress=False)
    found = lines(card)
    assert found.loc["faithfulness", "value"] < 0.1
    assert found.loc["completeness", "value"] > 0.9
    assert found.loc["equivalence", "p"] < 0.01
    assert found.loc["independence", "p"] < 0.05
    assert found.loc["minimality", "value"] == 0.0
    assert card.curve.empty
    assert "cpr" not in found.index
    with pytest.raises(HcLensError, match="the curve of a ranking"):
        card.figure()


def test_the_same_seed_gives_the_same_card_and_the_figure_draws_it(known, card) -> None:
    scores = pd.DataFrame({"unit": known.space.labels, "score": known.truth.double().numpy()})
    again = scorecard.analyse(known.model, known.batches, scores, "zero", SMALL, progress=False)
    pd.testing.assert_frame_equal(lines(card).drop("stability"), lines(again))
    (axes,) = card.figure().axes
    named = [text.get_text() for text in axes.get_legend().get_texts()]
    assert named[1:] == ["random", "circuit of 3"]


def test_resampled_rows_find_the_large_effects_again_and_again() -> None:
    effects = np.array([[5.0, 4.0, 6.0], [0.0, 0.1, 0.0], [3.0, 3.0, 3.0]])
    assert scorecard.resampled(effects, 2, 20).tolist() == [[True, False, True]] * 20
    noise = np.random.default_rng(0).normal(size=(6, 200))
    found = scorecard.stability(scorecard.resampled(noise, 2, 50), list("abcdef"))
    assert 0 < found.units["share"].max() < 1
    with pytest.raises(HcLensError, match="a size between 1 and 2"):
        scorecard.resampled(effects, 3)


def test_a_circuit_goes_to_the_json_of_the_benchmark_and_back(known, tmp_path) -> None:
    circuit = hc.Subnetwork.from_units(known.model, known.units)
    path = scorecard.to_mib(tmp_path / "c.json", known.model, circuit)
    nodes = json.loads(path.read_text())["nodes"]
    first = known.units[0]
    assert nodes[f"a{first.layer}.h{first.head}"] == {"in_graph": True}
    assert nodes["m0"] == {"in_graph": False}
    assert nodes["input"]["in_graph"]
    assert nodes["logits"]["in_graph"]
    assert scorecard.from_mib(path, known.model).kept == circuit.kept
    for change, said in (
        ({"a9.h0": {"in_graph": True}}, r"unknown nodes \['a9.h0'\]"),
        ({"b1": {"in_graph": True}}, r"unknown nodes \['b1'\]"),
        ({"m0": {}}, "expected a circuit of the Mechanistic"),
    ):
        path.write_text(json.dumps({"nodes": {**nodes, **change}}))
        with pytest.raises(HcLensError, match=said):
            scorecard.from_mib(path, known.model)
    path.write_text(json.dumps({"nodes": {k: v for k, v in nodes.items() if k != "m1"}}))
    with pytest.raises(HcLensError, match=r"none for \['L1.MLP'\]"):
        scorecard.from_mib(path, known.model)


def test_scores_come_back_from_the_json_and_rank_the_units(known, tmp_path) -> None:
    scores = torch.arange(10.0)
    circuit = hc.Subnetwork(
        known.space, scores > 6, hc.Subnetwork.from_units(known.model, []).model, scores
    )
    back = scorecard.from_mib(
        scorecard.to_mib(tmp_path / "c.json", known.model, circuit), known.model
    )
    assert torch.equal(back.scores, scores)
    assert scorecard.as_ranking(known.space, back) == tuple(list(known.space)[::-1])


def test_bad_input_is_named(known) -> None:
    def call(given, **changes):
        config = ScorecardConfig(**{**vars(SMALL), **changes})
        return scorecard.analyse(known.model, known.batches, given, "zero", config, progress=False)

    with pytest.raises(HcLensError, match=r"L5\.H0"):
        call(["L5.H0"])
    with pytest.raises(HcLensError, match=r"missing \['L0.H0', 'L0.H1', 'L0.H2'\]"):
        call({"L1.H0": 1.0})
    with pytest.raises(HcLensError, match="a finite score"):
        call({**dict.fromkeys(known.space.labels, 1.0), "L1.H0": float("nan")})
    with pytest.raises(HcLensError, match="the columns unit and one of"):
        call(pd.DataFrame({"unit": known.space.labels}))
    with pytest.raises(HcLensError, match="1 to 9 of 10 units"):
        call(known.space.labels, size=10)
    with pytest.raises(HcLensError, match="above 0 and up to 1"):
        call(known.space.labels, shares=(50.0,))
    metrics = {"one": lambda logits, batch: torch.ones(len(logits))}
    with pytest.raises(HcLensError, match="for both, so that no circuit is faithful"):
        Measured(known.model, known.batches, "zero", "one", metrics=metrics, progress=False)
    other = hc.circuits.planted(hc.circuits.PlantedConfig("gpt2", n_layers=1, n_true=1, n_rows=4))
    with pytest.raises(HcLensError, match="expected a ranking of the units of this model"):
        call(hc.Subnetwork.from_units(other.model, other.units))


def test_the_command_scores_a_subnetwork_and_writes_its_json(known, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = hc.circuits.PlantedConfig("gpt2", n_layers=2, n_true=3, noise=0.5, n_rows=60)
    for part in hc.circuits.planted_checkpoint(config):
        part.save_pretrained("model")
    rows = known.batches.name
    assert rows.endswith("validation")
    words = "yes0a yes1a yes2a so1", "no0a no1a yes2b so3", "no0b no1b no2a", "yes0a no1a yes2a"
    labels = ("positive", "negative", "negative", "positive")
    pd.DataFrame({"text": words, "label": labels}).to_csv("rows.csv", index=False)
    hc.Subnetwork.from_units(known.model, known.units).save("sub")
    line = ("--model", "model", "--task", "own", "--path", "rows.csv", "--columns", "text")
    few = ("--n-random", 4, "--n-added", 2, "--n-permutations", 9, "--n-resamples", 50)
    done = invoke(
        "analyse",
        "scorecard",
        *line,
        *few,
        "--subnetworks",
        "sub",
        "--means",
        "zero",
        "--out",
        "out",
    )
    assert done.exit_code == 0, done.output
    table = pd.read_csv("out/table.csv").set_index("question")
    assert table.loc["faithfulness", "value"] > 0.8
    assert scorecard.from_mib("out/circuit.json", known.model).kept == [str(u) for u in known.units]
    again = invoke(
        "analyse", "scorecard", *line, *few, "--mib", "out/circuit.json", "--means", "zero"
    )
    assert again.exit_code == 0, again.output
    both = invoke("analyse", "scorecard", *line, "--mib", "x.json", "--circuit", "L0.H0")
    assert both.exit_code == 1
    assert "expected one of --subnetworks, --circuit and --mib, got 2" in both.stderr
