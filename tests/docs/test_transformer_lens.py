"""The code of the page "Coming from TransformerLens" runs with either version."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hc_lens.models.quiet import quiet
from tests import tiny
from tests.docs.test_pages import METHODS, blocks

(PAGE,) = (page for page in METHODS if page.stem == "transformer_lens")


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_its_session_and_its_bridge_run_and_say_the_same(tmp_path, family: str):
    folder = tiny.save_checkpoint(tmp_path, family)
    said: dict[str, Any] = {}
    with quiet():
        for code in blocks(PAGE, "python"):
            exec(code.replace("path/to/classifier", str(folder)), said)
    assert said["cache"]["blocks.0.attn.hook_z"].shape[2:] == (4, 8)
    tokens = torch.tensor([[5, 6, 7]])
    assert said["bridge"](tokens).shape == (1, 3)
    torch.testing.assert_close(said["bridge"](tokens), said["model"](tokens), atol=1e-5, rtol=0)
