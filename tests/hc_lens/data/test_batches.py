from __future__ import annotations

import errno
import math
import socket
import subprocess
import sys
from itertools import permutations

import datasets
import jaxtyping
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hc_lens as hc
import hc_lens.data.batches as batches_module
from hc_lens.data.batches import MOST_PADDING, bucket, draw, named_batches, sample
from hc_lens.errors import HcLensError
from hc_lens.records import DamagedWarning, RecordsError, digest
from tests import tiny
from tests.damage import DAMAGES, swap
from tests.hc_lens.data.conftest import PAIRS

NLI = ("entailment", "neutral", "contradiction")


def everything(batches):
    return [(batch.tokens, batch.mask, batch.labels, batch.rows) for batch in batches]


def same(first, second):
    return len(first) == len(second) and all(
        torch.equal(a, b)
        for x, y in zip(first, second, strict=True)
        for a, b in zip(x, y, strict=True)
    )


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=80),
    st.integers(60, 400),
    st.integers(0, 3),
)
def test_buckets_hold_every_row_once_within_budget_and_padding(lengths, budget, seed):
    batches = bucket(lengths, budget, seed)
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    for batch in batches:
        sizes = [lengths[row] for row in batch]
        assert sizes == sorted(sizes)
        assert len(batch) * max(sizes) <= budget
        assert 1 - sum(sizes) / (len(batch) * max(sizes)) <= MOST_PADDING + 1e-9
    assert batches == bucket(lengths, budget, seed)


def test_buckets_close_at_the_budget_and_at_a_tenth_of_padding():
    by_budget = sorted(sorted(batch) for batch in bucket([4, 2, 4, 2, 2], 8, 0))
    assert by_budget == [[0, 2], [1, 3, 4]]
    # 9 + 10 of 20 tokens are real, 8 + 9 + 10 of 30 would be exactly nine tenths, 7 less.
    by_padding = sorted(sorted(batch) for batch in bucket([7, 9, 10, 10], 1000, 0))
    assert by_padding == [[0], [1, 2, 3]]


def test_the_order_of_batches_and_of_equal_rows_comes_from_the_seed():
    lengths = [3] * 50 + [9] * 50
    orders = [bucket(lengths, 45, seed) for seed in range(3)]
    assert orders[0] != orders[1] != orders[2]


def test_a_budget_below_the_longest_row_is_an_error(bert, task):
    with pytest.raises(HcLensError, match=r"longest row \(\d+ tokens\), got 5; raise it"):
        task.batches(bert, token_budget=5)


def test_a_smaller_sample_is_part_of_a_larger_one():
    small, large = sample(1000, 10, 4), sample(1000, 50, 4)
    assert set(small) < set(large)
    assert small == sorted(small)
    assert small != sample(1000, 10, 5)
    assert sample(7, None, 0) == sample(7, 99, 0) == list(range(7))


def test_tokens_are_those_of_the_tokenizer_without_further_padding(hooked, family, task):
    tokenizer = tiny.tokenizer_for(family)
    seen = []
    for batch in task.batches(hooked, token_budget=160):
        lengths = batch.mask.sum(dim=1).tolist()
        assert batch.tokens.shape == batch.mask.shape == (len(batch), max(lengths))
        for place, row in enumerate(batch.rows.tolist()):
            expected = tokenizer(PAIRS[row]["premise"], PAIRS[row]["hypothesis"])
            real = batch.mask[place].bool()
            assert batch.tokens[place][real].tolist() == expected["input_ids"]
            if "token_type_ids" in batch.inputs:
                types = batch.inputs["token_type_ids"][place][real]
                assert types.tolist() == expected["token_type_ids"]
        seen += batch.rows.tolist()
    assert sorted(seen) == list(range(len(PAIRS)))


def test_inputs_go_into_the_model_by_name_and_match_a_row_alone(hooked, task):
    batches = task.batches(hooked, token_budget=160)
    logits = batches.restore([hooked(**batch.inputs) for batch in batches])
    for row, pair in enumerate(PAIRS):
        alone = hooked(**hc.models.inputs.encode(hooked, (pair["premise"], pair["hypothesis"])))
        torch.testing.assert_close(logits[row], alone[0], atol=1e-10, rtol=0)


