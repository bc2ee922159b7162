import json
from pathlib import Path

import pandas as pd
import pytest
import torch

import hc_lens as hc
from hc_lens.pruning.subnetwork import Subnetwork
from hc_lens.units import UnitSpace
from tests import tiny

SPACE = UnitSpace((2, 2), (0, 1))


def sub(*kept: str, model: str = "m", **settings) -> Subnetwork:
    keep = torch.tensor([label in kept for label in SPACE.labels])
    return Subnetwork(SPACE, keep, model, **settings)


def test_kept_removed_mask_and_sparsity_say_the_same():
    made = sub("L0.H1", "L1.MLP", config={"seed": 42})
    assert made.kept == ["L0.H1", "L1.MLP"]
    assert made.removed == ["L0.H0", "L1.H0", "L1.H1", "L0.MLP"]
    assert made.mask.tolist() == [0, 1, 0, 0, 0, 1]
    assert made.sparsity == pytest.approx(4 / 6)
    assert repr(made) == "Subnetwork(2 of 6 units kept, seed 42, model m)"


def test_set_algebra_is_on_the_kept_units():
    one, two = sub("L0.H0", "L0.H1"), sub("L0.H1", "L1.MLP")
    assert (one & two).kept == ["L0.H1"]
    assert (one | two).kept == ["L0.H0", "L0.H1", "L1.MLP"]
    assert (one - two).kept == ["L0.H0"]
    assert (one & two).model == "m"
    assert (one & sub("L0.H0", model="other")).model == ""


def test_subnetworks_of_different_architectures_do_not_combine():
    other = Subnetwork(UnitSpace((3, 3), (0, 1)), torch.ones(8, dtype=torch.bool), "m")
    with pytest.raises(hc.HcLensError, match="4 heads and 2 MLPs and 2 layers, 6 heads"):
        _ = sub("L0.H0") & other


def test_a_saved_subnetwork_comes_back_bit_by_bit_in_a_few_kilobytes(tmp_path):
    history = pd.DataFrame({"step": [1, 2], "loss": [0.1, 1 / 3]})
    scores = torch.randn(6, generator=torch.Generator().manual_seed(0))
    made = sub(
        "L0.H1", scores=scores, config={"seed": 3, "keep": ["L0.H1"]}, means="a", data="b",
        history=history,
    )  # fmt: skip
    folder = made.save(tmp_path / "runs" / "one")
    back = Subnetwork.load(folder)
    assert back.space == SPACE
    assert torch.equal(back.keep, made.keep)
    assert torch.equal(back.scores, scores)
    assert (back.model, back.means, back.data) == ("m", "a", "b")
    assert dict(back.config) == {"seed": 3, "keep": ["L0.H1"]}
    pd.testing.assert_frame_equal(back.history, history)
    assert sum(place.stat().st_size for place in folder.iterdir()) < 10_000


def test_a_half_written_folder_is_not_read(tmp_path, monkeypatch):
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", stop)
    with pytest.raises(KeyboardInterrupt):
        sub("L0.H0").save(tmp_path)
    with pytest.raises(hc.HcLensError, match=r"expected subnetwork\.json"):
        Subnetwork.load(tmp_path)


def test_a_folder_of_another_format_is_an_error(tmp_path):
    sub("L0.H0").save(tmp_path)
    place = tmp_path / "subnetwork.json"
    place.write_text(
        json.dumps({**json.loads(place.read_text()), "format": "hc_lens.subnetwork.0"})
    )
    with pytest.raises(hc.HcLensError, match=r"got 'hc_lens\.subnetwork\.0'"):
        Subnetwork.load(tmp_path)


def test_attaching_runs_the_model_under_the_mask():
    model = hc.load(tiny.tiny_hf("bert"))
    keep = torch.arange(10) % 2 == 0
    made = Subnetwork(hc.UnitSpace.of(model), keep, model.fingerprint)
    inputs = tiny.tiny_inputs(0, "right")
    with hc.masked(model, keep, "zero"):
        expected = model(**inputs)
    with made.attach(model, "zero"):
        assert torch.equal(model(**inputs), expected)


def test_attaching_to_another_model_is_an_error():
    model, other = hc.load(tiny.tiny_hf("bert")), hc.load(tiny.tiny_hf("bert", seed=1))
    made = Subnetwork(hc.UnitSpace.of(model), torch.ones(10, dtype=torch.bool), model.fingerprint)
    with pytest.raises(hc.HcLensError, match="expected the model of this subnetwork"):
        made.attach(other, "zero")
    with pytest.raises(hc.HcLensError, match="several models combined"):
        (made - Subnetwork(made.space, made.keep, other.fingerprint)).attach(model, "zero")


def test_pushing_uploads_the_two_files(monkeypatch):
    calls = {}

    class Api:
        def create_repo(self, repo, private, exist_ok):
            calls["repo"] = (repo, private, exist_ok)

        def upload_folder(self, repo_id, folder_path, path_in_repo):
            calls["upload"] = (
                repo_id,
                path_in_repo,
                sorted(p.name for p in Path(folder_path).iterdir()),
            )

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    sub("L0.H0").push_to_hub("me/subnetworks", path="mnli-50-42")
    assert calls["repo"] == ("me/subnetworks", False, True)
    assert calls["upload"] == (
        "me/subnetworks", "mnli-50-42", ["subnetwork.json", "subnetwork.safetensors"],
    )  # fmt: skip
