"""Attention patterns as circuitsvis draws them, and as a figure for a paper.

1. Run the model on a pair (or a batch of them) and read the patterns of the heads asked for, under
   a subnetwork's mask if one is given.
2. Write each token as the text that it stands for: no ``##``, no ``Ġ``.
3. Show one map for each head, with queries down and keys across. A decoder's upper triangle is
   masked, as it is empty.
4. ``.save("x.html")`` writes one file that opens without a network (`hc_lens.show.page`),
   ``.figure()`` draws the same maps with matplotlib.
"""

from __future__ import annotations

import html
import json
import math
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from hc_lens.attention.patterns import WordBatch, check_heads, patterns, word_batch
from hc_lens.attention.words import NONE
from hc_lens.data.batches import Batch
from hc_lens.errors import HcLensError
from hc_lens.masks.ablate import masked
from hc_lens.masks.replacements import Source, as_source
from hc_lens.models.inputs import is_encoder, tokenizer_of
from hc_lens.protocols import Model
from hc_lens.show.notebook import carries_bundle
from hc_lens.show.page import bundle, own_scripts, pack, policy, save
from hc_lens.units import Unit, UnitSpace

MOST_VALUES = 20_000_000
"""Most numbers to hold at once, over all rows."""
MOST_CELLS = 1_500_000
"""Most cells of one figure that a browser draws in a few seconds."""
SMALL = 12
"""With more heads than this the static figure has small maps without token labels."""
BOUNDARY = "#D55E00"
"""Colour of the lines between the two sentences."""


@dataclass(frozen=True, eq=False)
class Attention:
    """The patterns of some heads on one row."""

    tokens: tuple[str, ...]
    """The tokens, as they are shown."""
    sentences: tuple[int, ...]
    """Sentence of each token, 0 or 1; -1 for special tokens."""
    heads: tuple[str, ...]
    """Labels of the heads."""
    patterns: Float[Tensor, "head query key"]
    """What share of its attention each token gives to each token."""
    causal: bool
    """Whether a token sees only itself and earlier ones."""
    title: str = ""
    """Heading of the figure, if it has one."""

    def fragment(self, name: str) -> str:
        """HTML of the figure, which needs `hc.show.bundle` once on its page."""
        if self.patterns.numel() > MOST_CELLS:
            raise HcLensError(
                f"expected at most {MOST_CELLS:,} cells, which a browser can draw, got "
                f"{len(self.heads)} heads of {len(self.tokens)} x {len(self.tokens)} tokens; name "
                "fewer heads with heads=, or draw them with .figure()"
            )
        data: dict[str, Any] = {"tokens": self.tokens, "heads": self.heads}
        data |= {"values": pack(self.patterns), "causal": self.causal}
        heading = f"<h2>{html.escape(self.title)}</h2>" if self.title else ""
        # As an attribute the data are text to every browser and notebook, whatever they hold.
        content = html.escape(json.dumps(data, separators=(",", ":")))
        return (
            f'<div class="hc-lens-figure">{heading}{self._sentences()}'
            f'<div class="hc-lens-canvas" id="{html.escape(name)}" data-figure="{content}"></div>'
            "</div>"
        )

    def html(self) -> str:
        """A whole HTML document that needs nothing else."""
        return Page([self]).html()

    def save(self, path: str | Path) -> Path:
        """Write one file that opens in any browser, without a network."""
        return Page([self]).save(path)

    def _repr_html_(self) -> str:
        return Page([self])._repr_html_()

    def figure(self) -> Figure:
        """The same maps with matplotlib, for a paper."""
        n_heads = len(self.heads)
        columns = n_heads if n_heads <= 3 else math.ceil(math.sqrt(n_heads))
        lines = math.ceil(n_heads / columns)
        side = 1.6 if n_heads > SMALL else 1.3 + 0.17 * len(self.tokens)
        drawing = Figure(figsize=(columns * side + 0.6, lines * side), layout="constrained")
        grid = drawing.subplots(lines, columns, squeeze=False).flatten().tolist()
        for axes, label, pattern in zip(grid, self.heads, self.patterns, strict=False):
            axes.imshow(pattern.detach().cpu().float().numpy(), cmap="Blues", vmin=0, vmax=1)
            axes.set_title(label, fontsize=9)
            self._mark(axes)
        for axes in grid[n_heads:]:
            axes.set_axis_off()
        drawing.colorbar(grid[0].images[0], ax=grid, shrink=0.6, label="attention")
        return drawing

    def _mark(self, axes: Axes) -> None:
        """Tokens beside a map, unless it is small, and lines where the second sentence begins."""
        small = len(self.heads) > SMALL
        # A dollar sign would begin a formula.
        labels = [] if small else [token.replace("$", r"\$") for token in self.tokens]
        axes.set_xticks(range(len(labels)), labels, rotation=90, fontsize=6)
        axes.set_yticks(range(len(labels)), labels, fontsize=6)
        axes.tick_params(length=0)
        if not small:
            axes.set_xlabel("to", fontsize=7)
            axes.set_ylabel("from", fontsize=7)
        if 1 in self.sentences:
            boundary = self.sentences.index(1) - 0.5
            axes.axhline(boundary, color=BOUNDARY, linewidth=0.7)
            axes.axvline(boundary, color=BOUNDARY, linewidth=0.7)

    def _sentences(self) -> str:
        """The tokens of each sentence as HTML; special tokens go with the sentence before them."""
        lines: dict[int, list[str]] = {}
        current = 0
        for token, sentence in zip(self.tokens, self.sentences, strict=True):
            current = max(current, sentence)
            kind = "special" if sentence == NONE else f"sentence-{sentence}"
            lines.setdefault(current, []).append(
                f'<span class="hc-lens-token hc-lens-{kind}">{html.escape(token)}</span>'
            )
        names = ("premise", "hypothesis") if len(lines) == 2 else ("text",)
        return "".join(
            f'<div class="hc-lens-line"><span class="hc-lens-name">{name}</span>'
            f'<span class="hc-lens-tokens">{"".join(parts)}</span></div>'
            for name, parts in zip(names, lines.values(), strict=True)
        )


