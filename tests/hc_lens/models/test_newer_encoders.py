"""DeBERTa, ModernBERT, ALBERT and MPNet against Hugging Face, in all that their files describe."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import hc_lens as hc
from hc_lens.errors import HcLensError
from hc_lens.masks.run import MaskedRun
from hc_lens.models.views import view
from hc_lens.scans.engine import SuffixEngine
from hc_lens.scans.layers import FusedLayers
from tests import tiny
from tests.batches import random_batches
from tests.hc_lens.masks.test_run import by_hooks, gradient, soft_masks
from tests.hc_lens.models.test_parity import expected_logits
from tests.hc_lens.pairs import brute_force
from tests.lens import BRIDGES, bridges_only, hooked_only

VARIANTS = {
    "the first version": ("deberta", {}),
    "the first version with absolute positions": (
        "deberta",
        {"position_biased_input": True, "type_vocab_size": 2, "pos_att_type": "p2c"},
    ),
    "shared keys, log buckets, no absolute positions": ("deberta-v3", {}),
    "no buckets": ("deberta-v3", {"position_buckets": -1, "max_relative_positions": 5}),
    "weights of their own, absolute positions": ("deberta-v2", {"type_vocab_size": 2}),
    "content to position": ("deberta-v2", {"pos_att_type": "c2p"}),
    "position to content": ("deberta-v3", {"pos_att_type": ["p2c"], "norm_rel_ebd": "none"}),
    "terms that only scale": ("deberta-v2", {"relative_attention": False}),
    "no terms": ("deberta-v3", {"relative_attention": False, "pos_att_type": None}),
    "a convolution": ("deberta-v2", {"conv_kernel_size": 3, "conv_act": "gelu"}),
    "a wide convolution in groups": ("deberta-v3", {"conv_kernel_size": 5, "conv_groups": 4}),
    "narrow embeddings": ("deberta-v3", {"embedding_size": 16, "pooler_hidden_act": "relu"}),
    "windows, cls": ("modernbert", {"num_hidden_layers": 4}),
    "windows, mean": ("modernbert-mean", {"attention_bias": True, "norm_bias": True}),
    "global layers at other places": (
        "modernbert",
        {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "a biased head": ("modernbert", {"classifier_bias": True, "classifier_activation": "relu"}),
    "one layer again and again": ("albert", {"num_hidden_layers": 3, "hidden_act": "gelu_new"}),
    "groups of two layers": (
        "albert",
        {"num_hidden_layers": 3, "num_hidden_groups": 2, "inner_group_num": 2},
    ),
    "embeddings as wide as the stream": ("albert", {"embedding_size": 32}),
    "numbers for distances": ("mpnet", {"max_position_embeddings": 180}),
}
LENGTHS = (19, 11, 2, 1)
"""Longer than ModernBERT's window of 3 to either side and DeBERTa's 4 buckets."""

variants = pytest.mark.parametrize("variant", VARIANTS)
sides = pytest.mark.parametrize("side", ["right", "left"])


def original_of(variant: str, dtype: torch.dtype = torch.float64) -> Any:
    family, changes = VARIANTS[variant]
    return tiny.tiny_hf(family, **changes).to(dtype)


def inputs_of(original, side: str, token_types: bool = False) -> dict[str, torch.Tensor]:
    # MPNet's buckets begin to be logarithmic at 8 and end at 128.
    lengths = (150, 40, 2) if original.config.model_type == "mpnet" else LENGTHS
    pad = original.config.pad_token_id
    return tiny.tiny_inputs(pad, side, lengths, token_types=token_types)


@hooked_only
@variants
@sides
def test_logits_equal_hugging_face(variant: str, side: str, monkeypatch):
    for dtype, bound in ((torch.float32, 1e-4), (torch.float64, 1e-9)):
        original = original_of(variant, dtype)
        inputs = inputs_of(original, side)
        expected = expected_logits(original, inputs, monkeypatch)
        assert (hc.load(original, dtype=dtype)(**inputs) - expected).abs().max() < bound


@hooked_only
@variants
def test_patterns_equal_what_hugging_face_gives_out(variant: str):
    original = original_of(variant, torch.float32)
    model, inputs = hc.load(original), inputs_of(original, "right")
    original.set_attn_implementation("eager")
    with torch.no_grad():
        expected = original(**inputs, output_attentions=True).attentions
    _, cache = model.run_with_cache(
        inputs["input_ids"], one_zero_attention_mask=inputs["attention_mask"]
    )
    assert len(expected) == model.cfg.n_layers
    real = inputs["attention_mask"].bool()[:, None, :, None]
    for layer, theirs in enumerate(expected):
        ours = cache[f"blocks.{layer}.attn.hook_pattern"]
        assert ((ours - theirs) * real).abs().max() < 1e-5
        assert ours.shape == theirs.shape


@hooked_only
@variants
@sides
def test_scans_and_masked_runs_by_kernels_are_those_of_hooks(variant: str, side: str):
    original = original_of(variant)
    model = hc.load(original, dtype=torch.float64)
    batches = random_batches(model, lengths=((14, 9, 2), (12, 12)), side=side)
    means = hc.collect_means(model, batches, progress=False)
    units = list(hc.UnitSpace.of(model))
    last = model.cfg.n_layers - 1
    sets = [[], *([unit] for unit in units), [units[0], units[6]], [units[1], hc.Unit(last)]]
    engine = SuffixEngine(model, sets, means, 10**9)
    assert isinstance(engine.layers, FusedLayers)
    masked = MaskedRun(model, means, first=1)
    for batch in batches:
        expected = brute_force(model, batch, means, sets)
        assert (engine.logits(batch) - expected).abs().max() < 1e-11
        mask = torch.ones(len(units), dtype=torch.float64)
        mask[units.index(hc.Unit(last))] = mask[units.index(hc.Unit(1, 2))] = 0.0
        with torch.no_grad(), hc.ablate(model, [hc.Unit(1, 2), hc.Unit(last)], means):
            expected = model(**batch.inputs)
        held = masked.readout.logits(masked.held(batch, mask))
        assert (held - expected).abs().max() < 1e-11


@hooked_only
@pytest.mark.parametrize("bfloat16", [False, True])
@pytest.mark.parametrize("family", ["deberta-v3", "modernbert", "modernbert-mean", "mpnet"])
def test_gradients_of_masks_are_those_of_hooks_also_where_a_pad_sees_nothing(family, bfloat16):
    model = hc.load(tiny.tiny_hf(family))
    (batch,) = random_batches(model, lengths=((14, 9, 2),))
    means = hc.collect_means(model, [batch], progress=False)
    mask = soft_masks(model, batch).float().detach().requires_grad_()
    found = gradient(MaskedRun(model, means, first=0, bfloat16=bfloat16).held(batch, mask), mask)
    expected = gradient(by_hooks(model, batch, mask, means), mask)
    assert expected.isfinite().all()
    assert (found - expected).abs().max() < (0.1 if bfloat16 else 1e-5)


@hooked_only
def test_results_of_heads_add_up_to_what_they_write():
    model = hc.load(tiny.tiny_hf("deberta-v3"), dtype=torch.float64)
    (batch,) = random_batches(model, lengths=((9, 5),))
    _, plain = model.run_with_cache(**batch.inputs)
    model.cfg.use_attn_result = True
    _, split = model.run_with_cache(**batch.inputs)
    at = "blocks.1.attn.hook_result"
    assert split[at].shape == (2, 9, 4, 32)
    whole = split[at].sum(2) + model.blocks[1].attn.b_O
    torch.testing.assert_close(whole, plain["blocks.1.hook_attn_out"])
    torch.testing.assert_close(split["blocks.1.hook_attn_out"], plain["blocks.1.hook_attn_out"])


@hooked_only
@pytest.mark.parametrize("family", ["deberta-v3", "modernbert-mean"])
def test_a_scan_with_hooks_of_the_user_runs_the_models_own_blocks(family: str):
    model: Any = hc.load(tiny.tiny_hf(family), dtype=torch.float64)
    batches = random_batches(model, lengths=((14, 9, 2),))
    means = hc.collect_means(model, batches, progress=False)
    sets = [[], [hc.Unit(0, 1)], [hc.Unit(1)]]
    fused = SuffixEngine(model, sets, means, 10**9).logits(batches[0])
    seen: list[int] = []
    model.add_hook("blocks.0.hook_mlp_out", lambda x, hook: seen.append(len(x)))
    hooked = SuffixEngine(model, sets, means, 10**9)
    assert not isinstance(hooked.layers, FusedLayers)
    assert (hooked.logits(batches[0]) - fused).abs().max() < 1e-11
    assert seen


@hooked_only
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", ["deberta-v3", "modernbert-mean", "mpnet"])
def test_half_precision_is_scanned(family: str, dtype: torch.dtype):
    exact, model = (hc.load(tiny.tiny_hf(family), dtype=kind) for kind in (torch.float32, dtype))
    batch, sets = random_batches(model, lengths=((14, 9, 2),))[0], [[], [hc.Unit(0, 1)]]
    logits = SuffixEngine(model, sets, hc.Zero(), 10**9).logits(batch)
    assert logits.dtype == dtype
    expected = SuffixEngine(exact, sets, hc.Zero(), 10**9).logits(batch)
    assert (logits.float() - expected).abs().max() < (0.02 if dtype == torch.float16 else 0.15)


@hooked_only
@pytest.mark.parametrize("family", ["deberta-v3", "deberta-v2"])
def test_token_types_count_as_in_hugging_face(family: str):
    types = 2 if family == "deberta-v2" else 0
    original: Any = tiny.tiny_hf(family, type_vocab_size=types).double()
    inputs = inputs_of(original, "right", token_types=True)
    with torch.no_grad():
        expected = original(**inputs).logits
    assert (hc.load(original, dtype=torch.float64)(**inputs) - expected).abs().max() < 1e-9


@hooked_only
def test_a_row_within_the_window_of_modernbert_is_not_cut_and_a_longer_one_is():
    model = hc.load(tiny.tiny_hf("modernbert"), dtype=torch.float64)
    assert [view(model, layer).heads.window for layer in range(3)] == [None, 4, 4]
    ids = tiny.tiny_inputs(0, "right", (9,))["input_ids"]
    _, cache = model.run_with_cache(ids)
    near = (torch.arange(9) - torch.arange(9)[:, None]).abs() <= 3
    assert (cache["blocks.1.attn.hook_pattern"] > 0).eq(near).all()
    assert (cache["blocks.0.attn.hook_pattern"] > 0).all()


@hooked_only
def test_layers_of_albert_share_their_weights_and_not_their_units():
    model = hc.load(tiny.tiny_hf("albert", num_hidden_layers=3), dtype=torch.float64)
    assert model.blocks[2].attn.W_Q is model.blocks[0].attn.W_Q
    batch = random_batches(model)[0]
    _, before = model.run_with_cache(**batch.inputs)
    with hc.ablate(model, ["L1.H0"], "zero"):
        _, after = model.run_with_cache(**batch.inputs)
    assert torch.equal(before["blocks.0.attn.hook_z"], after["blocks.0.attn.hook_z"])
    assert after["blocks.1.attn.hook_z"][:, :, 0].abs().max() == 0
    assert after["blocks.2.attn.hook_z"][:, :, 0].abs().max() > 0
    with torch.no_grad():
        model.blocks[1].attn.W_Q.zero_()
    assert model.blocks[0].attn.W_Q.abs().max() == 0


@hooked_only
@pytest.mark.parametrize("family", ["deberta-v3", "mpnet"])
def test_a_copy_of_a_model_has_a_table_of_distances_of_its_own(family: str):
    model: Any = hc.load(tiny.tiny_hf(family), dtype=torch.float64)
    batch, other = random_batches(model)[0], copy.deepcopy(model)
    before = model(**batch.inputs)
    assert model.fingerprint == other.fingerprint
    with torch.no_grad():
        model.embed.relative.w.normal_(generator=torch.Generator().manual_seed(1))
    assert torch.equal(other(**batch.inputs), before)
    assert not torch.equal(model(**batch.inputs), before)
    assert model.fingerprint != other.fingerprint


@hooked_only
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("deberta-v3", {"position_buckets": 4, "max_relative_positions": 9}),
        ("deberta-v3", {"pos_att_type": ["c2p"]}),
        ("deberta-v3", {"pooler_hidden_act": "relu"}),
        ("modernbert", {"local_attention": 4}),
        ("modernbert", {"classifier_pooling": "mean"}),
        ("modernbert", {"classifier_activation": "relu"}),
        (
            "modernbert",
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "default", "rope_theta": 160_000.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 9.0},
                }
            },
        ),
    ],
)
def test_what_weights_do_not_say_is_in_the_fingerprint(family: str, changes: dict):
    model, other = hc.load(tiny.tiny_hf(family)), hc.load(tiny.tiny_hf(family, **changes))
    assert [name for name, _ in model.named_parameters()] == [
        name for name, _ in other.named_parameters()
    ]
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        theirs.data = mine.data
    assert model.fingerprint != other.fingerprint


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("deberta-v3", {"position_biased_input": "both"}, "with position_biased_input among"),
        ("deberta-v3", {"pos_att_type": ["p2p"]}, r"with pos_att_type among .*got \['p2p'\]"),
        ("deberta-v3", {"norm_rel_ebd": "batch_norm"}, "with norm_rel_ebd among"),
        ("deberta-v3", {"z_steps": 3}, "with z_steps among .*got 3"),
        ("deberta-v2", {"conv_kernel_size": 3, "num_hidden_layers": 1}, "with a convolution as a"),
        ("deberta", {"talking_head": True}, "with talking_head among"),
        ("deberta", {"share_att_key": True}, "with share_att_key among"),
        ("modernbert", {"mlp_bias": True}, "with mlp_bias among"),
        ("modernbert", {"sparse_prediction": True}, "with sparse_prediction among"),
        ("modernbert", {"classifier_pooling": "max"}, "with classifier_pooling among"),
        ("mpnet", {"relative_attention_num_buckets": 64}, "relative_attention_num_buckets among"),
        ("mpnet", {"pad_token_id": 0}, "with pad_token_id among"),
        ("albert", {"hidden_act": "tanh"}, "with an MLP activation among"),
    ],
)
@hooked_only
def test_a_configuration_that_is_not_computed_is_refused_by_name(family, changes, message):
    original: Any = tiny.tiny_hf(family)
    for name, value in changes.items():
        vars(original.config)[name] = value
    with pytest.raises(HcLensError, match=message):
        hc.load(original)


@hooked_only
def test_other_layers_and_rotary_positions_of_modernbert_are_refused():
    original: Any = tiny.tiny_hf("modernbert")
    original.config.rope_parameters["full_attention"]["rope_type"] = "yarn"
    with pytest.raises(HcLensError, match=r"with rope_type among .*got 'yarn'"):
        hc.load(original)
    original = tiny.tiny_hf("modernbert")
    original.config.layer_types = ["full_attention", "chunked_attention", "full_attention"]
    with pytest.raises(HcLensError, match=r"with layer_types among .*got 'chunked_attention'"):
        hc.load(original)


@hooked_only
def test_a_model_that_was_set_to_run_its_last_layer_again_is_refused():
    original: Any = tiny.tiny_hf("deberta-v3")
    original.deberta.z_steps = 3
    with pytest.raises(HcLensError, match="z_steps"):
        hc.load(original)


def test_several_labels_at_once_are_refused():
    original: Any = tiny.tiny_hf("bert")
    original.config.problem_type = "multi_label_classification"
    with pytest.raises(HcLensError, match="expected a classifier of which one label is right"):
        hc.load(original)


@bridges_only
@pytest.mark.parametrize("family", tiny.NEWER)
def test_transformer_lens_4_has_no_bridge_for_them_and_says_so(family: str):
    assert BRIDGES
    with pytest.raises(HcLensError, match=r"expected TransformerLens 3 for a .* checkpoint, whose"):
        hc.load(tiny.tiny_hf(family))
