from __future__ import annotations

from collections import Counter

import pytest
import torch

from hc_lens.data.generated import agreement
from hc_lens.data.prompts import GENERATED, Prompts
from hc_lens.errors import HcLensError
from tests.hc_lens.data.generated.conftest import WORDS
from tests.hc_lens.data.words import word_model


@pytest.mark.parametrize("name", GENERATED)
def test_rows_follow_from_the_seed_and_no_prompt_is_in_both_splits(model, name):
    prompts = Prompts.named(name, n=300)
    train, held_out = (prompts.rows(model, split) for split in prompts.splits)
    assert prompts.splits == ("train", "validation")
    assert len(train) == len(held_out) == 300
    keys = [(str(row.prompt), str(row.right)) for row in train.itertuples()]
    assert len(set(keys)) == 300
    again = Prompts.named(name, n=300).rows(model, "train")
    assert again.equals(train)
    other = Prompts.named(name, n=300, seed=1).rows(model, "train")
    assert not other["prompt"].equals(train["prompt"])
    trained = {str(prompt) for prompt in (*train["prompt"], *other["prompt"])}
    assert trained.isdisjoint(map(str, held_out["prompt"]))


@pytest.mark.parametrize("name", GENERATED)
def test_cases_are_equally_frequent_and_batches_are_whole(model, name):
    batches = Prompts.named(name, n=280).batches(model, "validation")
    counts = Counter(case for batch in batches for case in batch.cases)
    assert max(counts.values()) - min(counts.values()) <= 1
    batch = batches[0]
    reads = range(len(batch)), batch.reads
    assert torch.equal(batch.counterfactual["attention_mask"], batch.mask)
    assert torch.isfinite(batches.log_probs(model(**batch.inputs)[reads], batch)).all()


def test_a_larger_sample_begins_with_a_smaller_one(model):
    small, large = (Prompts.named("ioi", n=n).rows(model, "train") for n in (20, 60))
    assert large[:20].equals(small)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ioi", r"at least 5 names that are one token .* got \['Tom', 'Sue'\]"),
        ("agreement", r"at least 2 nouns whose plural .* got \[\('dog', 'dogs'\)\]"),
        ("induction", r"vocabulary for at least 8 tokens, got a causal one with 80 and 7"),
    ],
)
def test_a_vocabulary_that_is_too_small_is_refused(name, message):
    model = word_model(["They", "saw", "Tom", "Sue", "dog", "dogs", "cat"])
    with pytest.raises(HcLensError, match=message):
        Prompts.named(name).batches(model)


def test_more_rows_than_there_are_is_an_error():
    others = {*agreement.NOUNS} - {"dog", "cat"}
    model = word_model([word for word in WORDS if word not in others])
    with pytest.raises(HcLensError, match=r"got n=100000 and only about \d+ different ones; lower"):
        Prompts.named("agreement", n=100_000).batches(model)
    with pytest.raises(HcLensError, match=r"expected n as a whole number of at least 1, got 0"):
        Prompts.named("ioi", n=0)


@pytest.mark.parametrize("name", ["ioi", "agreement-ood"])
def test_a_masked_model_gets_whole_sentences_and_is_read_at_the_mask(name):
    model = word_model([*WORDS, "there", "ball"], attention_dir="bidirectional")
    batches = Prompts.named(name, n=60).batches(model, "validation")
    for batch in batches:
        read = batch.tokens[range(len(batch)), batch.reads]
        assert (read == model.tokenizer.mask_token_id).all()
        assert (batch.tokens == model.tokenizer.convert_tokens_to_ids(".")).any(-1).all()
    with pytest.raises(HcLensError, match=r"a causal model .* got a masked language model"):
        Prompts.named("induction").batches(model)
