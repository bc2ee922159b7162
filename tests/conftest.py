"""Shape checks on every annotated tensor of the packages, and shared tiny models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from jaxtyping import install_import_hook

import tests.typecheck  # noqa: F401

install_import_hook("hc_lens", "tests.typecheck.check")

import hc_lens as hc  # noqa: E402
from tests import tiny  # noqa: E402

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real rows beside the repository, where there is one."""
    folder = Path(__file__).parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("no folder of real rows beside the repository")
    return folder


@pytest.fixture(scope="session")
def stories(shared_data: Path):
    """A real language model beside the repository, where there is one."""
    folder = shared_data.parent / "models" / "stories15m"
    if not folder.is_dir():
        pytest.skip("no language model beside the repository")
    return hc.load(folder)


@pytest.fixture(params=["bert", "roberta", "gpt2"])
def family(request: pytest.FixtureRequest) -> str:
    """The three families that every instrument is tested on."""
    return request.param


@pytest.fixture
def hooked(family: str):
    """A tiny hooked classifier with its tokenizer, float64."""
    return hc.load(tiny.tiny_hf(family), dtype=torch.float64, tokenizer=tiny.tokenizer_for(family))
