"""Classifiers as bridges of TransformerLens 4, booted by the user or loaded."""

import pickle
import subprocess
import sys
import warnings
from importlib.metadata import entry_points

import pytest
import torch
from transformer_lens.factories.architecture_adapter_factory import (
    SUPPORTED_ARCHITECTURES,
    ArchitectureAdapterFactory,
)
from transformer_lens.model_bridge import TransformerBridge

import hc_lens as hc
from hc_lens.errors import HcLensWarning
from hc_lens.models.adapters import ADAPTERS
from hc_lens.models.fingerprint import fingerprint
from hc_lens.models.lens import parts_of
from hc_lens.models.quiet import quiet
from hc_lens.models.reading import is_classifier
from hc_lens.models.views import can_view, view
from tests import tiny
from tests.batches import random_batches
from tests.lens import bridges_only, hooks_on


def silently(call, **settings) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        call(**settings)


def booted(folder) -> TransformerBridge:
    with quiet():
        return TransformerBridge.boot_transformers(str(folder), device="cpu")


@pytest.mark.parametrize("family", tiny.BRIDGED)
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
        "hc.register_adapters(); hc.register_adapters();"
        "from transformer_lens.model_bridge import TransformerBridge as T;"
        f"print(type(T.boot_transformers({str(tmp_path)!r}, device='cpu').original_model).__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "DistilBertForSequenceClassification"


@bridges_only
def test_every_adapter_is_an_entry_point():
    found = {
        point.name: point
        for point in entry_points(group="transformer_lens.architectures")
        if point.value.startswith("hc_lens.")
    }
    assert {name: point.load() for name, point in found.items()} == ADAPTERS


@bridges_only
@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_a_booted_bridge_is_scanned_as_a_loaded_one_with_a_hook_and_without(family, tmp_path):
    hc.register_adapters()
    folder = tiny.save_checkpoint(tmp_path, family)
    loaded, bridge = hc.load(folder), booted(folder)
    assert is_classifier(bridge)
    batches = random_batches(loaded)
    means = hc.collect_means(loaded, batches, progress=False)
    wanted = hc.scan(loaded, batches, means, progress=False)
    for hooked in (False, True):
        if hooked:  # then the bridge's own blocks run, one after the other, many times
            bridge.blocks[0].attn.hook_q.add_hook(lambda value, hook: None)
        found = hc.scan(bridge, batches, means, progress=False)
        assert (found["kl"] - wanted["kl"]).abs().max() < 1e-6


PAIRS = [
    {"premise": "the doctor slept", "hypothesis": "the judge ran", "label": "neutral"},
    {"premise": "who called", "hypothesis": "the lawyer saw a student", "label": "entailment"},
]


@bridges_only
@pytest.mark.parametrize("family", ["bert", "roberta", "gpt2"])
def test_a_booted_bridge_reads_what_a_loaded_model_reads(family, tmp_path):
    hc.register_adapters()
    folder = tiny.save_checkpoint(tmp_path, family)
    loaded, bridge = hc.load(folder), booted(folder)
    labels = [*tiny.MNLI_LABELS.values()]
    task = hc.Task.from_rows({"train": PAIRS}, columns=("premise", "hypothesis"), labels=labels)
    theirs, ours = (task.batches(model, "train") for model in (bridge, loaded))
    # TransformerLens reads tokenizers with a BOS, and some without their other special tokens.
    assert torch.equal(theirs[0].inputs["input"], ours[0].inputs["input"])
    assert bridge.labels == loaded.labels == tiny.MNLI_LABELS
    assert fingerprint(bridge) == loaded.fingerprint


@bridges_only
def test_a_tokenizer_that_is_not_where_it_was_stays_as_transformer_lens_has_it(tmp_path):
    hc.register_adapters()
    tokenizer = tiny.bert_tokenizer()
    tokenizer.name_or_path = str(tmp_path / "gone" / "elsewhere")
    folder, original = tiny.save_checkpoint(tmp_path / "there", "bert"), tiny.tiny_hf("bert")
    original.config.architectures = [type(original).__name__]
    with pytest.warns(HcLensWarning, match="with the tokenizer as TransformerLens has it"):
        bridge = TransformerBridge.boot_transformers(
            str(folder), hf_model=original, tokenizer=tokenizer, device="cpu"
        )
    assert bridge.tokenizer("a doctor")["input_ids"] == tokenizer("a doctor")["input_ids"]


@bridges_only
@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_labels_that_are_given_stay_after_a_change_of_mode(family):
    unnamed, names = {0: "LABEL_0", 1: "LABEL_1", 2: "LABEL_2"}, ["no", "maybe", "yes"]
    model = hc.load(tiny.tiny_hf(family, labels=unnamed), labels=names)
    silently(model.enable_compatibility_mode)
    assert [*model.labels.values()] == names


def test_a_booted_classifier_has_a_configuration_that_can_be_pickled(tmp_path):
    hc.register_adapters()
    bridge = booted(tiny.save_checkpoint(tmp_path, "bert"))
    config = pickle.loads(pickle.dumps(bridge.original_model.config))
    assert type(config).__module__.startswith("transformers.")


@bridges_only
def test_an_adapter_that_the_user_has_registered_stays(monkeypatch):
    name = "DistilBertForSequenceClassification"
    theirs = type("Theirs", (ADAPTERS[name],), {})
    monkeypatch.setitem(SUPPORTED_ARCHITECTURES, name, theirs)
    monkeypatch.setitem(ArchitectureAdapterFactory._adapters, name, theirs)
    hc.register_adapters()
    assert SUPPORTED_ARCHITECTURES[name] is ArchitectureAdapterFactory._adapters[name] is theirs


