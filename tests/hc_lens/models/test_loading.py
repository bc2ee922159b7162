"""From a directory: what loads, what is refused, and what is left untouched."""

import io
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import hc_lens as hc
from hc_lens.finetuning.checkpoints import trainable
from hc_lens.models.loading import read_tokenizer
from hc_lens.records import MARKER, SCRATCH, Records
from tests import tiny
from tests.damage import DAMAGES, truncate
from tests.lens import BRIDGES, HookedEncoder, HookedTransformer, hooked_only


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
    assert BRIDGES or isinstance(model, kind)
    assert model.labels == tiny.MNLI_LABELS
    torch.testing.assert_close(model(**inputs), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", tiny.LANGUAGE_MODELS)
def test_a_directory_gives_the_logits_of_the_language_model_that_was_saved(family, tied, tmp_path):
    original = tiny.tiny_language_model(family, tie_word_embeddings=tied)
    model = hc.load(tiny.save_language_model(tmp_path, family, tie_word_embeddings=tied))
    tokens = tiny.tiny_inputs(0, "right", lengths=(7,))["input_ids"]
    with torch.no_grad():
        expected = original(tokens).logits
    kind = HookedEncoder if family in tiny.ENCODERS else HookedTransformer
    assert BRIDGES or isinstance(model, kind)
    assert model.labels == {}
    assert model.fingerprint == hc.load(original).fingerprint
    torch.testing.assert_close(model(tokens), expected, atol=1e-4, rtol=0)


@pytest.fixture
def masked(tmp_path: Path) -> Path:
    return tiny.save_language_model(tmp_path / "masked", "bert")


def edit_weights(folder: Path, change) -> None:
    """Write a checkpoint's weights again, changed."""
    place = folder / "model.safetensors"
    save_file(change(load_file(place)), place, metadata={"format": "pt"})


@hooked_only
def test_a_masked_language_model_reads_text_and_ids_alike(masked):
    model = hc.load(masked)
    texts = ["the doctor saw the [MASK] .", ("the artist ran .", "the [MASK] slept .")]
    tokens, types, mask = model.to_tokens(texts)
    assert tokens[0, :8].tolist() == model.tokenizer(texts[0])["input_ids"]
    assert mask.sum(-1).tolist() == [8, 11]
    assert types[1].tolist() == model.tokenizer(*texts[1])["token_type_ids"]
    logits = model(texts)
    assert logits.shape == (2, 11, tiny.VOCABULARY)
    for given in ({"input": tokens, "one_zero_attention_mask": mask}, {
        "input_ids": tokens, "attention_mask": mask,
    }):  # fmt: skip
        torch.testing.assert_close(model(**given, token_type_ids=types), logits)
    torch.testing.assert_close(model(texts[0])[0], logits[0, :8])
    assert model(texts, return_type=None) is None


@hooked_only
def test_a_masked_language_model_has_the_head_of_its_checkpoint_and_no_other(masked):
    model = hc.load(masked)
    assert isinstance(model.mlm_head, torch.nn.Module)
    assert not hasattr(model, "pooler")
    assert not hasattr(model, "nsp_head")
    _, cache = model.run_with_cache("the doctor slept .")
    assert cache["mlm_head.ln.hook_normalized"].shape == (1, 6, 32)
    assert not any(name.startswith(("pooler", "nsp_head")) for name in model.state_dict())


def test_predictions_are_not_a_return_type_of_a_masked_language_model(masked):
    with pytest.raises(hc.HcLensError, match=r"return_type among \['logits', None\], got 'predict"):
        hc.load(masked)("the doctor slept .", return_type="predictions")


def test_labels_cannot_be_given_to_a_masked_language_model(masked):
    with pytest.raises(hc.HcLensError, match="0 labels"):
        hc.load(masked, labels=["a", "b"])


def test_a_masked_language_model_with_the_heads_of_pretraining_loads_as_itself(masked):
    expected = hc.load(masked).fingerprint

    def published(weights: dict) -> dict:
        # As the first published BERT: its decoder is spelt out, and further heads are there.
        words = weights["bert.embeddings.word_embeddings.weight"]
        return {
            **weights,
            "cls.predictions.decoder.weight": words.clone(),
            "cls.seq_relationship.weight": torch.zeros(2, 32),
            "cls.seq_relationship.bias": torch.zeros(2),
            "bert.pooler.dense.weight": torch.zeros(32, 32),
            "bert.pooler.dense.bias": torch.zeros(32),
        }

    edit_weights(masked, published)
    assert hc.load(masked).fingerprint == expected


@pytest.mark.parametrize(
    ("family", "part"),
    [
        ("bert", "cls.predictions.transform.dense.weight"),
        ("bert", "cls.predictions.transform.LayerNorm.bias"),
        ("bert", "cls.predictions.bias"),
        ("roberta", "lm_head.dense.weight"),
        ("roberta", "lm_head.layer_norm.bias"),
        ("xlm-roberta", "lm_head.bias"),
    ],
)
def test_a_masked_language_model_without_a_part_of_its_head_is_an_error(family, part, tmp_path):
    folder = tiny.save_language_model(tmp_path / "masked", family)
    edit_weights(folder, lambda weights: {k: v for k, v in weights.items() if k != part})
    with pytest.raises(hc.HcLensError, match=rf"missing \['.*{re.escape(part)}'.*with its head"):
        hc.load(folder)


def test_an_untied_decoder_that_the_file_lacks_is_an_error(tmp_path):
    folder = tiny.save_language_model(tmp_path / "masked", "bert", tie_word_embeddings=False)
    edit_weights(folder, lambda weights: {k: v for k, v in weights.items() if "decoder" not in k})
    with pytest.raises(hc.HcLensError, match=r"missing \['cls\.predictions\.decoder\.bias', "):
        hc.load(folder)


def test_an_encoder_without_any_head_is_not_a_masked_language_model(masked):
    edit_weights(masked, lambda weights: {k: v for k, v in weights.items() if "cls." not in k})
    with pytest.raises(hc.HcLensError, match=r"every weight of BertForMaskedLM.*missing"):
        hc.load(masked)


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (transformers.DistilBertConfig, "DistilBertForMaskedLM"),
        (transformers.ElectraConfig, "ElectraForMaskedLM"),
        (transformers.AlbertConfig, "AlbertForMaskedLM"),
        (transformers.DebertaV2Config, "DebertaV2ForMaskedLM"),
        (transformers.ModernBertConfig, "ModernBertForMaskedLM"),
        (transformers.BertConfig, "BertForPreTraining"),
        (transformers.BertConfig, "BertLMHeadModel"),
        (transformers.RobertaConfig, "BertForMaskedLM"),
    ],
)
def test_a_masked_language_model_that_is_not_converted_lists_those_that_are(config, kind, masked):
    config(architectures=[kind]).save_pretrained(masked)
    known = r"\['BertForMaskedLM', 'RobertaForMaskedLM', 'XLMRobertaForMaskedLM'\]"
    with pytest.raises(hc.HcLensError, match=rf"masked language models {known}, got {kind}"):
        hc.load(masked)


