"""Classifiers as bridges of TransformerLens 4, booted by the user or loaded."""

import subprocess
import sys
import warnings

import pytest
import torch
from transformer_lens.model_bridge import TransformerBridge

import hc_lens as hc
from hc_lens.models.quiet import quiet
from hc_lens.models.reading import is_classifier
from tests import tiny
from tests.batches import random_batches
from tests.lens import bridges_only


def booted(folder) -> TransformerBridge:
    with quiet():
        return TransformerBridge.boot_transformers(str(folder), device="cpu")


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_with_our_adapters_a_classifier_boots_as_one(family, tmp_path):
    hc.register_adapters()
    original = tiny.tiny_hf(family)
    bridge = booted(tiny.save_checkpoint(tmp_path, family))
    inputs = tiny.tiny_inputs(original.config.pad_token_id, "right")
    with torch.no_grad():
        expected = original(**inputs).logits
        got = bridge(inputs["input_ids"], attention_mask=inputs["attention_mask"])
    assert type(bridge.original_model) is type(original)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


def test_the_adapters_are_found_without_a_warning_of_transformer_lens(tmp_path):
    tiny.save_checkpoint(tmp_path, "distilbert")
    code = (
        "import warnings; warnings.simplefilter('error', UserWarning); import hc_lens as hc;"
        "hc.register_adapters(); from transformer_lens.model_bridge import TransformerBridge as T;"
        f"print(type(T.boot_transformers({str(tmp_path)!r}, device='cpu').original_model).__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "DistilBertForSequenceClassification"


@bridges_only
@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_a_booted_bridge_is_scanned_as_a_loaded_one(family, tmp_path):
    hc.register_adapters()
    folder = tiny.save_checkpoint(tmp_path, family)
    loaded, bridge = hc.load(folder), booted(folder)
    assert is_classifier(bridge)
    batches = random_batches(loaded)
    means = hc.collect_means(loaded, batches, progress=False)
    wanted = hc.scan(loaded, batches, means, progress=False)
    found = hc.scan(bridge, batches, hc.collect_means(bridge, batches, progress=False))
    assert (found["kl"] - wanted["kl"]).abs().max() < 1e-6


def test_a_language_model_around_the_checkpoint_of_a_classifier_is_refused(tmp_path):
    import transformers

    with quiet():
        wrong = transformers.BertForMaskedLM.from_pretrained(
            tiny.save_checkpoint(tmp_path, "bert"), trust_remote_code=False
        )
        wrong.config.architectures = ["BertForMaskedLM"]
        bridge = TransformerBridge.boot_transformers(
            str(tmp_path), hf_model=wrong, tokenizer=tiny.bert_tokenizer(), device="cpu"
        )
        wrong.config.architectures = ["BertForSequenceClassification"]
    message = r"holds \(BertForSequenceClassification\), got .*BertForMaskedLM.*register_adapters"
    for refused in (hc.UnitSpace.of, lambda model: hc.ablate(model, ["L0.H0"], "zero")):
        with pytest.raises(hc.HcLensError, match=message):
            refused(bridge)


@bridges_only
def test_a_hook_that_changes_the_pattern_of_an_encoder_is_refused_and_one_that_reads_is_not():
    model = hc.load(tiny.tiny_hf("bert"))
    tokens, seen = torch.tensor([[5, 6, 7]]), []
    full = model(tokens)
    model.add_hook("blocks.0.attn.hook_pattern", lambda value, hook: seen.append(value.shape))
    assert torch.equal(model(tokens), full)
    assert seen == [(1, 4, 3, 3)]
    model.add_hook("blocks.0.attn.hook_pattern", lambda value, hook: 0.5 * value)
    with pytest.raises(hc.HcLensError, match=r"has no effect on this model.*hook_z instead"):
        model(tokens)
    decoder = hc.load(tiny.tiny_hf("llama"))
    full = decoder(tokens)
    decoder.add_hook("blocks.0.attn.hook_pattern", lambda value, hook: 0.5 * value)
    assert not torch.allclose(decoder(tokens), full)


@bridges_only
def test_split_inputs_of_an_encoder_are_refused():
    with pytest.raises(NotImplementedError, match="use_split_qkv_input"):
        hc.load(tiny.tiny_hf("bert")).set_use_split_qkv_input(True)


@bridges_only
def test_loading_leaves_the_model_object_as_it_is():
    original = tiny.tiny_hf("gpt2")
    names, inputs = [*original.state_dict()], tiny.tiny_inputs(0, "right")
    with torch.no_grad():
        before = original(**inputs).logits
        hc.load(original, dtype=torch.float64)
        assert [*original.state_dict()] == names
        assert torch.equal(original(**inputs).logits, before)


@bridges_only
@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_a_model_in_compatibility_mode_is_scanned_with_its_own_blocks(family):
    model = hc.load(tiny.tiny_hf(family))
    batches = random_batches(model)
    wanted = hc.scan(model, batches, "zero", progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.enable_compatibility_mode(no_processing=True)
    found = hc.scan(model, batches, "zero", progress=False)
    assert (found["kl"] - wanted["kl"]).abs().max() < 1e-5
