from __future__ import annotations

import json

import pandas as pd
import pytest
import torch
import transformers as hf
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

import hc_lens as hc
from hc_lens.data.batches import bucket
from hc_lens.data.encoding import token_ids
from hc_lens.data.prompts import Prompts, UnreadColumnWarning
from hc_lens.errors import HcLensError
from tests import tiny
from tests.hc_lens.data.words import word_model

WORDS = (  # noqa: SIM905
    "the a dog dogs cat cats was were is are near saw one day two three . ,"
).split()
ROWS = [
    {
        "prompt": "the dog near the cats",
        "right": ["was", "is"],
        "wrong": ["were"],
        "counterfactual": "the dogs near the cats",
        "case": "other/one",
        "side": "adversarial",
    },
    {
        "prompt": "the cats",
        "right": ["were"],
        "wrong": ["was"],
        "counterfactual": "the cat",
        "case": "none",
        "side": "friendly",
    },
    {
        "prompt": "one day , the dog",
        "right": ["was"],
        "wrong": [],
        "counterfactual": "one day , the dogs",
        "case": "none",
        "side": "friendly",
    },
]


@pytest.fixture(scope="module")
def model():
    return word_model(WORDS)


def one_batch(model, rows, **settings):
    """Batches of rows, and all of their rows in one batch in the order of the source."""
    batches = Prompts.from_rows(rows).batches(model, **settings)
    return batches, batches.gather(range(batches.n_rows))


def ids(model, *words):
    return [model.tokenizer.convert_tokens_to_ids(word) for word in words]


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_batch_says_what_each_row_is_and_where_it_is_read(model, side):
    batches, batch = one_batch(model, ROWS, padding_side=side)
    assert batches.labels == ("right", "wrong")
    assert batch.labels.tolist() == [0, 0, 0]
    assert batch.cases == ("other-one", "none", "none")
    assert batches.sides == {"other-one": "adversarial", "none": "friendly"}
    assert batches.heuristic is None
    # A BOS and 5, 2 and 5 words, padded to 6.
    assert batch.reads.tolist() == ([5, 5, 5] if side == "left" else [5, 2, 5])
    was, were, present = ids(model, "was", "were", "is")
    assert batch.answers.tolist() == [
        [[was, present], [were, -1]],
        [[were, -1], [was, -1]],
        [[was, -1], [-1, -1]],
    ]
    last = batch.tokens[range(3), batch.reads].tolist()
    assert last == ids(model, "cats", "cats", "dog")
    assert batch.counterfactual["input"][range(3), batch.reads].tolist() == ids(
        model, "cats", "cat", "dogs"
    )
    assert torch.equal(batch.counterfactual["attention_mask"], batch.mask)
    assert batch.mask.sum(-1).tolist() == [6, 3, 6]


def test_a_batch_without_counterfactuals_has_none(model):
    rows = [{"prompt": "the dog", "right": "was"}]
    assert one_batch(model, rows)[1].counterfactual is None


@pytest.mark.parametrize("tokenizer_puts_it", [False, True])
@pytest.mark.parametrize("default", [False, True])
@pytest.mark.parametrize("asked", [None, False, True])
def test_token_ids_are_those_of_to_tokens(tokenizer_puts_it, default, asked):
    model = word_model(WORDS, bos=tokenizer_puts_it, default_prepend_bos=default)
    texts = ["the dog near the cats", "one day"]
    settings = {} if asked is None else {"prepend_bos": asked}
    expected = [model.to_tokens(text, **settings)[0].tolist() for text in texts]
    assert token_ids(model, texts, asked) == expected
    batches = Prompts.from_rows([{"prompt": text, "right": "was"} for text in texts]).batches(
        model, **settings
    )
    assert batches._table["input_ids"][:] == expected


def test_a_model_of_load_tokenises_as_hugging_face_does():
    tokenizer = tiny.byte_tokenizer()
    model = hc.load(tiny.tiny_language_model("gpt2"), tokenizer=tokenizer)
    _, batch = one_batch(model, [{"prompt": "see the", "right": "the"}])
    assert batch.tokens[0].tolist() == tokenizer("see the")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(batch.answers[0, 0].tolist()) == ["Ġthe"]


