"""Patterns, and the words and sentences of their tokens."""

from __future__ import annotations

import weakref

import pytest
import torch
import transformers as hf
from transformer_lens.hook_points import HookPoint

import hc_lens as hc
from hc_lens.attention.patterns import check_heads, patterns, visit, word_batch, word_batches
from hc_lens.attention.words import align
from hc_lens.data.batches import sample
from hc_lens.errors import HcLensError
from hc_lens.models.inputs import encode
from tests import tiny
from tests.lens import BRIDGES, hooks_on

PAIRS = [
    ("the doctors saw the .", "the doctors ran"),
    ("the old a ran", "a ran , the old"),
    ("saw the a near the", "saw the"),
]


def task(pairs=PAIRS) -> hc.Task:
    rows = [{"premise": a, "hypothesis": b} for a, b in pairs]
    return hc.Task.from_rows({"train": rows}, columns=("premise", "hypothesis"), label=None)


def test_a_word_piece_row_tells_words_sentences_and_separators():
    (row,) = align(tiny.bert_tokenizer(), [("The doctors ran".lower(), "doctors, ran")])
    assert row.tokens == ("[CLS]", "the", "doctor", "s", "ran", "[SEP]", "doctor", "s", ",",
                          "ran", "[SEP]")  # fmt: skip
    assert row.sentences == (-1, 0, 0, 0, 0, -1, 1, 1, 1, 1, -1)
    assert row.word_ids == (-1, 0, 1, 1, 2, -1, 3, 3, 4, 5, -1)
    assert row.words == ("the", "doctors", "ran", "doctors", ",", "ran")
    assert row.words_of(0) == ("the", "doctors", "ran")
    assert row.words_of(1) == ("doctors", ",", "ran")
    assert [place for place, mark in enumerate(row.separators) if mark] == [5, 10]


def test_a_byte_level_row_has_words_without_their_space():
    (row,) = align(tiny.byte_tokenizer(), [("saw the", "the saw")])
    assert row.words == ("saw", "the", "the", "saw")
    assert row.tokens == ("s", "a", "w", "the", "the", "␣", "s", "a", "w")
    assert row.sentences == (0, 0, 0, 0, 1, 1, 1, 1, 1)
    assert row.word_ids == (0, 0, 0, 1, 2, 3, 3, 3, 3)
    assert not any(row.separators)


def test_both_end_tokens_between_two_roberta_sentences_are_separators():
    (row,) = align(tiny.byte_tokenizer(roberta=True), [("the", "the the")])
    assert row.tokens == ("<s>", "the", "</s>", "</s>", "the", "the", "</s>")
    assert row.separators == (False, False, True, True, False, False, True)
    assert row.words == ("the", "the", "the")


@pytest.mark.parametrize("separator", [" . ", ".", "\n", ", "])
def test_two_texts_joined_by_a_separator_are_told_apart_by_their_characters(separator):
    (row,) = align(tiny.byte_tokenizer(), [("the cat", "the dog")], separator=separator)
    assert row.words_of(0) == ("the", "cat")
    assert row.words_of(1) == ("the", "dog")
    assert any(row.separators)
    assert all(s == -1 for s, mark in zip(row.sentences, row.separators, strict=True) if mark)


def test_the_pieces_of_one_character_are_numbered():
    (row,) = align(tiny.byte_tokenizer(), [("a🙂",)])
    assert row.tokens == ("a", "🙂", "🙂·2", "🙂·3", "🙂·4")
    assert row.words == ("a", "🙂")


def test_a_text_that_the_tokenizer_takes_for_one_word_is_split_at_spaces():
    tokenizer = tiny.byte_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = None
    tokenizer.backend_tokenizer.normalizer = None
    (row,) = align(tokenizer, [("the saw the",)])
    assert row.words == ("the", "saw", "the")


def test_words_follow_the_rows_of_the_tasks_batches(hooked):
    rows = word_batches(hooked, task(), seed=3)
    plain = {int(row): batch for batch in task().batches(hooked, seed=3) for row in batch.rows}
    seen = []
    for batch in rows:
        for row, place, ids, real in zip(
            batch.words.rows,
            batch.rows.tolist(),
            batch.inputs["input"],
            batch.words.mask,
            strict=True,
        ):
            seen.append(place)
            assert ids[real].tolist() == list(row.ids)
            assert torch.equal(batch.inputs["input"], plain[place].tokens)
            texts = (row.words_of(0), row.words_of(1))
            assert tuple(" ".join(words) for words in texts) == PAIRS[place]
    assert sorted(seen) == [0, 1, 2]


