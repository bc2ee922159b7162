"""What tests of several modules share: random batches, their means, and one finished sweep."""

from __future__ import annotations

import shutil

import pytest

import hc_lens as hc
from hc_lens.sweeps import perform as work
from tests.batches import random_batches
from tests.hc_lens.sweeps import made as sweeps


@pytest.fixture
def batches(hooked):
    """Two batches of random ids for a tiny model."""
    return random_batches(hooked)


@pytest.fixture
def means(hooked, batches):
    """The means of that model over them."""
    return hc.collect_means(hooked, batches, progress=False)


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """A finished sweep: its config, its runs, its store. Not to be changed."""
    folder = tmp_path_factory.mktemp("sweep")
    config = sweeps.make(folder / "data")
    return config, sweeps.run(config, folder / "store"), folder / "store"


@pytest.fixture
def copied(finished, tmp_path):
    """The same, in a store that a test may change."""
    shutil.copytree(finished[2], tmp_path / "store")
    return finished[0], finished[1], tmp_path / "store"


@pytest.fixture
def pruned(monkeypatch):
    """The (sparsity, seed) of every pruning in this process from now on."""
    calls, real = [], work.prune

    def count(model, batches, means, config, **settings):
        calls.append((config.sparsity, config.seed))
        return real(model, batches, means, config, **settings)

    monkeypatch.setattr(work, "prune", count)
    return calls