def byte_fallback_model():
    """Words are tokens with the space before them; what is no word is a space and its bytes."""
    pieces = ("▁", "▁the", "▁dog", "▁was", "▁4x")
    words = [*pieces, *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = [("<unk>", 0.0), ("<s>", 0.0), *((word, -1.0) for word in words)]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    model = word_model([], d_vocab=len(vocabulary), tokenizer_prepends_bos=False)
    model.tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", pad_token="<s>"
    )
    return model


def test_an_answer_that_begins_with_a_bare_space_is_refused():
    model = byte_fallback_model()
    rows = [{"prompt": "the dog", "right": [answer]} for answer in ("was", "☃", "4", " 4")]
    message = (
        r"whose first token is not a space alone in prompts/all, got 3 rows that are not so: "
        r"row 1 \('☃' for 'the dog'\), row 2 \('4' .*, row 3 \(' 4' .*; give token ids, or end "
    )
    with pytest.raises(HcLensError, match=message):
        Prompts.from_rows(rows).batches(model)
    with pytest.raises(HcLensError, match=r"got 1 row that is not so: row 0 \('☃'"):
        Prompts.from_rows([{**rows[0], "wrong": ["☃"]}]).batches(model)


def test_an_answer_may_be_or_begin_with_white_space_that_is_meant():
    model = byte_fallback_model()
    rows = [
        {"prompt": "the dog", "right": "was"},
        {"prompt": "the dog", "right": "4x"},
        {"prompt": "the dog ", "right": "☃"},  # the prompt ends with the space itself
        {"prompt": "the dog", "right": " "},
        {"prompt": "the dog", "right": "\n☃"},
    ]
    table = Prompts.from_rows(rows).rows(model)
    expected = ["▁was", "▁4x", "<0xE2>", "▁", "<0x0A>"]
    assert [tokens for [tokens] in table["right_tokens"]] == expected


LOGITS = torch.tensor([0.0, 1.0, 2.0, 3.0, -1.0])


@pytest.mark.parametrize(
    ("right", "wrong", "prediction"),
    [
        ([3], [0, 1], 0),
        ([2], [3], 1),
        ([0, 2], [1], 0),
        ([3], [], 0),
        ([2], [], 1),
        ([0, 3], [], 0),
    ],
)
def test_answers_are_scored_as_by_hand(right, wrong, prediction):
    model = word_model([], d_vocab=5)
    rows = [{"prompt": [1, 2], "right": right, "wrong": wrong}]
    batches, batch = one_batch(model, rows)
    probs = LOGITS.double().softmax(-1)
    rest = [token for token in range(5) if token not in right]
    expected = [sum(probs[t] for t in right), sum(probs[t] for t in wrong or rest)]
    given = LOGITS.double()[None]
    assert batches.predictions(given, batch).tolist() == [prediction]
    torch.testing.assert_close(
        batches.log_probs(given, batch), torch.stack(expected).log()[None], rtol=0, atol=1e-12
    )


def test_a_tie_counts_as_wrong_and_so_does_a_number_that_is_none():
    model = word_model([], d_vocab=5)
    rows = [
        {"prompt": [1], "right": [0], "wrong": [1]},
        {"prompt": [1], "right": [0, 1], "wrong": []},
    ]
    batches, batch = one_batch(model, rows)
    tied = torch.tensor([[2.0, 2.0, 9.0, 0.0, 0.0], [1.0, 3.0, 3.0, 0.0, 0.0]])
    assert batches.predictions(tied, batch).tolist() == [1, 1]
    assert batches.predictions(torch.full((2, 5), torch.nan), batch).tolist() == [1, 1]
    right = torch.tensor([[3.0, 2.0, 9.0, 0.0, 0.0], [3.0, 3.0, 2.0, 0.0, 0.0]])
    assert batches.predictions(right, batch).tolist() == [0, 0]


def test_many_runs_are_scored_as_one_by_one(model):
    batches, batch = one_batch(model, ROWS)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 4, 3, model.cfg.d_vocab, generator=generator)
    together = batches.log_probs(logits, batch), batches.predictions(logits, batch)
    assert together[0].shape == (2, 4, 3, 2)
    for first in range(2):
        for second in range(4):
            alone = logits[first, second]
            torch.testing.assert_close(together[0][first, second], batches.log_probs(alone, batch))
            assert torch.equal(together[1][first, second], batches.predictions(alone, batch))


