"""A hooked model with other logits than Hugging Face's is not handed out."""

import pytest
import torch

import hc_lens as hc
from hc_lens.models.probe import check_logits
from tests import tiny
from tests.lens import BRIDGES, bridges_only, hooked_only

PASSED_OVER = (
    ("gpt2", {"scale_attn_weights": False})
    if BRIDGES
    else ("llama", {"attention_bias": True, "mlp_bias": True})
)
"""A setting that the installed TransformerLens passes over."""


def test_another_models_logits_are_refused_with_how_far_apart_they_are():
    original, other = (tiny.tiny_hf("bert", seed) for seed in (0, 1))
    model = hc.load(original)
    check_logits(original, model)
    with pytest.raises(hc.HcLensError, match=r"BertForSeq.*apart by [\d.]+, the largest is [\d.]+"):
        check_logits(other, model)


def test_a_setting_that_transformer_lens_passes_over_is_refused():
    family, change = PASSED_OVER
    other = 3 if BRIDGES else 4
    with pytest.raises(hc.HcLensError, match=rf"passes over a setting.*TransformerLens {other}"):
        hc.load(tiny.tiny_hf(family, **change))


def test_what_a_converter_cannot_take_is_told_in_our_words():
    message = r"expected a GPTNeoXForSeq.* can take, got one with which it fails: \w+Error"
    with pytest.raises(hc.HcLensError, match=message):
        hc.load(tiny.tiny_hf("gpt_neox", attention_bias=False))


WINDOWS = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}


@hooked_only
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_windows_that_transformer_lens_3_passes_over_are_refused(family):
    with pytest.raises(hc.HcLensError, match=r"layers see 3 tokens.*use TransformerLens 4"):
        hc.load(tiny.tiny_hf(family, **WINDOWS))


@bridges_only
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_windows_are_hugging_faces_with_transformer_lens_4(family):
    original = tiny.tiny_hf(family, **WINDOWS)
    inputs = tiny.tiny_inputs(0, "right")
    with torch.no_grad():
        wide = tiny.tiny_hf(family)(**inputs).logits
        expected = original(**inputs).logits
    assert (wide - expected).abs().max() > 0.01
    torch.testing.assert_close(hc.load(original)(**inputs), expected, atol=1e-5, rtol=0)


def test_each_part_of_the_model_object_stays_in_its_mode():
    original = tiny.tiny_hf("bert", hidden_dropout_prob=0.5).train()
    original.bert.encoder.layer[0].eval()
    before = {name: part.training for name, part in original.named_modules()}
    hc.load(original)
    assert {name: part.training for name, part in original.named_modules()} == before


def test_a_model_with_weights_that_are_not_finite_is_loaded_and_told_of_where_it_is_used():
    original = tiny.tiny_hf("bert")
    with torch.no_grad():
        original.classifier.bias[0] = torch.nan
    assert hc.load(original)(torch.tensor([[5, 6]])).isnan().any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_types_of_16_bits_may_be_as_far_apart_as_they_round(dtype):
    original = tiny.tiny_hf("bert")
    assert hc.load(original, dtype=dtype).cfg.dtype == dtype
    assert hc.load(original.to(dtype)).cfg.dtype == torch.float32
