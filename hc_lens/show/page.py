"""Figures in one self-contained HTML file, with the JavaScript of circuitsvis once.

1. `bundle` is a style sheet, the JavaScript of circuitsvis as it is installed (no network), and
   `attention.js`, which unpacks a figure's data and gives them to circuitsvis.
2. A figure's fragment is a few HTML elements and one call with its data.
3. Text reaches the page in two ways only: as HTML through `html.escape`, and as JSON with every
   ``<``, ``>`` and ``&`` written as an escape, so that no text can end a script or begin a tag.
4. A saved page forbids the browser to load anything else (a content security policy).
5. Patterns are packed as 16-bit integers in base64: 2.7 bytes per value, exact to 1e-5.
"""

from __future__ import annotations

import base64
import functools
import html
import json
import uuid
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from hc_lens.errors import HcLensError
from hc_lens.records import write_file

LARGEST = 65535
"""The integer that stands for an attention of 1."""
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"
"""What a saved page may load: nothing beyond itself."""


@runtime_checkable
class Figure(Protocol):
    """What a page is made of."""

    def fragment(self, name: str) -> str:
        """HTML of the figure, which needs `bundle` once on its page; `name` becomes its id."""
        ...


class Page:
    """Several figures, one after the other, in one file."""

    def __init__(self, figures: Sequence[Figure], title: str = "Attention patterns"):
        if not len(figures):
            raise HcLensError("expected at least one figure for a page, got none; pass figures")
        self.figures = list(figures)
        self.title = title

    def html(self) -> str:
        """A whole HTML document that needs nothing else."""
        body = "\n".join(figure.fragment(f"figure-{k}") for k, figure in enumerate(self.figures))
        title = html.escape(self.title)
        return (
            f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
            f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{title}</title>\n{bundle()}\n</head>\n"
            f'<body class="hc-lens-page">\n<h1>{title}</h1>\n{body}\n</body>\n</html>\n'
        )

    def save(self, path: str | Path) -> Path:
        """Write the document; it opens in any browser, without a network."""
        return save(path, self.html())

    def _repr_html_(self) -> str:
        # A notebook has many figures on one page: each needs an id that no other has.
        parts = [figure.fragment(f"hc-lens-{uuid.uuid4().hex}") for figure in self.figures]
        return "\n".join([bundle(), *parts])

    def __len__(self) -> int:
        return len(self.figures)

    def __getitem__(self, index: int) -> Figure:
        return self.figures[index]


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
    # Several outputs of a notebook are one page: only the first of them runs the script.
    script = f"window.CircuitsVis ||= (function () {{{script}\nreturn CircuitsVis}})();"
    style, own = asset("attention.css"), asset("attention.js")
    return f"<style>{style}</style>\n<script>{script}</script>\n<script>{own}</script>"


def json_for_script(value: Any) -> str:
    """JSON that is safe inside a script element."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def pack(values: Float[Tensor, "..."]) -> str:
    """Numbers between 0 and 1 as base64 of little-endian 16-bit integers, row by row."""
    whole = (values.detach().cpu().double().clamp(0, 1) * LARGEST).round().to(torch.int64)
    return base64.b64encode(whole.numpy().astype("<u2").tobytes()).decode("ascii")