def test_log_probs_and_their_gradients_are_finite_where_an_answer_is_certain(model):
    batches, batch = one_batch(model, ROWS)
    logits = torch.zeros(3, model.cfg.d_vocab)
    logits[range(3), batch.answers[:, 0, 0]] = 200.0
    logits.requires_grad_()
    log_probs = batches.log_probs(logits, batch)
    log_probs.sum().backward()
    assert log_probs.isfinite().all()
    assert logits.grad.isfinite().all()


def test_the_gradient_of_the_rest_is_that_of_the_plain_formula():
    model = word_model([], d_vocab=5)
    batches, batch = one_batch(model, [{"prompt": [1], "right": [2]}])
    logits = LOGITS.double()[None].requires_grad_()
    batches.log_probs(logits, batch)[0, 1].backward()
    plain = LOGITS.double()[None].requires_grad_()
    (1 - plain.softmax(-1)[0, 2]).log().backward()
    torch.testing.assert_close(logits.grad, plain.grad)


def test_logits_need_their_batch_and_its_read_positions(model):
    batches, batch = one_batch(model, ROWS)
    with pytest.raises(HcLensError, match=r"expected the batch of prompts/all"):
        batches.predictions(torch.zeros(3, model.cfg.d_vocab))
    with pytest.raises(HcLensError, match=r"at the read position .* got \[3, 6, \d+\]"):
        batches.log_probs(torch.zeros(3, 6, model.cfg.d_vocab), batch)


@pytest.mark.parametrize("side", ["left", "right"])
def test_limits_cases_and_restore_work_as_for_a_task(model, side):
    rows = [
        {"prompt": "the " * length, "right": "dog", "case": f"c{length % 2}"}
        for length in range(1, 13)
    ]
    batches = Prompts.from_rows(rows).batches(model, padding_side=side, token_budget=20)
    assert len(batches) > 3
    lengths = batches._table["length"][:]
    assert [list(plan) for plan, _ in batches._plan] == bucket(lengths, 20, 0)
    restored = batches.restore([batch.mask.sum(-1) for batch in batches])
    assert restored.tolist() == list(range(2, 14))
    odd = batches.of_cases("c1")
    assert odd.rows.tolist() == [0, 2, 4, 6, 8, 10]
    assert [batch.tokens[range(len(batch)), batch.reads] for batch in odd]
    few = batches.limited(per_case=2)
    assert few.n_rows == 4
    assert few.fingerprint != batches.fingerprint
    assert type(few) is type(batches)
    for batch in few:
        part = batch.take([0])
        assert part.reads.tolist() == batch.reads[:1].tolist()
        assert torch.equal(part.answers, batch.answers[:1])
    limited = Prompts.from_rows(rows).batches(model, limit=5, seed=3)
    assert limited.rows.tolist() == batches.limited(5, seed=3).rows.tolist()


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": "the dogs near the cats"},
        {"right": ["was"]},
        {"wrong": ["are"]},
        {"counterfactual": "the cat near the cats"},
        {"case": "new"},
        {"side": "friendly"},
        {"read": 1},
    ],
)
def test_the_fingerprint_names_everything_that_decides_a_batch(model, change):
    rows = [{**row, "read": -1} for row in ROWS]
    first = Prompts.from_rows(rows).batches(model).fingerprint
    assert Prompts.from_rows(rows).batches(model).fingerprint == first
    changed = [{**rows[0], **change}, *rows[1:]]
    assert Prompts.from_rows(changed).batches(model).fingerprint != first


def test_the_fingerprint_names_the_settings(model):
    prompts = Prompts.from_rows(ROWS)
    settings = [
        {},
        {"padding_side": "left"},
        {"prepend_bos": False},
        {"seed": 1},
        {"token_budget": 99},
    ]
    assert len({prompts.batches(model, **each).fingerprint for each in settings}) == 5


def test_a_row_is_read_where_it_says(model):
    rows = [{"prompt": "the dog saw", "right": "the", "read": read} for read in (0, -2, None)]
    _, batch = one_batch(model, rows, padding_side="left")
    assert batch.reads.tolist() == [0, 2, 3]