def test_only_encoders_with_token_types_get_them(bert, gpt2, task):
    assert set(next(iter(task.batches(bert))).inputs) == {
        "input",
        "one_zero_attention_mask",
        "token_type_ids",
    }
    assert set(next(iter(task.batches(gpt2))).inputs) == {"input", "attention_mask"}


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_decoder_is_padded_on_the_side_asked_for(gpt2, task, side):
    batch = max(task.batches(gpt2, padding_side=side, token_budget=160), key=len)
    width, lengths = batch.mask.shape[1], batch.mask.sum(dim=1)
    assert min(lengths) < width
    for mask, length in zip(batch.mask, lengths, strict=True):
        pads = mask[: width - length] if side == "left" else mask[length:]
        assert pads.sum() == 0


def test_an_encoder_is_not_padded_on_the_left(bert, task):
    message = "padding_side 'right' on this model, which is an encoder, got 'left'; leave it out"
    with pytest.raises(HcLensError, match=message):
        task.batches(bert, padding_side="left")


def test_a_side_that_is_none_is_refused_with_those_there_are(gpt2, task, monkeypatch):
    # A user's session has no type checks at run time.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(HcLensError, match="padding_side 'right' or 'left', got 'middle'; leave it"):
        task.batches(gpt2, padding_side="middle")


def test_a_second_pass_gives_the_same_batches(bert, task):
    batches = task.batches(bert, token_budget=40)
    assert same(everything(batches), everything(batches))
    assert len(batches) == len(everything(batches))


def test_one_seed_gives_one_order_and_another_seed_another(bert):
    rows = [{"text": "the judge ran", "label": "entailment"}] * 64
    task = hc.Task.from_rows(rows, columns="text", labels=NLI)
    first, again, other = (task.batches(bert, seed=s, token_budget=20) for s in (0, 0, 1))
    assert same(everything(first), everything(again))
    assert not same(everything(first), everything(other))


def test_restore_undoes_the_order(bert, task):
    batches = task.batches(bert, limit=4, seed=3, token_budget=30)
    assert batches.n_rows == 4
    restored = batches.restore([batch.rows for batch in batches])
    assert restored.tolist() == batches.rows.tolist() == sorted(restored.tolist())
    labels = batches.restore([batch.labels for batch in batches])
    assert labels.tolist() == [task.dataset()["label"][row] for row in restored.tolist()]


def test_restore_of_a_part_is_an_error(bert, task):
    batches = task.batches(bert, token_budget=30)
    with pytest.raises(HcLensError, match="each of the 6 rows of rows/train, got"):
        batches.restore([next(iter(batches)).rows])
    with pytest.raises(HcLensError, match="got 0 in 0 batches"):
        batches.restore([])


def test_a_row_longer_than_the_context_is_an_error(bert):
    rows = [{"text": "the " * n, "label": "neutral"} for n in (3, 50, 60)]
    task = hc.Task.from_rows(rows, columns="text", labels=NLI)
    with pytest.raises(HcLensError, match=r"at most 40 tokens.*got 2 longer.*62.*max_length=40"):
        task.batches(bert)
    cut = task.batches(bert, max_length=40)
    assert cut.n_truncated == 2
    assert max(batch.tokens.shape[1] for batch in cut) == 40


def test_truncation_is_that_of_the_tokenizer(bert, task):
    batches = task.batches(bert, max_length=9)
    tokenizer = tiny.bert_tokenizer()
    texts = [(row["premise"], row["hypothesis"]) for row in PAIRS]
    assert batches.n_truncated == sum(len(tokenizer(*pair)["input_ids"]) > 9 for pair in texts) == 4
    for batch in batches:
        for place, row in enumerate(batch.rows.tolist()):
            expected = tokenizer(*texts[row], truncation=True, max_length=9)
            real = batch.mask[place].bool()
            assert batch.tokens[place][real].tolist() == expected["input_ids"]
            assert (
                batch.inputs["token_type_ids"][place][real].tolist() == expected["token_type_ids"]
            )


