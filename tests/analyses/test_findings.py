"""Sentences from facts with names."""

from __future__ import annotations

import json
import math

import pytest

from analyses.findings import facts_json, write
from hc_lens.show.report import Fact

FACTS = {"accuracy": 0.5, "rows": 12, "case": "a {strange} name", "heads": ["L0.H1", "L2.H3"]}


def test_a_number_is_shown_in_the_style_after_its_name() -> None:
    sentence = write(FACTS, "{accuracy:percent} of {rows} rows.", True)
    assert sentence.plain == "50.0% of 12 rows."
    assert sentence.parts[:2] == (Fact("accuracy", 0.5, "percent"), " of ")
    assert sentence.parts[2] == Fact("rows", 12, "number")
    assert sentence.found is True


def test_texts_and_lists_are_written_as_they_are() -> None:
    assert write(FACTS, "{heads} on {case}", None).plain == "L0.H1, L2.H3 on a {strange} name"


def test_a_name_that_is_no_fact_is_an_error() -> None:
    with pytest.raises(KeyError, match="acuracy"):
        write(FACTS, "{acuracy:percent}", None)


def test_a_number_that_is_not_defined_is_null() -> None:
    facts = json.loads(facts_json(FACTS | {"accuracy": math.nan}))
    assert facts == FACTS | {"accuracy": None}