def test_answers_that_begin_alike_count_once():
    model = word_model(WORDS)
    _, batch = one_batch(model, [{"prompt": "the", "right": ["dog", "dog saw"], "wrong": ["cat"]}])
    assert batch.answers.tolist() == [[ids(model, "dog"), ids(model, "cat")]]


def test_the_rows_are_shown_with_the_tokens_that_are_scored(model):
    table = Prompts.from_rows(ROWS).rows(model)
    assert table["right_tokens"].tolist() == [["was", "is"], ["were"], ["was"]]
    assert table["wrong_tokens"].tolist() == [["were"], ["was"], []]
    assert table["tokens"].tolist() == [6, 3, 6]
    assert table["prompt"].tolist() == [row["prompt"] for row in ROWS]
    assert table["side"].tolist() == ["adversarial", "friendly", "friendly"]


def test_a_model_without_a_tokenizer_reads_token_ids(model):
    bare = word_model([], d_vocab=9)
    bare.tokenizer = None
    rows = [{"prompt": [1, 2, 3], "right": 4, "wrong": 5, "counterfactual": [1, 2, 8]}]
    prompts = Prompts.from_rows(rows)
    batch = prompts.batches(bare)[0]
    assert batch.tokens.tolist() == [[1, 2, 3]]
    assert batch.answers.tolist() == [[[4], [5]]]
    assert prompts.rows(bare)["right_tokens"].tolist() == [["4"]]


def test_columns_go_by_the_names_that_are_given(model):
    rows = pd.DataFrame({"text": ["the dog"], "good": ["was"], "kind": ["x"], "case": ["unread"]})
    batches = Prompts.from_rows(rows, prompt="text", right="good", case="kind").batches(model)
    assert batches[0].cases == ("x",)
    unread = Prompts.from_rows(rows, prompt="text", right="good", case=None).batches(model)
    assert unread[0].cases == ("all",)


def test_without_cases_each_side_is_one_and_a_case_of_two_sides_has_none(model):
    rows = [
        {"prompt": "the dog", "right": "was", "side": "friendly"},
        {"prompt": "the cats", "right": "were", "side": "adversarial"},
        {"prompt": "the cat", "right": "was", "side": "friendly"},
    ]
    sides = Prompts.from_rows(rows).batches(model).sides
    assert sides == {"friendly": "friendly", "adversarial": "adversarial"}
    mixed = [{**row, "case": "x"} for row in rows]
    assert Prompts.from_rows(mixed).batches(model).sides == {"x": ""}
    assert Prompts.from_rows(mixed).batches(model, limit=1).sides == {"x": ""}


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_files_of_each_kind_give_the_same_batches(model, tmp_path, suffix):
    rows = pd.DataFrame([{**row, "read": -1} for row in ROWS])
    path = tmp_path / f"mine.{suffix}"
    if suffix == "csv":
        for column in ("right", "wrong"):
            rows[column] = rows[column].map(json.dumps)
        rows.to_csv(path, index=False)
    elif suffix == "jsonl":
        rows.to_json(path, orient="records", lines=True)
    else:
        rows.to_parquet(path)
    prompts = Prompts.from_files(path)
    assert (prompts.name, prompts.splits) == ("mine", ("all",))
    expected = Prompts.from_rows([{**row, "read": -1} for row in ROWS], name="mine")
    assert prompts.batches(model).fingerprint == expected.batches(model).fingerprint


ONE_OR_SEVERAL = [
    {"prompt": "the dog", "right": "is", "wrong": ""},
    {"prompt": "the cat", "right": ["is", "was"], "wrong": ["are"]},
    {"prompt": "the cats", "right": ("are", "were"), "wrong": "is"},
    {"prompt": "the dogs", "right": ["are"]},
]


@pytest.mark.parametrize("source", ["rows", "frame", "jsonl"])
def test_a_row_gives_one_answer_and_another_row_a_list(model, tmp_path, source):
    if source == "jsonl":
        path = tmp_path / "mine.jsonl"
        path.write_text("\n".join(map(json.dumps, ONE_OR_SEVERAL)))
        prompts = Prompts.from_files(path)
    else:
        rows = pd.DataFrame(ONE_OR_SEVERAL) if source == "frame" else ONE_OR_SEVERAL
        prompts = Prompts.from_rows(rows)
    table = prompts.rows(model)
    assert table["right"].tolist() == [["is"], ["is", "was"], ["are", "were"], ["are"]]
    assert table["wrong"].tolist() == [[], ["are"], ["is"], []]


