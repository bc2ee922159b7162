import pytest
import torch
from transformer_lens.model_bridge import TransformerBridge

import hc_lens as hc
from hc_lens.masks.hooks import LostMaskWarning
from hc_lens.models.quiet import quiet
from tests import tiny
from tests.batches import random_batches
from tests.lens import HookedTransformer, hooked_only

N_UNITS = 10
EVERYTHING = ["L0.H0", "L0.H1", "L0.H2", "L0.H3", "L1.H0", "L1.H1", "L1.H2", "L1.H3",
              "L0.MLP", "L1.MLP"]  # fmt: skip


def hooks_of(model) -> dict[str, list]:
    return {name: list(point.fwd_hooks) for name, point in model.hook_dict.items()}


def points(model, names) -> set[int]:
    """The hook points of some names; on a bridge a point has several."""
    return {id(model.hook_dict[name]) for name in names}


def test_a_mask_of_ones_leaves_the_logits_bit_identical(hooked, batches, means):
    full = hooked(**batches[0].inputs)
    with hc.masked(hooked, torch.ones(N_UNITS, requires_grad=True), means):
        assert torch.equal(hooked(**batches[0].inputs), full)
    single = hc.load(tiny.tiny_hf("bert"))
    rows = random_batches(single)
    full = single(**rows[0].inputs)
    mask = torch.ones(3, N_UNITS, requires_grad=True)
    with hc.masked(single, mask, hc.collect_means(single, rows, progress=False)):
        assert torch.equal(single(**rows[0].inputs), full)


def by_hand(model, inputs, means) -> torch.Tensor:
    """Logits when every head and MLP gives its mean, written without hooks."""
    n_layers = model.cfg.n_layers
    attn = [
        torch.einsum("hd,hdm->m", means.at_token[f"blocks.{i}.attn.hook_z"], model.W_O[i])
        + model.b_O[i]
        for i in range(n_layers)
    ]
    mlp = [means.at_token[f"blocks.{i}.hook_mlp_out"] for i in range(n_layers)]
    if model.cfg.attention_dir == "bidirectional":
        resid = model.embed(inputs["input"], inputs.get("token_type_ids"))
        for i, block in enumerate(model.blocks):
            resid = block.ln2(block.ln1(resid + attn[i]) + mlp[i])
        return model.unembed(model.pooler(resid))
    tokens, mask = inputs["input"], inputs["attention_mask"]
    resid = model.embed(tokens) + model.pos_embed(tokens, 0, mask) + sum(attn) + sum(mlp)
    everywhere = model.unembed(model.ln_final(resid))
    return everywhere[torch.arange(len(tokens)), mask.sum(1) - 1]


@hooked_only
def test_a_mask_of_zeros_equals_a_forward_written_by_hand_with_the_means(hooked, batches, means):
    inputs = batches[0].inputs
    expected = by_hand(hooked, inputs, means)
    with hc.masked(hooked, torch.zeros(N_UNITS), means):
        torch.testing.assert_close(hooked(**inputs), expected, atol=1e-12, rtol=0)
    with hc.ablate(hooked, EVERYTHING, means):
        torch.testing.assert_close(hooked(**inputs), expected, atol=1e-12, rtol=0)


def edited_hugging_face(family: str, head: int, mean: torch.Tensor, dtype: torch.dtype):
    """Hugging Face's own model with a head cut out of W_O and its mean put into b_O."""
    original = tiny.tiny_hf(family).to(dtype)
    columns = slice(8 * head, 8 * head + 8)
    with torch.no_grad():
        if family == "gpt2":
            out = original.transformer.h[1].attn.c_proj
            out.bias += mean @ out.weight[columns]
            out.weight[columns] = 0
        else:
            out = original.base_model.encoder.layer[1].attention.output.dense
            out.bias += out.weight[:, columns] @ mean
            out.weight[:, columns] = 0
    return original


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_ablating_a_head_equals_editing_the_weights_of_hugging_face(family, dtype, bound):
    model = hc.load(tiny.tiny_hf(family), dtype=dtype)
    batches = random_batches(model)
    means = hc.collect_means(model, batches, progress=False)
    pad = model.pad_token_id
    inputs = tiny.tiny_inputs(pad, "right")
    for head in range(4):
        mean = means.at_token["blocks.1.attn.hook_z"][head]
        with torch.no_grad():
            expected = edited_hugging_face(family, head, mean, dtype)(**inputs).logits
        with hc.ablate(model, [f"L1.H{head}"], means):
            assert (model(**inputs) - expected).abs().max() < bound


