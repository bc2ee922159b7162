import json
import shutil
from pathlib import Path

import jaxtyping
import pandas as pd
import pytest
import torch
from safetensors.torch import save

import hc_lens as hc
from hc_lens.pruning.subnetwork import Subnetwork
from hc_lens.units import UnitSpace
from tests import tiny
from tests.damage import DAMAGES, swap
from tests.lens import THERE, in_the_other_version

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
    assert back == made
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
    about = {**json.loads(place.read_text()), "format": "hc_lens.subnetwork.0"}
    about.pop("seal")
    place.write_text(json.dumps(about))
    with pytest.raises(hc.HcLensError, match=r"got 'hc_lens\.subnetwork\.0'"):
        Subnetwork.load(tmp_path)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["subnetwork.json", "subnetwork.safetensors"])
def test_a_damaged_file_of_a_subnetwork_is_refused(tmp_path, damage, name):
    history = pd.DataFrame({"step": [0, 10], "loss": [1 / 3, 0.25]})
    sub("L0.H0", scores=torch.arange(len(SPACE)) / 7, history=history).save(tmp_path)
    damage(tmp_path / name)
    with pytest.raises(hc.HcLensError, match=r"as Subnetwork.save wrote them"):
        Subnetwork.load(tmp_path)


@pytest.mark.parametrize("name", ["subnetwork.json", "subnetwork.safetensors"])
def test_files_of_two_subnetworks_that_changed_places_are_refused(tmp_path, name):
    folders = [sub(kept).save(tmp_path / kept) for kept in ("L0.H0", "L0.H1")]
    swap(*(folder / name for folder in folders))
    for folder in folders:
        with pytest.raises(hc.HcLensError, match="content that has changed"):
            Subnetwork.load(folder)


def without_seal(folder) -> None:
    """Make the JSON file one of an older version."""
    about = json.loads((folder / "subnetwork.json").read_text())
    about.pop("seal")
    (folder / "subnetwork.json").write_text(json.dumps(about))


def test_a_mask_that_keeps_other_units_than_it_says_is_refused_also_without_a_seal(tmp_path):
    made = sub("L0.H0")
    without_seal(made.save(tmp_path))
    assert Subnetwork.load(tmp_path) == made
    (tmp_path / "subnetwork.safetensors").write_bytes(save({"keep": ~made.keep}))
    with pytest.raises(hc.HcLensError, match=r"says \(1 units\), got another"):
        Subnetwork.load(tmp_path)


@pytest.mark.parametrize("name", ["keep", "scores"])
def test_a_mask_of_another_length_is_refused(name, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as outside the tests
    wrong = {"keep": torch.ones(len(SPACE), dtype=torch.bool)}
    wrong[name] = torch.ones(len(SPACE) + 1, dtype=torch.bool if name == "keep" else torch.float)
    with pytest.raises(hc.HcLensError, match=f"expected {name} with an entry for each of the"):
        Subnetwork(SPACE, model="m", **wrong)


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


def test_a_subnetwork_found_with_the_other_version_of_transformer_lens_says_so():
    model = hc.load(tiny.tiny_hf("bert"))
    found = in_the_other_version(model.fingerprint)
    made = Subnetwork(hc.UnitSpace.of(model), torch.ones(10, dtype=torch.bool), found)
    message = rf"got a subnetwork made with TransformerLens {THERE}.*hc.masked\(model, sub.mask"
    with pytest.raises(hc.HcLensError, match=message):
        made.attach(model, "zero")


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


@pytest.mark.parametrize("path", [".", "mnli-50-42"])
def test_loading_from_the_hub_gives_what_was_pushed(path, monkeypatch, tmp_path):
    class Api:
        def create_repo(self, repo, private, exist_ok): ...

        def upload_folder(self, repo_id, folder_path, path_in_repo):
            shutil.copytree(folder_path, tmp_path / repo_id / path_in_repo, dirs_exist_ok=True)

    def download(repo_id, revision, allow_patterns):
        folder = tmp_path / repo_id
        found = [file.relative_to(folder).as_posix() for file in folder.rglob("*.*")]
        assert (sorted(allow_patterns), revision) == (sorted(found), "v1")
        return str(folder)

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    made = sub("L0.H0", scores=torch.randn(6), config={"seed": 42})
    made.push_to_hub("me/subnetworks", path=path)
    assert Subnetwork.load("me/subnetworks", path=path, revision="v1") == made


def test_a_name_that_is_neither_a_folder_nor_on_the_hub_is_an_error(monkeypatch):
    def download(*_, **__):
        raise ConnectionError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(hc.HcLensError, match=r"Hub repository, got 'runs/typo': .*no network"):
        Subnetwork.load("runs/typo")
    for local in ("runs/deep/typo", "./runs", Path("runs/typo")):
        with pytest.raises(hc.HcLensError, match=r"pass a folder that Subnetwork\.save wrote"):
            Subnetwork.load(local)


def test_subnetworks_are_equal_if_everything_they_record_is():
    def made(**changes) -> Subnetwork:
        values = {"scores": torch.arange(6.0), "config": {"seed": 1}, "means": "a", "data": "b"}
        return sub("L0.H1", **{**values, **changes})

    assert made() == made(config={"seed": 1})
    assert len({made(), made()}) == 1
    changes = [{"model": "n"}, {"scores": None}, {"config": {}}, {"means": "c"}, {"data": "c"},
               {"history": pd.DataFrame({"step": [1]})}]  # fmt: skip
    different = [made(), sub("L0.H0"), *(made(**change) for change in changes)]
    assert len(set(different)) == 8
    assert made() != "L0.H1"


def test_named_units_are_kept_and_all_others_removed():
    model = hc.load(tiny.tiny_hf("bert"))
    made = Subnetwork.from_units(model, ["L1.MLP", "L0.H3"])
    assert made.kept == ["L0.H3", "L1.MLP"]
    assert made.sparsity == pytest.approx(8 / 10)
    assert made == Subnetwork.from_units(model, "L0.H3+L1.MLP")
    assert repr(made) == f"Subnetwork(2 of 10 units kept, model {model.fingerprint[:8]})"
    inputs = tiny.tiny_inputs(0, "right")
    with hc.ablate(model, made.removed, "zero"):
        expected = model(**inputs)
    with made.attach(model, "zero"):
        assert torch.equal(model(**inputs), expected)
    with pytest.raises(hc.HcLensError, match=r"got L2\.H0"):
        Subnetwork.from_units(model, ["L2.H0"])


@pytest.mark.parametrize("change", [{"n_heads": None}, {"mlps": 3}, {"history": 5}, {"config": 1}])
def test_entries_of_another_kind_are_refused_also_without_a_seal(tmp_path, change):
    folder = sub("L0.H0").save(tmp_path)
    about = json.loads((folder / "subnetwork.json").read_text())
    del about["seal"]
    (folder / "subnetwork.json").write_text(json.dumps({**about, **change}))
    with pytest.raises(hc.HcLensError, match=r"as Subnetwork\.save wrote them"):
        Subnetwork.load(folder)