class Page:
    """Several figures, one after the other, in one file."""

    def __init__(self, figures: Sequence[Attention], title: str = "Attention patterns"):
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
            f'<meta http-equiv="Content-Security-Policy" content="{policy()}">\n'
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
        return "\n".join([bundle() if carries_bundle() else own_scripts(), *parts])

    def __len__(self) -> int:
        return len(self.figures)

    def __getitem__(self, index: int) -> Attention:
        return self.figures[index]


def attention(
    model: Model,
    premise: str | Sequence[str] | Batch,
    hypothesis: str | Sequence[str] | None = None,
    heads: Iterable[Unit | str] | str | None = None,
    subnetwork: object = None,
    means: Source | str | None = None,
    *,
    raw_tokens: bool = False,
    separator: str | None = None,
) -> Attention | Page:
    """Show attention patterns: a notebook draws them, ``.save("x.html")`` writes them to a file.

    Args:
        model: a hooked model with its tokenizer.
        premise: the first (or only) text; a list of them; or a batch.
        hypothesis: the second text, or a list of as many.
        heads: labels such as ``"L4.H0"``; all heads by default.
        subnetwork: anything with a ``mask``, such as `hc.Subnetwork`. The patterns are those under
            the mask, and removed heads are marked.
        means: what stands in for the removed units; needed with `subnetwork`.
        raw_tokens: write tokens as the tokenizer does, with ``##`` or ``Ġ``.
        separator: text between the two sentences, for a decoder trained with one.

    Returns:
        An `Attention`, or a `Page` of them for lists and batches.
    """
    units, space = check_heads(model, heads), UnitSpace.of(model)
    batch = _batch(model, premise, hypothesis, separator)
    n_rows, width = batch.inputs["input"].shape
    if n_rows * len(units) * width**2 > MOST_VALUES:
        raise HcLensError(
            f"expected at most {MOST_VALUES:,} numbers in a figure, got {n_rows} rows of "
            f"{len(units)} heads and {width} tokens; name fewer heads with heads=, or show "
            "fewer rows"
        )
    mask, source = torch.ones(len(space)), as_source("zero")
    if subnetwork is not None:
        mask, source = _mask(subnetwork, means)
    with masked(model, mask, source.on(batch)):
        values = patterns(model, batch, units).cpu()
    removed = {unit for unit in units if float(mask[space.index(unit)]) == 0}
    labels = tuple(f"{unit} (removed)" if unit in removed else str(unit) for unit in units)
    figures = []
    for index, pattern in enumerate(values):
        tokens, sentences = _tokens(tokenizer_of(model), batch, index, raw_tokens)
        real = batch.mask[index].bool().cpu()
        own = pattern[:, real][:, :, real]
        figures.append(Attention(tokens, sentences, labels, own, causal=not is_encoder(model)))
    return figures[0] if isinstance(premise, str) else Page(figures)


