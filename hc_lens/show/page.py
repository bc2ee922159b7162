"""What every HTML page of hc_lens needs to be one file that opens without a network.

1. `bundle` is a style sheet, the JavaScript of circuitsvis as it is installed, and `attention.js`,
   which unpacks a figure's data and gives them to circuitsvis.
2. Text reaches a page in two ways only: as HTML, escaped, and as JSON with every ``<``, ``>`` and
   ``&`` written as an escape, so that no text can end a script or begin a tag.
3. A saved page forbids the browser to load anything else (a content security policy).
4. Patterns are packed as 16-bit integers in base64: 2.7 bytes per value, exact to 1e-5.
"""

from __future__ import annotations

import base64
import functools
import json
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from hc_lens.records import write_file

POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"
"""What a saved page may load: nothing beyond itself."""


def save(path: str | Path, text: str) -> Path:
    """Write a page, whole or not at all, and the folder that it goes to."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, text)
    return path


def asset(name: str) -> str:
    """A style sheet or script that comes with this package."""
    return resources.files("hc_lens.show").joinpath(name).read_text("utf-8")


@functools.cache
def bundle() -> str:
    """The style sheet and the scripts that all figures of a page share: 1.3 MB, needed once."""
    script = resources.files("circuitsvis").joinpath("dist/cdn/iife.js").read_text("utf-8")
    # The source map is not there, and an end tag inside a string would end the script element.
    script = script.split("//# sourceMappingURL=")[0].replace("</script", "<\\/script")
    # Several outputs of a notebook are one page: only the first of them runs the script, and tells
    # the figures that were there before it.
    script = f"window.CircuitsVis ||= (function () {{{script}\nreturn CircuitsVis}})();"
    script += 'window.dispatchEvent(new Event("hc-lens-bundle"));'
    return f"<script>{script}</script>\n{own_scripts()}"


def own_scripts() -> str:
    """The style sheet and the script of `bundle` without circuitsvis: 4 kB."""
    return f"<style>{asset('attention.css')}</style>\n<script>{asset('attention.js')}</script>"


def json_for_script(value: Any) -> str:
    """JSON that is safe inside a script element."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def pack(values: Float[Tensor, "..."]) -> str:
    """Numbers from 0 to 1 as base64 of little-endian integers from 0 to 65535, row by row."""
    whole = (values.detach().cpu().double().clamp(0, 1) * 65535).round().to(torch.int64)
    return base64.b64encode(whole.numpy().astype("<u2").tobytes()).decode("ascii")
