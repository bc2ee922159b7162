import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats

import hc_lens as hc
from hc_lens.pruning.config import n_removed
from hc_lens.pruning.gates import HardConcrete
from hc_lens.units import UnitSpace

SPACE = UnitSpace((4, 4), (0, 1))


def gates(log_alpha, **settings) -> HardConcrete:
    made = HardConcrete(SPACE, seed=0, **settings)
    with torch.no_grad():
        made.log_alpha.copy_(torch.as_tensor(log_alpha, dtype=torch.float32).expand(len(SPACE)))
    return made


def density(x: float, log_alpha: float) -> float:
    """Density of the stretched gate before clamping, by differentiating its distribution."""
    s = (x + 0.1) / 1.2
    at = math.exp(-(log_alpha - 2 / 3 * math.log(s / (1 - s))))
    slope = 2 / 3 * (1 / s + 1 / (1 - s)) / 1.2
    return slope * at / (1 + at) ** 2


def test_the_gate_at_the_median_of_the_noise_is_known_by_hand():
    # u = 1/2 and log_alpha = 0: s = 1/2, stretched to 1.2 / 2 - 0.1 = 0.5.
    median = torch.full((len(SPACE),), 0.5)
    assert gates(0.0).from_noise(median).tolist() == pytest.approx([0.5] * len(SPACE))
    # log_alpha = 2/3 ln 3: s = 3/4, stretched to 0.9 - 0.1 = 0.8.
    made = gates(2 / 3 * math.log(3))
    assert made.from_noise(median).tolist() == pytest.approx([0.8] * len(SPACE))


def test_expected_l0_of_a_gate_is_known_by_hand():
    # sigmoid(0 - 2/3 ln(1/11)) = 1 / (1 + 11^(-2/3)).
    assert gates(0.0).expected_l0()[0].item() == pytest.approx(1 / (1 + 11 ** (-2 / 3)))


@pytest.mark.parametrize("log_alpha", [-2.0, -0.5, 0.0, 1.0, 2.5])
def test_samples_follow_the_distribution(log_alpha):
    made = gates(log_alpha)
    draws = made.sample(20_000).detach().double().flatten()
    p_zero = 1 - made.expected_l0()[0].item()
    p_one = made.prob_above(1.0)[0].item()
    bound = 4 * math.sqrt(0.25 / len(draws))
    assert (draws == 0).double().mean().item() == pytest.approx(p_zero, abs=bound)
    assert (draws == 1).double().mean().item() == pytest.approx(p_one, abs=bound)
    inside = draws[(draws > 0) & (draws < 1)].numpy()

    def cdf(values):
        above = [made.prob_above(x)[0].item() for x in values]
        return (1 - np.array(above) - p_zero) / (1 - p_zero - p_one)

    assert stats.kstest(inside[:2000], cdf).pvalue > 0.001


@pytest.mark.parametrize("log_alpha", [-2.0, 0.0, 1.5])
def test_probabilities_and_moments_agree_with_numerical_integration(log_alpha):
    alive, _ = integrate.quad(density, 0, 1.1 - 1e-12, args=(log_alpha,))
    made = gates(log_alpha)
    assert made.expected_l0()[0].item() == pytest.approx(alive, abs=1e-5)
    one, _ = integrate.quad(density, 1, 1.1 - 1e-12, args=(log_alpha,))
    assert made.prob_above(1.0)[0].item() == pytest.approx(one, abs=1e-5)
    mean, _ = integrate.quad(lambda x: x * density(x, log_alpha), 0, 1)
    square, _ = integrate.quad(lambda x: x * x * density(x, log_alpha), 0, 1)
    draws = made.sample(20_000).double()
    assert draws.mean().item() == pytest.approx(mean + one, abs=0.005)
    assert draws.square().mean().item() == pytest.approx(square + one, abs=0.005)


def test_expected_sparsity_is_the_mean_probability_of_zero():
    made = gates([-3.0, -1.0, 0.0, 1.0, 3.0, 5.0, -2.0, 2.0, 0.5, -0.5])
    zero = (made.sample(50_000) == 0).double().mean().item()
    assert made.expected_sparsity().item() == pytest.approx(zero, abs=0.003)


def test_expected_sparsity_has_the_gradient_of_the_sigmoid():
    made = gates(0.3)
    made.expected_sparsity().backward()
    p = made.expected_l0()[0].item()
    assert made.log_alpha.grad[0].item() == pytest.approx(-p * (1 - p) / len(SPACE), rel=1e-5)


def test_the_starting_values_are_those_of_the_public_code():
    many = HardConcrete(UnitSpace((12,) * 12, tuple(range(12))), seed=42)
    assert many.log_alpha.mean().item() == pytest.approx(10, abs=0.01)
    assert many.log_alpha.std().item() == pytest.approx(0.01, rel=0.25)


