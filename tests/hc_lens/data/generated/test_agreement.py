from __future__ import annotations

from collections import Counter

from hc_lens.data.generated import agreement
from hc_lens.data.prompts import Prompts
from tests.hc_lens.data.generated.conftest import words_in


def test_what_agreement_trains_on_is_never_held_out_of_its_ood_rows(model):
    train = Prompts.named("agreement", n=2_000).rows(model, "train")
    held_out = Prompts.named("agreement-ood", n=2_000).rows(model, "validation")
    assert set(train["prompt"]).isdisjoint(held_out["prompt"])


def test_an_agreement_row_is_right_by_its_subject(model):
    plurals = {*agreement.NOUNS.values()}
    nouns = {*agreement.NOUNS, *plurals}
    for row in Prompts.named("agreement-ood", n=700).rows(model, "train").itertuples():
        found = [word for word in words_in(row.prompt) if word in nouns]
        number = "plural" if found[0] in plurals else "singular"
        assert row.case.endswith(f"_{number}")
        assert (row.right[0] in ("were", "are", "have")) == (number == "plural")
        other = len(found) == 2 and (found[1] in plurals) != (number == "plural")
        assert row.side == ("adversarial" if other else "friendly")
        assert ("_other_" in row.case) == other
        assert row.case.startswith("none") == (len(found) == 1)
        turned = [word for word in words_in(row.counterfactual) if word in nouns]
        assert turned[1:] == found[1:]
        assert (turned[0] in plurals) != (found[0] in plurals)
        both = agreement.NOUNS.get(found[0], found[0]), agreement.NOUNS.get(turned[0], turned[0])
        assert both[0] == both[1]


def test_agreement_has_the_friendly_cases_alone_and_its_ood_rows_all(model):
    friendly = Prompts.named("agreement", n=80).batches(model)
    assert set(friendly.sides) == {*agreement.FRIENDLY_CASES}
    assert set(friendly.sides.values()) == {"friendly"}
    ood = Prompts.named("agreement-ood", n=140).batches(model)
    assert Counter(ood.sides.values()) == {"friendly": 8, "adversarial": 6}
