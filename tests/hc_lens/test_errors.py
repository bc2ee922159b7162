"""Messages of refused choices."""

from __future__ import annotations

import pytest

from hc_lens.errors import HcLensError, check_choice


def test_a_known_choice_passes():
    check_choice("a colour", "red", ("red", "blue"))


def test_an_unknown_choice_is_told_the_known_ones():
    with pytest.raises(HcLensError, match=r"a colour among \['red', 'blue'\], got 'green'; choose"):
        check_choice("a colour", "green", (name for name in ("red", "blue")))


def test_a_long_list_of_choices_is_cut():
    with pytest.raises(HcLensError, match=r"18, 19\] and 5 more, got 99"):
        check_choice("a number", 99, range(25))
