"""The rows that an analysis runs on, and what patching did to them.

1. `Rows` holds batches by name with what replaces a sender's activation, and gives them in pieces
   that are small enough to hold every layer's activations.
2. `Rows.effects` averages, per dataset and case, what each patched run did against the clean one
   (`hc_lens.metrics`): the KL divergence, whether the prediction stays, and the changes of the
   accuracy, of the margin (the log-odds of the label that the clean run predicts) and of the gold
   label's log-odds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from analyses.composition.engine import PathEngine
from analyses.composition.passes import Pass, check_supported
from hc_lens.masks.replacements import Source, as_source
from hc_lens.metrics import ACCURACY, AGREEMENT, KL, LOGIT, MARGIN, Totals, row_metrics
from hc_lens.models.inputs import mask_of
from hc_lens.protocols import BatchesLike, BatchLike, Model
from hc_lens.scans.engine import cut
from hc_lens.scans.scan import limited_batches
from hc_lens.units import UnitSpace

PIECE_TOKENS = 1024
"""Batches are cut along their rows to about so many tokens: every layer's activations are held."""
CHANGES = {ACCURACY: "accuracy_change", MARGIN: "margin_change", LOGIT: "logit_change"}
"""Metrics that are compared with the clean run, and the columns of their changes."""
MEASURES = (KL, "accuracy_change", AGREEMENT, "margin_change", "logit_change")
"""The columns that measure an effect."""


@dataclass(frozen=True)
class Rows:
    """The rows of an analysis."""

    named: dict[str, BatchesLike]
    """The batches by name."""
    source: Source
    """What replaces a sender's activation."""

    @classmethod
    def of(
        cls,
        model: Model,
        datasets: Mapping[str, BatchesLike] | BatchesLike,
        means: Source | str,
        limit: int | None,
    ) -> Rows:
        """At most `limit` rows of each dataset, after the checks that all analyses share."""
        check_supported(model)
        source = as_source(means)
        source.check(model, UnitSpace.of(model))
        return cls(limited_batches(datasets, source, limit), source)

    def pieces(self, progress: bool, what: str) -> Iterator[tuple[str, BatchLike]]:
        """The name of each dataset with its batches in pieces, if the source can be cut."""
        total = sum(len(batches) for batches in self.named.values())
        with tqdm(total=total, desc=what, disable=not progress, leave=False, unit="batch") as bar:
            for name, batches in self.named.items():
                for batch in batches:
                    rows, pos = mask_of(batch.inputs).shape
                    size = max(1, PIECE_TOKENS // pos) if self.source.row_wise else rows
                    for piece in cut(batch, size):
                        yield name, piece
                    bar.update()

    def effects(
        self,
        engine: PathEngine,
        keys: pd.DataFrame,
        patched: Callable[[Pass], Float[Tensor, "runs batch labels"]],
        progress: bool,
    ) -> pd.DataFrame:
        """For each dataset, case and run: the keys, dataset, case, n (rows) and the measures.

        `keys` says what each run is, such as its sender and receiver; `patched` gives the logits of
        all runs from the clean pass over a batch.
        """
        totals = Totals(keys, (KL, ACCURACY, AGREEMENT, MARGIN, LOGIT))
        for name, batch in self.pieces(progress, "patching"):
            clean, logits = engine.start(batch)
            both = torch.cat([logits[None], patched(clean)])
            metrics = row_metrics(self.named[name], batch, logits, both)
            values = {
                key: value[1:] - value[:1] if key in CHANGES else value[1:]
                for key, value in metrics.items()
            }
            totals.add(name, batch.cases, batch.labels, values)
        return totals.table().rename(columns=CHANGES)
