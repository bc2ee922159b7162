"""The full model's kept logits: run once, in memory and on disk."""

from __future__ import annotations

import pytest
import torch

from hc_lens.pruning import teacher as teacher_module
from hc_lens.pruning.teacher import Shelf, Teacher
from tests.batches import random_batches
from tests.hc_lens.pairs import deep_model


@pytest.mark.parametrize("room", [0, 40, 10**6])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_what_is_put_on_a_shelf_comes_back_from_memory_and_from_disk(room: int, dtype):
    shelf = Shelf(room)
    values = {(n,): torch.arange(6.0).view(2, 3).to(dtype) * n for n in range(1, 5)}
    for key, value in values.items():
        shelf.put(key, value)
    assert (9,) not in shelf
    for key, value in reversed(values.items()):
        assert key in shelf
        assert torch.equal(shelf[key], value)
        assert shelf[key].dtype == dtype


def test_a_shelf_keeps_no_more_in_memory_than_it_has_room_for():
    shelf = Shelf(room=50)
    for n in range(4):  # 24 bytes each
        shelf.put((n,), torch.full((6,), float(n)))
    assert len(shelf._near) == 2
    assert len(shelf._far) == 2


def test_a_file_of_a_shelf_is_closed_with_it():
    shelf = Shelf(room=0)
    shelf.put((1,), torch.ones(3))
    file = shelf._file
    del shelf
    assert file.closed


@pytest.mark.parametrize("room", [0, 10**6])
def test_the_full_model_runs_once_for_each_batch_and_gives_its_own_logits(monkeypatch, room: int):
    monkeypatch.setattr(teacher_module, "Shelf", lambda: Shelf(room))
    model = deep_model("bert")
    batches = random_batches(model)
    expected = [model(**batch.inputs) for batch in batches]
    teacher, runs = Teacher(model), []
    model.add_hook("blocks.0.hook_resid_pre", lambda x, hook: runs.append(len(x)))
    for batch, logits in [*zip(batches, expected, strict=True)] * 2:
        assert torch.allclose(teacher.logits(batch), logits)
    assert runs == [3, 2]
