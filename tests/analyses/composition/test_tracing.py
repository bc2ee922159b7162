"""The combined trace: its tables fit together, go to disk and back, and draw."""

from __future__ import annotations

import json

import jaxtyping
import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.figure import Figure

import hc_lens as hc
from hc_lens.analyses import composition
from hc_lens.analyses.composition.cli import summary
from hc_lens.analyses.composition.config import TraceConfig
from hc_lens.analyses.composition.exact import strongest as strongest_of
from hc_lens.analyses.composition.tracing import FORMAT, Trace, trace
from hc_lens.errors import HcLensError
from hc_lens.metrics import over_cases
from tests import tiny
from tests.analyses.composition.twins import rows, twin
from tests.commands import invoke
from tests.damage import DAMAGES
from tests.hc_lens.pairs import deep_model, pair_batches, pair_task
from tests.lens import BRIDGES

CORE = ["L1.H2", "L0.H1"]


@pytest.fixture(scope="module")
def bert():
    model = deep_model("bert")
    batches = pair_batches(model)
    return model, batches, hc.collect_means(model, batches, progress=False)


@pytest.fixture(scope="module")
def found(bert) -> Trace:
    model, batches, means = bert
    datasets = {"id": batches, "ood": pair_batches(model, n_rows=10)}
    return trace(model, datasets, means, CORE, TraceConfig(top=3), progress=False)


def test_every_edge_of_the_core_has_all_three_scores(bert, found):
    model, batches, means = bert
    assert found.core == ("L0.H1", "L1.H2")
    exact = composition.edge_effects(
        model, {"id": batches}, means, CORE, norms="recomputed", progress=False
    )
    keys = ["sender", "receiver", "kind", "case"]
    ours = found.edges[found.edges["dataset"] == "id"].set_index(keys)["kl"]
    assert np.allclose(ours[exact.set_index(keys).index], exact["kl"])
    assert found.edges.notna().all(axis=None)
    weights = composition.weight_scores(model, senders=CORE, progress=False)
    edge = weights.set_index(["sender", "receiver", "kind"]).loc[("L0.H1", "L2.H3", "k")]
    row = found.edges.set_index(["sender", "receiver", "kind"]).loc[("L0.H1", "L2.H3", "k")]
    assert (row["weight_score"] == edge["score"]).all()


def test_all_edges_together_explain_all_of_the_ablation(bert, found):
    every = found.explained[found.explained["patched"] == "all"]
    assert np.allclose(every["share"], 1)
    assert np.allclose(every["margin_change"], every["total_margin_change"])
    scanned = hc.scan(bert[0], {"id": bert[1]}, bert[2], sets=CORE, progress=False)
    total = scanned.set_index(["set", "case"])["kl"]
    rows_of = every[every["dataset"] == "id"].set_index(["sender", "case"])["total_kl"]
    assert np.allclose(rows_of, total[rows_of.index])


def test_the_top_edges_are_those_with_the_largest_divergence(found):
    top = found.explained[found.explained["patched"] == "top"]
    assert (top["n_edges"] == 3).all()
    edges = found.edges[found.edges["sender"] == "L0.H1"]
    best = strongest_of(edges, 3)
    named = [
        f"{name}.{kind}" if kind in ("q", "k", "v") else name
        for name, kind in zip(best["receiver"], best["kind"], strict=True)
    ]
    assert top.set_index("sender").loc["L0.H1", "receivers"].unique() == ["+".join(named)]


def test_dependents_are_heads_outside_the_core_that_read_it(bert, found):
    model, batches, means = bert
    heads = set(found.dependents["head"])
    assert heads == {f"L{layer}.H{head}" for layer in (1, 2, 3) for head in range(4)} - {"L1.H2"}
    order = list(dict.fromkeys(found.dependents["head"]))
    means_of = over_cases(found.dependents, ["dataset", "head"], ["kl"])
    sizes = means_of.groupby("head")["kl"].mean()
    assert sizes[order].is_monotonic_decreasing
    joint = composition.edge_effects(
        model, {"id": batches}, means, ["L0.H1+L1.H2"], ["L3.H0"], norms="recomputed",
        progress=False,
    )  # fmt: skip
    row = found.dependents.query("head == 'L3.H0' and dataset == 'id'").set_index("case")
    assert np.allclose(row["kl"][joint["case"]], joint["kl"])


def test_a_trace_goes_to_disk_and_back(found, tmp_path):
    again = Trace.load(found.save(tmp_path / "trace"))
    assert (again.core, again.norms, again.metric) == (found.core, found.norms, "margin")
    for name in ("edges", "explained", "dependents", "agreement"):
        pd.testing.assert_frame_equal(getattr(again, name), getattr(found, name))


def test_a_trace_of_an_older_version_attributed_the_margin(found, tmp_path):
    path = found.save(tmp_path) / "trace.json"
    path.write_text(json.dumps({"format": FORMAT, "core": ["L0.H0"], "norms": "frozen"}))
    assert Trace.load(tmp_path).metric == "margin"


def test_a_folder_without_a_trace_is_refused(tmp_path):
    with pytest.raises(HcLensError, match=r"expected a folder that Trace\.save wrote"):
        Trace.load(tmp_path)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["trace.json", "edges.csv"])
