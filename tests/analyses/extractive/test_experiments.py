"""Training, grafting and the experiments on tiny worlds; the command."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pandas as pd
import pytest
import torch

from hc_lens.analyses import extractive
from hc_lens.analyses.extractive.desk import Desk, agreement, report, save
from hc_lens.analyses.extractive.experiments import mean_rank, train
from hc_lens.analyses.extractive.figures import heat_maps, rank_bars
from hc_lens.analyses.extractive.models import graft, parameters, with_weights
from hc_lens.analyses.extractive.settings import DeskConfig, TrainConfig
from hc_lens.errors import HcLensError
from tests.analyses.extractive.shapes import moved, random_model
from tests.commands import invoke

QUICK = TrainConfig(steps=2, batch_size=8, warmup=1)
TINY = DeskConfig(
    n_layers=2,
    d_model=8,
    n_heads=2,
    n_cities=3,
    n_known_cities=2,
    n_known_people=6,
    n_invented_people=4,
    n_counterfactuals=2,
    **dict.fromkeys(("pretraining", "facts", "invented"), QUICK),
)


@pytest.fixture(scope="module")
def desk():
    return Desk(TINY, 0)


@pytest.fixture(scope="module")
def tables():
    return extractive.study([0], TINY, progress=False)


def test_every_public_name_is_there():
    assert all(callable(getattr(extractive, name)) for name in extractive.__all__)


def test_the_settings_are_read_without_torch_and_pandas():
    code = (
        "import sys; from hc_lens.analyses.extractive import DeskConfig, ScoreConfig, TrainConfig; "
        "assert not {'torch', 'pandas', 'transformer_lens', 'matplotlib'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_graft_adds_the_difference():
    one, two, three = ({"w": torch.tensor([value, 2.0])} for value in (1.0, 5.0, 3.0))
    assert graft(one, two, three)["w"].tolist() == [3.0, 2.0]
    assert one["w"].tolist() == [1.0, 2.0]


def test_a_graft_of_other_shapes_or_of_buffers_is_an_error():
    base = {"w": torch.zeros(2)}
    with pytest.raises(HcLensError, match="same parameters in base and plus, got differences"):
        graft(base, {"v": torch.zeros(2)}, base)
    with pytest.raises(HcLensError, match=r"expected weights only, got m of type torch\.bool"):
        graft({"m": torch.zeros(2, dtype=torch.bool)}, base, base)


def test_training_changes_only_the_chosen_layers_and_leaves_the_model_alone(desk):
    model = desk.untrained()
    before = {name: value.clone() for name, value in parameters(model).items()}
    tuned = train(model, desk.sets["first hop"].facts, QUICK, trainable=("blocks.1.",))
    state = parameters(tuned)
    assert all(torch.equal(before[name], value) for name, value in parameters(model).items())
    changed = {name for name in state if not torch.equal(state[name], before[name])}
    assert changed
    assert all(name.startswith("blocks.1.") for name in changed)


def test_training_lowers_the_rank_of_the_facts_and_repeats_bit_for_bit(desk):
    model, facts = desk.untrained(), desk.sets["first hop"]
    config = TrainConfig(steps=60, lr=1e-2, batch_size=8)
    tuned = train(model, facts.facts, config)
    state, again = parameters(tuned), parameters(train(model, facts.facts, config))
    assert all(torch.equal(state[name], again[name]) for name in state)
    assert mean_rank(tuned, facts.facts, facts.fact_options) == 0.0


def test_the_mean_rank_of_a_model_that_knows_nothing_is_chance(desk):
    model, facts = desk.untrained(), desk.sets["first hop"]
    blank = {name: torch.zeros_like(value) for name, value in parameters(model).items()}
    assert mean_rank(with_weights(model, blank), facts.facts, facts.fact_options) == 1.0


def test_no_person_of_a_test_is_in_a_corpus(desk):
    known = {word for q in desk.corpora["first hop"] for word in f"{q.prompt} {q.answer}".split()}
    new = {q.prompt.split()[0] for q in desk.sets["first hop"].facts}
    new |= {q.prompt.split()[0] for q in desk.invented[0].facts}
    assert not known & new


def test_a_config_without_steps_is_an_error():
    with pytest.raises(HcLensError, match="steps as a whole number of at least 1, got 0"):
        TrainConfig(steps=0)


def test_reverting_both_halves_are_the_conditions_of_the_freezing_table(tables):
    freezing = tables["freezing"]
    names = ["untuned", "train all", "train early", "train late", "revert late", "revert early"]
    assert freezing[freezing["set"] == "second hop"]["condition"].tolist() == names


def test_freezing_half_of_a_single_layer_is_an_error():
    shallow = Desk(replace(TINY, n_layers=1), 0)
    with pytest.raises(HcLensError, match="expected a model of at least 2 layers, got 1"):
        extractive.freezing(shallow.untrained(), shallow.sets["first hop"], QUICK)


def test_the_study_has_every_table(tables):
    assert tables["ordering"]["order"].tolist() == ["joint", "facts first", "implications first"]
    assert tables["grafting"]["model"].tolist() == ["facts", "graft", "control"]
    assert set(tables["agreement"]["score"]) == {"informative", "downstream", "upstream"}
    assert set(tables["components"]["method"]) == {"linear", "exact"}


def test_out_of_context_has_both_models(desk):
    found = extractive.out_of_context(desk.untrained(), desk.sets["first hop"], QUICK)
    assert found["model"].tolist() == ["untuned", "facts"]


def test_agreement_is_one_for_equal_scores():
    columns = {"score": "informative", "question": [0, 0, 1, 1], "component": ["a", "b"] * 2}
    found = pd.DataFrame({**columns, "value": [1.0, 2.0, 3.0, 5.0]})
    row = agreement(found, found).iloc[0]
    assert row["pearson"] == pytest.approx(1)
    assert row["pearson_mean"] == pytest.approx(1)


def test_heat_maps_have_a_map_for_heads_and_mlps_of_each_score(tables):
    table = tables["positions"][tables["positions"]["set"] == "first hop"]
    figure = heat_maps(table)
    maps = [axis for axis in figure.axes if axis.images]
    assert [axis.get_title() for axis in maps[:3]] == ["informative", "downstream", "upstream"]
    chosen = table[(table["score"] == "downstream") & (table["kind"] == "mlp")]
    cell = chosen[(chosen["layer"] == 1) & (chosen["slot"] == 5)]["value"].mean()
    drawn = maps[4].images[0].get_array()
    assert drawn[1, 5] == pytest.approx(cell)


def test_heat_maps_of_whole_components_are_an_error(tables):
    with pytest.raises(HcLensError, match="expected scores by position"):
        heat_maps(tables["components"])


def test_rank_bars_show_the_mean_over_seeds():
    table = pd.DataFrame({"order": ["a", "b", "a", "b"], "rank": [1.0, 4.0, 3.0, 6.0]})
    axis = rank_bars([("title", table, "order", "rank")], chance=9.5).axes[0]
    assert [bar.get_height() for bar in axis.patches] == [2.0, 5.0]


def test_the_study_is_reported_and_saved(tables, tmp_path):
    text = report(tables)
    assert "implications first" in text
    assert "Mean exact score by layer" in text
    save(tables, tmp_path, TINY)
    assert {path.name for path in tmp_path.iterdir()} >= {
        "first-hop-heat-maps.png",
        "second-hop-heat-maps.png",
        "ranks.png",
        "ordering.csv",
    }
    assert all(path.stat().st_size > 0 for path in tmp_path.iterdir())


def test_the_command_writes_the_demo(tables, tmp_path, monkeypatch):
    monkeypatch.setattr("hc_lens.analyses.extractive.desk.study", lambda *_, **__: tables)
    result = invoke("analyse", "extractive", "--demo", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "Mean exact score by layer" in result.output
    assert (tmp_path / "out" / "ranks.png").is_file()


def test_the_command_scores_two_checkpoints(tmp_path, monkeypatch):
    before = random_model("gpt2")
    pair = {"old": before, "new": moved(before)}
    monkeypatch.setattr("hc_lens.analyses.extractive.models.language_model", pair.get)
    path = tmp_path / "facts.csv"
    path.write_text(
        "kind,prompt,answer\nfact,Ann lives in,Rome\nfact,Bob lives in,Bonn\n"
        "implication,The people Ann speak,Latin\nimplication,The people Bob speak,German\n"
    )
    out = tmp_path / "out"
    options = ["--before", "old", "--after", "new", "--path", path, "--by", "position"]
    result = invoke("analyse", "extractive", *options, "--out", out)
    assert result.exit_code == 0, result.output
    assert "L2.MLP" in result.output
    assert (out / "heat-maps.png").is_file()
    assert (out / "table.csv").is_file()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "pass --before and --after, or --demo"),
        (["freezing"], "expected a checkpoint to train"),
        (["grafting", "--before", "a"], "expected counterfactual facts for grafting, got none"),
        (["--before", "a", "--after", "b", "--path", "x.txt"], ".csv or .jsonl"),
    ],
)
def test_the_command_says_what_is_missing(given, message):
    result = invoke("analyse", "extractive", *given)
    assert result.exit_code == 1
    assert message in result.stderr


def test_an_unknown_experiment_is_one_line():
    result = invoke("analyse", "extractive", "baking")
    assert result.exit_code == 2
    assert 'Invalid value "baking"' in result.stderr
    assert result.stderr.count("\n") == 1
