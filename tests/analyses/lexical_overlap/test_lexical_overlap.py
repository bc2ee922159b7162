"""Scores of heads against hand-made models, a slow loop and known numbers."""

from __future__ import annotations

import math
import weakref

import pandas as pd
import pytest
import torch

import hc_lens as hc
from hc_lens.analyses import lexical_overlap
from hc_lens.analyses.lexical_overlap import STOP_WORDS, WordRule, role_of, scores
from hc_lens.attention.patterns import word_batches
from hc_lens.errors import HcLensError
from hc_lens.models.inputs import encode, is_encoder
from tests import tiny
from tests.handmade import handmade_model

SENTENCES = [
    ("the doctors saw a judge", "a judge saw the doctors"),
    ("old artists called a young banker", "a young banker called old artists"),
    ("the lawyer ran near a student", "a student ran near the lawyer"),
    ("if students slept , a judge ran", "a judge ran , if students slept"),
]
SHORT = [
    ("the saws ran .", "the saws ran a"),
    ("a the ran", "the a , the"),
    ("near the a", "saw near ."),
    ("the ran", "a saw"),
    ("a a ran", "the a"),
]
OTHERS = ("previous", "next", "separator", "first", "self", "repeat")


def task(pairs) -> hc.Task:
    rows = [{"premise": a, "hypothesis": b} for a, b in pairs]
    return hc.Task.from_rows({"train": rows}, columns=("premise", "hypothesis"), label=None)


def table_of(model, pairs, split: dict | None = None, **settings) -> pd.DataFrame:
    rows = word_batches(model, task(pairs), **(split or {}))
    return scores(model, rows, progress=False, **{"n_bootstrap": 50, **settings})


@pytest.fixture(scope="module")
def handmade() -> pd.DataFrame:
    """Scores of the model whose heads are set by hand; plurals are split in two pieces."""
    return table_of(handmade_model(), SENTENCES)


def cell(table: pd.DataFrame, unit: str, score: str) -> pd.Series:
    (row,) = (row for _, row in table[(table.unit == unit) & (table.score == score)].iterrows())
    return row


@pytest.mark.parametrize(
    ("unit", "score"), [("L0.H0", "overlap"), ("L0.H1", "previous"), ("L0.H2", "separator")]
)
def test_a_head_made_for_a_role_scores_one_there_and_near_chance_elsewhere(handmade, unit, score):
    own = cell(handmade, unit, score)
    assert own.value == pytest.approx(1, abs=1e-3)
    assert own.role == score
    assert own.reach == "all"
    others = handmade[(handmade.unit == unit) & (handmade.n > 0)]
    others = others[others.score.isin([*OTHERS, "overlap"]) & (others.score != score)]
    assert len(others) == 5  # no word occurs twice in a sentence
    assert (others.value < others.chance + 0.05).all()


def test_both_ways_of_a_hand_made_overlap_head_score_one(handmade):
    for way in ("overlap_to_hypothesis", "overlap_to_premise"):
        assert cell(handmade, "L0.H0", way).value == pytest.approx(1, abs=1e-3)


def test_swapping_the_hypotheses_takes_identity_away_and_leaves_position():
    pairs = [
        ("doctor saw artist", "artist saw doctor"),
        ("banker helped lawyer", "lawyer helped banker"),
    ]
    table = table_of(handmade_model(), pairs)
    overlap, previous = cell(table, "L0.H0", "overlap"), cell(table, "L0.H1", "previous")
    assert overlap.value == pytest.approx(1, abs=1e-3)
    # Without its word, a premise word sees itself, 3 words and [SEP] alike; a hypothesis word
    # sees [CLS] as well.
    assert overlap.permuted == pytest.approx((1 / 5 + 1 / 6) / 2, abs=1e-3)
    assert previous.value == pytest.approx(1, abs=1e-3)
    assert previous.permuted == pytest.approx(1, abs=1e-3)


def test_a_uniform_head_scores_chance():
    model = handmade_model()
    with torch.no_grad():
        model.blocks[0].attn.W_Q.zero_()
        model.blocks[0].attn.b_Q.zero_()
    table = table_of(model, SENTENCES)
    known = table[table.n > 0]
    assert (known.value - known.chance).abs().max() < 1e-6
    assert set(table.role) == {""}


