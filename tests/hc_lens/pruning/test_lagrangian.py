import pytest
import torch

from hc_lens.pruning.lagrangian import Lagrangian, target_sparsity


def test_the_target_rises_linearly_and_then_stays():
    assert [target_sparsity(step, 0.5, 100) for step in (0, 50, 100, 500)] == [0, 0.25, 0.5, 0.5]
    assert target_sparsity(0, 0.5, 0) == 0.5


def test_the_penalty_and_its_gradients_are_known_by_hand():
    made = Lagrangian()
    with torch.no_grad():
        made.lambda_1.fill_(2.0)
        made.lambda_2.fill_(3.0)
    sparsity = torch.tensor(0.3, requires_grad=True)
    penalty = made.penalty(sparsity, 0.5)
    # 2 x 0.2 + 3 x 0.04 = 0.52; d/ds = -2 - 2 x 3 x 0.2 = -3.2.
    assert penalty.item() == pytest.approx(0.52)
    penalty.backward()
    assert sparsity.grad.item() == pytest.approx(-3.2)
    assert made.lambda_1.grad.item() == pytest.approx(0.2)
    assert made.lambda_2.grad.item() == pytest.approx(0.04)


def test_the_gradient_of_the_second_multiplier_is_never_negative():
    for sparsity in (0.1, 0.5, 0.9):
        made = Lagrangian()
        made.penalty(torch.tensor(sparsity), 0.5).backward()
        assert made.lambda_2.grad.item() >= 0
