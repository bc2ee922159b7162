from __future__ import annotations

from hc_lens.data.generated import ioi
from hc_lens.data.prompts import Prompts
from tests.hc_lens.data.generated.conftest import words_in


def test_an_ioi_row_names_the_giver_twice_and_its_counterfactual_nobody(model):
    for row in Prompts.named("ioi", n=200).rows(model, "train").itertuples():
        names = [word for word in words_in(row.prompt) if word in ioi.NAMES]
        (right,), (wrong,) = row.right, row.wrong
        assert names[2] == wrong
        assert names[:2] == ([right, wrong] if row.case == "first" else [wrong, right])
        others = [word for word in words_in(row.counterfactual) if word in ioi.NAMES]
        assert len({*others, right, wrong}) == 5
