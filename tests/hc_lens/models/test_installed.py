"""Versions of TransformerLens: those that hc_lens runs on, and the others."""

import re
import subprocess
import sys

import pytest

import hc_lens as hc
from hc_lens.models.installed import has_bridges, only_before_bridges
from tests.commands import invoke
from tests.lens import bridges_only


def test_bridges_come_with_the_fourth_version():
    assert [has_bridges(version) for version in ("3.9.0", "3.10.1", "4.0.0", "4.3.0")] == [
        *(False, False),
        *(True, True),
    ]


@pytest.mark.parametrize("version", ["2.16.1", "3.8.1", "5.0.0", "10.1", "none"])
def test_another_version_is_refused_with_what_to_install(version):
    message = rf"TransformerLens 3 \(from 3\.9\) or 4, got {version}; .*transformer-lens>=3\.9,<5"
    with pytest.raises(hc.HcLensError, match=message):
        has_bridges(version)


def test_another_version_is_refused_before_it_is_imported():
    names = ["load", "register_adapters", "Task", "Means", "scan", "show"]
    code = f"""
import importlib.metadata, sys
sys.modules["transformer_lens"] = None
import hc_lens as hc
for version in ("2.16.1", "5.0.0"):
    importlib.metadata.version = lambda _: version
    for name in {names}:
        try:
            getattr(hc, name)
        except hc.HcLensError as error:
            assert f"got {{version}}; install one of them" in str(error)
            print(version, name)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    refused = [f"{version} {name}" for version in ("2.16.1", "5.0.0") for name in names]
    assert done.stdout.splitlines() == refused


@bridges_only
def test_the_command_that_needs_version_3_says_so_on_one_line():
    done = invoke("analyse", "extractive", "--demo")
    assert done.exit_code == 1
    assert re.search(r"expected TransformerLens 3 for extractive.*<4", done.stderr.splitlines()[-1])


def test_what_needs_a_hooked_transformer_says_so():
    only_before_bridges("extractive structures", bridges=False)
    with pytest.raises(hc.HcLensError, match=r"TransformerLens 3 for extractive .*<4"):
        only_before_bridges("extractive structures", bridges=True)
