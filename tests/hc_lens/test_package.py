import subprocess
import sys

import pytest

import hc_lens as hc


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout


def test_importing_the_package_imports_neither_torch_nor_transformers():
    heavy = "{'torch', 'transformers', 'transformer_lens', 'datasets', 'pandas'}"
    assert run(f"import sys, hc_lens; print({heavy} & set(sys.modules))").strip() == "set()"


def test_every_public_name_is_found():
    for name in hc.__all__:
        assert getattr(hc, name) is not None
    assert set(hc.__all__) <= set(dir(hc))


@pytest.mark.slow
@pytest.mark.parametrize("first", ["hc_lens.masks.ablate", "hc_lens.pruning.importance"])
def test_a_function_and_its_module_may_share_a_name(first):
    code = f"import {first}, hc_lens as hc; print(callable(hc.ablate), callable(hc.importance))"
    assert run(code).split() == ["True", "True"]


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(AttributeError, match="UnitSpace"):
        _ = hc.nothing_of_this_name