def test_zero_ablation_equals_a_model_without_the_units_output(hooked, batches):
    inputs = batches[0].inputs
    with hc.ablate(hooked, ["L0.H2", "L1.MLP"], "zero"):
        got = hooked(**inputs)
    with torch.no_grad():
        hooked.blocks[0].attn.W_O[2] = 0
        hooked.blocks[1].mlp.W_out.zero_()
        hooked.blocks[1].mlp.b_out.zero_()
    torch.testing.assert_close(got, hooked(**inputs), atol=1e-12, rtol=0)


def test_the_gradient_of_a_loss_equals_finite_differences(hooked, batches, means):
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(N_UNITS, generator=generator, dtype=torch.float64) * 0.8 + 0.1

    def loss(values: torch.Tensor) -> torch.Tensor:
        with hc.masked(hooked, values, means):
            return hooked(**batches[0].inputs).log_softmax(-1)[:, 0].sum()

    mask.requires_grad_()
    (gradient,) = torch.autograd.grad(loss(mask), mask)
    for place in range(N_UNITS):
        step = torch.zeros(N_UNITS, dtype=torch.float64)
        step[place] = 1e-6
        slope = (loss(mask.detach() + step) - loss(mask.detach() - step)) / 2e-6
        assert gradient[place].item() == pytest.approx(slope.item(), rel=1e-6, abs=1e-8)
    assert not any(p.requires_grad for p in hooked.parameters())


def test_a_mask_per_row_gives_the_logits_of_one_run_per_mask(hooked, batches, means):
    generator = torch.Generator().manual_seed(1)
    masks = torch.rand(3, N_UNITS, generator=generator)
    masks[0] = (masks[0] > 0.5).float()
    inputs = batches[0].inputs
    with hc.masked(hooked, masks, means):
        together = hooked(**inputs)
    for row in range(3):
        with hc.masked(hooked, masks[row], means):
            alone = hooked(**inputs)
        torch.testing.assert_close(together[row], alone[row], atol=1e-12, rtol=0)


def test_only_hook_z_and_hook_mlp_out_are_written(hooked, means):
    before = hooks_of(hooked)
    with hc.masked(hooked, torch.zeros(N_UNITS), means):
        written = {name for name, hooks in hooks_of(hooked).items() if hooks != before[name]}
    expected = [f"blocks.{i}.{name}" for i in (0, 1) for name in ("attn.hook_z", "hook_mlp_out")]
    assert points(hooked, written) == points(hooked, expected)


def test_a_fixed_set_hooks_only_the_layers_it_touches(hooked, means):
    before = hooks_of(hooked)
    with hc.ablate(hooked, ["L1.H0"], means):
        written = {name for name, hooks in hooks_of(hooked).items() if hooks != before[name]}
    assert points(hooked, written) == points(hooked, ["blocks.1.attn.hook_z"])


def test_a_cache_inside_holds_the_masked_activations(hooked, batches, means):
    with hc.ablate(hooked, ["L1.H2"], means):
        _, cache = hooked.run_with_cache(**batches[0].inputs)
    z = cache["blocks.1.attn.hook_z"]
    mean = means.at_token["blocks.1.attn.hook_z"][2]
    assert torch.equal(z[:, :, 2], mean.expand_as(z[:, :, 2]))
    assert not torch.equal(z[:, :, 1], mean.expand_as(z[:, :, 1]))


def test_nested_ablations_add_up_and_come_off_one_by_one(hooked, batches, means):
    inputs = batches[0].inputs
    full = hooked(**inputs)
    with hc.ablate(hooked, ["L0.H0", "L1.MLP"], means):
        both = hooked(**inputs)
    with hc.ablate(hooked, ["L0.H0"], means):
        first = hooked(**inputs)
        with hc.ablate(hooked, ["L1.MLP"], means):
            assert torch.equal(hooked(**inputs), both)
        assert torch.equal(hooked(**inputs), first)
    assert torch.equal(hooked(**inputs), full)


