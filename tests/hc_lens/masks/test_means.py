import inspect
import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save

import hc_lens as hc
from hc_lens.masks.hooks import hook_points
from hc_lens.masks.means import Means
from tests import tiny
from tests.batches import random_batches, single_rows
from tests.damage import DAMAGES
from tests.lens import THERE, hooks_on, in_the_other_version

LENGTHS = ((9, 5, 2), (7, 7), (3,))


def brute_force(model, batches) -> dict[str, torch.Tensor]:
    """Run every row alone, without pads, and average over all tokens."""
    names = list(hook_points(hc.UnitSpace.of(model)))
    tokens = {name: [] for name in names}
    for inputs in single_rows(batches):
        _, cache = model.run_with_cache(**inputs, names_filter=names)
        for name in names:
            tokens[name].append(cache[name][0])
    return {name: torch.cat(values) for name, values in tokens.items()}


@pytest.mark.parametrize("lengths", [LENGTHS, ((9,), (5,), (2,)), ((9, 5, 2, 7, 3),)])
def test_means_equal_the_average_over_unpadded_single_rows(hooked, lengths):
    batches = random_batches(hooked, lengths)
    means = hc.collect_means(hooked, batches, progress=False)
    expected = brute_force(hooked, batches)
    for name, values in expected.items():
        torch.testing.assert_close(means.at_token[name], values.mean(0), atol=1e-10, rtol=0)
    assert means.n_rows == sum(len(rows) for rows in lengths)
    assert means.n_tokens == sum(sum(rows) for rows in lengths)


@pytest.mark.parametrize("family", ["gpt2"])
def test_means_of_a_decoder_do_not_depend_on_the_padding_side(hooked):
    batches = random_batches(hooked, LENGTHS, side="left")
    means = hc.collect_means(hooked, batches, progress=False)
    for name, values in brute_force(hooked, batches).items():
        torch.testing.assert_close(means.at_token[name], values.mean(0), atol=1e-10, rtol=0)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("family", ["gpt2"])
def test_means_by_position_average_the_rows_that_reach_the_position(hooked, side):
    batches = random_batches(hooked, LENGTHS, side=side)
    means = hc.collect_means(hooked, batches, by="position", progress=False)
    name = "blocks.1.attn.hook_z"
    rows = [hooked.run_with_cache(**inputs)[1][name][0] for inputs in single_rows(batches)]
    for place in range(9):
        reached = torch.stack([row[place] for row in rows if len(row) > place])
        torch.testing.assert_close(means.at_position[name][place], reached.mean(0))
    bound = means.on(batches[0]).value(name, rows[0].new_zeros(3, 9, 4, 8))
    first = 0 if side == "right" else 9 - 2
    torch.testing.assert_close(bound[2, first], means.at_position[name][0])


def test_a_position_that_no_row_reached_gets_the_mean_over_tokens(hooked):
    means = hc.collect_means(hooked, random_batches(hooked), by="position", progress=False)
    name = "blocks.0.hook_mlp_out"
    value = means.value(name, torch.zeros(1, 12, 32, dtype=torch.float64))
    torch.testing.assert_close(value[0, 11], means.at_token[name])
    torch.testing.assert_close(value[0, 8], means.at_position[name][8])


def test_means_in_float32_are_accumulated_in_float64():
    model = hc.load(tiny.tiny_hf("bert"))
    once = random_batches(model, ((9, 5, 2),))
    many = hc.collect_means(model, list(once) * 200, progress=False)
    once = hc.collect_means(model, once, progress=False)
    for name, value in once.at_token.items():
        torch.testing.assert_close(many.at_token[name], value, atol=1e-6, rtol=0)


def test_collecting_leaves_no_hook_and_keeps_the_users(hooked):
    seen = []
    hooked.add_hook("blocks.0.hook_mlp_out", lambda value, hook: seen.append(hook.name))
    hc.collect_means(hooked, random_batches(hooked), progress=False)
    own = hooked.hook_dict["blocks.0.hook_mlp_out"]
    assert {id(hooked.hook_dict[name]) for name in hooks_on(hooked)} == {id(own)}
    assert len([hook for hook in own.fwd_hooks if not hook.is_permanent]) == 1
    assert len(seen) == 2


@pytest.mark.parametrize("by", ["token", "position"])
def test_saved_means_come_back_bit_by_bit(hooked, tmp_path, by):
    means = hc.collect_means(hooked, random_batches(hooked), by=by, progress=False)
    back = Means.load(means.save(tmp_path / "folder" / "means.safetensors"))
    assert (back.model, back.n_rows, back.n_tokens) == (hooked.fingerprint, 5, 30)
    assert back.by == by
    assert back.fingerprint == means.fingerprint
    for name, value in means.at_token.items():
        assert torch.equal(back.at_token[name], value)


def test_means_are_the_same_bytes_each_time(hooked, tmp_path):
    means = hc.collect_means(hooked, random_batches(hooked), progress=False)
    files = {means.save(tmp_path / str(number)).read_bytes() for number in range(20)}
    assert len(files) == 1


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_of_means_is_refused(hooked, tmp_path, damage):
    means = hc.collect_means(hooked, random_batches(hooked), progress=False)
    path = means.save(tmp_path / "means.safetensors")
    damage(path)
    with pytest.raises(hc.HcLensError, match=r"got .*; (collect and )?save"):
        Means.load(path)