@pytest.mark.parametrize("length", [4, 41])
def test_a_max_length_that_cannot_be_is_an_error(bert, task, length):
    with pytest.raises(HcLensError, match=rf"max_length from 5 .* to 40 .*, got {length}"):
        task.batches(bert, max_length=length)


@pytest.mark.parametrize("setting", [{"limit": 0}, {"token_budget": -1}, {"max_length": 0}])
def test_a_number_below_one_is_an_error(bert, task, setting):
    with pytest.raises(HcLensError, match=f"expected {next(iter(setting))} as a whole number"):
        task.batches(bert, **setting)


def test_a_decoder_reads_a_pair_as_hugging_face_does_or_with_a_separator(gpt2):
    task = hc.Task.from_rows(
        [{"a": "the judge", "b": "ran", "label": "neutral"}], columns=("a", "b"), labels=NLI
    )
    tokenizer = tiny.byte_tokenizer()
    (plain,) = task.batches(gpt2)
    (joined,) = task.batches(gpt2, separator=" , ")
    assert plain.tokens[0].tolist() == tokenizer("the judgeran")["input_ids"]
    assert joined.tokens[0].tolist() == tokenizer("the judge , ran")["input_ids"]


def test_a_separator_has_no_place_in_an_encoder_or_between_single_texts(bert, gpt2, task):
    with pytest.raises(HcLensError, match="an encoder, which has its own"):
        task.batches(bert, separator=" ")
    single = hc.Task.from_rows([{"text": "a", "label": "neutral"}], columns="text", labels=NLI)
    with pytest.raises(HcLensError, match="single texts"):
        single.batches(gpt2, separator=" ")


@pytest.mark.parametrize("text", ["", " "])
def test_a_row_without_text_is_an_error_that_names_it(gpt2, text):
    task = hc.Task.from_rows(
        [{"text": "a", "label": "neutral"}, {"text": text, "label": "neutral"}],
        columns="text",
        labels=NLI,
    )
    with pytest.raises(
        HcLensError, match=r"expected text in column 'text'.*got ' ?' in row 1 \(and 0 more\)"
    ):
        task.batches(gpt2)


def test_a_model_without_tokenizer_is_an_error(task):
    model = hc.load(tiny.tiny_hf("bert"))
    with pytest.raises(HcLensError, match=r"expected a tokenizer.*tokenizer=\.\.\. to hc\.load"):
        task.batches(model)


def test_batches_are_made_for_a_model_not_for_its_name(task):
    with pytest.raises(HcLensError, match=r"TransformerLens model.*'bert-base'.*hc\.load"):
        task.batches("bert-base")


def test_a_checkpoint_without_label_names_needs_them_and_says_so(task):
    names = {place: f"LABEL_{place}" for place in range(3)}
    model = hc.load(tiny.tiny_hf("bert", labels=names), tokenizer=tiny.bert_tokenizer())
    with pytest.raises(HcLensError, match=r"placeholders \['LABEL_0'.*labels=\[\.\.\.\]"):
        task.batches(model)
    labels = ["neutral", "contradiction", "entailment"]
    checkpoint = tiny.tiny_hf("bert", labels=names)
    named = hc.load(checkpoint, tokenizer=tiny.bert_tokenizer(), labels=labels)
    assert task.batches(named).to_task.tolist() == [1, 2, 0]


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_predictions_do_not_depend_on_the_order_of_a_checkpoints_labels(bert, task, order):
    permuted = tiny.tiny_hf("bert")
    with torch.no_grad():
        permuted.classifier.weight.copy_(permuted.classifier.weight[list(order)])
        permuted.classifier.bias.copy_(permuted.classifier.bias[list(order)])
    permuted.config.id2label = {place: NLI[label] for place, label in enumerate(order)}
    model = hc.load(permuted, tokenizer=tiny.bert_tokenizer())
    plain, moved = task.batches(bert), task.batches(model)
    for first, second in zip(plain, moved, strict=True):
        a, b = bert(**first.inputs), model(**second.inputs)
        assert plain.predictions(a).tolist() == moved.predictions(b).tolist()
        torch.testing.assert_close(plain.log_probs(a), moved.log_probs(b))


