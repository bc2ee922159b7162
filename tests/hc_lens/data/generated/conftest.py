"""A model that knows every word of the generators."""

from __future__ import annotations

import re

import pytest

from hc_lens.data.generated import agreement, drawing, ioi
from tests.hc_lens.data.words import word_model


def words_in(*texts: str) -> list[str]:
    """The words and marks of texts, without the names in braces of a template."""
    return re.findall(r"\w+|[^\w\s]", re.sub(r"{\w+}", " ", " ".join(texts)))


WORDS = [
    *words_in(*ioi.TEMPLATES, *ioi.NAMES, *ioi.PLACES, *ioi.THINGS),
    *words_in(*agreement.NOUNS, *agreement.NOUNS.values(), *agreement.CONSTRUCTIONS.values()),
    *words_in(*agreement.PAST, *agreement.PRESENT, *agreement.ADJECTIVES, *agreement.PAST_VERBS),
    *words_in(*agreement.PREPOSITIONS, drawing.BEFORE),
    *(verb for pair, _, _ in agreement.VERBS for verb in pair),
]


@pytest.fixture(scope="session")
def model():
    """A causal model with one token for each word."""
    return word_model(WORDS)