def test_token_ids_too_are_one_or_several(model):
    rows = [{"prompt": [4, 5], "right": 6}, {"prompt": 7, "right": [8, 9]}]
    table = Prompts.from_rows(rows).rows(model)
    assert table["prompt"].tolist() == [[4, 5], [7]]
    assert table["right"].tolist() == [[6], [8, 9]]


def test_a_csv_cell_is_a_list_or_a_text(model, tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text('prompt,right,wrong\nthe dog,was,\nthe cats,"[""were"", ""are""]",[4]\n')
    table = Prompts.from_files(path).rows(model)
    assert table["right"].tolist() == [["was"], ["were", "are"]]
    assert table["wrong"].tolist() == [[], [4]]


def test_splits_are_chosen_as_those_of_a_task(model):
    prompts = Prompts.from_rows({"train": ROWS, "validation": ROWS[:1]})
    assert prompts.training_split() == "train"
    assert prompts.held_out_split() == "validation"
    assert prompts.split_named("dev") == "validation"
    assert prompts.batches(model, "dev").name == "prompts/validation"
    assert prompts.batches(model).n_rows == 3
    with pytest.raises(HcLensError, match=r"a split of prompts among .* got 'test'"):
        prompts.batches(model, "test")


@pytest.fixture(scope="module")
def masked():
    return hc.load(tiny.tiny_language_model("bert"), tokenizer=tiny.bert_tokenizer())


@pytest.mark.parametrize("mask", ["[MASK]", "<mask>"])
def test_a_masked_model_is_read_at_its_mask(masked, mask):
    rows = [
        {
            "prompt": f"the doctor {mask} the judge .",
            "right": ["saw", "helped"],
            "wrong": "slept",
            "counterfactual": f"the artist {mask} the judge .",
        },
        {
            "prompt": f"{mask} ran",
            "right": ["a"],
            "wrong": "the",
            "counterfactual": f"{mask} slept",
        },
    ]
    rows = [{**row, "wrong": [row["wrong"]]} for row in rows]
    batches, batch = one_batch(masked, rows)
    assert batch.reads.tolist() == [3, 1]
    assert batch.answers.tolist() == [
        [ids(masked, "saw", "helped"), [*ids(masked, "slept"), -1]],
        [[*ids(masked, "a"), -1], [*ids(masked, "the"), -1]],
    ]
    logits = masked(**batch.inputs)[range(2), batch.reads]
    assert batches.log_probs(logits, batch).shape == (2, 2)


@pytest.mark.parametrize(
    ("prompt", "read", "reads"),
    [
        ("the doctor saw the judge .", 2, 2),
        ("the [MASK] saw the [MASK] .", 2, 2),
        ("the [MASK] saw the <mask> .", -3, 5),
        ("the [MASK] saw the judge .", 5, 5),
        ("the judge saw the judge .", 5, 5),
    ],
)
def test_a_masked_model_is_read_where_a_row_says(masked, prompt, read, reads):
    row = {"prompt": prompt, "right": ["doctor", "artist"], "wrong": ["judge"], "read": read}
    _, batch = one_batch(masked, [row])
    assert batch.reads.tolist() == [reads]
    answers = [ids(masked, "doctor", "artist"), [*ids(masked, "judge"), -1]]
    assert batch.answers.tolist() == [answers]


def test_the_space_of_the_token_that_is_read_stays_before_the_answer():
    # RoBERTa's tokens have the space before their word, and its mask takes the space with it.
    tokenizer = tiny.byte_tokenizer(roberta=True)
    tokenizer.backend_tokenizer.post_processor = processors.RobertaProcessing(
        ("</s>", 2), ("<s>", 0), add_prefix_space=False, trim_offsets=False
    )
    tokenizer.add_special_tokens({"mask_token": AddedToken("<mask>", lstrip=True, special=True)})
    model = hc.load(tiny.tiny_language_model("roberta"), tokenizer=tokenizer)
    rows = [{"prompt": "a the a the", "right": "the", "read": read} for read in (1, 2, 5)]
    rows += [{"prompt": "a <mask> a <mask>", "right": "the", "read": 5}]
    rows += [{"prompt": "a the a <mask>", "right": "the"}]
    table = Prompts.from_rows(rows).rows(model)
    assert table["read"].tolist() == [1, 2, 5, 5, 5]
    assert table["right_tokens"].tolist() == [["the"], *[["Ġthe"]] * 4]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "the doctor ran", "right": "saw"}, r"one mask token .* row 0 \(0 in"),
        ({"prompt": "[MASK] [MASK]", "right": "saw"}, r"one mask token .* row 0 \(2 in"),
        ({"prompt": "the [MASK] ran", "right": "doctors"}, r"one token in the place .*'doctors'"),
        ({"prompt": "the man ran", "right": "saw", "read": 0}, r"one token in the place .*'saw'"),
        ({"prompt": "the [MASK] ran", "right": "xylophone"}, r"tokenizer knows .*'xylophone'"),
    ],
)
def test_what_a_masked_model_cannot_answer_is_refused(masked, row, message):
    with pytest.raises(HcLensError, match=message):
        Prompts.from_rows([row]).batches(masked)
    with pytest.raises(HcLensError, match=r"prepend_bos= for a causal model, got True"):
        Prompts.from_rows([row]).batches(masked, prepend_bos=True)