def begins_word(name: str, before: str, by_bytes: bool) -> bool:
    """Whether a token that is not the first of its sentence begins a word, by its look."""
    if not by_bytes:
        return not name.startswith("##")
    if before == "Ġ":
        return False
    return "Ġ" in name or name in ".," or before in (".", ",")


def loop_words(model, texts: tuple[str, str]) -> tuple[list[int], list[int], list[str], list[int]]:
    """Ids, sentences, word texts and word of each token, from the look of the tokens alone."""
    ids = encode(model, texts)["input"][0].tolist()
    names = model.tokenizer.convert_ids_to_tokens(ids)
    n_first = len(model.tokenizer(texts[0], add_special_tokens=False)["input_ids"])
    sentences: list[int] = []
    words: list[str] = []
    word_ids: list[int] = []
    for index, name in enumerate(names):
        if name[0] in "[<":
            sentences.append(-1)
            word_ids.append(-1)
            continue
        seen = sum(sentence >= 0 for sentence in sentences)
        sentences.append(int(seen >= n_first))
        if seen in (0, n_first) or begins_word(name, names[index - 1], "[CLS]" not in names):
            words.append("")
        words[-1] += name.removeprefix("##").replace("Ġ", "")
        word_ids.append(len(words) - 1)
    return ids, sentences, words, word_ids


def loop_scores(model, texts: tuple[str, str]) -> dict[str, torch.Tensor]:
    """Every score of every head on one pair, token by token in plain Python."""
    ids, sentences, words, word_ids = loop_words(model, texts)
    _, cache = model.run_with_cache(**encode(model, texts))
    layers = range(model.cfg.n_layers)
    pattern = torch.cat([cache[f"blocks.{layer}.attn.hook_pattern"][0] for layer in layers])
    n, causal = len(ids), not is_encoder(model)

    def is_target(score: str, q: int, k: int) -> bool:
        same = word_ids[k] >= 0 and words[word_ids[q]] == words[word_ids[k]]
        same = same and words[word_ids[q]] not in (".", ",")
        across = same and sentences[q] != sentences[k]
        return {
            "overlap": across,
            "overlap_to_hypothesis": across and sentences[q] == 0,
            "overlap_to_premise": across and sentences[q] == 1,
            "previous": k == q - 1,
            "next": k == q + 1,
            "separator": ids[k] == model.tokenizer.sep_token_id,
            "first": k == 0,
            "self": k == q,
            "repeat": same and sentences[q] == sentences[k] and word_ids[q] != word_ids[k],
        }[score]

    found = {}
    for score in lexical_overlap.SCORES:
        by_word: dict[int, list[torch.Tensor]] = {}
        for q in range(n):
            reachable = [k for k in range(n) if k <= q or not causal]
            targets = [k for k in reachable if word_ids[q] >= 0 and is_target(score, q, k)]
            if targets and len(reachable) > 1:
                mass = torch.stack([pattern[:, q, k] for k in targets]).sum(0)
                by_word.setdefault(word_ids[q], []).append(mass)
        if by_word:
            means = [torch.stack(masses).mean(0) for masses in by_word.values()]
            found[score] = torch.stack(means).mean(0)
    return found


@pytest.mark.parametrize("side", ["right", "left"])
def test_the_scores_equal_a_slow_loop(hooked, family, side):
    if side == "left" and family != "gpt2":
        return
    split = {"padding_side": side} if family == "gpt2" else None
    table = table_of(hooked, SHORT, split)
    rows = [loop_scores(hooked, pair) for pair in SHORT]
    for score in lexical_overlap.SCORES:
        values = [row[score] for row in rows if score in row]
        own = table[table.score == score]
        assert (own.n == len(values)).all(), score
        if values:
            expected = torch.stack(values).mean(0)
            assert own.value.tolist() == pytest.approx(expected.tolist(), abs=1e-9), score
        else:
            assert own.value.isna().all()


