"""A short part of the campaign of kills, damage, two writers and full disks."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.docs.test_pages import ROOT


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the campaign forks its processes")
def test_a_short_campaign_loses_nothing_and_nothing_is_wrong_in_silence():
    script = ROOT / "docs" / "benchmarks" / "reliability.py"
    works = ("scan", "language", "prune", "evaluate", "sweep", "finetune")
    line = [sys.executable, script, "--trials", "14", "--workers", "1", "--works", *works]
    done = subprocess.run(
        line, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "14 trials, 0 wrong" in done.stdout