def test_a_masked_language_model_of_an_unknown_family_lists_the_known_ones(masked):
    transformers.MobileBertConfig(architectures=["MobileBertForMaskedLM"]).save_pretrained(masked)
    with pytest.raises(hc.HcLensError, match=r"families \['albert', 'bert'.*got 'mobilebert'"):
        hc.load(masked)


@pytest.mark.parametrize("make", [tiny.tiny_hf, tiny.tiny_language_model])
def test_an_encoder_that_attends_to_earlier_tokens_alone_is_an_error(make):
    with pytest.raises(hc.HcLensError, match=r"is_decoder among \[False\], got True"):
        hc.load(make("bert", is_decoder=True))


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
    with pytest.raises(hc.HcLensError, match=r"'deberta-v2', .*'modernbert', 'mpnet'.*got 't5'"):
        hc.load(checkpoint)


def test_a_family_that_transformers_does_not_know_is_an_error(checkpoint):
    edit_config(checkpoint, model_type="martian")
    with pytest.raises(hc.HcLensError, match=r"families \['albert', 'bert'.*martian"):
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


def test_a_config_with_fewer_layers_than_the_weights_says_how_many_there_are(checkpoint):
    edit_config(checkpoint, num_hidden_layers=1)
    with pytest.raises(
        hc.HcLensError, match=r"weights of 1 layers.*got 2; set num_hidden_layers to 2"
    ):
        hc.load(checkpoint)


