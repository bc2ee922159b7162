from __future__ import annotations

from hc_lens.data.prompts import Prompts
from tests.hc_lens.data.words import word_model


def test_an_induction_row_repeats_its_first_tokens(model):
    bos, special = model.tokenizer.bos_token_id, {*model.tokenizer.all_special_ids}
    for row in Prompts.named("induction", n=200).rows(model, "train").itertuples():
        length, (right,), (wrong,) = int(row.case.split("_")[1]), row.right, row.wrong
        first, *tokens = row.prompt
        assert first == bos
        assert special.isdisjoint(tokens)
        copy, second = tokens[:length], tokens[length:]
        assert len(set(copy)) == length
        assert copy[: len(second)] == second
        assert right == copy[len(second)]
        assert wrong in copy
        assert wrong != right
        assert row.counterfactual[length + 1 :] == second
        assert set(row.counterfactual[1 : length + 1]).isdisjoint(copy)


def test_induction_needs_no_tokenizer_and_fits_the_context():
    model = word_model([], d_vocab=30, n_ctx=18)
    model.tokenizer = None
    table = Prompts.named("induction", n=40).rows(model, "train")
    assert set(table["case"]) == {"distance_4", "distance_8"}
    assert table["tokens"].max() <= 18
