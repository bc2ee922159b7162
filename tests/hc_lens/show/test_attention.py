"""Attention figures: their labels, their HTML and their static version."""

from __future__ import annotations

import base64
import hashlib
import html
import importlib
import json
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import hc_lens as hc
from hc_lens.attention.patterns import word_batch
from hc_lens.errors import HcLensError
from hc_lens.models.inputs import encode
from hc_lens.show import Attention, Page, attention, bundle
from hc_lens.show.page import pack, policy
from tests import tiny
from tests.batches import random_batches
from tests.handmade import handmade_model
from tests.lens import hooks_on
from tests.notebooks import Notebook

BUNDLE_MARK = "var CircuitsVis="


@pytest.fixture(scope="module")
def bert():
    return hc.load(tiny.tiny_hf("bert"), tokenizer=tiny.bert_tokenizer())


@pytest.fixture
def notebook(monkeypatch):
    return Notebook(monkeypatch)


def data_of(text: str) -> list[dict]:
    """The data of every figure in some HTML."""
    return [json.loads(html.unescape(data)) for data in re.findall(r'data-figure="(.*?)"', text)]


def random_figure(n_heads: int, n_tokens: int) -> Attention:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(n_heads, n_tokens, n_tokens, generator=generator).softmax(-1)
    tokens = tuple(f"word{place}" for place in range(n_tokens))
    heads = tuple(f"L{place // 12}.H{place % 12}" for place in range(n_heads))
    half = n_tokens // 2
    return Attention(tokens, (0,) * half + (1,) * (n_tokens - half), heads, values, False)


def test_the_figure_holds_the_patterns_of_the_heads_asked_for(bert):
    shown = attention(bert, "the doctors ran", "the judge ran", heads=["L1.H3", "L0.H0"])
    _, cache = bert.run_with_cache(**encode(bert, ("the doctors ran", "the judge ran")))
    assert shown.heads == ("L1.H3", "L0.H0")
    assert torch.equal(shown.patterns[0], cache["blocks.1.attn.hook_pattern"][0, 3])
    assert shown.tokens == ("[CLS]", "the", "doctor", "s", "ran", "[SEP]", "the", "judge", "ran",
                            "[SEP]")  # fmt: skip


def test_all_heads_are_shown_by_default_and_raw_tokens_on_request(bert):
    shown = attention(bert, "the doctors", "ran", raw_tokens=True)
    assert shown.heads == tuple(map(str, hc.UnitSpace.of(bert).heads))
    assert "##s" in shown.tokens


def test_byte_level_tokens_are_readable():
    model = hc.load(tiny.tiny_hf("gpt2"), tokenizer=tiny.byte_tokenizer())
    shown = attention(model, "saw the", "the", heads="L0.H1")
    assert shown.tokens == ("s", "a", "w", "the", "the")
    assert shown.causal
    assert data_of(shown.html())[0]["causal"] is True
    assert "Ġthe" in attention(model, "saw the", "the", raw_tokens=True).tokens


def test_an_encoder_shows_both_directions(bert):
    shown = attention(bert, "the judge", "ran")
    assert data_of(shown.html())[0]["causal"] is False
    assert (shown.patterns.triu(1) > 0).any()


def test_pads_are_not_shown_and_lists_make_a_page(bert):
    page = attention(bert, ["the judge", "the"], ["ran near the old judge", "ran"], ["L0.H0"])
    assert isinstance(page, Page)
    assert [len(figure.tokens) for figure in page] == [10, 5]
    short = attention(bert, "the", "ran", ["L0.H0"])
    assert torch.allclose(page[1].patterns, short.patterns, atol=1e-6)


def test_a_batch_is_shown_row_by_row(hooked):
    rows = [{"text": "the saw the"}, {"text": "the ran the"}]
    task = hc.Task.from_rows({"train": rows}, columns="text", label=None)
    (batch,) = task.batches(hooked)
    page = attention(hooked, batch, heads=["L1.H1"])
    assert len(page) == 2
    assert all("the" in figure.tokens for figure in page)
    assert not any(token[0] in "#Ġ" for figure in page for token in figure.tokens)
    words = attention(hooked, word_batch(hooked, ["the saw the"]), heads=["L1.H1"])
    assert len(words) == 1