def test_a_seed_gives_bit_identical_gates_and_touches_no_global_generator():
    state = torch.get_rng_state()
    first, second = HardConcrete(SPACE, seed=7), HardConcrete(SPACE, seed=7)
    assert torch.equal(first.log_alpha, second.log_alpha)
    assert torch.equal(first.sample(3), second.sample(3))
    assert not torch.equal(first.log_alpha, HardConcrete(SPACE, seed=8).log_alpha)
    low = {"init_mean": 0.0}
    third, fourth = HardConcrete(SPACE, seed=8, **low), HardConcrete(SPACE, seed=9, **low)
    assert not torch.equal(third.sample(), fourth.sample())
    assert torch.equal(torch.get_rng_state(), state)


def test_samples_have_one_row_per_draw():
    assert gates(0.0).sample().shape == (10,)
    assert gates(0.0).sample(4).shape == (4, 10)


def test_kept_and_removed_units_never_move():
    made = gates(0.0, keep=["L0.MLP", "L1.MLP"], remove=["L0.H1"])
    draws = made.sample(200)
    assert (draws[:, [8, 9]] == 1).all()
    assert (draws[:, 1] == 0).all()
    assert made.expected_l0()[[1, 8, 9]].tolist() == [0, 1, 1]
    assert made.deterministic()[[1, 8, 9]].tolist() == [0, 1, 1]
    made.sample().sum().backward()
    assert made.log_alpha.grad[[1, 8, 9]].tolist() == [0, 0, 0]
    assert made.free.tolist() == [True, False, *[True] * 6, False, False]
    mask = made.binarize(0.5)
    assert mask[[1, 8, 9]].tolist() == [0, 1, 1]
    assert (mask == 0).sum() == 5


def test_binarizing_removes_exactly_the_lowest():
    made = gates([5.0, -3.0, 2.0, 1.0, 0.0, 4.0, -1.0, 3.0, -2.0, 6.0])
    removed = [SPACE[i] for i in (made.binarize(0.3) == 0).nonzero().flatten().tolist()]
    assert [str(unit) for unit in removed] == ["L0.H1", "L1.H2", "L0.MLP"]
    for percent in range(10, 100, 10):
        assert (made.binarize(percent / 100) == 0).sum() == percent // 10


def test_deterministic_gates_are_known_by_hand():
    # sigmoid(0) * 1.2 - 0.1 = 0.5; far out the clamp holds.
    assert gates(0.0).deterministic()[0].item() == pytest.approx(0.5)
    assert gates(8.0).deterministic()[0].item() == 1.0
    assert gates(-8.0).deterministic()[0].item() == 0.0


def test_the_public_codes_variant_zeroes_within_each_module():
    # Layer 0: two gates surely dead, two surely alive; layer 1: all alive; MLPs: one dead.
    made = gates([-8.0, 8.0, -7.0, 7.0, 6.0, 7.0, 8.0, 9.0, -9.0, 9.0])
    soft = made.deterministic_by_module()
    assert (soft == 0).tolist() == [True, False, True, *[False] * 5, True, False]
    assert soft[1].item() == pytest.approx(1 / (1 + math.exp(-8.0 * 1.5 * 0.8)), rel=1e-6)


def test_the_public_codes_variant_can_miss_the_target_where_ours_does_not():
    # Every head is alive with probability 0.6: each layer of 4 loses round(1.6) = 2, whatever the
    # target, and equal soft values leave no threshold in between.
    log_alpha = math.log(0.6 / 0.4) + 2 / 3 * math.log(0.1 / 1.1)
    made = gates(log_alpha)
    counts = {int((made.binarize_by_module(t) == 0).sum()) for t in (0.2, 0.3)}
    assert counts == {4}
    assert [(made.binarize(t) == 0).sum().item() for t in (0.2, 0.3)] == [2, 3]


@pytest.mark.parametrize("sparsity", [0.0, 1.0, -0.5, 50, float("nan")])
def test_a_sparsity_outside_zero_to_one_is_an_error(sparsity):
    with pytest.raises(hc.HcLensError, match=r"write 5% as 0\.05"):
        n_removed(sparsity, 156)


@pytest.mark.parametrize("sparsity", [0.001, 0.999])
def test_a_sparsity_that_rounds_to_nothing_or_everything_is_an_error(sparsity):
    with pytest.raises(hc.HcLensError, match="between 1 and 155 of 156"):
        n_removed(sparsity, 156)


def test_frozen_units_that_leave_no_room_are_an_error():
    made = gates(0.0, keep=SPACE.labels[:8])
    with pytest.raises(hc.HcLensError, match="between 0 and 2 of 10 units"):
        made.binarize(0.5)


def test_a_unit_both_kept_and_removed_is_an_error():
    with pytest.raises(hc.HcLensError, match=r"L0\.H0 in both"):
        gates(0.0, keep=["L0.H0"], remove=["L0.H0"])


def test_a_stretch_that_never_reaches_zero_or_one_is_an_error():
    with pytest.raises(hc.HcLensError, match="contains"):
        gates(0.0, stretch=(0.0, 1.0))