def test_a_two_way_task_takes_the_argmax_before_it_merges_labels(bert):
    rows = [{"text": "a", "label": "entailment"}]
    task = hc.Task.from_rows(rows, columns="text", labels=("entailment", "non-entailment"))
    batches = task.batches(bert)
    probabilities = torch.tensor([[0.4, 0.3, 0.3], [0.2, 0.5, 0.3], [0.1, 0.2, 0.7]])
    logits = probabilities.log() + 5
    # In the first row non-entailment has 0.6 in sum, yet entailment is the largest label.
    assert batches.predictions(logits).tolist() == [0, 1, 1]
    expected = torch.tensor([[0.4, 0.6], [0.2, 0.8], [0.1, 0.9]])
    torch.testing.assert_close(batches.log_probs(logits).exp(), expected)


def test_log_probs_stay_finite_where_probabilities_vanish(bert):
    task = hc.Task.from_rows(
        [{"text": "a", "label": "entailment"}],
        columns="text",
        labels=("entailment", "non-entailment"),
    )
    logits = torch.tensor([[0.0, -2000.0, -2000.0]])
    expected = torch.tensor([[0.0, math.log(2) - 2000]])
    torch.testing.assert_close(task.batches(bert).log_probs(logits), expected)


def test_logits_of_another_width_are_an_error(bert, task):
    with pytest.raises(HcLensError, match="logits of 3 labels for rows/train, got 2"):
        task.batches(bert).predictions(torch.zeros(1, 2))


def test_a_task_without_labels_gives_batches_without_predictions(bert):
    task = hc.Task.from_rows([{"text": "the judge"}], columns="text", label=None)
    batches = task.batches(bert)
    (batch,) = batches
    assert batch.labels.tolist() == [-1]
    with pytest.raises(HcLensError, match="on a task with labels"):
        batches.predictions(torch.zeros(1, 3))


def test_cases_go_with_their_rows(bert):
    rows = [{"text": "the " * n, "label": "neutral", "kind": f"k{n}"} for n in (9, 2, 30, 4)]
    task = hc.Task.from_rows(rows, columns="text", labels=NLI, case="kind")
    found = {
        row: case
        for batch in task.batches(bert)
        for row, case in zip(batch.rows.tolist(), batch.cases, strict=True)
    }
    assert found == {0: "k9", 1: "k2", 2: "k30", 3: "k4"}


def test_tokens_are_read_from_the_cache_the_second_time(bert, task, cache, monkeypatch):
    first = everything(task.batches(bert, token_budget=30))
    files = sorted((cache / "hc_lens").rglob("*.arrow"))
    monkeypatch.setattr(type(bert.tokenizer), "__call__", None)
    assert same(first, everything(task.batches(bert, token_budget=30)))
    assert sorted((cache / "hc_lens").rglob("*.arrow")) == files
    assert len(files) == 1


def test_what_a_dead_process_left_in_the_cache_is_removed_when_tokens_are_read(bert, task, cache):
    task.batches(bert)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left = cache / "hc_lens" / ".unfinished" / f"{socket.gethostname()}@{ended.pid}-{'0' * 32}"
    left.mkdir()
    task.batches(bert)
    assert not left.exists()


def test_each_version_of_datasets_has_tokens_of_its_own(bert, task, cache, monkeypatch):
    first = everything(task.batches(bert, token_budget=30))
    monkeypatch.setattr(batches_module, "datasets_version", "0")
    assert same(first, everything(task.batches(bert, token_budget=30)))
    assert len(list((cache / "hc_lens").rglob("*.arrow"))) == 2


def edit_ids(path):
    """Write other token ids into a table that can be read."""
    table = datasets.Dataset.from_file(str(path)).with_format("arrow")[:]
    ids = pa.array([[5] * len(row) for row in table["input_ids"].to_pylist()], pa.list_(pa.int32()))
    changed = table.set_column(table.column_names.index("input_ids"), "input_ids", ids)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, changed.schema) as stream:
        stream.write_table(changed)


