"""The same seed gives the same bytes in every file, whatever order a process gives to its sets."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TIME = re.compile(rb"<time>[^<]*</time>")
"""When a report was written: the one thing in a result that is not the same each time."""
OF_THE_TIME = ("study/pages.json", "study/steps/report/done.json")
"""Files with the hash of a report."""
LOCK = ".unfinished/lock"
"""Who wrote a folder last, and since when."""


@pytest.mark.slow
def test_two_processes_write_the_same_bytes(tmp_path: Path) -> None:
    folders = [tmp_path / seed for seed in ("1", "2")]
    processes = []
    for folder in folders:
        folder.mkdir()
        own = {"PYTHONHASHSEED": folder.name, "HF_DATASETS_CACHE": str(folder / "cache")}
        own["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **own}
        command = [sys.executable, "-m", "tests.written"]
        errors = subprocess.PIPE
        processes.append(subprocess.Popen(command, cwd=folder, env=env, stderr=errors, text=True))
    for process in processes:
        _, told = process.communicate()
        assert process.returncode == 0, told
    first, second = map(contents, folders)
    assert {path.split("/")[0] for path in first} == {
        *("means", "subnetwork", "scan", "sweep", "finetune", "study"),
        *("evaluate", "attention", "cache"),
    }
    assert sorted(first) == sorted(second)
    assert [path for path in first if first[path] != second[path]] == []


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, without times."""
    paths = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*"))}
    return {
        name: TIME.sub(b"", path.read_bytes())
        for name, path in paths.items()
        if path.is_file() and name not in OF_THE_TIME and not name.endswith(LOCK)
    }
