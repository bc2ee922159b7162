"""The look that all figures share."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.collections import LineCollection

from hc_lens.analyses.style import COLOURS, LINES, error_bars, legend, panels, percent_axis


def test_panels_come_row_by_row_without_a_frame_at_the_top_and_on_the_right():
    drawing, grid = panels((4.0, 3.0), rows=2, columns=3, sharex=True)
    assert len(grid) == 6
    assert grid == drawing.axes
    for axes in grid:
        assert not axes.spines["top"].get_visible()
        assert not axes.spines["right"].get_visible()
        assert axes.spines["left"].get_visible()


def test_a_legend_lists_what_has_a_label():
    drawing, (axes,) = panels((4.0, 3.0))
    axes.plot([0, 1], [0, 1], label="a line")
    axes.plot([0, 1], [1, 0])
    legend(drawing, side="right")
    assert [text.get_text() for text in drawing.legends[0].get_texts()] == ["a line"]


def test_a_percent_axis_holds_both_ends():
    _, (axes,) = panels((4.0, 3.0))
    percent_axis(axes, "y", "accuracy")
    low, high = axes.get_ylim()
    assert low < 0 < 100 < high
    assert axes.get_ylabel() == "accuracy (%)"


def test_intervals_that_are_missing_are_not_drawn():
    _, (axes,) = panels((4.0, 3.0))
    error_bars(axes, np.arange(2), [0.5, 0.6], ([math.nan] * 2, [math.nan] * 2))
    assert not axes.collections
    error_bars(axes, np.arange(2), [0.5, 0.6], ([0.4, 0.5], [0.7, math.nan]))
    (lines,) = (part for part in axes.collections if isinstance(part, LineCollection))
    ends = [segment[:, 1].tolist() for segment in lines.get_segments()]
    assert np.allclose(ends, [[0.4, 0.7], [0.5, 0.6]])


def test_lines_have_no_colour_that_is_faint_on_white():
    assert set(COLOURS) - set(LINES) == {"#F0E442"}