def test_rows_with_words_are_drawn_evenly_over_cases_like_those_of_the_task(hooked):
    rows = [{"a": a, "b": b, "kind": str(at % 2)} for at, (a, b) in enumerate(PAIRS * 4)]
    made = hc.Task.from_rows({"train": rows}, columns=("a", "b"), label=None, case="kind")
    few = word_batches(hooked, made, limit_per_case=2)
    assert few.rows.tolist() == made.batches(hooked, limit_per_case=2).rows.tolist()
    assert sorted(row % 2 for row in few.rows.tolist()) == [0, 0, 1, 1]


def test_batches_with_words_are_batches_whose_rows_can_be_chosen(hooked):
    rows = word_batches(hooked, task(PAIRS * 4), limit=8, seed=3)
    few = rows.limited(3)
    assert repr(few).startswith("WordBatches(rows/train: 3 rows in ")
    assert few.rows.tolist() == rows.rows[sample(8, 3, seed=0)].tolist()
    for batch in few:
        for row, position in zip(batch.words.rows, batch.rows.tolist(), strict=True):
            texts = (row.words_of(0), row.words_of(1))
            assert tuple(" ".join(words) for words in texts) == (PAIRS * 4)[position]


def test_a_row_that_is_cut_keeps_its_alignment(hooked):
    for batch in word_batches(hooked, task(), max_length=9):
        assert batch.inputs["input"].shape[1] == 9
        for at, row in enumerate(batch.words.rows):
            assert len(row.ids) == 9
            assert {0, 1} <= set(row.sentences)
            assert batch.words.word[at].tolist() == list(row.word_ids)


def test_left_pads_have_no_word():
    model = hc.load(tiny.tiny_hf("gpt2"), tokenizer=tiny.byte_tokenizer())
    pairs = [("the", "the" + " the" * 9), ("the", "the" + " the" * 8)]
    (batch,) = word_batches(model, task(pairs), padding_side="left")
    short = int(batch.words.mask.sum(1).argmin())
    assert batch.words.word[short].tolist() == [-1, *range(10)]
    assert batch.words.sentence[short].tolist() == [-1, 0] + [1] * 9
    assert (batch.words.word != -1)[batch.words.mask].all()


def test_the_pattern_seen_is_the_models(hooked):
    batch = word_batch(hooked, PAIRS)
    _, cache = hooked.run_with_cache(**batch.inputs)
    got = patterns(hooked, batch, ["L1.H3", "L0.H2"])
    assert torch.equal(got[:, 0], cache["blocks.1.attn.hook_pattern"][:, 3])
    assert torch.equal(got[:, 1], cache["blocks.0.attn.hook_pattern"][:, 2])
    assert patterns(hooked, batch).shape[1] == 8


def test_visit_leaves_no_hook_and_the_logits_as_they_are(hooked):
    batch = word_batch(hooked, PAIRS)
    before = hooked(**batch.inputs)
    visit(hooked, batch, lambda layer, pattern: None)
    assert torch.equal(hooked(**batch.inputs), before)
    assert hooks_on(hooked) == []


def test_the_pattern_of_a_layer_is_gone_before_the_next(hooked, family):
    if BRIDGES and family == "gpt2":
        pytest.skip("TransformerLens itself keeps the last pattern here")
    alive: list[weakref.ref] = []

    def see(layer: int, pattern: torch.Tensor) -> None:
        assert [ref() for ref in alive if ref() is not None] == []
        alive.append(weakref.ref(pattern))

    for batch in word_batches(hooked, task(PAIRS * 4), token_budget=80):
        visit(hooked, batch, see)
    assert len(alive) > 4


