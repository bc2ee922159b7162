"""One finished sweep for all tests that read it."""

from __future__ import annotations

import shutil

import pytest

from hc_lens import sweeptasks
from tests.hc_lens import sweeps


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
    calls, real = [], sweeptasks.prune

    def count(model, batches, means, config, **settings):
        calls.append((config.sparsity, config.seed))
        return real(model, batches, means, config, **settings)

    monkeypatch.setattr(sweeptasks, "prune", count)
    return calls
