import copy
import subprocess
import sys

import pytest
import torch
import transformers

import hc_lens as hc
from hc_lens.models.fingerprint import (
    BRIDGE,
    check_version,
    fingerprint,
    same_version,
    weighted_sums,
)
from hc_lens.records import OtherWorkError, Records
from tests import tiny
from tests.lens import BRIDGES, THERE, bridges_only, hooked_only, in_the_other_version


@pytest.mark.slow
def test_the_fingerprint_is_the_same_in_another_process(tmp_path):
    folder = tiny.save_checkpoint(tmp_path / "checkpoint")
    code = f"import hc_lens as hc; print(hc.load({str(folder)!r}).fingerprint)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == hc.load(folder).fingerprint


def test_weights_labels_and_dtype_each_change_the_fingerprint():
    original = tiny.tiny_hf("bert")
    renamed = tiny.tiny_hf("bert", labels={0: "a", 1: "b", 2: "c"})
    seen = {
        hc.load(original).fingerprint,
        hc.load(tiny.tiny_hf("bert", seed=1)).fingerprint,
        hc.load(renamed).fingerprint,
        hc.load(original, dtype=torch.float64).fingerprint,
    }
    assert len(seen) == 4
    assert hc.load(tiny.tiny_hf("bert")).fingerprint in seen


def test_the_fingerprint_says_whether_the_model_is_a_bridge():
    digest, mark, rest = hc.load(tiny.tiny_hf("bert")).fingerprint.partition(BRIDGE)
    assert (len(digest), bool(mark), rest) == (32, BRIDGES, "")


def test_what_was_made_with_the_other_version_is_told_from_what_is_of_another_checkpoint():
    check_version("means", "1" * 32, "2" * 32, "collect again")
    check_version("means", "", "2" * 32, "collect again")
    message = (
        r"expected means made with TransformerLens 3, as this model is, got means made with "
        r"TransformerLens 4, where the same checkpoint has another fingerprint \(11111111 there, "
        r"22222222 here\); collect again, or go on with TransformerLens 4"
    )
    with pytest.raises(hc.HcLensError, match=message):
        check_version("means", "1" * 32 + BRIDGE, "2" * 32, "collect again")


def test_a_folder_that_was_begun_with_the_other_version_says_so(tmp_path):
    own = hc.load(tiny.tiny_hf("bert")).fingerprint
    Records(tmp_path / "there", "study", {"model": in_the_other_version(own)})
    Records(tmp_path / "other", "study", {"model": own[::-1] if not BRIDGES else "2" + own})
    with same_version(own):
        Records(tmp_path / "new", "study", {"model": own})
    message = f"got a run made with TransformerLens {THERE}.*name another folder"
    with pytest.raises(hc.HcLensError, match=message), same_version(own):
        Records(tmp_path / "there", "study", {"model": own})
    with pytest.raises(OtherWorkError, match="whose model is"), same_version(own):
        Records(tmp_path / "other", "study", {"model": own})


def test_writing_to_a_weight_changes_the_fingerprint_and_undoing_restores_it():
    model = hc.load(tiny.tiny_hf("bert"))
    before = model.fingerprint
    kept = model.W_U.clone()
    with torch.no_grad():
        model.W_U.add_(1.0)
    assert model.fingerprint != before
    with torch.no_grad():
        model.W_U.copy_(kept)
    assert model.fingerprint == before


def test_hooks_do_not_change_the_fingerprint():
    model = hc.load(tiny.tiny_hf("bert"))
    before = fingerprint(model)
    model.add_hook("blocks.0.hook_mlp_out", lambda value, hook: value * 2)
    assert fingerprint(model) == before


def through_data(weight):
    weight.data[3, 1] += 1.0


def through_numpy(weight):
    weight.detach().numpy()[3, 1] += 1.0


def one_bit(weight):
    weight.detach().numpy().view("uint32")[3, 1] ^= 1


def swap(weight):
    values = weight.detach().numpy()
    values[3, 1], values[5, 2] = values[5, 2], values[3, 1]


def signs_of_a_column(weight):
    weight.detach().numpy()[:, 1] *= -1


EDITS = (through_data, through_numpy, one_bit, swap, signs_of_a_column)


@pytest.mark.parametrize("family", ["bert", "gpt2"])
@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_that_torch_does_not_count_changes_the_fingerprint(edit, family):
    model = hc.load(tiny.tiny_hf(family))
    before, weight = model.fingerprint, model.blocks[1].mlp.W_in
    kept, state = weight.detach().clone(), (weight._version, weight.data_ptr())
    edit(weight)
    assert (weight._version, weight.data_ptr()) == state
    assert model.fingerprint != before
    weight.detach().copy_(kept)
    assert model.fingerprint == before


@bridges_only
def test_the_epsilon_of_a_hugging_face_norm_changes_the_fingerprint():
    model = hc.load(tiny.tiny_hf("llama"))
    before = model.fingerprint
    model.blocks[1].ln2.original_component.variance_epsilon = 0.1
    assert model.fingerprint != before


def test_other_labels_on_the_same_model_change_the_fingerprint():
    model = hc.load(tiny.tiny_hf("bert"))
    before, kept = model.fingerprint, dict(model.labels)
    model.labels[0], model.labels[1] = model.labels[1], model.labels[0]
    assert model.fingerprint != before
    model.labels = kept
    assert model.fingerprint == before


def test_a_language_models_own_fingerprint_follows_its_weights():
    config = transformers.GPT2Config(**tiny.GPT2, vocab_size=tiny.VOCABULARY)
    with torch.random.fork_rng():
        model = hc.load(transformers.GPT2LMHeadModel(config))
    before = model.fingerprint
    assert copy.deepcopy(model).fingerprint == before
    through_data(model.blocks[1].mlp.W_in)
    assert model.fingerprint == fingerprint(model) != before


@pytest.mark.parametrize("edit", EDITS)
def test_the_weighted_sums_that_stand_for_a_tensor_off_the_processor_notice_every_edit(edit):
    weight = torch.arange(40.0).reshape(10, 4)
    before = weighted_sums(weight.reshape(-1)).tolist()
    assert weighted_sums(weight.clone().reshape(-1)).tolist() == before
    edit(weight)
    assert weighted_sums(weight.reshape(-1)).tolist() != before


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float8_e4m3fn])
def test_weighted_sums_read_values_of_any_size(dtype):
    values = torch.tensor([1.0, 2.0, 3.0]).to(dtype)
    swapped = torch.tensor([2.0, 1.0, 3.0]).to(dtype)
    assert weighted_sums(values).tolist() != weighted_sums(swapped).tolist()


@pytest.mark.parametrize(
    ("place", "name", "value"),
    [
        pytest.param("blocks.0.attn", "attn_scale", 1.0, marks=hooked_only),
        pytest.param("blocks.1.mlp", "act_fn", torch.relu, marks=hooked_only),
        pytest.param("blocks.0.attn._original_component.self", "scaling", 1.0, marks=bridges_only),
        pytest.param("blocks.0.ln1", "eps", 0.5, marks=hooked_only),
        pytest.param("blocks.0.ln1._original_component", "eps", 0.5, marks=bridges_only),
    ],
)
def test_a_setting_of_a_module_that_is_changed_by_hand_changes_the_fingerprint(place, name, value):
    model = hc.load(tiny.tiny_hf("bert"))
    before, module = fingerprint(model), model.get_submodule(place)
    kept = getattr(module, name)
    setattr(module, name, value)
    assert fingerprint(model) != before
    setattr(module, name, kept)
    assert fingerprint(model) == before
