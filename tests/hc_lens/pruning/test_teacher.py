import torch

import hc_lens as hc
from hc_lens.pruning.teacher import Teacher
from tests import tiny
from tests.batches import random_batches


def test_the_full_model_runs_once_per_row():
    model = hc.load(tiny.tiny_hf("bert"))
    batches = random_batches(model)
    runs = []
    model.add_hook("hook_full_embed", lambda value, hook: runs.append(len(value)))
    teacher = Teacher(model)
    expected = [model(**batch.inputs) for batch in batches]
    runs.clear()
    for _ in range(3):
        for batch, logits in zip(batches, expected, strict=True):
            assert torch.equal(teacher.logits(batch), logits)
    assert runs == [3, 2]
