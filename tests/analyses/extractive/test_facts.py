"""The generated sets, their files, and the rank of an answer."""

from __future__ import annotations

import pytest
import torch

from hc_lens.analyses.extractive.facts import (
    FactSet,
    World,
    first_hop,
    invented_relation,
    named_set,
    second_hop,
)
from hc_lens.analyses.extractive.prompts import Encoded, Question
from hc_lens.errors import HcLensError


def test_a_seed_gives_the_same_first_hop_set_again():
    assert first_hop(World.real(3), seed=3) == first_hop(World.real(3), seed=3)
    assert first_hop(World.real(3), seed=3) != first_hop(World.real(4), seed=4)


def test_a_first_hop_implication_follows_from_its_fact():
    world = World.real()
    found = first_hop(world)
    languages = dict(zip(world.cities, world.languages, strict=True))
    for fact, implication in zip(found.facts, found.implications, strict=True):
        name = fact.prompt.removesuffix(" lives in")
        assert implication.prompt == f"The people in the city {name} is from speak"
        assert implication.answer == languages[fact.answer]
    assert len(found.fact_options) == len(found.implication_options) == 20


def test_second_hop_mayors_have_different_first_names():
    found = second_hop(World.real())
    firsts = [fact.answer.split()[0] for fact in found.facts]
    assert len(set(firsts)) == 20
    assert found.facts[1].prompt == "The mayor of Paris is"
    assert found.implications[1].prompt == "The mayor of the city that contains the Eiffel Tower is"
    assert found.implications[1].answer == found.facts[1].answer


def test_the_invented_relation_has_the_same_new_people_and_other_facts_for_the_rest():
    facts, other = invented_relation(World.real())
    assert len(facts.facts) == 104
    assert facts.facts[:20] == other.facts[:20]
    assert {fact.answer for fact in facts.facts[:20]} == set(facts.fact_options)
    changed = [a != b for a, b in zip(facts.facts[20:], other.facts[20:], strict=True)]
    assert sum(changed) > 60
    assert [q.prompt for q in facts.facts] == [q.prompt for q in other.facts]


def test_invented_names_are_all_different_words():
    world = World.invented(0, 60, 300)
    words = [*world.cities, *world.languages, *world.landmarks, *world.animals, *world.people]
    assert len(set(words)) == len(words) == 540
    assert not any(" " in word for word in words)


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_a_set_comes_back_from_its_file(tmp_path, suffix):
    found = second_hop(World.real())
    path = found.write(tmp_path / f"second hop.{suffix}")
    assert FactSet.read(path) == found


def test_a_file_without_options_takes_the_answers(tmp_path):
    path = tmp_path / "own.csv"
    path.write_text(
        "kind,prompt,answer\nfact,A is,one\nfact,B is,two\nimplication,A,x\nimplication,B,y\n"
    )
    found = FactSet.read(path)
    assert found.fact_options == ("one", "two")
    assert found.implications == (Question("A", "x"), Question("B", "y"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prompt,answer\na,b\n", "columns kind, prompt and answer"),
        ("kind,prompt,answer\nfoct,a,b\n", "got 'foct'"),
        ("kind,prompt,answer\nfact,a,b\n", "1 facts and 0 implications"),
    ],
)
def test_a_file_of_another_form_is_an_error(tmp_path, text, message):
    path = tmp_path / "own.csv"
    path.write_text(text)
    with pytest.raises(HcLensError, match=message):
        FactSet.read(path)


def test_a_set_is_made_by_its_name_or_read_from_a_file(tmp_path):
    assert named_set("first-hop", 3) == (first_hop(World.real(3), seed=3), None)
    assert named_set("second-hop") == (second_hop(World.real()), None)
    assert named_set("invented") == invented_relation(World.real())
    path = second_hop(World.real()).write(tmp_path / "second hop.csv")
    assert named_set(path) == named_set("second-hop")


def test_an_unknown_format_and_a_missing_file_are_errors(tmp_path):
    with pytest.raises(HcLensError, match=r"\.csv or \.jsonl"):
        FactSet.read(tmp_path / "facts.txt")
    with pytest.raises(HcLensError, match="check the path"):
        FactSet.read(tmp_path / "facts.csv")


def test_a_split_outside_the_set_and_too_few_people_are_errors():
    with pytest.raises(HcLensError, match="between 1 and 19, got 20"):
        first_hop(World.real()).split(20)
    with pytest.raises(HcLensError, match="expected 20 people in the world, got 5"):
        first_hop(World.invented(0, 20, 5))


def test_rank_and_reward_by_hand():
    whole = torch.tensor([0]), torch.zeros(1, 1, dtype=torch.long)
    batch = Encoded(*whole, torch.tensor([1]), torch.tensor([[0, 1, 2, 3]]))
    logits = torch.tensor([[5.0, 2.0, 2.0, -1.0, 99.0]])
    assert batch.rank(logits).tolist() == [1.5]
    assert batch.reward(logits).tolist() == [0.0]
