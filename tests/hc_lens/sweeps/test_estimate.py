"""How long a sweep is said to take: the sum is checked by hand, the speed on a real model."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import hc_lens as hc
from hc_lens.sweeps.estimate import Speed, expected, in_words, measure, seconds
from tests.hc_lens.sweeps import made as sweeps
from tests.lens import hooks_on

SPEED = Speed(update=2.0, row=0.5)


def test_the_seconds_of_separate_runs_are_the_sum_of_their_parts():
    config = sweeps.small(prune={"steps": 10, "accumulate": 3})
    # 2 checkpoints x 2 seeds x 2 sparsities x 30 updates of 2 s; 8 subnetworks and 2 full models on
    # 7 rows of 0.5 s; 2 checkpoints x 2 x 100 training rows of 0.5 s.
    assert seconds(config, SPEED, 100, 7) == 8 * 30 * 2 + 10 * 7 * 0.5 + 4 * 100 * 0.5


def test_a_path_counts_its_updates_once_for_all_sparsities():
    config = sweeps.small(prune={"steps": 10}, as_paths=True)
    assert seconds(config, SPEED, 0, 0) == 2 * 2 * 10 * 2


def test_what_is_measured_leaves_no_trace_on_the_model():
    config = sweeps.small(prune={"steps": 10})
    model = hc.organism.load().requires_grad_(True)
    train = config.train.batches(model)
    data = {name: spec.batches(model) for name, spec in config.evaluation.items()}
    before = [parameter.clone() for parameter in model.parameters()]
    learn = [parameter.requires_grad for parameter in model.parameters()]
    speed = measure(model, train, data, config.prune_config(0.5, 1))
    assert speed.update > 0
    assert speed.row > 0
    assert all(map(torch.equal, before, model.parameters()))
    assert [parameter.requires_grad for parameter in model.parameters()] == learn
    assert hooks_on(model) == []
    random = measure(model, train, data, hc.PruneConfig(0.5, method="random"))
    assert random.update == 0


def test_what_is_expected_is_said_for_as_many_processes_as_there_are(monkeypatch):
    monkeypatch.setattr("hc_lens.sweeps.estimate.measure", lambda *_: Speed(60.0, 0.0))
    config = sweeps.small(prune={"steps": 30})
    rows = hc.organism.task().batches(hc.organism.load(), "train", limit=4)
    said = expected([config, dataclasses.replace(config)], None, rows, {}, 2)  # type: ignore[arg-type]
    # Twice 8 runs of 30 updates of a minute.
    assert said == "finding and evaluating 16 subnetworks takes about 4 h, 2 at a time"


@pytest.mark.parametrize(
    ("duration", "said"),
    [(3, "1 min"), (59 * 60, "59 min"), (3600, "1 h"), (3725, "1 h"), (5500, "1 h 30 min")],
)
def test_a_duration_is_said_in_words(duration, said):
    assert in_words(duration) == said