def _batch(
    model: Model,
    premise: str | Sequence[str] | Batch,
    hypothesis: str | Sequence[str] | None,
    separator: str | None,
) -> Batch:
    if isinstance(premise, Batch):
        if hypothesis is not None or separator is not None:
            raise HcLensError(
                "expected a batch alone, got a batch and a hypothesis or separator; a batch has "
                "its sentences already"
            )
        return premise
    firsts = [premise] if isinstance(premise, str) else list(premise)
    if not all(text.strip() for text in firsts):
        raise HcLensError(
            f"expected a first text, got {next(t for t in firsts if not t.strip())!r}; give one"
        )
    if hypothesis is None:
        return word_batch(model, firsts, separator)
    seconds = [hypothesis] if isinstance(hypothesis, str) else list(hypothesis)
    if len(firsts) != len(seconds):
        raise HcLensError(
            f"expected one hypothesis for each premise, got {len(firsts)} premises and "
            f"{len(seconds)} hypotheses; pass two lists of one length"
        )
    return word_batch(model, list(zip(firsts, seconds, strict=True)), separator)


def _mask(subnetwork: object, means: Source | str | None) -> tuple[Tensor, Source]:
    mask = getattr(subnetwork, "mask", None)
    if not isinstance(mask, Tensor) or mask.ndim != 1 or means is None:
        raise HcLensError(
            "expected a subnetwork with a mask of shape [units], and the means that stand in for "
            f"its removed units, got {type(subnetwork).__name__} and means={means!r:.40}; pass "
            "means=hc.collect_means(model, batches)"
        )
    return mask, as_source(means)


def _tokens(
    tokenizer: Any, batch: Batch, index: int, raw: bool
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The tokens of a row as they are shown, and their sentences."""
    real = batch.mask[index].bool()
    ids = batch.tokens[index][real].tolist()
    if isinstance(batch, WordBatch):
        tokens, sentences = batch.words.rows[index].tokens, batch.words.rows[index].sentences
    else:
        types = batch.inputs.get("token_type_ids", torch.zeros_like(batch.tokens))
        sides = zip(ids, types[index][real].tolist(), strict=True)
        special = tokenizer.all_special_ids
        sentences = tuple(NONE if token in special else side for token, side in sides)
        tokens = tuple(_text(tokenizer, token) for token in ids)
    return (tuple(tokenizer.convert_ids_to_tokens(ids)) if raw else tokens), sentences


def _text(tokenizer: Any, token: int) -> str:
    """What a token stands for, as far as that is known without the text."""
    text = tokenizer.decode([token])
    if "\ufffd" in text:  # a part of a character
        return tokenizer.convert_ids_to_tokens(token)
    return text.strip().removeprefix("##") or "␣"
