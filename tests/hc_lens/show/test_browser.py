"""Saved pages in headless Chromium, with the network off."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.image import imread

import hc_lens as hc
from hc_lens.show import Attention, Page, attention
from tests import tiny
from tests.browser import Browser, running_browser
from tests.handmade import handmade_model
from tests.notebooks import Notebook

pytestmark = pytest.mark.browser

NASTY = (
    "</script><script>document.title='ran'</script>",
    "<img src=x onerror=\"document.title='ran'\">",
    "\"double\" 'single' & ${document.title='ran'}",
    "🙂",
    "<!--",
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory):
    with running_browser(tmp_path_factory.mktemp("browser")) as window:
        yield window


def drawn(n_figures: int, n_heads: int) -> str:
    """True when every figure has a small map for each head and a large one."""
    return f"document.querySelectorAll('canvas').length === {n_figures * (n_heads + 1)}"


def texts(browser: Browser, selector: str) -> list[str]:
    return browser.run(
        f"return [...document.querySelectorAll('{selector}')].map((node) => node.textContent)"
    )


def pixels(browser: Browser, path: Path) -> np.ndarray:
    """The screenshot as 8-bit colours [y, x, rgb]."""
    browser.run("return new Promise((done) => requestAnimationFrame(() => setTimeout(done, 100)))")
    return (imread(browser.screenshot(path))[..., :3] * 255).round().astype(int)


def count(image: np.ndarray, *colour: int) -> int:
    return int((np.abs(image - np.array(colour)).sum(-1) <= 6).sum())


def test_a_saved_figure_shows_its_tokens_and_heads_without_a_network(browser, tmp_path):
    shown = attention(handmade_model(), "the doctors ran", "the doctors slept")
    browser.open(shown.save(tmp_path / "figure.html"), drawn(1, 3))
    assert browser.errors() == []
    assert texts(browser, ".hc-lens-token") == list(shown.tokens)
    assert texts(browser, "h4") == ["L0.H0", "L0.H1", "L0.H2"]
    image = pixels(browser, tmp_path / "figure.png")
    # Attention of 1 is pure blue; the large map of L0.H0 has cells of thousands of pixels.
    assert count(image, 0, 0, 255) > 5_000
    assert count(image, 200, 200, 200) < 5_000  # no triangle is masked


def test_a_decoder_masks_the_triangle_it_cannot_see(browser, tmp_path):
    model = hc.load(tiny.tiny_hf("gpt2"), tokenizer=tiny.byte_tokenizer())
    shown = attention(model, "the saw", "the ran", heads=["L0.H0", "L1.H2"])
    browser.open(shown.save(tmp_path / "decoder.html"), drawn(1, 2))
    assert browser.errors() == []
    assert count(pixels(browser, tmp_path / "decoder.png"), 200, 200, 200) > 50_000


def test_text_that_looks_like_html_is_shown_and_runs_nothing(browser, tmp_path):
    sizes = (len(NASTY), len(NASTY))
    figure = Attention(NASTY, (0, 0, 1, 1, 1), (NASTY[1], "L0.H1"), torch.eye(5).expand(2, *sizes),
                       False, title=NASTY[0])  # fmt: skip
    page = Page([figure], title=NASTY[1])
    browser.open(page.save(tmp_path / "nasty.html"), drawn(1, 2))
    assert browser.errors() == []
    assert texts(browser, ".hc-lens-token") == list(NASTY)
    assert texts(browser, "h4") == [NASTY[1], "L0.H1"]
    assert texts(browser, ".hc-lens-figure h2")[0] == NASTY[0]
    assert browser.run("return document.title") == NASTY[1]
    assert browser.run("return document.images.length") == 0
    browser.screenshot(tmp_path / "nasty.png")


ADDED = {
    "<script>document.title = 'ran'</script>": "script-src",
    "<img src=x onerror=\"document.title = 'ran'\">": "img-src",
    "<img src='data:,' onerror=\"document.title = 'ran'\">": "script-src",
    "<svg onload=\"document.title = 'ran'\"></svg>": "script-src",
    "<a id=go href=\"javascript:document.title='ran'\">x</a>": "script-src",
    "<iframe srcdoc=\"<script>top.document.title = 'ran'</script>\"></iframe>": "script-src",
    "<script src='data:text/javascript,document.title=1'></script>": "script-src",
    "<style>h1 { display: none }</style>": "style-src",
    "<h1 style='display: none'>x</h1>": "style-src",
    "<form action='https://example.org'><button id=go>x</button></form>": "form-action",
}
"""What somebody may add to a saved page by hand, and the rule that stops it."""


@pytest.mark.parametrize("added", ADDED)
def test_what_is_added_to_a_saved_page_by_hand_is_neither_run_nor_applied(browser, tmp_path, added):
    shown = attention(handmade_model(), "the judge", "the judge ran", heads=["L0.H0"])
    path = shown.save(tmp_path / "figure.html")
    text = path.read_text("utf-8")
    path.write_text(text.replace("</h1>", f"</h1>{added}", 1), "utf-8")
    browser.open(path, drawn(1, 1))
    browser.run("document.getElementById('go')?.click()")
    browser.run("return new Promise((done) => setTimeout(done, 200))")
    assert browser.run("return document.title") == "Attention patterns"
    shown = "[...document.querySelectorAll('h1')].map((node) => getComputedStyle(node).display)"
    assert set(browser.run(f"return {shown}")) == {"block"}
    told = browser.errors()
    assert any(ADDED[added] in line for line in told), told


def test_figures_further_down_are_drawn_when_they_come_into_view(browser, tmp_path):
    shown = attention(handmade_model(), "the judge", "the judge ran", heads=["L0.H0"])
    browser.open(Page([shown] * 8).save(tmp_path / "many.html"), "document.images.length === 0")
    browser.run("window.scrollTo(0, 0)")
    before = browser.run("return document.querySelectorAll('canvas').length")
    for _ in range(8):
        browser.run(
            "window.scrollTo(0, document.body.scrollHeight);"
            "return new Promise((done) => requestAnimationFrame(() => setTimeout(done, 200)))"
        )
    assert before < 16
    assert browser.run("return " + drawn(8, 1))
    assert browser.errors() == []


def test_a_notebook_output_draws_inside_another_page(browser, tmp_path):
    shown = attention(handmade_model(), "the judge", "the judge ran", heads=["L0.H0", "L0.H1"])
    outputs = shown._repr_html_() + shown._repr_html_()
    browser.open(page_of(tmp_path / "notebook.html", outputs), drawn(2, 2))
    assert browser.errors() == []


def page_of(path: Path, *outputs: str) -> Path:
    path.write_text(
        f"<!DOCTYPE html><meta charset='utf-8'><body>{''.join(outputs)}</body>", "utf-8"
    )
    return path


def test_two_figures_of_a_notebook_share_one_bundle_and_both_draw(browser, tmp_path, monkeypatch):
    shown = attention(handmade_model(), "the judge", "the judge ran", heads=["L0.H0", "L0.H1"])
    first, second = Notebook(monkeypatch).cells("a", "b")
    outputs = first(shown), second(shown)
    path = page_of(tmp_path / "notebook.html", *outputs)
    assert path.stat().st_size < 1_500_000
    browser.open(path, drawn(2, 2))
    assert browser.errors() == []
    # In the other order, as where a front end renders the outputs that are in view first.
    browser.open(page_of(tmp_path / "turned.html", *outputs[::-1]), drawn(2, 2))
    assert browser.errors() == []
    assert "Plain maps" not in "".join(texts(browser, "p"))


def test_an_output_without_the_bundle_on_its_page_draws_plain_maps(browser, tmp_path, monkeypatch):
    shown = attention(handmade_model(), "the judge", "the judge ran", heads=["L0.H0", "L0.H1"])
    first, second = Notebook(monkeypatch).cells("a", "b")
    carried, alone = first(shown), second(shown)
    path = page_of(tmp_path / "alone.html", alone, f"<template>{carried}</template>")
    browser.open(path, "document.querySelectorAll('canvas').length === 2")
    assert browser.errors() == []
    assert texts(browser, "figcaption") == ["L0.H0", "L0.H1"]
    assert "Run that cell again" in texts(browser, "p")[0]
    # Attention of 1 is pure blue.
    assert count(pixels(browser, tmp_path / "alone.png"), 0, 0, 255) > 500
    # When the output with the bundle is back, the figure is drawn again, by circuitsvis.
    browser.run(
        "const copy = document.createElement('script');"
        "copy.text = document.querySelector('template').content.querySelector('script').text;"
        "document.body.append(copy)"
    )
    browser.run("return new Promise((done) => requestAnimationFrame(() => setTimeout(done, 500)))")
    assert browser.run("return " + drawn(1, 2))
    assert texts(browser, "figcaption") == []
    assert browser.errors() == []


INSERT = """
const out = document.getElementById("out");
out.innerHTML = JSON.parse(document.getElementById("output").textContent);
for (const old of [...out.getElementsByTagName("script")]) {
  const script = document.createElement("script");
  script.text = old.textContent;
  out.appendChild(script).parentNode.removeChild(script);
}
"""


def test_an_output_that_a_notebook_inserts_is_drawn(browser, tmp_path):
    # VS Code and JupyterLab set innerHTML and then run a copy of each script.
    shown = attention(handmade_model(), "the judge", "the judge ran", heads=["L0.H0", "L0.H1"])
    content = json.dumps(shown._repr_html_()).replace("<", "\\u003c")
    output = f'<script id="output" type="application/json">{content}'
    path = tmp_path / "inserted.html"
    path.write_text(
        f"<!DOCTYPE html><meta charset='utf-8'><body><div id='out'></div>{output}</script>"
        f"<script>{INSERT}</script></body>",
        "utf-8",
    )
    browser.open(path, drawn(1, 2))
    assert browser.errors() == []


def test_the_console_of_a_broken_page_is_seen(browser, tmp_path):
    path = tmp_path / "broken.html"
    path.write_text("<script>null.x</script><script src='https://unpkg.com/x.js'></script>")
    browser.open(path, "true")
    errors = browser.errors()
    assert any("TypeError" in error for error in errors)
    assert any("ERR_NAME_NOT_RESOLVED" in error for error in errors)