@bridges_only
def test_the_components_of_a_classifier_are_known_by_its_adapter_alone(monkeypatch, tmp_path):
    hc.register_adapters()
    bridge = booted(tiny.save_checkpoint(tmp_path, "bert"))
    assert parts_of(bridge) is not None
    foreign = type("Foreign", (), {"component_mapping": bridge.adapter.component_mapping})()
    monkeypatch.setattr(bridge, "adapter", foreign)
    assert parts_of(bridge) is None


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
    batches, silent = random_batches(hc.load(tmp_path)), {"progress": False}
    for refused in (
        hc.UnitSpace.of,
        lambda model: hc.ablate(model, ["L0.H0"], "zero"),
        lambda model: hc.evaluate(model, {"rows": batches}, **silent),
        lambda model: hc.scan(model, batches, "zero", **silent),
        lambda model: hc.prune(model, batches, "zero", hc.PruneConfig(0.5, seed=0), **silent),
        lambda model: hc.patterns(model, hc.word_batch(model, ["a doctor"]), ["L0.H0"]),
    ):
        with pytest.raises(hc.HcLensError, match=message):
            refused(bridge)


def halve(value, hook):
    return 0.5 * value


def halve_in_place(value, hook):
    value *= 0.5
    return value


@bridges_only
@pytest.mark.parametrize("name", ["hook_pattern", "hook_attn_scores"])
@pytest.mark.parametrize("edit", [halve, halve_in_place])
def test_a_hook_that_changes_the_pattern_of_an_encoder_is_refused_and_one_that_reads_is_not(
    name, edit
):
    model, point = hc.load(tiny.tiny_hf("bert")), f"blocks.0.attn.{name}"
    tokens, seen = torch.tensor([[5, 6, 7]]), []
    full = model(tokens)
    model.add_hook(point, lambda value, hook: seen.append(value.shape))
    assert torch.equal(model(tokens), full)
    assert seen == [(1, 4, 3, 3)]
    model.add_hook(point, edit)
    with torch.no_grad(), pytest.raises(hc.HcLensError, match=r"has no effect on this.*hook_z"):
        model(tokens)
    model.reset_hooks()
    assert hooks_on(model) == []
    assert not model.hook_dict[point]._forward_hooks
    decoder = hc.load(tiny.tiny_hf("llama"))
    full = decoder(tokens)
    decoder.add_hook(point, edit)
    with torch.no_grad():
        assert not torch.allclose(decoder(tokens), full)


@bridges_only
@pytest.mark.parametrize("part", ["start_at_layer", "stop_at_layer"])
def test_a_part_of_an_encoder_is_refused_as_transformer_lens_runs_all_of_it(part):
    model = hc.load(tiny.tiny_hf("bert"))
    with pytest.raises(hc.HcLensError, match=f"{part}=1, which TransformerLens 4 does not heed"):
        model(torch.tensor([[5, 6]]), **{part: 1})


@bridges_only
@pytest.mark.parametrize("asked", ["logits", "predictions", None])
def test_a_decoder_that_stops_at_a_layer_gives_the_stream(asked):
    model = hc.load(tiny.tiny_hf("gpt2"))
    tokens = torch.tensor([[5, 6, 7]])
    _, cache = model.run_with_cache(tokens)
    stream = model(tokens, return_type=asked, stop_at_layer=1)
    torch.testing.assert_close(stream, cache["blocks.1.hook_resid_pre"])


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
    silently(model.enable_compatibility_mode, no_processing=True)
    found = hc.scan(model, batches, "zero", progress=False)
    assert (found["kl"] - wanted["kl"]).abs().max() < 1e-5


@bridges_only
@pytest.mark.parametrize("family", tiny.BRIDGED)
def test_processed_weights_say_the_same_and_are_another_model_to_means(family):
    model = hc.load(tiny.tiny_hf(family))
    batches = random_batches(model)
    means = hc.collect_means(model, batches, progress=False)
    wanted = model(**batches[0].inputs).softmax(-1)
    silently(model.enable_compatibility_mode)
    torch.testing.assert_close(model(**batches[0].inputs).softmax(-1), wanted, atol=1e-5, rtol=0)
    with pytest.raises(hc.HcLensError, match="expected means of this model"):
        hc.scan(model, batches, means, progress=False)


@bridges_only
def test_a_gate_with_biases_which_the_kernels_do_not_know_is_run_by_the_models_own_blocks():
    original = tiny.tiny_hf("llama", mlp_bias=True)
    model = hc.load(original)
    assert not can_view(model)
    batches = random_batches(model)
    found = hc.scan(model, batches, "zero", sets=[["L0.MLP"]], progress=False)
    with torch.no_grad(), hc.ablate(model, ["L0.MLP"], "zero"):
        logits = torch.cat([model(**batch.inputs) for batch in batches])
    labels = torch.cat([batch.labels for batch in batches])
    accuracy = (logits.argmax(-1) == labels).float().mean().item()
    assert found.set_index("set")["accuracy"]["L0.MLP"] == pytest.approx(accuracy)


@bridges_only
def test_weights_in_the_place_of_a_bridges_own_are_refused():
    model = hc.load(tiny.tiny_hf("bert"))
    with pytest.raises(hc.HcLensError, match="TransformerLens 3 for weights in the place"):
        view(model, 0, {"blocks.0.ln1.w": torch.ones(32)})