def test_a_subnetwork_shows_the_patterns_under_its_mask(bert):
    means = hc.collect_means(bert, random_batches(bert), progress=False)
    mask = torch.ones(len(hc.UnitSpace.of(bert)))
    mask[0] = 0
    sub = SimpleNamespace(mask=mask)
    whole = attention(bert, "the judge", "ran")
    shown = attention(bert, "the judge", "ran", subnetwork=sub, means=means)
    assert shown.heads[:2] == ("L0.H0 (removed)", "L0.H1")
    assert torch.equal(shown.patterns[:4], whole.patterns[:4])  # layer 0 reads the embedding
    assert not torch.allclose(shown.patterns[4:], whole.patterns[4:])
    with hc.ablate(bert, ["L0.H0"], means):
        by_hand = attention(bert, "the judge", "ran")
    assert torch.equal(shown.patterns, by_hand.patterns)
    assert hooks_on(bert) == []


def test_a_page_of_twenty_heads_stays_under_three_megabytes(tmp_path):
    path = random_figure(20, 128).save(tmp_path / "deep" / "twenty.html")
    assert path.stat().st_size < 3_000_000


def test_many_figures_on_a_page_share_one_bundle():
    page = Page([random_figure(2, 5)] * 7)
    for text in (page.html(), page._repr_html_()):
        assert text.count(BUNDLE_MARK) == 1
        assert len(data_of(text)) == 7
    ids = re.findall(r'class="hc-lens-canvas" id="([^"]+)"', page._repr_html_())
    assert len(set(ids)) == 7


def test_a_notebook_carries_the_bundle_once(notebook):
    first, second, third = notebook.cells("a", "b", "c")
    figure = random_figure(2, 5)
    outputs = [first(figure), second(figure), third(figure)]
    assert [BUNDLE_MARK in output for output in outputs] == [True, False, False]
    assert sum(map(len, outputs)) < 1_500_000
    assert len(outputs[1]) < 10_000
    assert [len(data_of(output)) for output in outputs] == [1, 1, 1]
    assert BUNDLE_MARK in figure.html()  # a page of its own needs it
    assert BUNDLE_MARK in Page([figure]).html()


def test_the_cell_that_carries_the_bundle_carries_it_again_when_it_is_run_again(notebook):
    first, second = notebook.cells("a", "b")
    figure = random_figure(2, 5)
    for _ in range(2):
        # Its new output takes the place of the one that had the bundle; a loop shows two figures.
        output = first(figure, figure)
        assert output.count(BUNDLE_MARK) == 1
        assert BUNDLE_MARK not in second(figure)


def test_without_ids_a_cell_is_known_by_its_text(notebook):
    first, second = notebook.cells(None, None)
    figure = random_figure(2, 5)
    outputs = [first(figure), second(figure), first(figure)]
    assert [BUNDLE_MARK in output for output in outputs] == [True, False, True]


def test_every_output_carries_the_bundle_where_outputs_do_not_share_a_page(notebook, monkeypatch):
    monkeypatch.setitem(sys.modules, "google.colab", SimpleNamespace())
    first, second = notebook.cells("a", "b")
    figure = random_figure(2, 5)
    assert BUNDLE_MARK in first(figure)
    assert BUNDLE_MARK in second(figure)


def test_a_saved_page_is_the_same_every_time():
    figure = random_figure(2, 5)
    assert figure.html() == figure.html()
    assert figure._repr_html_() != figure._repr_html_()  # ids that no other cell has


def test_no_text_can_end_a_script_or_begin_a_tag(bert):
    nasty = "</script><script>alert(1)</script> <!-- \" ' & \u2028 🙂 <img src=x onerror=alert(1)>"
    shown = Attention((nasty, "b"), (0, 1), (nasty,), torch.eye(2)[None], False, title=nasty)
    fragment = shown.fragment("f")
    assert "<script>alert" not in fragment
    assert "<img" not in fragment
    assert "<!--" not in fragment
    assert "script>" not in fragment
    assert data_of(fragment)[0]["tokens"][0] == nasty
    assert "<script>" not in Page([shown], title=nasty).html().split("</title>")[0]
    assert bundle().count("</script>") == 2


def inline_blocks(page: str, tag: str) -> set[str]:
    """The texts of a page's elements of one kind, hashed as a browser does."""
    texts = re.findall(rf"<{tag}>(.*?)</{tag}>", page, flags=re.DOTALL)
    digests = (hashlib.sha256(text.encode()).digest() for text in texts)
    return {f"'sha256-{base64.b64encode(each).decode()}'" for each in digests}


