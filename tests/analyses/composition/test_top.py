"""The strongest edges of a sender, against all of them."""

from __future__ import annotations

import numpy as np
import pytest

import hc_lens as hc
from hc_lens.analyses.composition.exact import edge_effects
from hc_lens.analyses.composition.top import top_edges
from hc_lens.metrics import over_cases
from tests.hc_lens.pairs import deep_model, pair_batches

EDGE = ["receiver", "kind"]


@pytest.fixture(scope="module")
def bert():
    model = deep_model("bert")
    batches = pair_batches(model, 300, token_budget=2000)
    return model, batches, hc.collect_means(model, batches, progress=False)


@pytest.mark.parametrize(
    ("by", "column", "norms"),
    [("kl", "kl", "frozen"), ("logit", "logit_change", "recomputed")],
)
def test_the_strongest_edges_are_those_of_all_edges(bert, by, column, norms):
    sender = "L1.H1"
    every = edge_effects(*bert, [sender], norms=norms, progress=False)
    effects = over_cases(every, EDGE, [column]).set_index(EDGE)[column]
    found = top_edges(*bert, sender, k=4, by=by, norms=norms, progress=False)
    assert list(found.columns) == ["rank", "sender", *EDGE, "n", column, "low", "high"]
    assert (found["sender"] == sender).all()
    chosen = effects.loc[list(found[EDGE].itertuples(index=False, name=None))].to_numpy()
    assert np.allclose(np.sort(np.abs(chosen)), np.sort(effects.abs().to_numpy())[-4:])
    assert (found["low"] <= chosen + 1e-9).all()
    assert (chosen <= found["high"] + 1e-9).all()


def test_few_receivers_compete_on_few_rows(bert):
    heard = ["L2.H0.q", "L2.MLP", "classifier"]
    found = top_edges(*bert, "L0.H1+L1.H0", k=9, receivers=heard, progress=False)
    assert set(found["receiver"]) == {"L2.H0", "L2.MLP", "classifier"}
    assert (found["n"] < 300).all()


def test_rows_that_cannot_be_drawn_and_numbers_out_of_range_are_refused(bert):
    model, batches, means = bert
    with pytest.raises(hc.HcLensError, match="drawn one by one, got Resample"):
        top_edges(model, batches, hc.Resample(0), "L0.H0")
    with pytest.raises(hc.HcLensError, match="expected k as a whole number"):
        top_edges(model, batches, means, "L0.H0", k=0)
