"""A user's own folder called ``analyses`` beside a script or a notebook does not get in our way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hc_lens.settings import read_settings

ROOT = Path(__file__).parents[2]
USE = "from hc_lens.analyses import effective_size, subnetworks"
SAY = "print(subnetworks.__name__, effective_size.SizeConfig.published().average)"
SAID = "hc_lens.analyses.subnetworks seeds-last"
RUN_NOTEBOOK = """
import json
cells = json.load(open("notebook.ipynb"))["cells"]
space = {"__name__": "__main__"}
for cell in cells:
    if cell["cell_type"] == "code":
        exec("".join(cell["source"]), space)
"""
"""Runs the cells in order in one process, with the notebook's folder first on the path, as a kernel
does: ``python -c`` puts the current folder there."""


@pytest.fixture(params=["a package that fails", "a folder of files"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder that holds another one called ``analyses``."""
    (tmp_path / "analyses").mkdir()
    (tmp_path / "analyses" / "subnetworks.py").write_text("raise RuntimeError('not ours')")
    if request.param == "a package that fails":
        (tmp_path / "analyses" / "__init__.py").write_text("raise RuntimeError('not ours')")
    return tmp_path


def python(folder: Path, *arguments: object) -> str:
    """What a fresh Python prints that is started in a folder and finds hc_lens in this tree."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_script_beside_it_imports_ours(folder: Path):
    (folder / "script.py").write_text(f"{USE}\n{SAY}\n")
    assert python(folder, "script.py").strip() == SAID


@pytest.mark.slow
def test_a_notebook_beside_it_imports_ours(folder: Path):
    sources = (["import hc_lens as hc\n", "hc.UnitSpace"], [USE], [SAY])
    cells = [{"cell_type": "code", "source": source} for source in sources]
    (folder / "notebook.ipynb").write_text(json.dumps({"cells": cells, "nbformat": 4}))
    assert python(folder, "-c", RUN_NOTEBOOK).strip() == SAID


@pytest.mark.slow
def test_commands_run_from_its_folder(folder: Path):
    told = python(folder, "-m", "hc_lens.cli", "study", "--help")
    assert "Study a classifier or a language model" in told
    (folder / "runs.csv").write_text(
        "checkpoint,sparsity,seed,dataset,case,accuracy\nend,0.5,1,id,all,0.9\n"
    )
    (folder / "full.csv").write_text("checkpoint,dataset,case,accuracy\nend,id,all,0.9\n")
    line = ("analyse", "effective-size", "runs.csv", "--full", "full.csv", "--ood-name", "")
    assert "50.0000" in python(folder, "-m", "hc_lens.cli", *line)


def test_a_wheel_holds_the_analyses_as_a_part_of_hc_lens_and_nothing_called_analyses():
    settings = read_settings(ROOT / "pyproject.toml")
    wheel = settings["tool"]["hatch"]["build"]["targets"]["wheel"]
    # The link is left out, and the folder that it points to takes its place.
    assert wheel["packages"] == ["hc_lens"]
    assert wheel["exclude"] == ["/hc_lens/analyses"]
    assert wheel["force-include"] == {"analyses": "hc_lens/analyses"}
    assert (ROOT / "hc_lens" / "analyses").resolve() == ROOT / "analyses"
    named = {**settings["project"]["scripts"]}
    named |= settings["project"]["entry-points"]["hc_lens.analyses"]
    assert all(target.startswith("hc_lens.") for target in named.values())