def test_the_policy_of_a_page_allows_its_own_blocks_and_nothing_inline():
    page = random_figure(2, 5).html()
    assert f'<meta http-equiv="Content-Security-Policy" content="{policy()}">' in page
    rules = dict(rule.split(" ", 1) for rule in policy().split("; "))
    assert rules["default-src"] == "'none'"
    assert "unsafe" not in policy()
    for tag in ("script", "style"):
        own = inline_blocks(page, tag)
        assert len(own) == {"script": 2, "style": 1}[tag]
        assert own <= set(rules[f"{tag}-src"].split())
    assert page.index("Content-Security-Policy") < page.index("<script>")


def test_packed_values_are_exact_to_one_in_a_hundred_thousand():
    values = torch.tensor([0.0, 1.0, 0.5, 1e-4, 1 / 3])
    packed = np.frombuffer(base64.b64decode(pack(values)), "<u2") / 65535
    assert packed.tolist() == pytest.approx(values.tolist(), abs=1e-5)


def test_the_static_figure_has_a_map_for_each_head(bert):
    shown = attention(bert, "the doctors ran $x$", "the judge", heads=["L0.H0", "L1.H1"])
    drawing = shown.figure()
    maps = [axes for axes in drawing.axes if axes.get_images()]
    assert [axes.get_title() for axes in maps if axes.get_title()] == ["L0.H0", "L1.H1"]
    assert maps[0].get_images()[0].get_array().shape == shown.patterns.shape[1:]
    assert [tick.get_text() for tick in maps[0].get_xticklabels()][1] == "the"
    assert len(maps[0].lines) == 2  # where the second sentence begins
    drawing.canvas.draw()


def test_a_single_sentence_is_shown(bert):
    shown = attention(bert, "the judge ran")
    assert '<span class="hc-lens-name">text</span>' in shown.fragment("f")
    assert "premise" not in shown.fragment("f")
    assert "sentence<" not in shown.fragment("f")
    assert 1 not in shown.sentences


def test_the_hand_made_heads_are_seen_in_the_figure():
    shown = attention(handmade_model(), "doctor ran", "ran doctor")
    assert shown.patterns[0, 1, 5] == pytest.approx(1, abs=1e-3)  # doctor -> doctor
    assert shown.patterns[1, 4, 3] == pytest.approx(1, abs=1e-3)  # the token before


def test_bad_input_is_told(bert):
    with pytest.raises(HcLensError, match=r"got L7\.H0"):
        attention(bert, "the", "the", heads=["L7.H0"])
    with pytest.raises(HcLensError, match="expected one hypothesis for each premise, got 2 prem"):
        attention(bert, ["the", "a"], ["the"])
    with pytest.raises(HcLensError, match="got 1 premises and 0 hypotheses"):
        attention(bert, ["the"], [])
    with pytest.raises(HcLensError, match=r"pass means=hc\.collect_means"):
        attention(bert, "the", "a", subnetwork=SimpleNamespace(mask=torch.ones(10)))
    with pytest.raises(HcLensError, match="expected a subnetwork with a mask of shape"):
        attention(bert, "the", "a", subnetwork="runs/1", means="zero")
    with pytest.raises(HcLensError, match="expected a batch alone"):
        attention(bert, word_batch(bert, "the"), "a")
    with pytest.raises(HcLensError, match="expected at least one figure"):
        Page([])
    with pytest.raises(HcLensError, match="expected at most 40 tokens"):
        attention(bert, "the " * 50, "a")


def test_too_many_numbers_are_told(bert, monkeypatch):
    # The package's attribute of that name is the function, so the module is asked for by name.
    monkeypatch.setattr(importlib.import_module("hc_lens.show.attention"), "MOST_VALUES", 100)
    with pytest.raises(HcLensError, match="got 1 rows of 8 heads and 5 tokens; name fewer heads"):
        attention(bert, "the", "a")


def test_a_figure_that_no_browser_can_draw_is_told_and_still_drawn_with_matplotlib():
    large = random_figure(100, 128)
    with pytest.raises(HcLensError, match="got 100 heads of 128 x 128 tokens; name fewer heads"):
        large.html()
    maps = [axes for axes in large.figure().axes if axes.get_images()]
    assert len(maps) == 100
    assert not any(axes.get_xticklabels() for axes in maps)
