"""What every HTML page of hc_lens needs to be one file that opens without a network.

1. `bundle` is a style sheet, the JavaScript of circuitsvis as it is installed, and `attention.js`,
   which unpacks the data of every figure and gives them to circuitsvis.
2. Text and data reach a page in one way only, as escaped HTML, and never as part of a script.
3. A saved page forbids the browser to load anything else, and to run any script or apply any style
   sheet but those of this package, which it knows by their hashes (a content security policy). A
   script that somebody put into the text of a page is not run.
4. Patterns are packed as 16-bit integers in base64: 2.7 bytes per value, exact to 1e-5.
"""

from __future__ import annotations

import base64
import functools
from importlib import resources
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from hc_lens.records import sha256, write_file


def save(path: str | Path, text: str) -> Path:
    """Write a page, whole or not at all, and the folder that it goes to."""
    path = Path(path)
    write_file(path, text)
    return path


def asset(name: str) -> str:
    """A style sheet or script that comes with this package."""
    return resources.files("hc_lens.show").joinpath(name).read_text("utf-8")


@functools.cache
def policy() -> str:
    """What a saved page may load and run: pictures that it holds itself, and our own blocks.

    The file is written once and read often, so its blocks are known by hashes: a nonce could be
    read from the file by whoever adds a script to it.
    """

    def hashes(*blocks: str) -> str:
        return " ".join(f"'sha256-{base64.b64encode(sha256(text)).decode()}'" for text in blocks)

    scripts = hashes(_circuitsvis(), asset("attention.js"), asset("report.js"))
    styles = hashes(asset("attention.css"), asset("report.css"))
    return (
        f"default-src 'none'; script-src {scripts}; style-src {styles}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def bundle() -> str:
    """The style sheet and the scripts that all figures of a page share: 1.3 MB, needed once."""
    return f"<script>{_circuitsvis()}</script>\n{own_scripts()}"


@functools.cache
def _circuitsvis() -> str:
    script = resources.files("circuitsvis").joinpath("dist/cdn/iife.js").read_text("utf-8")
    # The source map is not there, and an end tag inside a string would end the script element.
    script = script.split("//# sourceMappingURL=")[0].replace("</script", "<\\/script")
    # Several outputs of a notebook are one page: only the first of them runs the script, and tells
    # the figures that were there before it.
    script = f"window.CircuitsVis ||= (function () {{{script}\nreturn CircuitsVis}})();"
    return script + 'window.dispatchEvent(new Event("hc-lens-bundle"));'


def own_scripts() -> str:
    """The style sheet and the script of `bundle` without circuitsvis: 4 kB."""
    return f"<style>{asset('attention.css')}</style>\n<script>{asset('attention.js')}</script>"


def pack(values: Float[Tensor, "..."]) -> str:
    """Numbers from 0 to 1 as base64 of little-endian integers from 0 to 65535, row by row."""
    whole = (values.detach().cpu().double().clamp(0, 1) * 65535).round().to(torch.int64)
    return base64.b64encode(whole.numpy().astype("<u2").tobytes()).decode("ascii")
