"""From a directory: what loads, what is refused, and what is left untouched."""

import json
import logging
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformer_lens import HookedEncoder, HookedTransformer

import hc_lens as hc
from tests import tiny


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return tiny.save_checkpoint(tmp_path / "checkpoint")


def edit_config(folder: Path, **changes) -> None:
    place = folder / "config.json"
    place.write_text(json.dumps({**json.loads(place.read_text()), **changes}))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_directory_gives_the_logits_of_the_model_that_was_saved(family, tmp_path):
    folder = tiny.save_checkpoint(tmp_path / "llama-t5-bert-named-to-confuse", family)
    inputs = tiny.tiny_inputs(tiny.tiny_hf(family).config.pad_token_id, "right")
    model = hc.load(str(folder))
    with torch.no_grad():
        expected = tiny.tiny_hf(family)(**inputs).logits
    kind = HookedEncoder if family in tiny.ENCODERS else HookedTransformer
    assert isinstance(model, kind)
    assert model.labels == tiny.MNLI_LABELS
    torch.testing.assert_close(model(**inputs), expected, atol=1e-4, rtol=0)


def test_text_goes_in_as_sentences_pairs_and_lists(checkpoint):
    model = hc.load(checkpoint)
    pair = ("the doctor saw the lawyer .", "the lawyer slept .")
    together = model([pair, "the artist ran ."])
    torch.testing.assert_close(together[0], model(pair)[0])
    torch.testing.assert_close(together[1], model("the artist ran .")[0])
    assert model(pair, return_type="predictions")[0] in tiny.MNLI_LABELS.values()
    assert model(pair, return_type=None) is None


def test_text_goes_into_a_decoder_without_a_pad_token(tmp_path):
    model = hc.load(tiny.save_checkpoint(tmp_path / "gpt", "gpt2", pad_token_id=None))
    both = model(["the", "the the, the"])
    torch.testing.assert_close(both[:1], model("the"))
    torch.testing.assert_close(both[1:], model("the the, the"))


def test_a_decoder_runs_from_and_up_to_a_layer(tmp_path):
    model = hc.load(tiny.save_checkpoint(tmp_path / "gpt", "gpt2"))
    inputs = {**tiny.tiny_inputs(0, "right")}
    halfway = model(**inputs, stop_at_layer=1)
    rest = model(
        halfway, start_at_layer=1, attention_mask=inputs["attention_mask"],
        tokens=inputs["input_ids"],
    )  # fmt: skip
    torch.testing.assert_close(rest, model(**inputs))


def test_the_loaded_object_is_used_like_any_hooked_model(checkpoint):
    model = hc.load(checkpoint)
    inputs = tiny.tiny_inputs(0, "right")
    logits, cache = model.run_with_cache(**inputs)
    assert cache["blocks.1.attn.hook_z"].shape == (3, 9, 4, 8)
    assert model.W_Q.shape == (2, 4, 32, 8)
    torch.testing.assert_close(cache["unembed.hook_out"], logits)
    assert not any(p.requires_grad for p in model.parameters())


def test_a_bin_file_is_read_only_where_there_is_no_safetensors(checkpoint):
    expected = hc.load(checkpoint).fingerprint
    torch.save(load_file(checkpoint / "model.safetensors"), checkpoint / "pytorch_model.bin")
    (checkpoint / "model.safetensors").unlink()
    assert hc.load(checkpoint).fingerprint == expected


def test_loading_leaves_no_warning_no_log_and_no_changed_setting(checkpoint, caplog, capfd):
    state = torch.get_rng_state()
    verbosity = transformers.logging.get_verbosity()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hc.load(checkpoint)
    assert torch.equal(torch.get_rng_state(), state)
    assert transformers.logging.get_verbosity() == verbosity
    assert logging.getLogger().level == logging.WARNING
    assert caplog.records == []
    assert capfd.readouterr() == ("", "")


def test_a_given_tokenizer_is_not_changed(tmp_path):
    tokenizer = tiny.byte_tokenizer()
    model = hc.load(tiny.tiny_hf("gpt2"), tokenizer=tokenizer)
    assert tokenizer.pad_token is None
    assert model.tokenizer.pad_token == "</s>"


def test_a_given_model_object_is_not_changed():
    original = tiny.tiny_hf("bert")
    before = {name: value.clone() for name, value in original.state_dict().items()}
    hc.load(original)
    assert all(torch.equal(before[name], value) for name, value in original.state_dict().items())
    assert all(p.requires_grad for p in original.parameters())


def test_an_unknown_family_lists_the_known_ones(checkpoint):
    transformers.T5Config(architectures=["T5ForSequenceClassification"]).save_pretrained(checkpoint)
    with pytest.raises(hc.HcLensError, match=r"families \['bert', 'distilbert'.*got 't5'"):
        hc.load(checkpoint)


def test_a_family_that_transformers_does_not_know_is_an_error(checkpoint):
    edit_config(checkpoint, model_type="martian")
    with pytest.raises(hc.HcLensError, match=r"families \['bert'.*martian"):
        hc.load(checkpoint)


def test_a_config_with_a_broken_field_is_an_error(checkpoint):
    edit_config(checkpoint, hidden_size="wide")
    with pytest.raises(hc.HcLensError, match="cannot read from"):
        hc.load(checkpoint)


def test_a_directory_without_config_is_an_error(tmp_path):
    (tmp_path / "notes.txt").write_text("nothing here")
    with pytest.raises(hc.HcLensError, match=r"expected config\.json.*notes\.txt"):
        hc.load(tmp_path)


def test_a_directory_without_weights_is_an_error(checkpoint):
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(hc.HcLensError, match=r"expected weights \(model\.safetensors\)"):
        hc.load(checkpoint)