def test_a_damaged_trace_is_refused(found, tmp_path, damage, name):
    damage(found.save(tmp_path) / name)
    with pytest.raises(HcLensError, match=r"expected a folder that Trace.save wrote"):
        Trace.load(tmp_path)


def test_a_trace_of_another_format_is_refused(found, tmp_path):
    found.save(tmp_path)
    (tmp_path / "trace.json").write_text(json.dumps({"format": "other"}))
    with pytest.raises(HcLensError, match="format 'other'"):
        Trace.load(tmp_path)


def test_a_trace_that_leaves_something_out_is_refused(found, tmp_path):
    found.save(tmp_path)
    (tmp_path / "trace.json").write_text(json.dumps({"format": FORMAT}))
    with pytest.raises(HcLensError, match=r"a folder that Trace\.save wrote .*: 'core'"):
        Trace.load(tmp_path)


@pytest.mark.parametrize("work", [composition.edge_effects, composition.edge_attribution])
def test_patched_edges_of_a_weight_that_is_not_finite_are_refused(work):
    model = deep_model("bert")
    model.blocks[1].attn.W_Q.data[0, 0, 0] = torch.nan
    name = "attention.self.query.weight" if BRIDGES else "attn.W_Q"
    with pytest.raises(HcLensError, match=rf"NaN or infinity in blocks\.1\.{name}"):
        work(model, pair_batches(model), "zero", CORE, progress=False)


def test_the_figure_has_a_node_per_unit_and_a_line_per_edge(found):
    drawing = found.figure(n_edges=6)
    assert isinstance(drawing, Figure)
    axes = drawing.axes[0]
    names = {text.get_text() for text in axes.texts}
    strongest = found.strongest(6)
    assert names == {*found.core, *strongest["sender"], *strongest["receiver"]}
    assert len(axes.patches) == 6
    widths = [patch.get_linewidth() for patch in axes.patches]
    assert max(widths) == pytest.approx(7.0)
    found.figure(dataset="ood", n_edges=30)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_edges": 0}, "expected n_edges as a whole number of at least 1"),
        ({"dataset": "hans"}, "expected a dataset among"),
    ],
)
def test_a_figure_of_nothing_is_refused(found, settings, message, monkeypatch):
    # A user's session has no type checks at run time.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(HcLensError, match=message):
        found.figure(**settings)


@pytest.mark.parametrize(
    ("core", "settings", "message"),
    [
        ([], {}, "expected at least one core unit"),
        (["L0.H9"], {}, "expected a unit of a model with 4 layers"),
        (["L0.H1", "L0.H1"], {}, "expected each unit once"),
        (CORE, {"top": 0}, "expected top as a whole number of at least 1"),
    ],
)
def test_a_trace_of_nothing_is_refused(bert, core, settings, message):
    model, batches, means = bert
    with pytest.raises(HcLensError, match=message):
        trace(model, {"id": batches}, means, core, TraceConfig(**settings), progress=False)


def test_a_core_in_the_last_layer_has_readers_but_no_dependents(bert):
    model, batches, means = bert
    last = trace(model, batches, means, ["L3.H0"], TraceConfig(limit=6), progress=False)
    assert set(last.edges["receiver"]) == {"L3.MLP", "classifier"}
    assert last.dependents.empty
    assert "none: no head outside the core" in summary(last)


def test_an_mlp_may_be_in_the_core(bert):
    model, batches, means = bert
    mixed = trace(model, batches, means, ["L1.MLP"], TraceConfig(limit=6), progress=False)
    assert mixed.edges["weight_score"].isna().all()
    assert np.allclose(mixed.explained.query("patched == 'all'")["share"], 1)


def test_the_trace_of_a_twin_is_its_one_wire():
    model, batches = twin("k"), rows("k")
    means = hc.collect_means(model, batches, progress=False)
    wire = trace(model, {"rows": batches}, means, ["L0.H0"], TraceConfig(top=1), progress=False)
    (first,) = wire.strongest(1).to_dict("records")
    assert (first["receiver"], first["kind"]) == ("L1.H0", "k")
    alone = wire.explained.query("patched == 'top'").iloc[0]
    assert alone["share"] == pytest.approx(1, abs=0.01)
    assert not model._forward_hooks


@pytest.mark.slow
def test_the_command_prints_and_writes(tmp_path):
    checkpoint = tiny.save_checkpoint(tmp_path / "model", "bert")
    rows_file = tmp_path / "mnli.csv"
    table = pair_task(40).dataset("all").to_pandas()
    names = dict(enumerate(("entailment", "neutral", "contradiction")))
    table["label"] = table["label"].map(lambda label: names.get(label, label))
    table.to_csv(rows_file, index=False)
    options = ["--model", checkpoint, "--task", "mnli", "--path", rows_file]
    options += ["--ood", "", "--limit", "20", "--means-limit", "20", "--max-length", "30"]
    options += ["--core", "L0.H1,L0.H2", "--out", tmp_path / "out"]
    result = invoke("analyse", "composition", *options)
    assert result.exit_code == 0, result.output
    assert "strongest edges of L0.H1, L0.H2" in result.output
    assert (tmp_path / "out" / "edges.png").stat().st_size > 10_000
    assert Trace.load(tmp_path / "out").core == ("L0.H1", "L0.H2")


def test_names_are_imported_on_first_use():
    assert composition.trace is trace
    with pytest.raises(AttributeError, match="has no attribute 'paths'"):
        composition.paths  # noqa: B018