def test_hooks_of_the_user_work_beside_ours_and_stay(hooked, batches, means):
    doubled = ("blocks.1.hook_mlp_out", lambda value, hook: value * 2)
    hooked.add_hook("blocks.0.attn.hook_z", lambda value, hook: value + 1)
    before = hooks_of(hooked)
    with hc.ablate(hooked, ["L1.MLP"], means):
        _, cache = hooked.run_with_cache(**batches[0].inputs)
        hooked.run_with_hooks(**batches[0].inputs, fwd_hooks=[doubled])
    assert hooks_of(hooked) == before
    mean = means.at_token["blocks.1.hook_mlp_out"]
    assert torch.equal(cache["blocks.1.hook_mlp_out"][0, 0], mean)


def test_after_an_exception_the_hooks_are_what_they_were(hooked, batches, means):
    hooked.add_hook("blocks.0.attn.hook_z", lambda value, hook: None)
    before = hooks_of(hooked)
    with pytest.raises(RuntimeError, match="in the middle"), hc.ablate(hooked, EVERYTHING, means):
        raise RuntimeError("in the middle")
    assert hooks_of(hooked) == before

    def broken(value, hook):
        raise RuntimeError("in the forward")

    forward = {**batches[0].inputs, "fwd_hooks": [("blocks.1.hook_mlp_out", broken)]}
    with pytest.raises(RuntimeError, match="in the forward"), hc.ablate(hooked, EVERYTHING, means):
        hooked.run_with_hooks(**forward)
    assert hooks_of(hooked) == before


def test_a_handle_stays_until_it_is_detached(hooked, batches, means):
    inputs = batches[0].inputs
    full, before = hooked(**inputs), hooks_of(hooked)
    handle = hc.attach(hooked, ["L0.MLP"], means)
    assert handle.attached
    assert not torch.equal(hooked(**inputs), full)
    handle.detach()
    handle.detach()
    assert not handle.attached
    assert torch.equal(hooked(**inputs), full)
    assert hooks_of(hooked) == before


def test_reset_hooks_by_the_user_ends_the_ablation_with_a_warning(hooked, batches, means):
    full = hooked(**batches[0].inputs)
    message = r"the mask \(L0\.H0, .* removed\).*blocks\.0\.attn\.hook_z.*reset_hooks\(\)"
    handle = hc.ablate(hooked, EVERYTHING, means).__enter__()
    hooked.reset_hooks()
    assert not handle.attached
    hooked.add_hook("blocks.0.attn.hook_z", lambda value, hook: None)
    added = hooks_of(hooked)
    with pytest.warns(LostMaskWarning, match=message):
        handle.__exit__(None, None, None)
    assert hooks_of(hooked) == added
    assert torch.equal(hooked(**batches[0].inputs), full)


def test_a_mask_that_lost_one_of_its_hooks_warns_too(hooked, means):
    with (
        pytest.warns(LostMaskWarning, match=r"hook_mlp_out'\] \(1 in all\)"),
        hc.ablate(hooked, ["L0.H0", "L1.MLP"], means),
    ):
        hooked.hook_dict["blocks.1.hook_mlp_out"].remove_hooks()


@pytest.mark.filterwarnings("error")
def test_a_mask_that_is_taken_off_on_purpose_does_not_warn(hooked, batches, means):
    with hc.ablate(hooked, EVERYTHING, means) as handle:
        handle.detach()
    with hc.ablate(hooked, EVERYTHING, means), hc.ablate(hooked, ["L0.H0"], means):
        hc.detach_all(hooked)
    with hc.ablate(hooked, EVERYTHING, means):
        hooked.run_with_cache(**batches[0].inputs)
        with hooked.hooks([("blocks.0.attn.hook_z", lambda value, hook: None)]):
            hooked(**batches[0].inputs)


def test_masks_work_without_gradients(hooked, batches, means):
    mask = torch.full((N_UNITS,), 0.5, requires_grad=True)
    with torch.no_grad(), hc.masked(hooked, mask, means):
        assert not hooked(**batches[0].inputs).requires_grad