def test_edited_numbers_beside_the_means_are_refused(hooked, tmp_path):
    path = hc.collect_means(hooked, random_batches(hooked), progress=False).save(tmp_path / "m")
    for old, new in ((rb"n_rows\": 5", rb"n_rows\": 6"), (b"hook_z", b"hook_y")):
        content = path.read_bytes()
        assert old in content
        path.write_bytes(content.replace(old, new))
        with pytest.raises(hc.HcLensError, match="content that has changed since it was written"):
            Means.load(path)
        path.write_bytes(content)
    Means.load(path)


def test_means_of_an_older_version_are_read(hooked, tmp_path):
    means = hc.collect_means(hooked, random_batches(hooked), progress=False)
    about = {"model": means.model, "n_rows": means.n_rows, "n_tokens": means.n_tokens}
    tensors = {f"token/{name}": value for name, value in means.at_token.items()}
    older = {"format": "hc_lens.means.1", "about": json.dumps(about)}
    (tmp_path / "m").write_bytes(save(tensors, metadata=older))
    assert Means.load(tmp_path / "m").fingerprint == means.fingerprint


def test_means_of_another_model_are_refused_before_any_forward():
    model, other = hc.load(tiny.tiny_hf("bert")), hc.load(tiny.tiny_hf("bert", seed=1))
    means = hc.collect_means(other, random_batches(other), progress=False)
    with pytest.raises(hc.HcLensError, match=r"means of this model.*collect_means"):
        hc.ablate(model, ["L0.H0"], means)


def test_means_made_with_the_other_version_of_transformer_lens_say_so(hooked, batches):
    means = hc.collect_means(hooked, batches, progress=False)
    other = replace(means, model=in_the_other_version(means.model))
    message = f"got means made with TransformerLens {THERE}.*hc.collect_means"
    with pytest.raises(hc.HcLensError, match=message):
        hc.ablate(hooked, ["L0.H0"], other)


def test_means_of_a_smaller_model_are_refused():
    small = hc.load(tiny.tiny_hf("bert", num_hidden_layers=1))
    means = hc.collect_means(small, random_batches(small), progress=False)
    with pytest.raises(hc.HcLensError, match=r"missing \['blocks\.1\.attn\.hook_z'"):
        hc.ablate(hc.load(tiny.tiny_hf("bert")), ["L0.H0"], means)


def test_means_with_nan_are_refused():
    with pytest.raises(hc.HcLensError, match=r"NaN or infinity at blocks\.0\.hook_mlp_out"):
        Means({"blocks.0.hook_mlp_out": torch.tensor([float("nan")])}, "model", 1, 1)


def test_no_batches_are_an_error(hooked):
    with pytest.raises(hc.HcLensError, match="at least one batch"):
        hc.collect_means(hooked, [], progress=False)


def test_a_model_that_does_not_run_its_hooks_is_an_error(hooked, monkeypatch):
    batches = random_batches(hooked)
    monkeypatch.setattr(hooked, "forward", lambda *_, **__: None)
    with pytest.raises(hc.HcLensError, match=r"blocks.0.attn.hook_z.* to fire, they did not"):
        hc.collect_means(hooked, batches)


def test_an_unknown_kind_of_mean_is_an_error(hooked):
    with pytest.raises(hc.HcLensError, match=r"by among \['token', 'position'\], got 'row'"):
        # Without the type checker of the tests, which would be first to refuse it.
        inspect.unwrap(hc.collect_means)(hooked, random_batches(hooked), by="row")


def test_a_file_that_is_no_means_file_is_an_error(tmp_path):
    place = tmp_path / "means.safetensors"
    with pytest.raises(hc.HcLensError, match="readable safetensors"):
        Means.load(place)
    place.write_bytes(b"not a tensor")
    with pytest.raises(hc.HcLensError, match="readable safetensors"):
        Means.load(place)


@pytest.mark.parametrize("by", ["token", "position"])
def test_means_are_shown_in_one_short_line(hooked, batches, by):
    means = hc.collect_means(hooked, batches, by=by, progress=False)
    model = hooked.fingerprint[:8]
    assert repr(means) == f"Means(by {by}, 8 heads and 2 MLPs, 5 rows, 30 tokens, model {model})"


@pytest.mark.parametrize("wrong", [torch.arange(5, 9)[None], "a text", {"input": None}])
def test_what_is_no_batch_is_an_error_that_says_how_to_make_one(hooked, wrong):
    told = rf"with inputs, got a {type(wrong).__name__}; .*task\.batches.*word_batch.*hc\.Batch"
    with pytest.raises(hc.HcLensError, match=told):
        hc.collect_means(hooked, [wrong], progress=False)


def test_the_ways_that_this_error_names_make_batches(hooked):
    ids = torch.arange(5, 9)[None]
    named = hc.Batch({"input": ids}, torch.tensor([-1]), ("all",), torch.tensor([0]))
    assert hc.collect_means(hooked, [named], progress=False).n_tokens == 4
    texts = hc.word_batch(hooked, ["the doctor slept"])
    assert hc.collect_means(hooked, [texts], progress=False).n_rows == 1
