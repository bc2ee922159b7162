import dataclasses
import re

import pytest
import torch

import hc_lens as hc
from tests.lens import hooks_on


def row_gradients(model, batches, means) -> torch.Tensor:
    """One backward pass per row, with a shared mask: the slow way."""
    gradients = []
    for batch in batches:
        for row in range(len(batch.rows)):
            mask = torch.ones(10, dtype=torch.float64, requires_grad=True)
            with hc.masked(model, mask, means):
                log_probs = model(**batch.inputs)[row].log_softmax(-1)
            gradients.append(torch.autograd.grad(-log_probs[batch.labels[row]], mask)[0])
    return torch.stack(gradients)


def test_importance_is_the_mean_absolute_gradient_over_rows(hooked, batches, means):
    table = hc.importance(hooked, batches, means, progress=False)
    expected = row_gradients(hooked, batches, means)
    assert table["unit"].tolist() == hc.UnitSpace.of(hooked).labels
    torch.testing.assert_close(
        torch.tensor(table["importance"].to_numpy()), expected.abs().mean(0), atol=1e-6, rtol=1e-5
    )
    torch.testing.assert_close(
        torch.tensor(table["effect"].to_numpy()), -expected.mean(0), atol=1e-6, rtol=1e-5
    )


def test_the_effect_is_the_change_of_the_loss_for_a_small_step_towards_ablation(
    hooked, batches, means
):
    table = hc.importance(hooked, batches, means, progress=False).set_index("unit")
    space, step = hc.UnitSpace.of(hooked), 1e-5

    def loss(mask: torch.Tensor) -> float:
        total = 0.0
        for batch in batches:
            with torch.no_grad(), hc.masked(hooked, mask, means):
                log_probs = hooked(**batch.inputs).log_softmax(-1)
            total -= log_probs.gather(1, batch.labels[:, None]).sum().item()
        return total / 5

    ones = torch.ones(10, dtype=torch.float64)
    for unit in ("L0.H1", "L1.H3", "L1.MLP"):
        less = ones.clone()
        less[space.index(unit)] -= step
        rise = (loss(less) - loss(ones)) / step
        assert table.loc[unit, "effect"] == pytest.approx(rise, rel=1e-3, abs=1e-6)


def test_any_loss_of_the_logits_can_be_given(hooked, batches, means):
    table = hc.importance(
        hooked, batches, means, loss=lambda logits, batch: 0.0 * logits[:, 0], progress=False
    )
    assert (table["importance"] == 0).all()


def test_no_gradient_reaches_the_weights(hooked, batches, means):
    hooked.requires_grad_(True)
    hc.importance(hooked, batches, means, progress=False)
    assert all(p.grad is None for p in hooked.parameters())


def test_rows_without_labels_are_an_error(hooked, batches, means):
    batches[0].labels[0] = -1
    with pytest.raises(hc.HcLensError, match="rows without a label"):
        hc.importance(hooked, batches, means, progress=False)
    assert hooks_on(hooked) == []


def test_rows_without_labels_are_an_error_whose_remedy_works(hooked, batches, means):
    bare = type(batches)(dataclasses.replace(b, labels=b.labels * 0 - 1) for b in batches)
    with pytest.raises(hc.HcLensError, match=r"got rows without a label; .*loss=lambda") as told:
        hc.importance(hooked, bare, means, progress=False)
    with pytest.raises(hc.HcLensError, match=r"the labels of a task, got a list; .*loss="):
        hc.importance(hooked, list(bare), means, progress=False)
    remedy = re.search(r"loss=(lambda [^;]*);", str(told.value))[1]
    table = hc.importance(hooked, list(bare), means, loss=eval(remedy), progress=False)
    assert (table["importance"] > 0).any()


BAD = {
    "nan": (
        lambda logits, batch: logits[:, 0] * float("nan"),
        r"finite numbers of <lambda>, got NaN or infinity for row \d",
    ),
    "detached": (
        lambda logits, batch: logits[:, 0].detach(),
        r"with a derivative by the logits from <lambda>, got torch\.float\d\d without one",
    ),
    "whole numbers": (
        lambda logits, batch: logits.argmax(-1),
        r"with a derivative by the logits from <lambda>, got torch\.int64 without one",
    ),
    "numpy": (
        lambda logits, batch: logits[:, 0].detach().numpy(),
        r"one number for each of the \d rows .* got a ndarray of shape \[\d\]; give a tensor",
    ),
    "a number": (lambda logits, batch: 1.0, "one number for each of the .* got a float"),
}


@pytest.mark.parametrize("kind", sorted(BAD))
def test_a_loss_that_is_no_finite_number_with_a_derivative_is_an_error(kind, hooked, batches):
    loss, message = BAD[kind]
    config = hc.PruneConfig(0.4, method="importance", loss=loss)
    for work in (
        lambda: hc.importance(hooked, batches, "zero", loss=loss, progress=False),
        lambda: hc.prune(hooked, batches, "zero", config, progress=False),
    ):
        with pytest.raises(hc.HcLensError, match=message):
            work()
    assert not hooks_on(hooked)


def test_kl_has_no_gradient_at_the_full_model_and_is_refused(hooked, batches, means):
    with pytest.raises(hc.HcLensError, match=r"gradient at the full model, got 'kl'.*logit_diff"):
        hc.importance(hooked, batches, means, loss="kl", progress=False)


def test_the_cross_entropy_is_the_default_and_the_loss_of_the_label(hooked, batches, means):
    default = hc.importance(hooked, batches, means, progress=False)
    for name in (None, "cross-entropy"):
        assert default.equals(hc.importance(hooked, batches, means, loss=name, progress=False))
    # "loss" is the same number, in double precision.
    same = hc.importance(hooked, batches, means, loss="loss", progress=False)
    assert same["effect"].tolist() == pytest.approx(default["effect"].tolist(), abs=1e-5)


def test_a_metric_of_the_right_answer_needs_rows_with_labels(hooked, batches, means):
    batches[0].labels[0] = -1
    with pytest.raises(hc.HcLensError, match="labelled rows for probability, got rows without"):
        hc.importance(hooked, batches, means, loss="probability", progress=False)
    hc.importance(hooked, batches, means, loss="margin", progress=False)