def test_a_causal_mask_leaves_one_way_and_says_so():
    model = hc.load(tiny.tiny_hf("gpt2"), tokenizer=tiny.byte_tokenizer())
    table = table_of(model, SHORT).set_index("score")
    assert set(table.loc["overlap_to_hypothesis"].reach) == {"none: hidden by the causal mask"}
    assert set(table.loc["next"].reach) == {"none: hidden by the causal mask"}
    assert set(table.loc["overlap"].reach) == {"from the hypothesis to the premise only"}
    assert set(table.loc["separator"].reach) == {"none: no row has such a token"}
    assert (table.loc["overlap"].value.values == table.loc["overlap_to_premise"].value.values).all()


def test_a_separator_text_is_scored_as_the_separator():
    model = hc.load(tiny.tiny_hf("gpt2"), tokenizer=tiny.byte_tokenizer())
    table = table_of(model, SHORT, {"separator": " , "})
    assert (table[table.score == "separator"].n == len(SHORT)).all()


def test_single_sentences_have_every_score_but_overlap():
    model = handmade_model()
    rows = [{"text": a} for pair in SENTENCES for a in pair]
    single = hc.Task.from_rows({"train": rows}, columns="text", label=None)
    table = scores(model, word_batches(model, single), n_bootstrap=10, progress=False)
    overlap = table[table.score.str.startswith("overlap")]
    assert set(overlap.reach) == {"none: the task has one sentence"}
    assert overlap.value.isna().all()
    assert (overlap.n == 0).all()
    assert cell(table, "L0.H1", "previous").value == pytest.approx(1, abs=1e-3)
    assert table.permuted.isna().all()
    with pytest.raises(HcLensError, match="expected an overlap score to choose the heads by"):
        lexical_overlap.figure(table)


def test_the_chance_level_of_a_pair_is_its_share_of_cells():
    # [CLS] the [SEP] the a [SEP]: 6 reachable tokens; "the" has 1 target each way, "a" has none.
    table = table_of(handmade_model(), [("the", "the a"), ("judge", "judge a")])
    assert cell(table, "L0.H0", "overlap").chance == pytest.approx(1 / 6)
    assert cell(table, "L0.H0", "separator").chance == pytest.approx(2 / 6)
    assert cell(table, "L0.H0", "self").chance == pytest.approx(1 / 6)


@pytest.mark.parametrize(
    ("rule", "word", "form"),
    [
        (WordRule(), "The", "the"),
        (WordRule(), "STRASSE", "strasse"),
        (WordRule(), "straße", "strasse"),
        (WordRule(), "doctor.", "doctor"),
        (WordRule(), '"well', "well"),
        (WordRule(), ".", None),
        (WordRule(), "", None),
        (WordRule(stop_words=STOP_WORDS), "The", None),
        (WordRule(lemma=lambda word: word.rstrip("s")), "Doctors", "doctor"),
        (WordRule(), "cafe\u0301", "caf\u00e9"),
    ],
)
def test_a_word_is_compared_by_its_form(rule, word, form):
    assert rule(word) == form


def test_a_lemma_and_stop_words_change_which_words_match():
    model = handmade_model()
    pairs = [("the doctors", "the doctor"), ("a judge", "a judges")]
    plain = cell(table_of(model, pairs), "L0.H0", "overlap")
    rule = WordRule(lemma=lambda word: word.rstrip("s"), stop_words=STOP_WORDS)
    lemma = cell(table_of(model, pairs, words=rule), "L0.H0", "overlap")
    assert plain.value == pytest.approx(1, abs=1e-3)  # "the" and "a"
    # "doctor" finds "doctor"; of "doctors" the second piece finds nothing of its own.
    assert 0.5 < lemma.value < 1
    assert lemma.n == 2


def test_the_table_does_not_depend_on_the_batches():
    model = handmade_model()
    small = table_of(model, SENTENCES * 3, {"token_budget": 30})
    large = table_of(model, SENTENCES * 3, {"token_budget": 4096})
    pd.testing.assert_frame_equal(small, large, atol=1e-9)


def test_the_interval_is_that_of_a_mean():
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(400, len(lexical_overlap.SCORES), 2, generator=generator)
    sums = lexical_overlap._Sums(n_units=2, n_bootstrap=2000, seed=0)
    defined = torch.ones(400, len(lexical_overlap.SCORES), dtype=torch.bool)
    for start in range(0, 400, 100):
        part = slice(start, start + 100)
        sums.add(torch.arange(400)[part], values[part], values[part, :, 0], defined[part])
    low, high = sums.interval()
    half = 1.96 * values.double().std(0) / math.sqrt(400)
    assert torch.allclose(sums.means(), values.double().mean(0))
    assert ((high - low) / (2 * half) - 1).abs().max() < 0.1