def test_a_swapped_row_has_another_rows_hypothesis_of_its_length():
    model = hc.load(tiny.tiny_hf("bert"), tokenizer=tiny.bert_tokenizer())
    pairs = [("the judge", f"the {word}") for word in ("doctor", "lawyer", "artist")]
    pairs += [("the judge", f"the old {word} ran today") for word in ("doctor", "lawyer")]
    rows = word_batches(model, task(pairs))
    swapped = rows.swapped(seed=1)
    seconds = swapped.texts["hypothesis"][:]
    assert swapped.texts["premise"][:] == rows.texts["premise"][:]
    assert all(a != b for a, b in zip(seconds, rows.texts["hypothesis"][:], strict=True))
    assert seconds == rows.swapped(seed=1).texts["hypothesis"][:]
    for batch in swapped:
        assert batch.own is not None
        for place, own in zip(batch.rows.tolist(), batch.own, strict=True):
            assert " ".join(own.words) == " ".join(pairs[place])


def test_a_swapped_row_that_outgrows_the_context_is_cut():
    model = hc.load(tiny.tiny_hf("bert"), tokenizer=tiny.bert_tokenizer())
    long = " ".join(["judge"] * 30)
    rows = word_batches(model, task([(long, "the old"), ("the", f"{long} ran")]))
    assert max(batch.inputs["input"].shape[1] for batch in rows.swapped()) == 40


def test_an_unknown_head_is_an_error(hooked):
    with pytest.raises(HcLensError, match=r"got L2\.H0; list the units"):
        check_heads(hooked, ["L2.H0"])
    with pytest.raises(HcLensError, match=r"expected a unit label such as 'L4\.H0'"):
        check_heads(hooked, ["head 3"])
    with pytest.raises(HcLensError, match=r"got L0\.MLP; an MLP has no attention pattern"):
        check_heads(hooked, ["L0.MLP"])
    with pytest.raises(HcLensError, match="expected attention heads"):
        check_heads(hooked, [])


def test_a_tokenizer_without_word_ids_is_an_error():
    model = hc.load(tiny.tiny_hf("bert", vocab_size=400), tokenizer=hf.ByT5Tokenizer())
    with pytest.raises(HcLensError, match="ByT5Tokenizer without word ids; load the"):
        word_batches(model, task())
    with pytest.raises(HcLensError, match="expected a tokenizer on the model"):
        word_batches(hc.load(tiny.tiny_hf("bert")), task())


class Silent(torch.nn.Module):
    """A model whose hook points never fire."""

    def __init__(self, cfg, names):
        super().__init__()
        self.cfg = cfg
        self.hook_dict = {name: HookPoint() for name in names}

    def forward(self, **inputs) -> None:
        return None


def test_hook_points_that_are_missing_or_silent_are_an_error(hooked):
    batch = word_batch(hooked, PAIRS)
    with pytest.raises(HcLensError, match=r"expected the hook points \['blocks.0.attn.hook_patt"):
        visit(Silent(hooked.cfg, []), batch, lambda layer, pattern: None)
    silent = Silent(hooked.cfg, [f"blocks.{layer}.attn.hook_pattern" for layer in range(2)])
    with pytest.raises(HcLensError, match="to fire, they did not; the model computes its attent"):
        visit(silent, batch, lambda layer, pattern: None)


def test_a_limit_below_one_and_texts_of_both_kinds_are_errors(hooked):
    with pytest.raises(HcLensError, match="expected limit as a whole number of at least 1, got 0"):
        word_batches(hooked, task(), limit=0)
    with pytest.raises(HcLensError, match="expected all sentences or all pairs"):
        word_batch(hooked, ["the", ("the", "the")])


def test_texts_in_hand_become_the_same_inputs_as_encode_gives(hooked):
    inputs = encode(hooked, PAIRS)
    batch = word_batch(hooked, PAIRS)
    assert all(torch.equal(batch.inputs[name], inputs[name]) for name in inputs)
    assert batch.rows.tolist() == [0, 1, 2]


def test_a_weight_that_is_not_finite_is_refused_where_the_pattern_would_hide_it():
    model = hc.load(tiny.tiny_hf("bert"), tokenizer=tiny.bert_tokenizer())
    model.blocks[1].attn.W_Q.data[0, 0, 0] = torch.nan
    batch = word_batch(model, PAIRS)
    with pytest.raises(HcLensError, match=r"NaN or infinity in blocks\.1\.att"):
        patterns(model, batch)