GOOD = {"prompt": "the dog", "right": "was", "wrong": "were"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": " "}, r"every row in prompts/all, got 1 row that is not so: row 1 \(' '\)"),
        ({"right": ""}, r"a right answer in every row .* row 1 \('the dog'\)"),
        ({"right": "was saw", "wrong": "was"}, r"row 1 \(right 'was saw' and wrong 'was'\)"),
        ({"right": "zebra"}, r"answers that the tokenizer knows .* row 1 \('zebra'\)"),
        ({"prompt": "the " * 80}, r"at most 80 tokens .* row 1 \(81 tokens\)"),
        ({"read": 3}, r"a read position inside .* row 1 \(3 of 3 tokens\)"),
        ({"read": -4}, r"a read position inside .* row 1 \(-4 of 3 tokens\)"),
        ({"counterfactual": "one day"}, r"counterfactual in every row or in none .* row 0"),
        ({"side": "hard"}, r"a side among \['friendly', 'adversarial'\] .* 'hard' in row 1"),
    ],
)
def test_a_row_that_cannot_be_scored_is_refused_with_its_number(model, row, message):
    with pytest.raises(HcLensError, match=message):
        Prompts.from_rows([GOOD, {**GOOD, **row}]).batches(model)


def test_a_counterfactual_of_another_length_is_refused_with_both_lengths(model):
    rows = [{**GOOD, "counterfactual": other} for other in ["the cat", *["the cat saw"] * 5]]
    message = r"5 rows that .* row 1 \(4 tokens for 3: 'the cat saw'\), row 2 .*, row 3 [^,]*;"
    with pytest.raises(HcLensError, match=message):
        Prompts.from_rows(rows).batches(model)


def test_an_answer_that_changes_the_tokens_of_its_prompt_is_refused():
    model = hc.load(tiny.tiny_language_model("gpt2"), tokenizer=tiny.byte_tokenizer())
    with pytest.raises(HcLensError, match=r"leave the tokens .* row 0 \('the' for 'see '\)"):
        Prompts.from_rows([{"prompt": "see ", "right": "the"}]).batches(model)
    batch = Prompts.from_rows([{"prompt": "see th", "right": "e"}], separator="")
    with pytest.raises(HcLensError, match=r"leave the tokens of the prompt"):
        batch.batches(model)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": [1, 99], "right": [1]}, r"token ids below \d+ .* row 0 \(99\)"),
        ({"prompt": [1, 2], "right": [99]}, r"the tokenizer knows .* row 0 \(99\)"),
        ({"prompt": [1, 2], "right": ["was"]}, r"answers of token ids for prompts of token ids"),
        ({"prompt": [], "right": [1]}, r"a prompt in every row"),
        ({"prompt": [1, 2], "right": [4.7]}, r"whole numbers as token ids .* row 0 \(4\.7\)"),
        ({"prompt": [1, 2], "right": 4, "wrong": 4.7}, r"whole numbers .* row 0 \(4\.7\)"),
        ({"prompt": [1, 2], "right": True}, r"whole numbers .* row 0 \(True\)"),
        ({"prompt": "the", "right": [False]}, r"whole numbers .* row 0 \(False\)"),
        ({"prompt": [1.5, 2], "right": 4}, r"got 1 row that is not so: row 0 \(1\.5\); correct"),
        ({"prompt": [True], "right": 4}, r"whole numbers .* row 0 \(True\)"),
        ({"prompt": ["the dog"], "right": 4}, r"whole numbers .* row 0 \('the dog'\)"),
        ({"prompt": [[1, 2]], "right": 4}, r"whole numbers .* row 0 \(\[1, 2\]\)"),
        (
            {"prompt": [1, 2], "right": 4, "counterfactual": [1, 2.5]},
            r"whole numbers .* row 0 \(2\.5\)",
        ),
    ],
)
def test_token_ids_that_cannot_be_used_are_refused(model, row, message):
    with pytest.raises(HcLensError, match=message):
        Prompts.from_rows([row]).batches(model)


