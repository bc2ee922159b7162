"""Edge attribution: a derivative of the exact effect, and a sum that is the ablation."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

import hc_lens as hc
from hc_lens.analyses.composition.exact import edge_effects, joint_effects
from hc_lens.analyses.composition.gradient import agreement, edge_attribution
from hc_lens.errors import HcLensError
from hc_lens.masks.replacements import Source
from tests.hc_lens.pairs import deep_model, pair_batches

KEYS = ["sender", "receiver", "kind", "case"]


class Partly(Source):
    """A small part of the way to another source."""

    def __init__(self, source: Source, share: float):
        self.source, self.share = source, share

    def value(self, name, activation):
        return activation + self.share * (self.source.value(name, activation) - activation)


@pytest.mark.slow
@pytest.mark.parametrize("norms", ["frozen", "recomputed"])
@pytest.mark.parametrize("name", ["bert", "roberta", "gpt2", "gpt_neox"])
def test_the_attribution_is_the_derivative_of_the_exact_effect(name, norms):
    model = deep_model(name)
    batches = pair_batches(model, n_rows=8)
    means = hc.collect_means(model, batches, progress=False)
    settings = {"norms": norms, "progress": False}
    senders = ["L0.H1", "L1.MLP", "L0.H2+L2.H0"]
    share = 1e-5
    small = edge_effects(model, batches, Partly(means, share), senders, **settings)
    found = edge_attribution(model, batches, means, senders, **settings)
    assert (small[KEYS] == found[KEYS]).all(axis=None)
    assert np.allclose(small["margin_change"] / share, found["attribution"], atol=2e-4, rtol=1e-3)


@pytest.mark.slow
def test_integrated_attributions_add_up_to_the_ablation(family):
    model = deep_model(family)
    batches = pair_batches(model, n_rows=8)
    means = hc.collect_means(model, batches, progress=False)
    # The last sender is also one of its own receivers, which nobody hears while it is replaced.
    senders = ["L0.H1", "L1.MLP", "L0.H2+L2.H0", "L0.H2+L1.MLP"]
    settings = {"norms": "recomputed", "progress": False}
    paths = [(sender, "all") for sender in senders]
    total = joint_effects(model, batches, means, paths, **settings)
    total = total[total["receivers"] == "ablated"].set_index(["sender", "case"])["margin_change"]

    def gap(steps):
        found = edge_attribution(model, batches, means, senders, steps=steps, **settings)
        summed = found.groupby(["sender", "case"])["attribution"].sum()
        return (summed - total).abs().max()

    assert gap(16) < 5e-3
    assert gap(16) < 0.2 * gap(0)


def test_agreement_is_spearmans_correlation_over_the_top_and_over_all():
    keys = {"sender": "L0.H0", "kind": "q", "dataset": "d", "case": "all", "n": 5}
    names = [f"L1.H{head}" for head in range(5)]
    exact = pd.DataFrame({**keys, "receiver": names, "margin_change": [5.0, -4.0, 3.0, 0.2, 0.1]})
    guess = pd.DataFrame({**keys, "receiver": names, "attribution": [5.0, -3.0, 4.0, 0.1, 0.2]})
    table = agreement(exact, guess, top=3).set_index("edges")
    assert table.loc["top", "spearman"] == pytest.approx(1.0)
    # Ranks 5 1 4 3 2 against 5 1 4 2 3: two places differ by one.
    assert table.loc["all", "spearman"] == pytest.approx(1 - 6 * 2 / (5 * 24))
    with pytest.raises(HcLensError, match="got none in common"):
        agreement(exact, guess.assign(sender="L0.H1"))


@pytest.mark.parametrize("steps", [-1, True])
def test_steps_that_are_no_count_are_refused(steps):
    model = deep_model("bert")
    with pytest.raises(HcLensError, match="expected steps as a whole number of at least 0"):
        edge_attribution(model, [], "zero", steps=steps)