@pytest.mark.parametrize("layers", [0, -1, 1_000_000])
def test_a_config_with_no_layers_or_far_too_many_is_refused_before_weights_are_read(
    checkpoint, layers
):
    edit_config(checkpoint, num_hidden_layers=layers)
    with pytest.raises(hc.HcLensError, match=f"expected 1 to 1000 layers.*got {layers}"):
        hc.load(checkpoint)


def test_an_architecture_that_is_no_name_is_refused(checkpoint):
    edit_config(checkpoint, architectures=[5])
    with pytest.raises(hc.HcLensError):
        hc.load(checkpoint)


def test_names_of_the_logits_must_be_as_many_as_the_logits():
    with pytest.raises(hc.HcLensError, match=r"each of the model's 3 labels, got \['a', 'b'\]"):
        hc.load(tiny.tiny_hf("bert"), labels=["a", "b"])


@pytest.fixture
def hostile(checkpoint, tmp_path, monkeypatch) -> Path:
    """A checkpoint that asks for its own Python file, which leaves a mark; the user says yes."""
    code = f"open({str(tmp_path / 'mark')!r}, 'w').close()\nclass Own: pass\n"
    (checkpoint / "own.py").write_text(code)
    kinds = ("SequenceClassification", "CausalLM", "MaskedLM")
    names = ["AutoConfig", *(f"AutoModelFor{kind}" for kind in kinds)]
    edit_config(checkpoint, auto_map=dict.fromkeys(names, "own.Own"))
    place = checkpoint / "tokenizer_config.json"
    mapped = {"auto_map": {"AutoTokenizer": ["own.Own", None]}, "tokenizer_class": "Own"}
    place.write_text(json.dumps({**json.loads(place.read_text()), **mapped}))
    # The modules that transformers copies code to, in case it does.
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "own"))
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    return checkpoint


def test_code_of_a_checkpoint_of_an_unknown_kind_is_refused_without_a_question(
    hostile, tmp_path, capsys
):
    edit_config(hostile, model_type="own")
    refused = r"one of the families.*custom code.*never run"
    with pytest.raises(hc.HcLensError, match=refused):
        hc.load(hostile)
    with pytest.raises(hc.HcLensError, match=refused):
        trainable(hostile, ("a", "b"), None)
    with pytest.raises(hc.HcLensError, match=r"readable tokenizer.*custom code"):
        read_tokenizer(hostile)
    assert "[y/N]" not in capsys.readouterr().out
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_code_of_a_checkpoint_of_a_known_kind_is_left_alone(family, hostile, tmp_path):
    tiny.tiny_hf(family).save_pretrained(tmp_path / "plain")
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    config["auto_map"] = json.loads((hostile / "config.json").read_text())["auto_map"]
    (hostile / "config.json").write_text(json.dumps(config))
    shutil.copy(tmp_path / "plain" / "model.safetensors", hostile)
    loaded = hc.load(hostile, tokenizer=tiny.tokenizer_for(family))
    assert loaded.fingerprint == hc.load(tiny.tiny_hf(family)).fingerprint
    trainable(hostile, tuple(tiny.MNLI_LABELS.values()), tiny.tokenizer_for(family))
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("family", ["bert", "gpt2"])
@pytest.mark.parametrize("asked", ["own/kernel", "flash_attention_2", {"": "own/kernel"}])
def test_code_of_the_hub_that_a_configuration_attends_with_is_left_out(family, asked, tmp_path):
    tiny.tiny_hf(family).save_pretrained(tmp_path / "plain")
    tiny.tokenizer_for(family).save_pretrained(tmp_path / "plain")
    plain = hc.load(tmp_path / "plain").fingerprint
    edit_config(tmp_path / "plain", attn_implementation=asked)
    assert hc.load(tmp_path / "plain").fingerprint == plain
    model, _ = trainable(tmp_path / "plain", tuple(tiny.MNLI_LABELS.values()), None)
    assert model.config._attn_implementation in ("sdpa", "eager")


