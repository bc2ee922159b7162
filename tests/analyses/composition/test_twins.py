"""The wire that was built by hand is found, by all three methods."""

from __future__ import annotations

import pandas as pd
import pytest
import torch

import hc_lens as hc
from hc_lens.analyses.composition import edge_attribution, edge_effects, weight_scores
from tests.analyses.composition.twins import rows, twin


def check_on_top(table: pd.DataFrame, value: pd.Series, kind: str) -> None:
    """L0.H0 -> L1.H0 through `kind` is ten times the next edge between two heads."""
    between = table["receiver"].str.contains("H")
    ranked = value[between].sort_values(ascending=False)
    best = table.loc[ranked.index[0]]
    assert (best["sender"], best["receiver"], best["kind"]) == ("L0.H0", "L1.H0", kind)
    assert ranked.iloc[0] >= 10 * ranked.iloc[1]


@pytest.mark.parametrize("kind", ["q", "k", "v"])
@pytest.mark.parametrize("norms", ["frozen", "recomputed"])
def test_the_right_edge_comes_out_on_top_by_activations(kind, norms):
    model, batches = twin(kind), rows(kind)
    right = [model(**batch.inputs).argmax(-1) == batch.labels for batch in batches]
    assert torch.cat(right).all()
    means = hc.collect_means(model, batches, progress=False)
    exact = edge_effects(model, batches, means, norms=norms, progress=False)
    check_on_top(exact, exact["kl"], kind)
    check_on_top(exact, -exact["margin_change"], kind)
    assert exact.loc[exact["kl"].nlargest(2).index, "accuracy_change"].max() < -0.3


@pytest.mark.parametrize("kind", ["q", "k", "v"])
@pytest.mark.parametrize("steps", [0, 4])
def test_the_right_edge_comes_out_on_top_by_gradient(kind, steps):
    model, batches = twin(kind), rows(kind)
    means = hc.collect_means(model, batches, progress=False)
    found = edge_attribution(model, batches, means, steps=steps, progress=False)
    check_on_top(found, found["attribution"].abs(), kind)


@pytest.mark.parametrize("kind", ["q", "k", "v"])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_right_edge_comes_out_on_top_by_weights(kind, seed):
    scores = weight_scores(twin(kind, seed), progress=False)
    check_on_top(scores, scores["excess"], kind)