def test_without_replicates_there_is_no_interval_but_a_role():
    table = table_of(handmade_model(), SENTENCES, n_bootstrap=0, permuted=False)
    assert table[["low", "high", "permuted"]].isna().all().all()
    assert cell(table, "L0.H0", "overlap").role == "overlap"


def head_table(**values: float) -> pd.DataFrame:
    rows = [
        {"score": score, "value": value, "low": value - 0.02, "chance": 0.05, "permuted": 0.1}
        for score, value in values.items()
    ]
    return pd.DataFrame(rows)


def test_a_role_needs_mass_and_a_clear_lead():
    assert role_of(head_table(overlap=0.5, previous=0.1)) == "overlap"
    assert role_of(head_table(overlap=0.3, overlap_to_premise=0.6, next=0.2)) == "overlap"
    assert role_of(head_table(overlap=0.5, previous=0.4)) == ""
    assert role_of(head_table(overlap=0.19, previous=0.01)) == ""
    assert role_of(head_table(first=0.9, self=0.1)) == "first"
    assert role_of(head_table(overlap=0.5, previous=0.1).assign(permuted=0.4)) == ""
    assert role_of(head_table(previous=0.5, next=0.1).assign(permuted=0.5)) == "previous"


def test_one_batch_of_patterns_is_alive_at_most(monkeypatch):
    model, alive = handmade_model(), []
    real_visit = lexical_overlap.visit

    def watched(model, batch, see):
        def watch(layer, pattern):
            assert all(ref() is None for ref in alive)
            alive.append(weakref.ref(pattern))
            see(layer, pattern)

        real_visit(model, batch, watch)

    monkeypatch.setattr(lexical_overlap, "visit", watched)
    table_of(model, SENTENCES * 5, {"token_budget": 30})
    assert len(alive) > 20


def test_plain_batches_are_an_error():
    model = handmade_model()
    with pytest.raises(HcLensError, match=r"got Batches; make them with hc\.word_batches"):
        scores(model, task(SENTENCES).batches(model))
    with pytest.raises(HcLensError, match="n_bootstrap as a whole number of at least 0, got -1"):
        table_of(model, SENTENCES, n_bootstrap=-1)
    with pytest.raises(HcLensError, match="expected stop_words as a collection of words"):
        WordRule(stop_words="the")


def test_the_bar_chart_has_a_bar_for_each_head_and_score(handmade):
    drawing = lexical_overlap.figure(handmade, mark=["L0.H0"])
    (axes,) = drawing.axes
    assert len(axes.patches) == 3 * 4
    assert axes.patches[0].get_height() == pytest.approx(1, abs=1e-3)
    labels = axes.get_xticklabels()
    assert labels[0].get_text() == "L0.H0"
    assert labels[0].get_fontweight() == "bold"
    with pytest.raises(HcLensError, match=r"expected a unit of the table among .*, got 'L9\.H9'"):
        lexical_overlap.figure(handmade, units=["L9.H9"])


def test_there_is_a_heat_map_for_each_defined_score(handmade):
    drawing = lexical_overlap.heat_maps(handmade, mark=["L0.H1"])
    maps = [axes for axes in drawing.axes if axes.get_images()]
    assert len(maps) == handmade[handmade.n > 0].score.nunique() == 8
    assert maps[0].get_images()[0].get_array().shape == (1, 3)
    assert len(maps[0].patches) == 1
    with pytest.raises(HcLensError, match="expected a score of the table among"):
        lexical_overlap.heat_maps(handmade, scores=["overlop"])


def test_a_weight_that_is_not_finite_is_refused():
    model = handmade_model()
    model.blocks[0].attn.W_K.data[0, 0, 0] = torch.nan
    with pytest.raises(HcLensError, match=r"NaN or infinity in blocks\.0\.attn\.W_K"):
        table_of(model, SENTENCES)
