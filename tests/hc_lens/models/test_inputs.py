"""Batches that are cut along their rows: the same numbers, and memory that does not grow."""

from __future__ import annotations

import pytest
import torch

import hc_lens as hc
from hc_lens.models import inputs as inputs_module
from hc_lens.models.inputs import AT_ONCE, pieces, rows_at_once
from tests import tiny
from tests.batches import random_batches
from tests.hc_lens.pairs import deep_model
from tests.memory import peak_bytes

QUIET = {"progress": False}


def tiny_bert():
    return hc.load(tiny.tiny_hf("bert"))


def at_once(monkeypatch, tokens: int) -> None:
    """Run this many tokens at one time, however narrow the model is."""
    monkeypatch.setattr(inputs_module, "AT_ONCE", tokens)
    monkeypatch.setattr(inputs_module, "NUMBERS", 0)


def test_a_narrow_model_runs_more_tokens_at_one_time(monkeypatch):
    model = tiny_bert()
    inputs = {"input": torch.zeros(5, 10, dtype=torch.long)}
    monkeypatch.setattr(inputs_module, "AT_ONCE", 20)
    monkeypatch.setattr(inputs_module, "NUMBERS", 30 * model.cfg.d_model)
    assert rows_at_once(model, inputs) == 3
    monkeypatch.setattr(inputs_module, "NUMBERS", 10 * model.cfg.d_model)
    assert rows_at_once(model, inputs) == 2


def test_pieces_hold_every_row_once_and_what_has_no_rows_whole(monkeypatch):
    at_once(monkeypatch, 7)
    ids = torch.arange(15).view(5, 3)
    given = {"input": ids, "attention_mask": ids + 100, "position_ids": ids[:1], "flag": None}
    found = pieces(tiny_bert(), given)
    assert [piece["input"].tolist() for piece in found] == [
        [[0, 1, 2], [3, 4, 5]],
        [[6, 7, 8], [9, 10, 11]],
        [[12, 13, 14]],
    ]
    assert torch.equal(found[2]["attention_mask"], ids[4:] + 100)
    assert all(piece["position_ids"] is given["position_ids"] for piece in found)
    assert all(piece["flag"] is None for piece in found)


def works(model, batches) -> dict:
    """The pieces of work whose memory must not depend on the number of rows."""
    space = hc.UnitSpace.of(model)
    means = hc.collect_means(model, batches[:1], **QUIET)
    keep = torch.arange(len(space)) % 2 == 0
    sub = hc.Subnetwork(space, keep, model.fingerprint, means=means.fingerprint)
    return {
        "evaluate": lambda: hc.evaluate(
            model, {"rows": batches}, means=means, subnetwork=sub, **QUIET
        ),
        "means": lambda: hc.collect_means(model, batches, **QUIET),
        "means by position": lambda: hc.collect_means(model, batches, by="position", **QUIET),
        "scan": lambda: hc.scan(model, {"rows": batches}, means, ["L0.H1", "L1.MLP"], **QUIET),
    }


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_pieces_change_no_number(family: str, monkeypatch):
    model = deep_model(family)  # in float64
    batches = random_batches(model, lengths=((9, 5, 2, 9, 8), (7, 7)))

    def tables() -> list[torch.Tensor]:
        found = [run() for run in works(model, batches).values()]
        frames = [each.select_dtypes("number") for each in found if not isinstance(each, hc.Means)]
        values = [torch.tensor(frame.to_numpy(float)) for frame in frames]
        for means in (each for each in found if isinstance(each, hc.Means)):
            values += [*means.at_token.values(), *(means.at_position or {}).values()]
            values.append(torch.tensor([means.n_rows, means.n_tokens]))
        return values

    whole = tables()
    at_once(monkeypatch, 20)
    for one, other in zip(whole, tables(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12, equal_nan=True)


def test_a_large_batch_runs_a_few_hundred_tokens_at_a_time(monkeypatch):
    model, seen = tiny_bert(), []
    embed = type(model.embed).forward

    def note(self, tokens, *rest, **others):
        seen.append(tokens.numel())
        return embed(self, tokens, *rest, **others)

    monkeypatch.setattr(type(model.embed), "forward", note)
    at_once(monkeypatch, AT_ONCE)
    for name, run in works(model, random_batches(model, lengths=((30,) * 60,))).items():
        seen.clear()
        run()
        assert AT_ONCE / 2 < max(seen) <= AT_ONCE, name


def test_a_users_hook_sees_the_batch_as_it_is():
    model, seen = tiny_bert(), []
    batches = random_batches(model, lengths=((30,) * 60,))
    with model.hooks([("blocks.0.hook_mlp_out", lambda value, hook: seen.append(len(value)))]):
        for run in works(model, batches).values():
            run()
    assert set(seen) == {60}


@pytest.mark.slow
@pytest.mark.parametrize("work", ["evaluate", "means", "means by position", "scan"])
def test_ten_times_the_rows_need_no_more_memory(work: str):
    model = tiny_bert()
    few = random_batches(model, lengths=((20,) * 50,) * 4)
    many = random_batches(model, lengths=((20,) * 50,) * 40)
    small, large = (peak_bytes(works(model, batches)[work]) for batches in (few, many))
    assert large < 1.2 * small