def test_a_corrupt_weight_file_is_an_error(checkpoint):
    place = checkpoint / "model.safetensors"
    place.write_bytes(place.read_bytes()[:1000])
    with pytest.raises(hc.HcLensError, match="expected readable weights"):
        hc.load(checkpoint)


def test_a_checkpoint_without_its_classifier_is_an_error_not_a_random_start(checkpoint):
    place = checkpoint / "model.safetensors"
    weights = {name: value for name, value in load_file(place).items() if "classifier" not in name}
    save_file(weights, place, metadata={"format": "pt"})
    with pytest.raises(
        hc.HcLensError, match=r"missing \['classifier\.bias', 'classifier\.weight'\]"
    ):
        hc.load(checkpoint)


def test_a_regression_head_is_an_error(tmp_path):
    config = transformers.BertConfig(**tiny.SIZES, vocab_size=tiny.VOCABULARY, num_labels=1)
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path)
    with pytest.raises(hc.HcLensError, match=r"regression head \(num_labels=1"):
        hc.load(tmp_path)


def test_a_token_classification_head_is_an_error():
    config = transformers.BertConfig(**tiny.SIZES, vocab_size=tiny.VOCABULARY, num_labels=5)
    with pytest.raises(hc.HcLensError, match="got BertForTokenClassification"):
        hc.load(transformers.BertForTokenClassification(config))


def test_a_missing_tokenizer_is_an_error_that_says_how_to_pass_one(checkpoint):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (checkpoint / name).unlink()
    with pytest.raises(hc.HcLensError, match=r"expected a tokenizer.*pass tokenizer="):
        hc.load(checkpoint)
    assert hc.load(checkpoint, tokenizer=tiny.bert_tokenizer()).tokenizer is not None


def test_text_without_a_tokenizer_is_an_error():
    with pytest.raises(hc.HcLensError, match="expected a tokenizer on the model"):
        hc.load(tiny.tiny_hf("bert"))("the doctor slept .")


def test_text_longer_than_the_context_is_an_error(checkpoint):
    with pytest.raises(hc.HcLensError, match=r"at most 40 tokens.*got a row of 52"):
        hc.load(checkpoint)("the " * 50)


@pytest.mark.parametrize("place", ["./nowhere", "/nowhere/at/all", "~/nowhere", "a/b/c"])
def test_a_path_that_is_not_there_is_an_error(place):
    with pytest.raises(hc.HcLensError, match="which is not a directory"):
        hc.load(place)


@pytest.mark.slow
def test_a_hub_id_without_a_network_is_an_error_that_says_to_pass_a_path(tmp_path):
    code = (
        "import hc_lens as hc\n"
        "try: hc.load('someone/some-model')\n"
        "except hc.HcLensError as error: print(error)"
    )
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert "without a network, pass the path of a downloaded checkpoint" in done.stdout


def test_something_that_is_no_model_is_an_error():
    with pytest.raises(hc.HcLensError, match="got int"):
        hc.load(7)


def test_a_loss_is_not_a_return_type_of_a_classifier(checkpoint):
    with pytest.raises(hc.HcLensError, match="return_type"):
        hc.load(checkpoint)("the doctor slept .", return_type="loss")


def test_an_activation_that_cannot_be_hooked_is_an_error():
    with pytest.raises(hc.HcLensError, match="got 'mish'"):
        hc.load(tiny.tiny_hf("bert", hidden_act="mish"))


def test_the_logits_of_a_classifier_can_be_given_names():
    names = ["neutral", "entailment", "contradiction"]
    placeholders = {index: f"LABEL_{index}" for index in range(3)}
    unnamed = tiny.tiny_hf("bert", labels=placeholders)
    plain, named = (hc.load(unnamed, labels=labels) for labels in (None, names))
    assert named.labels == dict(enumerate(names))
    assert plain.labels == placeholders
    assert named.fingerprint != plain.fingerprint


def test_names_that_contradict_the_checkpoints_own_are_refused():
    with pytest.raises(hc.HcLensError, match=r"own, \['entailment', 'neutral', 'contradiction'\]"):
        hc.load(tiny.tiny_hf("bert"), labels=["neutral", "entailment", "contradiction"])
    same = hc.load(tiny.tiny_hf("bert"), labels=["Entailment", "NEUTRAL", "contradiction"])
    assert same.fingerprint == hc.load(tiny.tiny_hf("bert")).fingerprint


@pytest.mark.parametrize("device", ["cudaa", "cuda:99", "meta"])
def test_a_device_that_is_not_there_is_refused_before_anything_is_read(device):
    with pytest.raises(hc.HcLensError, match=rf"is there \(cpu.*\), got '{device}'; choose one"):
        hc.load("/nowhere/at/all", device=device)


def test_a_config_that_is_not_json_is_named_with_the_place_of_its_mistake(checkpoint):
    (checkpoint / "config.json").write_text('{\n "model_type": "bert",,\n}')
    with pytest.raises(
        hc.HcLensError, match=r"expected JSON in .*config\.json, got .*line 2 column 23"
    ):
        hc.load(checkpoint)


def test_a_config_with_more_layers_than_the_weights_says_how_many_there_are(checkpoint):
    edit_config(checkpoint, num_hidden_layers=5)
    with pytest.raises(
        hc.HcLensError, match=r"weights of 5 layers.*got those of 2; set num_hidden_layers to 2"
    ):
        hc.load(checkpoint)


def test_names_of_the_logits_must_be_as_many_as_the_logits():
    with pytest.raises(hc.HcLensError, match=r"each of the model's 3 labels, got \['a', 'b'\]"):
        hc.load(tiny.tiny_hf("bert"), labels=["a", "b"])
