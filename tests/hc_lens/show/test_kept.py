"""Attention figures on disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hc_lens.errors import HcLensError
from hc_lens.show import Attention
from hc_lens.show.kept import ABOUT, PATTERNS, load_figures, save_figures
from tests.damage import flip, truncate


def figures() -> list[Attention]:
    thirds = torch.full((1, 3, 3), 1 / 3)
    return [
        Attention(("a", "<b>", "é"), (0, -1, 1), ("L0.H1",), thirds, False, title="first"),
        Attention(("x", "y"), (0, 0), ("L0.H0", "L1.H0"), torch.eye(2).expand(2, 2, 2), True),
    ]


def test_figures_come_back_as_they_were(tmp_path: Path) -> None:
    save_figures(figures(), tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == [ABOUT, PATTERNS]
    found = load_figures(tmp_path)
    assert [one.fragment("f") for one in found] == [one.fragment("f") for one in figures()]
    for one, same in zip(figures(), found, strict=True):
        assert torch.equal(one.patterns, same.patterns)
        assert (one.tokens, one.sentences, one.heads) == (same.tokens, same.sentences, same.heads)


def test_no_figures_are_kept_too(tmp_path: Path) -> None:
    save_figures([], tmp_path)
    assert load_figures(tmp_path) == []


def test_the_same_figures_give_the_same_bytes(tmp_path: Path) -> None:
    kept = []
    for _ in range(2):
        save_figures(figures(), tmp_path)
        kept.append([(tmp_path / name).read_bytes() for name in (PATTERNS, ABOUT)])
    assert kept[0] == kept[1]


def rewrite(folder: Path, **changes: object) -> None:
    about = json.loads((folder / ABOUT).read_text("utf-8"))
    (folder / ABOUT).write_text(json.dumps([about[0] | changes, about[1]]), "utf-8")


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": ["a", "b"]},
        {"tokens": ["a", "b", 3]},
        {"tokens": None},
        {"sentences": [0, 0, 2]},
        {"sentences": [0, 0]},
        {"heads": []},
        {"heads": [["L0.H1"]]},
        {"markup": "<script>1</script>"},
        {"title": ["<b>"]},
        {"causal": "yes"},
    ],
)
def test_what_is_no_figure_is_told_with_its_file(tmp_path: Path, changes: dict) -> None:
    save_figures(figures(), tmp_path)
    rewrite(tmp_path, **changes)
    with pytest.raises(HcLensError, match=rf"{PATTERNS} and {ABOUT}, got .*; repeat the command"):
        load_figures(tmp_path)


def test_patterns_that_are_damaged_missing_or_not_finite_are_told(tmp_path: Path) -> None:
    def refused() -> None:
        with pytest.raises(HcLensError, match=f"expected the attention patterns.*{tmp_path}"):
            load_figures(tmp_path)

    refused()  # as in the folder of a version that kept no data
    for damage in (truncate, lambda path: flip(path) or path.write_bytes(b"\x07")):
        save_figures(figures(), tmp_path)
        damage(tmp_path / PATTERNS)
        refused()
    save_figures(figures(), tmp_path)
    save_file({"0": torch.full((1, 3, 3), torch.nan), "1": torch.eye(2).repeat(2, 1, 1)},
              tmp_path / PATTERNS)  # fmt: skip
    refused()
    save_figures(figures(), tmp_path)
    (tmp_path / ABOUT).write_text('{"a": 1}')
    refused()
