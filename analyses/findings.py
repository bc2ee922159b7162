"""What an analysis found: facts with names, and the sentences that are said about them.

1. Facts are numbers, texts and lists of texts by name. A sentence holds no number that is not a
   fact, so that each can be looked up in the file that `facts_json` makes.
2. `write` makes a sentence from a text with the names of facts in braces. A number is shown in the
   style after its name (a name of `hc_lens.show.report.STYLES`), such as ``{accuracy:percent}``.
"""

from __future__ import annotations

import math
from string import Formatter
from typing import Any

from hc_lens.records import json_bytes
from hc_lens.show.report import Fact, Part, Sentence

Facts = dict[str, Any]
"""Numbers, texts and lists of texts by name."""


def write(facts: Facts, text: str, found: bool | None) -> Sentence:
    """A sentence from a text with names of facts in braces."""
    parts: list[Part] = []
    for literal, name, style, _ in Formatter().parse(text):
        if literal:
            parts.append(literal)
        if name is not None:
            parts.append(_part(name, facts[name], style or "number"))
    return Sentence(tuple(parts), found)


def facts_json(facts: Facts) -> bytes:
    """Facts as JSON; a number that is not defined is null."""
    undefined = [
        name for name in facts if isinstance(facts[name], float) and math.isnan(facts[name])
    ]
    return json_bytes(facts | dict.fromkeys(undefined))


def _part(name: str, value: Any, style: str) -> Part:
    if isinstance(value, (int, float)):
        return Fact(name, value, style)
    return ", ".join(value) if isinstance(value, list) else str(value)