def test_whole_numbers_that_pandas_wrote_as_floats_are_token_ids(model):
    rows = pd.DataFrame({"prompt": [[1.0, 2.0], [3.0]], "right": [4, 5], "wrong": [6, None]})
    table = Prompts.from_rows(rows).rows(model)
    assert table["prompt"].tolist() == [[1, 2], [3]]
    assert table["wrong"].tolist() == [[6], []]
    assert all(type(each) is int for row in (*table["prompt"], *table["wrong"]) for each in row)


@pytest.mark.parametrize(
    ("column", "like"),
    [
        ("wrongs", "wrong"),
        ("Wrong", "wrong"),
        ("cases", "case"),
        ("counter_factual", "counterfactual"),
        ("sides", "side"),
    ],
)
def test_a_column_that_is_very_like_another_and_unread_is_named_in_a_warning(column, like):
    rows = [{"prompt": "the dog", "right": "was", column: "were"}]
    message = rf"column '{column}' of prompts/all is not read, .* like '{like}'; rename it"
    with pytest.warns(UnreadColumnWarning, match=message):
        Prompts.from_rows(rows)


@pytest.mark.parametrize(
    ("column", "settings"),
    [
        ("wrongs", {"wrong": "wrongs"}),
        ("cases", {"side": "cases"}),
        ("wrongs", {"wrong": None}),
        ("weight", {}),
        ("base", {}),
    ],
)
def test_other_columns_stay_unread_in_silence(recwarn, column, settings):
    rows = [{"prompt": "the dog", "right": "was", column: "friendly"}]
    Prompts.from_rows(rows, **settings)
    both = {"wrong": "were", "case": "a", "side": ""}
    Prompts.from_rows([{**rows[0], **both}])
    assert not [found for found in recwarn if found.category is UnreadColumnWarning]


def test_settings_that_cannot_be_used_are_refused(model, gpt2):
    prompts = Prompts.from_rows([GOOD])
    with pytest.raises(HcLensError, match=r"no max_length for prompts, .* got 5"):
        prompts.batches(model, max_length=5)
    with pytest.raises(HcLensError, match=r"got 2; raise it, or shorten the prompts$"):
        prompts.batches(model, token_budget=2)
    with pytest.raises(HcLensError, match=r"a language model for prompts, got a classifier"):
        prompts.batches(gpt2)
    with pytest.raises(HcLensError, match=r"a TransformerLens model, got 'gpt2'"):
        prompts.batches("gpt2")
    with pytest.raises(HcLensError, match=r"the columns \['good'\] in prompts/all, got"):
        Prompts.from_rows([GOOD], right="good")
    with pytest.raises(HcLensError, match=r"a column of prompts among .* got 'label'"):
        Prompts.from_rows([GOOD], label="right")
    with pytest.raises(HcLensError, match=r"rows in every split of prompts, got none in \['all'\]"):
        Prompts.from_rows([])
    with pytest.raises(HcLensError, match=r"whole number as the read position .* 'last' in row 0"):
        Prompts.from_rows([{**GOOD, "read": "last"}]).batches(model)
    with pytest.raises(HcLensError, match=r"named prompts ioi, agreement, .* got 'mnli'"):
        Prompts.named("mnli")