def test_quantised_weights_are_refused(checkpoint):
    edit_config(checkpoint, quantization_config={"quant_method": "fp8"})
    refused(checkpoint, r"expected plain weights in \S+, got a quantization_config")


def test_a_name_that_is_too_long_for_a_folder_is_told_as_one_that_is_not_there():
    for name in ("./" + 300 * "x", 300 * "x"):
        with pytest.raises(hc.HcLensError, match="expected a directory with a checkpoint, got"):
            hc.load(name)


class Hostile:
    """What leaves a mark when a pickle of it is read."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> tuple:
        return os.system, (f"touch {self.mark}",)


def garbage(path: Path) -> None:
    path.write_bytes(b"garbage" * 99)


def without_plain_tensors(path: Path) -> None:
    torch.save(["no", "weights"], path)


def hostile_pickle(path: Path) -> None:
    torch.save({"weight": Hostile(path.parent.parent / "mark")}, path)


BAD_FILES = (garbage, truncate, without_plain_tensors, hostile_pickle)


def refused(folder: Path, match: str) -> None:
    """Loading and fine-tuning refuse a folder with the same line, and run nothing."""
    with pytest.raises(hc.HcLensError, match=match):
        hc.load(folder)
    with pytest.raises(hc.HcLensError, match=match):
        trainable(folder, ("a", "b"), None)
    assert not (folder.parent / "mark").exists()


def test_the_hostile_pickle_would_leave_a_mark(tmp_path):
    (tmp_path / "folder").mkdir()
    hostile_pickle(tmp_path / "folder" / "pickle.bin")
    torch.load(tmp_path / "folder" / "pickle.bin", weights_only=False)
    assert (tmp_path / "mark").exists()


@pytest.mark.parametrize("spoil", BAD_FILES)
def test_a_bad_bin_file_is_told_with_its_name_and_runs_nothing(checkpoint, spoil):
    weights = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    torch.save(weights, checkpoint / "pytorch_model.bin")
    spoil(checkpoint / "pytorch_model.bin")
    refused(checkpoint, r"expected readable weights in \S+/pytorch_model\.bin, got .*again$")


@pytest.fixture(params=["safetensors", "bin"])
def shards(request, checkpoint) -> Path:
    """The index of a checkpoint in two files, of either kind."""
    weights = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    is_bin, names = request.param == "bin", sorted(weights)
    stem = "pytorch_model" if is_bin else "model"
    where = {}
    for number, part in enumerate((names[:20], names[20:]), start=1):
        file = f"{stem}-{number}.{request.param}"
        write = torch.save if is_bin else save_file
        write({name: weights[name] for name in part}, checkpoint / file)
        where |= dict.fromkeys(part, file)
    index = checkpoint / f"{stem}.{request.param}.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return index


def edit_map(index: Path, change) -> None:
    """Write an index with other files for its weights."""
    about = json.loads(index.read_text())
    files = {name: change(file) for name, file in about["weight_map"].items()}
    index.write_text(json.dumps({**about, "weight_map": files}))


def test_a_checkpoint_in_several_files_is_read(shards):
    expected = hc.load(tiny.tiny_hf("bert"), tokenizer=tiny.bert_tokenizer()).fingerprint
    assert hc.load(shards.parent).fingerprint == expected


@pytest.mark.parametrize("spoil", BAD_FILES)
def test_a_bad_file_of_several_is_told_with_its_name(shards, spoil):
    second = next(shards.parent.glob("*-2.*"))
    spoil(second)
    refused(shards.parent, rf"expected readable weights in \S+/{second.name}, got")


@pytest.mark.parametrize("text", ["", "{,,", "[" * 100_000])
def test_an_index_that_is_not_json_is_told_with_its_name(shards, text):
    shards.write_text(text)
    refused(shards.parent, rf"expected JSON in \S+/{shards.name}, got")


@pytest.mark.parametrize(
    "about",
    [
        [1],
        {"metadata": {}},
        {"metadata": {}, "weight_map": ["model-1.safetensors"]},
        {"metadata": {}, "weight_map": {}},
        {"metadata": {}, "weight_map": {"weight": 3}},
        {"weight_map": {"weight": "model-1.safetensors"}},
    ],
)
def test_an_index_of_another_form_is_told_with_its_name(shards, about):
    shards.write_text(json.dumps(about))
    refused(shards.parent, rf"expected an index of weights in \S+/{shards.name}, with")


def test_an_index_that_leads_out_of_its_folder_is_refused(shards):
    for file in shards.parent.glob("*-2.*"):
        shutil.copy(file, shards.parent.parent)
    there = shards.parent.parent
    for lead in ("../{}", "sub/../../{}", f"{there}/{{}}"):
        before = shards.read_text()
        edit_map(shards, lambda file: lead.format(file) if "-2." in file else file)  # noqa: B023
        refused(shards.parent, "weight_map that names files of its own folder")
        shards.write_text(before)


def test_an_index_that_names_a_file_that_is_not_there_is_told(shards):
    edit_map(shards, lambda file: file.replace("-2.", "-9."))
    refused(shards.parent, rf"the files that \S+/{shards.name} names, missing \['\S+-9\.\w+'\]")
    edit_map(shards, lambda file: file.replace("-9.", 300 * "x"))
    refused(shards.parent, rf"the files that \S+/{shards.name} names, missing \['\S+x'\]")


def test_weights_of_another_shape_are_named(checkpoint):
    place = checkpoint / "model.safetensors"
    weights = load_file(place)
    save_file({**weights, "classifier.weight": torch.zeros(2, 32)}, place)
    refused(checkpoint, r"the shapes that its config\.json .* others for \['classifier\.weight'\]")


@pytest.fixture
def kept(checkpoint, tmp_path) -> Path:
    """A checkpoint as fine-tuning keeps it."""
    records = Records(tmp_path / "run", "finetune")
    records.write("step-00005", lambda out: shutil.copytree(checkpoint, out, dirs_exist_ok=True))
    return records.folder("step-00005")


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_kept_checkpoint_that_has_changed_is_refused(kept, file, damage):
    assert hc.load(kept).fingerprint
    damage(kept / file)
    refused(kept, rf"as it was written, got another {file}; fine-tune again")


def test_a_kept_checkpoint_may_be_copied_and_no_other_file_counts(kept, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(kept, copy)
    (copy / "notes.txt").write_text("mine")
    assert hc.load(copy).fingerprint == hc.load(kept).fingerprint
    (copy / "model.safetensors").write_bytes(b"")
    refused(copy, r"got another model\.safetensors")


def test_a_done_file_is_damaged_in_a_run_and_somebody_elses_anywhere_else(kept, checkpoint):
    (checkpoint / "done.json").write_text("")
    assert hc.load(checkpoint).fingerprint == hc.load(kept).fingerprint
    assert (kept.parent / MARKER).exists()
    truncate(kept / "done.json")
    refused(kept, r"got another done\.json")


@hooked_only
def test_a_decoder_loads_where_the_temporary_folder_is_named_like_a_model(tmp_path, monkeypatch):
    (tmp_path / "llama-30b-gemma").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "llama-30b-gemma"))
    expected = tiny.tiny_hf("gpt2")
    assert hc.load(expected).cfg.original_architecture == "GPT2LMHeadModel"
    assert list((tmp_path / "llama-30b-gemma").iterdir()) == []


@hooked_only
def test_what_a_killed_load_leaves_has_a_name_by_which_it_is_removed_later(tmp_path, monkeypatch):
    seen = []

    def killed(place, **_):
        seen.extend(tmp_path.iterdir())
        raise KeyboardInterrupt

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    from transformer_lens import loading_from_pretrained as converters

    monkeypatch.setattr(converters, "get_pretrained_model_config", killed)
    with pytest.raises(KeyboardInterrupt):
        hc.load(tiny.tiny_hf("gpt2"))
    (folder,) = seen
    assert folder.name.startswith(f"{SCRATCH}~")
    assert f"@{os.getpid()}-" in folder.name
    assert not folder.exists()
