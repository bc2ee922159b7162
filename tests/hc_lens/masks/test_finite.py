"""Numbers that are not finite stop every function with the place where they begin."""

from __future__ import annotations

import pytest
import torch

import hc_lens as hc
from hc_lens.masks.finite import check_finite, is_finite
from tests import tiny
from tests.hc_lens.pairs import pair_batches
from tests.lens import hooked_only, hooks_on


def zeroed(work, *arguments):
    return lambda model, rows, **quiet: work(model, rows, "zero", *arguments, **quiet)


WORK = {
    "evaluate": hc.evaluate,
    "collect_means": hc.collect_means,
    "scan": zeroed(hc.scan),
    "scan_rows": zeroed(hc.scan_rows),
    "importance": zeroed(hc.importance),
    **{
        f"prune, {method}": zeroed(hc.prune, hc.PruneConfig(0.4, 0, method=method, steps=2))
        for method in ("gates", "importance", "greedy", "random")
    },
}


@pytest.fixture
def model(family: str):
    return hc.load(tiny.tiny_hf(family), tokenizer=tiny.tokenizer_for(family))


class Breaks(hc.Source):
    """Replaces everything by zero, and the MLP of layer 1 by infinity."""

    constant = True
    fingerprint = "breaks"

    def value(self, name, activation):
        return activation.new_tensor(torch.inf if name == "blocks.1.hook_mlp_out" else 0.0)


def refused(message: str, work, *args, **settings) -> hc.HcLensError:
    with pytest.raises(hc.HcLensError, match=message) as caught:
        work(*args, progress=False, **settings)
    return caught.value


@pytest.mark.parametrize("name", sorted(WORK))
def test_every_function_names_the_weight_the_hook_point_or_the_classifier(name, model):
    work, rows, block = WORK[name], pair_batches(model), model.blocks[1]
    kept = block.mlp.W_out.data.clone()
    block.mlp.W_out.data[0, 0] = torch.nan
    refused(r"finite weights, got NaN or infinity in blocks\.1\.", work, model, rows)
    block.mlp.W_out.data.fill_(3e38)  # finite, but its products are not
    refused(r"begin at the hook point blocks\.1\.(hook_mlp_out|mlp\.)", work, model, rows)
    block.mlp.W_out.data.copy_(kept)
    model.unembed.W_U.data[0, 0] = torch.inf
    refused(r"the weight \S*(unembed|classifier|score)\S* is not finite", work, model, rows)
    assert hooks_on(model) == []


@hooked_only
def test_weights_whose_nan_the_attention_hides_are_refused_too(model):
    rows = pair_batches(model)
    model.blocks[0].attn.W_Q.data.fill_(torch.nan)
    assert is_finite(model(**rows[0].inputs))
    refused(r"NaN or infinity in blocks\.0\.attn\.W_Q", hc.evaluate, model, rows)


def test_a_scan_names_the_set_and_keeps_nothing_of_the_batch(model, tmp_path):
    rows = pair_batches(model)
    sets = ["L0.H0", "L0.H1+L1.MLP", "L1.MLP"]
    message = r"the model without L0\.H1\+L1\.MLP, got.*hook point blocks\.1\.(hook_mlp_out|mlp\.)"
    refused(message, hc.scan, model, rows, Breaks(), sets, store=tmp_path)
    assert not list(tmp_path.rglob("logits.safetensors"))
    assert hc.scan(model, rows, Breaks(), sets[:1], progress=False)["kl"].notna().all()


def test_a_subnetwork_that_is_not_finite_stops_evaluate_and_prune(model):
    rows, space = pair_batches(model), hc.UnitSpace.of(model)
    sub = hc.Subnetwork.from_units(model, [unit for unit in space if str(unit) != "L1.MLP"])
    refused(
        r"of a subnetwork, got.*blocks\.1\.(hook_mlp_out|mlp\.)",
        *(hc.evaluate, model, rows),
        means=Breaks(),
        subnetwork=sub,
    )
    config = hc.PruneConfig(0.4, 0, steps=50, warmup=0.02, lr=0.1)
    message = r"under a mask, got.*blocks\.1\.(hook_mlp_out|mlp\.)"
    refused(message, hc.prune, model, rows, Breaks(), config)


def test_pruning_that_stops_midway_hands_over_what_it_has(model):
    class Later(Breaks):
        steps = 0

        def on(self, batch):
            Later.steps += 1
            return self if Later.steps > 3 else hc.Zero()

    config = hc.PruneConfig(0.4, 0, steps=50, warmup=0.02, lr=0.1)
    error = refused("under a mask", hc.prune, model, pair_batches(model), Later(), config)
    assert error.finished.history["step"].max() >= 3
    assert error.finished.scores.isfinite().all()


def test_the_model_runs_once_a_batch_where_all_is_finite(model):
    rows, runs = pair_batches(model), []
    model.add_hook("blocks.0.hook_mlp_out", lambda value, hook: runs.append(1))
    hc.evaluate(model, rows, progress=False)
    hc.collect_means(model, rows, progress=False)
    assert len(runs) == 2 * len(rows)


def test_the_logits_of_a_language_model_at_pads_do_not_count():
    model = hc.load(tiny.tiny_hf("gpt2"))
    inputs = {"input": torch.tensor([[5, 6, 7]]), "attention_mask": torch.tensor([[0, 1, 1]])}
    logits = torch.zeros(1, 3, 4)
    logits[0, 0] = torch.nan
    check_finite(model, inputs, logits)
    logits[0, 1, 2] = torch.inf
    with pytest.raises(hc.HcLensError, match=r"of the model, got.* begin behind the last hook"):
        check_finite(model, inputs, logits)
