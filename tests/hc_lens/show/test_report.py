"""Reports: sentences, tables and figures in one page."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pandas as pd
import pytest
import torch
from matplotlib.figure import Figure

from hc_lens.show import Attention
from hc_lens.show.report import Drawing, Fact, Report, Section, Sentence, Table, show
from tests.browser import running_browser


def figure() -> Figure:
    drawing = Figure(figsize=(3, 2))
    drawing.subplots().plot([0, 1], [1, 0])
    return drawing


def small_report(text: str = "plain") -> Report:
    frame = pd.DataFrame({"case": ["b", "a", "c"], "accuracy": [0.5, 0.25, math.nan]})
    table = Table(frame.assign(text=text), f"steps/{text}.csv", text, {"accuracy": "percent"})
    heads = Attention((text, "b"), (0, 1), (text,), torch.eye(2)[None], False, title=text)
    sentence = Sentence((f"{text}: ", Fact("core", 9), " heads"), found=True)
    sections = [
        Section("summary", "Summary", [sentence, Sentence(("nothing",), found=False)]),
        Section("tables", "Tables", items=[table, Drawing.of(figure(), text), heads]),
    ]
    return Report(text, "of nothing", sections, "a = 1", {"Command": text}, "today")


@pytest.mark.parametrize(
    ("value", "style", "text"),
    [
        (0.98765, "percent", "98.8%"),
        (-0.0312, "points", "-3.1"),
        (0.0312, "points", "+3.1"),
        (0.0312, "span", "3.1"),
        (12.0, "number", "12"),
        (0.12345, "number", "0.123"),
        (1e-30, "probability", "below 1e-12"),
        (0.00123, "probability", "0.0012"),
        (math.nan, "percent", "–"),  # noqa: RUF001
    ],
)
def test_a_number_is_shown_in_its_style(value: float, style: str, text: str) -> None:
    assert show(value, style) == text


def test_a_fact_carries_its_name_and_exact_value() -> None:
    page = small_report().html()
    found = re.search(r'<data value="9" data-fact="core"[^>]*>9</data> heads', page)
    assert found is not None


def test_a_cell_carries_its_exact_value_beside_the_rounded_one() -> None:
    page = small_report().html()
    assert '<td data-column="accuracy" data-value="0.25" class="number">25.0%</td>' in page
    assert '<td data-column="accuracy" data-value="" class="number">–</td>' in page  # noqa: RUF001


def test_text_from_models_and_rows_is_never_markup() -> None:
    page = small_report("<script>alert(1)</script>").html()
    assert "<script>alert(1)" not in page
    assert "&lt;script&gt;alert(1)" in page


def test_the_same_figure_gives_the_same_bytes() -> None:
    assert Drawing.of(figure(), "x").svg == Drawing.of(figure(), "x").svg


def test_a_report_is_written_whole(tmp_path: Path) -> None:
    path = small_report().save(tmp_path / "new" / "report.html")
    assert path.read_text().endswith("</html>\n") or path.read_text().endswith("</html>")
    assert [file.name for file in path.parent.iterdir()] == ["report.html"]


@pytest.mark.browser
def test_a_click_on_a_heading_sorts_the_table_and_missing_values_stay_last(tmp_path: Path) -> None:
    path = small_report().save(tmp_path / "report.html")
    column = "return [...document.querySelectorAll('tbody td:first-child')].map(x => x.innerText)"
    with running_browser(tmp_path) as window:
        window.open(path, "document.querySelector('.drawing img').naturalWidth > 0")
        click = "document.querySelectorAll('th button')[{}].click()"
        window.run(click.format(0))
        assert window.run(column) == ["a", "b", "c"]
        window.run(click.format(1))
        assert window.run(column) == ["a", "b", "c"]
        window.run(click.format(1))
        assert window.run(column) == ["b", "a", "c"]
        assert window.errors() == []


NASTY = (
    "</script><script>document.title = 'ran'</script>"
    "<img src=x onerror=\"document.title = 'ran'\"> \"double\" 'single' &amp; <!--"
)
"""A text of a model, a row or a file that would run something if it were taken for markup."""


@pytest.mark.browser
def test_a_report_draws_everything_and_runs_no_text(tmp_path: Path) -> None:
    path = small_report(NASTY).save(tmp_path / "report.html")
    texts = "return [...document.querySelectorAll('{}')].map(node => node.textContent)"
    with running_browser(tmp_path) as window:
        window.open(path, "document.querySelectorAll('canvas').length === 2")
        assert window.run("return document.title") == NASTY
        assert window.run(texts.format(".hc-lens-token")) == [NASTY, "b"]
        assert window.run(texts.format(".hc-lens-figure h4")) == [NASTY]
        assert window.run(texts.format("td:last-child")) == [NASTY] * 3
        assert window.run("return document.images.length") == 1  # the drawing
        assert window.run("return document.images[0].naturalWidth") > 0
        assert window.errors() == []


@pytest.mark.browser
def test_a_script_that_is_added_to_a_report_by_hand_is_not_run(tmp_path: Path) -> None:
    path = small_report().save(tmp_path / "report.html")
    added = "<p>read me</p><script>document.title = 'ran'</script>"
    path.write_text(path.read_text("utf-8").replace("</h1>", f"</h1>{added}", 1), "utf-8")
    with running_browser(tmp_path) as window:
        window.open(path, "document.querySelectorAll('canvas').length === 2")
        assert window.run("return document.title") == "plain"
        (told,) = window.errors()
        assert "script-src" in told
