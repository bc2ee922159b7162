from __future__ import annotations

import random

import torch
from transformers import BertConfig, BertForSequenceClassification

from hc_lens.organism import grammar
from hc_lens.organism.train import matching, pretrain, random_pair
from hc_lens.organism.vocabulary import SPECIAL, WORDS


def ids(text):
    return [WORDS.index(word) for word in text.split()]


def test_a_word_matches_when_it_stands_in_the_other_sentence():
    inputs, targets = matching([(ids("the pilot smiled"), ids("the cook smiled")), (ids("or"), [])])
    assert targets.tolist() == [[0, 1, 0, 1, 0, 1, 0, 1, 0], [0] * 9]
    assert inputs["token_type_ids"].tolist()[0] == [0, 0, 0, 0, 0, 1, 1, 1, 1]
    assert inputs["attention_mask"].sum(-1).tolist() == [9, 4]
    assert inputs["input_ids"][0, [0, 4, 8]].tolist() == [2, 3, 3]


def test_random_pairs_have_no_special_tokens_and_share_about_half_of_the_words():
    rng = random.Random(0)
    pairs = [random_pair(rng) for _ in range(500)]
    assert all(word >= len(SPECIAL) for pair in pairs for side in pair for word in side)
    shared = [word in first for first, second in pairs for word in second]
    assert 0.45 < sum(shared) / len(shared) < 0.65


def test_pretraining_is_decided_by_its_seed_and_leaves_the_global_generator_alone():
    def trained(seed):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            config = BertConfig(
                vocab_size=len(WORDS),
                **dict.fromkeys(("hidden_size", "intermediate_size"), 16),
                num_hidden_layers=1,
                num_attention_heads=2,
                max_position_embeddings=64,
                **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
            )
            model = BertForSequenceClassification(config)
        pretrain(model, grammar.in_domain(0, 20), seed, steps=3, warmup_steps=1, batch_size=4)
        return model.bert.embeddings.word_embeddings.weight

    state = torch.get_rng_state()
    first, again, other = trained(1), trained(1), trained(2)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