def test_a_plain_hooked_transformer_takes_masks():
    with quiet():
        cfg = {"n_layers": 2, "d_model": 16, "n_heads": 2, "d_head": 8, "n_ctx": 12,
               "d_vocab": 20, "act_fn": "relu", "seed": 0}  # fmt: skip
        model = HookedTransformer(cfg)
    tokens = torch.arange(10)[None]
    full = model(tokens)
    with hc.ablate(model, ["L1.H1"], "zero"):
        changed = model(tokens)
    with torch.no_grad():
        model.blocks[1].attn.W_O[1] = 0
    torch.testing.assert_close(changed, model(tokens), atol=1e-6, rtol=0)
    assert not torch.allclose(changed, full)


@pytest.mark.parametrize("compatibility", [False, True])
@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_a_transformer_bridge_takes_masks(family, compatibility, tmp_path):
    import transformers

    classes = {"gpt2": transformers.GPT2LMHeadModel, "bert": transformers.BertForMaskedLM}
    config_class, _, sizes = tiny.FAMILIES[family]
    original = tiny.roughen(classes[family](config_class(**sizes, vocab_size=tiny.VOCABULARY)))
    original.save_pretrained(tmp_path)
    tiny.tokenizer_for(family).save_pretrained(tmp_path)
    with quiet():
        bridge = TransformerBridge.boot_transformers(str(tmp_path), device="cpu")
        if compatibility:
            bridge.enable_compatibility_mode(no_processing=True)
    tokens = torch.arange(5, 14)[None]
    with hc.ablate(bridge, ["L1.H1"], "zero") as handle:
        got = bridge(tokens)
        assert hc.attached(bridge) == [handle]
    assert hc.attached(bridge) == []
    with torch.no_grad():
        if family == "gpt2":
            original.transformer.h[1].attn.c_proj.weight[8:16] = 0
        else:
            original.bert.encoder.layer[1].attention.output.dense.weight[:, 8:16] = 0
        expected = original(tokens).logits
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


def test_a_unit_that_does_not_exist_is_an_error(hooked, means):
    with pytest.raises(hc.HcLensError, match=r"2 layers, 8 heads and 2 MLPs, got L7\.H0"):
        hc.ablate(hooked, ["L7.H0"], means)


def test_a_mask_of_the_wrong_length_is_an_error(hooked, means):
    with pytest.raises(hc.HcLensError, match=r"\[10\] or \[batch, 10\].*got \[12\]"):
        hc.masked(hooked, torch.ones(12), means)


@pytest.mark.parametrize("bad", [1.5, -0.1, float("nan")])
def test_a_mask_entry_outside_zero_to_one_is_an_error_that_names_the_unit(hooked, means, bad):
    mask = torch.ones(N_UNITS)
    mask[8] = bad
    with pytest.raises(hc.HcLensError, match=r"between 0 and 1, got \[.*\] at L0\.MLP"):
        hc.masked(hooked, mask, means)


def test_a_mask_for_another_number_of_rows_is_an_error(hooked, batches, means):
    with (
        hc.masked(hooked, torch.zeros(2, N_UNITS), means),
        pytest.raises(hc.HcLensError, match=r"one mask per row of the batch \(3 rows\), got 2"),
    ):
        hooked(**batches[0].inputs)


@hooked_only
def test_a_model_without_the_hook_names_is_an_error(hooked, means):
    del hooked.hook_dict["blocks.1.hook_mlp_out"]
    with pytest.raises(hc.HcLensError, match=r"hook points \['blocks\.1\.hook_mlp_out'\]"):
        hc.ablate(hooked, ["L0.H0"], means)


def test_units_and_masks_are_not_mixed_up(hooked, means):
    with pytest.raises(hc.HcLensError, match=r"use hc\.masked"):
        hc.ablate(hooked, torch.ones(N_UNITS), means)
    with pytest.raises(hc.HcLensError, match=r"use hc\.ablate"):
        hc.masked(hooked, ["L0.H0"], means)


def test_an_unknown_source_is_an_error(hooked):
    with pytest.raises(hc.HcLensError, match="got 'nought'"):
        hc.ablate(hooked, ["L0.H0"], "nought")
