"""The same numbers with TransformerLens 3 and 4: those of the organism are kept here."""

import json
from pathlib import Path

from tests.versions import differences, of_organism

KEPT = Path(__file__).with_name("organism_numbers.json")
"""Made with TransformerLens 3.9: ``python -m tests.versions numbers --out`` this file."""


def test_every_instrument_says_of_the_organism_what_it_said_with_transformer_lens_3():
    kept = json.loads(KEPT.read_text(encoding="utf-8"))
    found = differences(kept, of_organism())
    assert found.pop("units"), "other units were pruned"
    assert {kind: apart for kind, apart in found.items() if apart > 1e-5} == {}
