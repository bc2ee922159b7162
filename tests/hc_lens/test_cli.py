from __future__ import annotations

import subprocess
import sys

import pytest

from hc_lens import cli
from hc_lens.errors import HcLensError
from tests import tiny


def call(monkeypatch, *arguments):
    """Exit code of ``hc-lens`` with these arguments."""
    monkeypatch.setattr(sys, "argv", ["hc-lens", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return stop.value.code or 0


def test_help_imports_neither_torch_nor_transformers():
    code = (
        "import sys, hc_lens.cli as cli\n"
        "sys.argv = ['hc-lens', '--help']\n"
        "try: cli.main()\n"
        "except SystemExit: pass\n"
        "print({'torch', 'transformers', 'transformer_lens', 'pandas'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("set()")
    assert "finetune" in done.stdout


def test_finetune_writes_checkpoints_and_prints_the_last_accuracies(tmp_path, monkeypatch, capsys):
    rows = tmp_path / "mnli"
    rows.mkdir()
    for split in ("train", "validation"):
        (rows / f"{split}.jsonl").write_text(
            '{"premise": "the doctor ran .", "hypothesis": "the doctor slept .", "label": 1}\n'
            '{"premise": "the judge ran .", "hypothesis": "the judge ran .", "label": 0}\n'
        )
    model = tiny.save_checkpoint(tmp_path / "model")
    settings = ("--steps", 2, "--batch-size", 2, "--checkpoint-every", 1, "--path", rows)
    out = tmp_path / "run"
    assert call(monkeypatch, "finetune", model, "--out", out, *settings) == 0
    printed = capsys.readouterr().out
    assert "accuracy" in printed
    assert "checkpoints [0, 1, 2]" in printed
    assert (out / "step-00002" / "model.safetensors").is_file()


def test_an_error_is_one_line_and_exit_code_1(tmp_path, monkeypatch, capsys):
    code = call(monkeypatch, "finetune", "model", "--out", tmp_path / "run")
    assert code == 1
    shown = capsys.readouterr().err
    assert shown == ("hc-lens: expected --steps or --paper, got neither; say how long to train\n")


def test_debug_shows_where_an_error_came_from(tmp_path, monkeypatch):
    arguments = ["hc-lens", "--debug", "finetune", "model", "--out", str(tmp_path / "run")]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(HcLensError, match="expected --steps or --paper"):
        cli.main()


def test_the_papers_settings_can_be_changed_one_by_one():
    config = cli._config(True, "qqp", {"seed": 3})
    assert (config.steps, config.batch_size, config.seed) == (40_000, 128, 3)


def test_an_analysis_is_found_through_its_entry_point(monkeypatch, capsys):
    assert call(monkeypatch, "analyse", "extractive", "--help") == 0
    assert "--demo" in capsys.readouterr().out


def test_an_unknown_analysis_lists_the_known_ones(monkeypatch, capsys):
    assert call(monkeypatch, "analyse", "nothing") == 1
    assert "['extractive'], got 'nothing'" in capsys.readouterr().err


def test_an_error_of_an_analysis_is_one_line(monkeypatch, capsys):
    assert call(monkeypatch, "analyse", "extractive", "scores", "--before", "./nowhere") == 1
    assert capsys.readouterr().err.startswith("hc-lens: expected")