@pytest.mark.parametrize("damage", [*DAMAGES, edit_ids])
def test_damaged_tokens_are_made_again(bert, task, cache, damage):
    first = [
        {name: tensor.clone() for name, tensor in batch.inputs.items()}
        for batch in task.batches(bert, token_budget=30)
    ]
    (file,) = (cache / "hc_lens").rglob("*.arrow")
    damage(file)
    with pytest.warns(DamagedWarning, match=r"tokens\.arrow is damaged"):
        again = task.batches(bert, token_budget=30)
    for batch, inputs in zip(again, first, strict=True):
        assert all(torch.equal(batch.inputs[name], inputs[name]) for name in inputs)


def test_tokens_that_changed_places_are_made_again(bert, task, cache):
    one, other = task.batches(bert), task.batches(bert, max_length=8)
    lengths = [batches.tokens.shape[1] for batches in (one[0], other[0])]
    del one, other
    swap(*(file.parent for file in (cache / "hc_lens").rglob("*.arrow")))
    with pytest.warns(DamagedWarning):
        again = [task.batches(bert)[0], task.batches(bert, max_length=8)[0]]
    assert [batch.tokens.shape[1] for batch in again] == lengths


def test_a_full_cache_is_named(bert, task, cache, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("hc_lens.records._write_flushed", full)
    message = rf"token ids to '{cache}/hc_lens', got .*No space left on device; make room there"
    with pytest.raises(RecordsError, match=message):
        task.batches(bert)


def test_a_cache_that_can_only_be_read_is_read(bert, task, cache, monkeypatch):
    first = everything(task.batches(bert))

    def refuse(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("hc_lens.records._write_flushed", refuse)
    assert same(first, everything(task.batches(bert)))


def test_every_setting_that_matters_changes_the_fingerprint(bert, gpt2, task):
    order = dict(enumerate(["neutral", "entailment", "contradiction"]))
    renamed = hc.load(tiny.tiny_hf("bert", labels=order), tokenizer=tiny.bert_tokenizer())
    prints = {
        name: task.batches(model, **settings).fingerprint
        for name, model, settings in [
            ("plain", bert, {}),
            ("seed", bert, {"seed": 1}),
            ("limit", bert, {"limit": 3}),
            ("length", bert, {"max_length": 9}),
            ("budget", bert, {"token_budget": 40}),
            ("labels", renamed, {}),
            ("tokenizer", gpt2, {}),
            ("side", gpt2, {"padding_side": "left"}),
            ("separator", gpt2, {"separator": " "}),
        ]
    }
    assert len(set(prints.values())) == len(prints)
    assert task.batches(bert).fingerprint == prints["plain"]


def test_a_changed_row_changes_the_fingerprint(bert):
    def fingerprint(**change):
        rows = [{**PAIRS[0], "kind": "a"} | change, {**PAIRS[1], "kind": "a"}]
        columns = ("premise", "hypothesis")
        return (
            hc.Task.from_rows(rows, columns=columns, labels=NLI, case="kind")
            .batches(bert)
            .fingerprint
        )

    changes = [{}, {"premise": "the"}, {"label": "entailment"}, {"kind": "b"}]
    assert len({fingerprint(**change) for change in changes}) == 4
    moved = {"premise": "the doctor saw the judge . the", "hypothesis": "judge ran"}
    assert fingerprint(**moved) != fingerprint()


def test_the_fingerprint_does_not_depend_on_what_the_tokenizer_did_before(bert, task):
    used = tiny.bert_tokenizer()
    used(["the judge"], truncation=True, max_length=4, padding="max_length")
    model = hc.load(tiny.tiny_hf("bert"), tokenizer=used)
    assert task.batches(model).fingerprint == task.batches(bert).fingerprint
    assert digest("ab", "c") != digest("a", "bc")


def test_a_cache_that_cannot_be_written_is_an_error(bert, task, cache):
    cache.write_text("a file where the folder should be")
    with pytest.raises(HcLensError, match="HF_DATASETS_CACHE"):
        task.batches(bert)


def test_batches_tell_what_they_hold(bert, task):
    text = repr(task.batches(bert, max_length=9))
    assert text.startswith("Batches(rows/train: 6 rows in ")
    assert text.endswith("% padding, 4 truncated, 0 dropped)")
    assert repr(task) == (
        "Task(rows: premise + hypothesis -> ['entailment', 'neutral', 'contradiction']; train 6)"
    )


def test_less_than_a_tenth_of_mnli_is_padding(shared_data, bert):
    task = hc.Task.named("mnli", shared_data)
    batches = task.batches(bert, "validation_matched", limit=500, max_length=40)
    padded = sum(batch.mask.numel() for batch in batches)
    real = sum(int(batch.mask.sum()) for batch in batches)
    assert batches.padding == pytest.approx(1 - real / padded)
    assert batches.padding < 0.1


def own_rows(n: int = 40) -> hc.Task:
    """Rows of one to nine words in three cases, as a task."""
    rows = [
        {"text": "the " * (1 + 7 * row % 9), "label": NLI[row % 3], "kind": f"k{row % 3}"}
        for row in range(n)
    ]
    return hc.Task.from_rows(rows, columns="text", labels=NLI, case="kind")


def test_taking_rows_of_a_batch_keeps_their_width_and_everything_that_goes_with_them(bert):
    batch = own_rows().batches(bert, token_budget=60)[0]
    part = batch.take([2, 0])
    assert part.rows.tolist() == [batch.rows[2], batch.rows[0]]
    assert part.labels.tolist() == [batch.labels[2], batch.labels[0]]
    assert part.cases == (batch.cases[2], batch.cases[0])
    for name, tensor in part.inputs.items():
        assert torch.equal(tensor, batch.inputs[name][[2, 0]])


def rows_by_hand(batches, wanted: set[int]):
    """The batches cut to some rows with `Batch.take`, without those that are left empty."""
    chosen = [
        batch.take([at for at, row in enumerate(batch.rows.tolist()) if row in wanted])
        for batch in batches
        if wanted & set(batch.rows.tolist())
    ]
    return everything(chosen)


def test_limited_batches_hold_the_sampled_rows_in_their_old_order_and_width(bert):
    batches = own_rows().batches(bert, token_budget=60)
    few = batches.limited(7)
    wanted = set(batches.rows[sample(40, 7, seed=0)].tolist())
    assert same(everything(few), rows_by_hand(batches, wanted))
    assert few.n_rows == 7
    assert few.name == batches.name
    assert set(few.rows.tolist()) == wanted
    assert few.rows.tolist() == sorted(wanted)
    logits = [batch.rows[:, None].double() for batch in few]
    assert few.restore(logits).flatten().tolist() == sorted(wanted)


def test_a_sample_does_not_depend_on_how_the_rows_are_batched(bert):
    one, other = own_rows().batches(bert, token_budget=60), own_rows().batches(bert, seed=5)
    assert one.limited(9).rows.tolist() == other.limited(9).rows.tolist()
    assert one.limited(9).rows.tolist() != one.limited(9, seed=1).rows.tolist()


def test_a_limit_that_is_no_smaller_gives_the_batches_themselves(bert):
    batches = own_rows().batches(bert)
    assert batches.limited(40) is batches
    assert batches.limited(None) is batches
    for wrong in (0, -1, True):
        with pytest.raises(HcLensError, match="expected limit as a whole number of at least 1"):
            batches.limited(wrong)


def in_cases(batches) -> dict[str, list[int]]:
    """The rows of each case."""
    found: dict[str, list[int]] = {}
    for batch in batches:
        for row, case in zip(batch.rows.tolist(), batch.cases, strict=True):
            found.setdefault(case, []).append(row)
    return {case: sorted(rows) for case, rows in found.items()}


def test_a_limit_per_case_draws_evenly_over_cases_and_all_rows_of_a_small_one(bert):
    few = own_rows().batches(bert, limit_per_case=4, token_budget=60)
    assert {case: len(rows) for case, rows in in_cases(few).items()} == {"k0": 4, "k1": 4, "k2": 4}
    assert few.rows.tolist() == sorted(few.rows.tolist())
    # Of the 40 rows 14 are of the case k0, 13 of each other.
    most = own_rows().batches(bert, limit_per_case=14)
    assert most.n_rows == 40
    nearly = in_cases(own_rows().batches(bert, limit_per_case=13))
    assert {case: len(rows) for case, rows in nearly.items()} == {"k0": 13, "k1": 13, "k2": 13}
    assert set(in_cases(few)["k0"]) < set(nearly["k0"])
    other = own_rows().batches(bert, limit_per_case=4, seed=1)
    assert in_cases(other) != in_cases(few)


def test_other_cases_do_not_change_the_rows_that_are_drawn_of_a_case():
    alone = draw(["x"] * 9, seed=3, limit_per_case=4)
    assert len(alone) == 4
    mixed = draw(["y", "x"] * 9, seed=3, limit_per_case=4)
    assert [row // 2 for row in mixed if row % 2] == alone
    assert [row // 2 for row in mixed if row % 2 == 0] != alone


def test_made_batches_are_limited_per_case_as_they_are_when_they_are_made(bert):
    batches = own_rows().batches(bert, token_budget=60)
    few = batches.limited(per_case=4)
    made = own_rows().batches(bert, limit_per_case=4)
    assert few.rows.tolist() == made.rows.tolist()
    assert same(everything(few), rows_by_hand(batches, set(made.rows.tolist())))
    assert batches.limited(per_case=14) is batches


def test_only_one_of_the_two_limits_is_taken(bert):
    for ask in (
        lambda: own_rows().batches(bert, limit=8, limit_per_case=2),
        lambda: own_rows().batches(bert).limited(8, per_case=2),
    ):
        with pytest.raises(HcLensError, match=r"for all rows or one for each case, got both \(8 a"):
            ask()
    with pytest.raises(HcLensError, match="expected limit_per_case as a whole number"):
        own_rows().batches(bert, limit_per_case=0)


def test_an_argument_that_batches_do_not_have_is_refused(bert):
    with pytest.raises(TypeError, match="seperator"):
        own_rows().batches(bert, seperator=" ")


def test_the_rows_of_some_cases_are_batches_of_their_own(bert):
    batches = own_rows().batches(bert, token_budget=60)
    part = batches.of_cases("k2", "k0")
    wanted = {row for row in range(40) if row % 3 != 1}
    assert same(everything(part), rows_by_hand(batches, wanted))
    assert part.name == f"{batches.name}/k2+k0"
    assert part.n_rows == len(wanted)
    assert {case for batch in part for case in batch.cases} == {"k0", "k2"}
    assert part.labels == batches.labels
    logits = torch.zeros(1, 3)
    assert torch.equal(part.log_probs(logits), batches.log_probs(logits))
    for cases in (["k9"], []):
        with pytest.raises(HcLensError, match=r"expected a case among \['k0', 'k1', 'k2'\]"):
            batches.of_cases(*cases)


def test_chosen_rows_have_a_fingerprint_of_their_own(bert):
    batches = own_rows().batches(bert)
    made = [batches, batches.limited(7), batches.limited(8), batches.of_cases("k1")]
    assert len({each.fingerprint for each in made}) == 4
    assert batches.limited(7).fingerprint == batches.limited(7).fingerprint
    assert batches.of_cases("k1").limited(3).n_rows == 3


def test_batches_go_by_the_names_they_are_given_or_by_their_own(bert, task):
    batches = task.batches(bert)
    assert named_batches(batches) == {"rows/train": batches}
    assert named_batches({"dev": batches}) == {"dev": batches}
    for wrong in ([1, 2], "mnli", {"dev": task}):
        with pytest.raises(HcLensError, match=r"batches by name.*got a (list|str|Task)"):
            named_batches(wrong)  # type: ignore[arg-type]
    with pytest.raises(HcLensError, match="rows in every dataset, got no dataset"):
        named_batches({})
